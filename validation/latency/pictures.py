"""The pictures of a latency report: what to show, as plots; `validation.plots` draws them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from validation.latency.roofline.roofs import Roofs
from validation.latency.words import count_text
from validation.plots.charts import Curve, Point, ecdf, loglog, spanning
from validation.plots.marks import Axis, Colour, Key, Line
from validation.plots.svg import svg
from validation.plots.texts import number_text, seconds_text

Json = Mapping[str, Any]
# Buckets that one picture can tell apart; nodes that it shows, the slowest.
MOST_CURVES, MOST_POINTS = 6, 40
_TONES: Mapping[str, Colour] = {"compute": "c1", "bandwidth": "c2", "overhead": "c6"}
# The axis ends behind this quantile: the slowest run of thousands would leave no room for the rest.
_SEEN = 0.99


def distribution_svg(buckets: Sequence[Json]) -> str:
    """The distribution of latency at each bucket, over a logarithmic axis."""
    shown = buckets[:MOST_CURVES]
    curves = [_curve(bucket) for bucket in shown]
    ends = [end for curve in curves for end in (curve.xs[0], curve.xs[round(_SEEN * (len(curve.xs) - 1))])]
    low, high = spanning(ends, log=True, least=0.2)
    words = "; ".join(
        f"{bucket['name']}: half of the runs within {seconds_text(bucket['median_s'])}" for bucket in shown
    )
    axis = Axis(low, high, "latency of a run, logarithmic", log=True, text=seconds_text)
    return svg(ecdf(curves, axis, f"Share of runs answered within a time. {words}"))


def _curve(bucket: Json) -> Curve:
    times = bucket["curve"]
    return Curve(bucket["name"], times, [index / (len(times) - 1) for index in range(len(times))])


def roofline_svg(anatomy: Json) -> str:
    """Each node and the whole run under the machine's roofs; nothing where either was not measured."""
    if anatomy["roofs"] is None or anatomy["profile"] is None:
        return ""
    roofs = Roofs.from_json(anatomy["roofs"])
    points = [*_points(anatomy["profile"]["nodes"], anatomy["profile"]["kernels_s"])]
    if not points:
        return ""
    peak = max(roofs.operations_per_s.values())
    ridge = peak / min(roofs.memory_bytes_per_s, roofs.cache_bytes_per_s)
    x = Axis(*spanning([*(point.x for point in points), 0.1, ridge], log=True), "operations for each byte", log=True)
    y = Axis(*spanning([*(point.y for point in points), peak], log=True), "operations a second", log=True, text=_rate)
    lines = [*_roofs(roofs, x)]
    bound = [Key(f"{name}-bound", colour, dot=True) for name, colour in _TONES.items()]
    words = (
        f"Roofline at {anatomy['bucket']}: {len(points)} nodes; the machine does {count_text(peak)} operations a second"
    )
    return svg(loglog(points, lines, x, y, words, [*bound, Key("memory", "ink"), Key("cache", "muted", dash=True)]))


def _rate(value: float) -> str:
    return f"{number_text(value / 1e9)} G" if value >= 1e8 else f"{number_text(value / 1e6)} M"


def _points(nodes: Sequence[Json], whole: float) -> Iterator[Point]:
    for node in nodes[:MOST_POINTS]:
        cost = node["cost"]
        if cost and cost["operations"] and cost["intensity"] and node["seconds"]:
            rate = cost["operations"] / node["seconds"]
            name = (
                f"{node['name']} ({node['op_type']}): {count_text(rate)} operations/s, {seconds_text(node['seconds'])}"
            )
            tone = _TONES.get(node["diagnosis"]["bound"], "muted")
            yield Point(name, cost["intensity"], rate, node["seconds"] / whole if whole else 0.0, tone)


def _roofs(roofs: Roofs, x: Axis) -> Iterator[Line]:
    """The slanted roofs of memory and cache, each up to the highest flat one; a flat one for each type."""
    peak = max(roofs.operations_per_s.values())
    for bandwidth, colour, dash, what in (
        (roofs.memory_bytes_per_s, "ink", False, "memory"),
        (roofs.cache_bytes_per_s, "muted", True, "cache"),
    ):
        corner = min(peak / bandwidth, x.high)
        told = f"{what}: {count_text(bandwidth, 'B/s')}"
        yield Line([x.low, corner], [x.low * bandwidth, corner * bandwidth], colour, 1.5, dash, title=told)  # type: ignore[arg-type]
    for dtype, rate in roofs.operations_per_s.items():
        start = max(rate / roofs.cache_bytes_per_s, x.low)
        yield Line([start, x.high], [rate, rate], "ink", 1.5, title=f"{dtype}: {count_text(rate)} operations/s")
