"""Latency, for the page of a version: from latency reports to texts, rows of tables and pictures (SVG)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
from validation.plots.figure import COLOURS, HEIGHT, QUARTERS, WIDTH, draw_svg, series, set_axis, shorten, span, tag
from validation.plots.texts import number_text, seconds_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Buckets in one picture, and nodes in one, the slowest first.
MOST_CURVES, MOST_POINTS = 6, 40
_TONES: Mapping[Bound, str] = {"compute": "c1", "bandwidth": "c2", "overhead": "c6"}
# The axis ends behind this quantile: the slowest run of thousands would leave no room for the rest.
_SEEN = 0.99


def distribution_svg(buckets: Sequence[BucketLatency]) -> str:
    """SVG of the distribution of latency at each bucket, on a logarithmic axis."""
    shown = buckets[:MOST_CURVES]
    ends = [end for bucket in shown for end in (bucket.curve[0], bucket.curve[round(_SEEN * (len(bucket.curve) - 1))])]

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        for index, bucket in enumerate(shown):
            shares = [at / (len(bucket.curve) - 1) for at in range(len(bucket.curve))]
            label, gid = shorten(bucket.name), tag("curve", bucket.name)
            axes.step(bucket.curve, shares, where="post", label=label, gid=gid, **series(index))
        label = "latency of a run, logarithmic"
        set_axis(axes, "x", span(ends, log=True, least=0.2), label, log=True, text=seconds_text)
        set_axis(axes, "y", (0.0, 1.0), ticks=QUARTERS)

    words = "; ".join(f"{bucket.name}: half of the runs within {seconds_text(bucket.median_s)}" for bucket in shown)
    return draw_svg("ecdf", f"Share of runs answered within a time. {words}", draw)


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
    x, y = span([*(point.x for point in points), 0.1, ridge], log=True), [*(point.y for point in points), peak]

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        set_axis(axes, "x", x, "operations for each byte", log=True)
        set_axis(axes, "y", span(y, log=True), "operations a second", log=True, text=_rate)
        _draw_roofs(axes, roofs, x)
        for point in points:
            radius = 2.5 + 7 * min(max(point.share, 0.0), 1.0) ** 0.5
            axes.plot(point.x, point.y, "o", color=point.colour, markersize=2 * radius, gid=tag("dot", point.name))
        for bound, colour in _TONES.items():
            axes.plot([], [], "o", color=COLOURS[colour], label=f"{bound}-bound")

    label = f"{len(points)} nodes; the machine does {format_count(peak)} operations a second"
    return draw_svg("loglog", f"Roofline at {breakdown.bucket}: {label}", draw, (WIDTH, HEIGHT + 30))


@dataclass(frozen=True)
class _Point:
    """A node in the roofline. share: of the engine's time."""

    name: str
    x: float
    y: float
    share: float
    colour: str


def _rate(value: float) -> str:
    return f"{number_text(value / 1e9)} G" if value >= 1e8 else f"{number_text(value / 1e6)} M"


def _points(nodes: Sequence[TimedNode], whole: float) -> Iterator[_Point]:
    for node in nodes[:MOST_POINTS]:
        cost, bound = node.cost, node.diagnosis and node.diagnosis.bound
        if cost and cost.operations and cost.intensity and node.seconds:
            rate = cost.operations / node.seconds
            name = f"{node.name} ({node.op_type}): {format_count(rate)} operations/s, {seconds_text(node.seconds)}"
            share = node.seconds / whole if whole else 0.0
            yield _Point(name, cost.intensity, rate, share, COLOURS[_TONES[bound] if bound else "muted"])


def _draw_roofs(axes: "Axes", roofs: Roofs, x: tuple[float, float]) -> None:
    """The slanted roofs of memory and cache, each up to the highest flat one; a flat one for each type."""
    peak = max(roofs.operations_per_s.values())
    for bandwidth, colour, dash, what in (
        (roofs.memory_bytes_per_s, "ink", "-", "memory"),
        (roofs.cache_bytes_per_s, "muted", "--", "cache"),
    ):
        ends, gid = [x[0], min(peak / bandwidth, x[1])], tag("roof", f"{what}: {format_count(bandwidth, 'B/s')}")
        rates = [end * bandwidth for end in ends]
        axes.plot(ends, rates, dash, color=COLOURS[colour], linewidth=1.5, label=what, gid=gid)
    for dtype, rate in roofs.operations_per_s.items():
        ends, gid = [max(rate / roofs.cache_bytes_per_s, x[0]), x[1]], tag("roof", f"{dtype}: {format_count(rate)}/s")
        axes.plot(ends, [rate, rate], color=COLOURS["ink"], linewidth=1.5, gid=gid)


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
