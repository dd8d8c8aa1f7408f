"""What the page says about latency, worked out from latency reports: plain values, and pictures."""

from collections.abc import Mapping, Sequence
from typing import Any

from validation.latency.machine import machine_text
from validation.latency.pictures import distribution_svg, roofline_svg
from validation.latency.words import (
    COLUMNS,
    NODE_COLUMNS,
    SHOWN_NODES,
    bucket_row,
    diagnosis_text,
    evidence,
    headline,
    lines,
    node_rows,
    remarks,
)


def sections(latencies: Mapping[str, Sequence[Mapping[str, Any]]], pictures: bool = True) -> list[dict[str, Any]]:
    """One per report. latencies: by the engine's digest, as `enginery.registry.evidence.latencies` gives them."""
    found = [_section(report, pictures) for each in latencies.values() for report in each]
    return sorted(found, key=lambda section: str(section["name"]))


def _section(report: Mapping[str, Any], pictures: bool) -> dict[str, Any]:
    first, *rest = lines(report)
    remarked = [*remarks(report)]
    anatomy = report["anatomy"]
    profile = anatomy["profile"]
    return {
        "name": report["unit"],
        "machine": machine_text(report["machine"]),
        "measured": first,
        "busy": any(bucket["surroundings"]["busy"] for bucket in report["buckets"]),
        "remarks": remarked,
        "headline": headline(anatomy),
        "evidence": evidence(anatomy),
        "lines": [line for line in rest if line not in (*remarked, diagnosis_text(anatomy))],
        "columns": COLUMNS,
        "rows": [bucket_row(bucket) for bucket in report["buckets"]],
        "node_columns": NODE_COLUMNS,
        "nodes": node_rows(anatomy),
        "more": max(0, len(profile["nodes"]) + profile["omitted"] - SHOWN_NODES) if profile else 0,
        "distribution": distribution_svg(report["buckets"]) if pictures else "",
        "roofline": roofline_svg(anatomy) if pictures else "",
    }
