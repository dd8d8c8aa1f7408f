"""What the HTML report shows of a version, worked out from its manifest and reports: plain values, no markup."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from builders.types import PRECISIONS
from validation.attribution.words import section
from validation.latency.section import sections
from validation.quantized import quantizations
from validation.report import Check

STATUSES = ("proven", "unproven", "failed", "refused")
_SYMBOLS = {"proven": "✓", "unproven": "?", "failed": "✕", "refused": "-"}
_JOINTS = {
    "export": "the ONNX model against the original framework",
    "quantization": "the quantized or cast graph against the fp32 graph",
    "engine": "the compiled engine against the graph it was built from",
}
_BAR_DB = 140.0

Json = Mapping[str, Any]


def overview(manifest: Json) -> dict[str, Any]:
    """The names that the template uses. manifest: its JSON, with `reports` and, if any, `failures`, `quantization`,
    `attributions`, `latencies`."""
    engines = [_engine(index, entry, manifest) for index, entry in enumerate(manifest.get("engines", ()))]
    counts = {status: sum(engine["status"] == status for engine in engines) for status in STATUSES}
    return {
        "manifest": manifest,
        "reference": f"{manifest['model']}@{manifest['version']}",
        "engines": engines,
        "groups": _by_target([engine for engine in engines if engine["status"] != "refused"]),
        "counts": counts,
        "symbols": _SYMBOLS,
        "verdict": _verdict(counts),
        "matrix": _matrix(engines),
        "tasks": _tasks(manifest, engines),
        "joints": _joints(manifest.get("reports", ())),
        "quantizations": quantizations(manifest),
        "attributions": [section(item) for item in manifest.get("attributions", ())],
        "latencies": sections(manifest.get("latencies", {})),
        "refusals": _by_reason(engines),
        "failures": manifest.get("failures", ()),
        "provenance": _provenance(manifest),
    }


def _verdict(counts: Mapping[str, int]) -> dict[str, str]:
    """Status and headline of the whole version."""
    usable = counts["proven"] + counts["unproven"]
    if counts["failed"]:
        return {"status": "failed", "text": f"{_count(counts['failed'], 'engine')} failed, {usable} can be pulled"}
    if counts["unproven"]:
        rest = f"{counts['unproven']} not yet run on their hardware"
        return {"status": "unproven", "text": f"{counts['proven']} of {_count(usable, 'engine')} proven, {rest}"}
    if usable:
        return {"status": "proven", "text": f"{'All ' if usable > 1 else ''}{_count(usable, 'engine')} proven"}
    return {"status": "failed", "text": "There is no engine to pull"}


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _engine(index: int, entry: Json, manifest: Json) -> dict[str, Any]:
    """An engine entry with the parts of its report that its row shows."""
    report = _report_of(entry, manifest)
    checks = [Check.from_json(check) for check in report["checks"]] if report else []
    limited = [check for check in checks if not check.passed or (check.limit is not None and check.joint != "task")]
    return {
        **entry,
        "index": index,
        "unit": _unit(entry),
        "tightest": min(limited, key=headroom_db, default=None),
        "failed_checks": sum(not check.passed for check in checks),
        "total_checks": len(checks),
        "ran": any(check.joint == "engine" for check in checks),
    }


def _by_target(engines: Sequence[Json]) -> list[dict[str, Any]]:
    """The engines of each target, with their reasons, each said once."""
    groups: dict[str, list[Json]] = {}
    for engine in engines:
        groups.setdefault(engine["target"], []).append(engine)
    return [{"target": target, "engines": members, "reasons": _reasons(members)} for target, members in groups.items()]


def _reasons(engines: Sequence[Json]) -> list[dict[str, str]]:
    reasons: dict[str, list[str]] = {}
    for engine in engines:
        reasons.setdefault(engine["reason"], []).append(engine["precision"])
    return [{"text": text, "precisions": ", ".join(dict.fromkeys(names))} for text, names in reasons.items() if text]


def _report_of(entry: Json, manifest: Json) -> Json | None:
    return next((report for report in manifest.get("reports", ()) if report["unit"] == _unit(entry)), None)


def _unit(entry: Json) -> str:
    return f"{entry['target']} {entry['precision']} {entry['backend']}"


def headroom_db(check: Check) -> float:
    """How far a value is from its limit, as a ratio in decibels; -inf for a failed check, so that it comes first."""
    if not check.passed or check.value is None or check.limit is None:
        return math.inf if check.passed else -math.inf
    if check.name == "nonfinite":
        return math.inf
    if check.name == "sqnr_db":
        return check.value - check.limit
    if check.name.startswith("contract "):
        # Promises, most of which are kept or not; what else they measure is not on this scale.
        return math.inf
    if check.name.startswith("max_"):
        return _decibels(check.limit, check.value)
    return _decibels(1 - check.limit, 1 - check.value)


def _decibels(limit: float, value: float) -> float:
    if value <= 0:
        return math.inf
    return 20 * math.log10(limit / value) if limit > 0 else -math.inf


def _matrix(engines: Sequence[Json]) -> dict[str, Any]:
    """Targets by precisions, each cell holding its engines."""
    targets = list(dict.fromkeys(engine["target"] for engine in engines))
    columns = [precision for precision in PRECISIONS if any(engine["precision"] == precision for engine in engines)]
    rows = [
        {"target": target, "cells": [_cell(engines, target, precision) for precision in columns]} for target in targets
    ]
    return {"columns": columns, "rows": rows}


def _cell(engines: Sequence[Json], target: str, precision: str) -> list[Json]:
    return [engine for engine in engines if (engine["target"], engine["precision"]) == (target, precision)]


def _tasks(manifest: Json, engines: Sequence[Json]) -> dict[str, Any] | None:
    """The task metric of each graph and of each engine that was run, placed on one axis with the floor."""
    metric = (manifest.get("spec", {}).get("golden") or {}).get("metric") or {}
    points = [
        {"name": name, "kind": "graph", "value": float(value)}
        for name, values in manifest.get("metrics", {}).items()
        for value in values.values()
    ]
    points += [{"name": name, "kind": "engine", "value": value} for name, value in _engine_tasks(manifest, engines)]
    if not points:
        return None
    floor = metric.get("floor")
    axis = _axis([point["value"] for point in points] + ([floor] if floor is not None else []))
    placed = [
        {**point, "at": _place(point["value"], axis), "passed": not _below(point["value"], floor)} for point in points
    ]
    at = None if floor is None else _place(floor, axis)
    return {"name": metric.get("name", "metric"), "points": placed, "floor": floor, "floor_at": at, "axis": axis}


def _engine_tasks(manifest: Json, engines: Sequence[Json]) -> Iterator[tuple[str, float]]:
    for engine in engines:
        report = _report_of(engine, manifest) or {"checks": ()}
        values = [check["value"] for check in report["checks"] if check["joint"] == "task"]
        if values and any(check["joint"] == "engine" for check in report["checks"]):
            yield engine["unit"], float(values[-1])


def _axis(values: Sequence[float]) -> tuple[float, float]:
    finite = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(finite), max(finite)
    pad = max((high - low) * 0.15, 0.005)
    return max(0.0, low - pad) if low >= 0 else low - pad, min(1.0, high + pad) if high <= 1 else high + pad


def _place(value: float, axis: tuple[float, float]) -> float:
    """Percent along the axis."""
    low, high = axis
    return round(100 * (value - low) / (high - low), 2) if math.isfinite(value) and high > low else 0.0


def _below(value: float, floor: float | None) -> bool:
    return floor is not None and not value >= floor


def _joints(reports: Sequence[Json]) -> list[dict[str, Any]]:
    """Per joint the distinct sets of checks, each with the units it holds for: many units share a graph."""
    groups: dict[tuple[str, str], dict[str, Any]] = {}
    for report in reports:
        for joint in _JOINTS:
            checks = [check for check in report["checks"] if check["joint"] == joint]
            if checks:
                group = groups.setdefault((joint, repr(checks)), {"joint": joint, "checks": checks, "units": []})
                group["units"].append(report)
    return [
        {"name": joint, "what": what, "groups": [_group(group) for group in groups.values() if group["joint"] == joint]}
        for joint, what in _JOINTS.items()
    ]


def _group(group: Json) -> dict[str, Any]:
    checks = [Check.from_json(check) for check in group["checks"]]
    return {
        "title": _title(group["joint"], group["units"]),
        "units": [report["unit"] for report in group["units"]],
        "checks": checks,
        "failed": [check for check in checks if not check.passed],
        "sqnr": _worst(checks, "sqnr_db"),
        "max_rel": _worst(checks, "max_rel"),
        "agreement": _worst(checks, "argmax_agreement") or _worst(checks, "agreement"),
    }


def _title(joint: str, reports: Sequence[Json]) -> str:
    if joint == "engine" and len(reports) == 1:
        return str(reports[0]["unit"])
    names = dict.fromkeys(f"{report['precision']} {report['backend']}" for report in reports)
    if joint == "export":
        return "fp32 graph"
    return ", ".join(names)


def _worst(checks: Sequence[Check], name: str) -> dict[str, Any] | None:
    """The worst check of a metric, and where a bar of it ends and its limit stands, in percent (SQNR: of 140 dB)."""
    found = [check for check in checks if check.name == name and check.value is not None]
    if not found:
        return None
    worst = min(found, key=lambda check: (check.passed, _goodness(check)))
    return {"check": worst, "at": _bar(worst.value), "limit_at": None if worst.limit is None else _bar(worst.limit)}


def _goodness(check: Check) -> float:
    value = -math.inf if check.value is None or math.isnan(check.value) else check.value
    return -value if check.name.startswith("max_") else value


def _bar(value: float | None) -> float:
    if value is None or math.isnan(value):
        return 0.0
    return round(100 * min(max(value, 0.0), _BAR_DB) / _BAR_DB, 2)


def _by_reason(engines: Sequence[Json]) -> list[dict[str, Any]]:
    reasons: dict[str, list[str]] = {}
    for engine in engines:
        if engine["status"] == "refused":
            reasons.setdefault(engine["reason"], []).append(engine["unit"])
    return [{"reason": reason, "units": units} for reason, units in reasons.items()]


def _provenance(manifest: Json) -> list[dict[str, Any]]:
    """Titled groups of facts; digests are set in a fixed-width face."""
    identity = {"content": manifest.get("content"), "version report": manifest.get("report")}
    groups = [
        ("Identity", identity),
        ("What went in", manifest.get("provenance", {})),
        ("What was made of it", manifest.get("sources", {})),
        ("Toolchain", manifest.get("toolchain", {})),
        ("Host", manifest.get("host", {})),
    ]
    found = [{"title": title, "facts": {k: v for k, v in facts.items() if v is not None}} for title, facts in groups]
    return [group for group in found if group["facts"]]
