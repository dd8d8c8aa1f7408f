"""What the page says about latency, worked out from latency reports: plain values, and pictures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from enginery.core.reports.latency import LatencyReport
from validation.latency.formatting import (
    COLUMNS,
    NODE_COLUMNS,
    SHOWN_NODES,
    describe_diagnosis,
    describe_report,
    format_bucket,
    format_nodes,
    list_evidence,
    list_remarks,
    name_bound,
)
from validation.latency.pictures import distribution_svg, roofline_svg


@dataclass(frozen=True)
class LatencyView:
    """A section of the page, on one report. rows, nodes: of tables, by column.  more: nodes that are not shown.

    distribution, roofline: SVG; '' where there is none.
    """

    name: str
    machine: str
    measured: str
    busy: bool
    remarks: tuple[str, ...]
    headline: str
    evidence: str
    lines: tuple[str, ...]
    rows: tuple[Mapping[str, str], ...]
    nodes: tuple[Mapping[str, str], ...]
    more: int
    distribution: str = ""
    roofline: str = ""
    columns: tuple[str, ...] = COLUMNS
    node_columns: tuple[str, ...] = NODE_COLUMNS


def view_latencies(latencies: Mapping[str, Sequence[LatencyReport]], pictures: bool = True) -> list[LatencyView]:
    """One section per report. latencies: by the engine's digest, as `evidence.latencies` gives them."""
    found = [_view(report, pictures) for each in latencies.values() for report in each]
    return sorted(found, key=lambda view: view.name)


def _view(report: LatencyReport, pictures: bool) -> LatencyView:
    first, *rest = describe_report(report)
    remarks, breakdown = tuple(list_remarks(report)), report.anatomy
    profile = breakdown.profile
    return LatencyView(
        name=report.unit,
        machine=str(report.machine),
        measured=first,
        busy=bool(report.busy),
        remarks=remarks,
        headline=name_bound(breakdown),
        evidence=list_evidence(breakdown),
        lines=tuple(line for line in rest if line not in (*remarks, describe_diagnosis(breakdown))),
        rows=tuple(format_bucket(bucket) for bucket in report.buckets),
        nodes=tuple(format_nodes(breakdown)),
        more=max(0, len(profile.nodes) + profile.omitted - SHOWN_NODES) if profile else 0,
        distribution=distribution_svg(report.buckets) if pictures else "",
        roofline=roofline_svg(breakdown) if pictures else "",
    )
