"""Latency, for the page of a version: from latency reports to texts, rows of tables and pictures (SVG)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from enginesmith.core.reports.breakdown import Bound, Roofs, TimeBreakdown, TimedNode
from enginesmith.core.reports.latency import BucketLatency, LatencyReport
from validation.latency.formatting import (
    COLUMNS,
    NODE_COLUMNS,
    SHOWN_NODES,
    describe_diagnosis,
    describe_report,
    format_bucket,
    format_count,
    format_nodes,
    list_evidence,
    list_remarks,
    name_bound,
)
from validation.plots.charts import Axis, Colour, Curve, Key, Line, Point, ecdf, loglog, span_axis
from validation.plots.svg import svg
from validation.plots.texts import number_text, seconds_text

# Buckets in one picture, and nodes in one, the slowest first.
MOST_CURVES, MOST_POINTS = 6, 40
_TONES: Mapping[Bound, Colour] = {"compute": "c1", "bandwidth": "c2", "overhead": "c6"}
# The axis ends behind this quantile: the slowest run of thousands would leave no room for the rest.
_SEEN = 0.99


def distribution_svg(buckets: Sequence[BucketLatency]) -> str:
    """SVG of the distribution of latency at each bucket, on a logarithmic axis."""
    shown = buckets[:MOST_CURVES]
    curves = [
        Curve(bucket.name, bucket.curve, [index / (len(bucket.curve) - 1) for index in range(len(bucket.curve))])
        for bucket in shown
    ]
    ends = [end for curve in curves for end in (curve.xs[0], curve.xs[round(_SEEN * (len(curve.xs) - 1))])]
    low, high = span_axis(ends, log=True, least=0.2)
    words = "; ".join(f"{bucket.name}: half of the runs within {seconds_text(bucket.median_s)}" for bucket in shown)
    axis = Axis(low, high, "latency of a run, logarithmic", log=True, text=seconds_text)
    return svg(ecdf(curves, axis, f"Share of runs answered within a time. {words}"))


def roofline_svg(breakdown: TimeBreakdown) -> str:
    """SVG of the nodes under the machine's roofs; '' where either was not measured."""
    roofs, profile = breakdown.roofs, breakdown.profile
    if roofs is None or profile is None:
        return ""
    points = list(_points(profile.nodes, profile.kernels_s))
    if not points:
        return ""
    peak = max(roofs.operations_per_s.values())
    ridge = peak / min(roofs.memory_bytes_per_s, roofs.cache_bytes_per_s)
    x = Axis(*span_axis([*(point.x for point in points), 0.1, ridge], log=True), "operations for each byte", log=True)
    y = Axis(*span_axis([*(point.y for point in points), peak], log=True), "operations a second", log=True, text=_rate)
    keys = [Key(f"{name}-bound", colour, dot=True) for name, colour in _TONES.items()]
    keys += [Key("memory", "ink"), Key("cache", "muted", dash=True)]
    label = f"{len(points)} nodes; the machine does {format_count(peak)} operations a second"
    return svg(loglog(points, list(_roofs(roofs, x)), x, y, f"Roofline at {breakdown.bucket}: {label}", keys))


def _rate(value: float) -> str:
    return f"{number_text(value / 1e9)} G" if value >= 1e8 else f"{number_text(value / 1e6)} M"


def _points(nodes: Sequence[TimedNode], whole: float) -> Iterator[Point]:
    for node in nodes[:MOST_POINTS]:
        cost, bound = node.cost, node.diagnosis and node.diagnosis.bound
        if cost and cost.operations and cost.intensity and node.seconds:
            rate = cost.operations / node.seconds
            name = f"{node.name} ({node.op_type}): {format_count(rate)} operations/s, {seconds_text(node.seconds)}"
            share = node.seconds / whole if whole else 0.0
            yield Point(name, cost.intensity, rate, share, _TONES[bound] if bound else "muted")


def _roofs(roofs: Roofs, x: Axis) -> Iterator[Line]:
    """The slanted roofs of memory and cache, each up to the highest flat one; a flat one for each type."""
    peak = max(roofs.operations_per_s.values())
    for bandwidth, colour, dash, what in (
        (roofs.memory_bytes_per_s, "ink", False, "memory"),
        (roofs.cache_bytes_per_s, "muted", True, "cache"),
    ):
        corner = min(peak / bandwidth, x.high)
        label = f"{what}: {format_count(bandwidth, 'B/s')}"
        yield Line([x.low, corner], [x.low * bandwidth, corner * bandwidth], colour, 1.5, dash, title=label)  # type: ignore[arg-type]
    for dtype, rate in roofs.operations_per_s.items():
        start = max(rate / roofs.cache_bytes_per_s, x.low)
        yield Line([start, x.high], [rate, rate], "ink", 1.5, title=f"{dtype}: {format_count(rate)} operations/s")


@dataclass(frozen=True)
class LatencyView:
    """The section of one report. rows, nodes: of tables, by column.  more: how many nodes are not shown.

    measured: where and when.  evidence: of the diagnosis in `headline`.  distribution, roofline: SVG, or ''.
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
