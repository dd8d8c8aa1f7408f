"""Traffic as plots: histograms of dims with their buckets, sizes and rates by hour, pairs of sizes, costs of plans."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from enginesmith.core.text import format_plain
from pipeline.traffic.choice import BucketPlan
from pipeline.traffic.summary import QUANTILES, PairCounts, SizeCounts, TrafficSummary
from validation.plots.charts import (
    SERIES,
    Axis,
    Bars,
    Interval,
    Key,
    Line,
    Mark,
    Plot,
    Point,
    Text,
    intervals,
    loglog,
    span_axis,
)
from validation.plots.texts import percent_text, seconds_text

WIDTH, HEIGHT = 640, 260
_MOST_BARS, _MOST_POINTS = 160, 400
# The axis of sizes is logarithmic where the greatest is so many times the median.
_LONG_TAIL = 8.0


def draw_traffic(summary: TrafficSummary, buckets: Mapping[str, Sequence[int]]) -> list[Plot]:
    """The plots of traffic. buckets: the upper edges that the spec has for each dim."""
    dims = [dim for dim, counts in summary.dims.items() if len(counts.counts) > 1] or [*summary.dims]
    plots = [draw_histogram(dim, summary.dims[dim], {"present": buckets[dim]}) for dim in dims]
    if len(summary.hours) > 1:
        plots += [_draw_rates(summary), *(_draw_hours(summary, dim) for dim in dims)]
    return plots + [_draw_pair(pair) for pair in summary.pairs if {*pair.dims} <= {*dims}]


def draw_choice(sizes: Mapping[str, SizeCounts], plans: Sequence[BucketPlan], chosen: Sequence[str]) -> list[Plot]:
    """The histogram of each chosen dim with the chosen buckets and the present ones, and what the plans cost."""
    named = {plan.name: plan for plan in plans}
    shown = [name for name in ("chosen", "present") if name in named]
    found = [draw_histogram(dim, sizes[dim], {name: named[name].edges[dim] for name in shown}) for dim in chosen]
    return [*found, _draw_costs(plans)]


def draw_histogram(dim: str, counts: SizeCounts, buckets: Mapping[str, Sequence[int]]) -> Plot:
    """Requests by size, and the upper edges of buckets as lines. buckets: name -> edges, the strongest first."""
    top = max([counts.greatest, *(edge for edges in buckets.values() for edge in edges)])
    log = counts.least > 0 and counts.greatest / max(counts.quantiles[0], 1.0) >= _LONG_TAIL
    low = max(counts.least - 1, 0.5) if log else min(counts.least - 1, 0)
    edges = _bar_edges(low, top, log)
    heights, _ = np.histogram(list(counts.counts), edges, weights=list(counts.counts.values()))
    most = float(heights.max())
    marks: list[Mark] = [Bars(edges.tolist(), heights.tolist(), "muted", kind="requests", opacity=0.55)]
    keys = [Key("requests", "muted")]
    for index, (name, ends) in reversed([*enumerate(buckets.items())]):
        colour, dash, high = ("accent", False, 1.0) if index == 0 else ("c2", True, 0.86)
        for end in ends:
            title = f"{name}: up to {end}"
            marks.append(Line([end, end], [0, high * 1.1 * most], colour, 1.6, dash, kind="edge", title=title))  # type: ignore[arg-type]
        keys.append(Key(f"{name} buckets", colour, dash))  # type: ignore[arg-type]
    for end in _apart(next(iter(buckets.values())), low, top, log):
        marks.append(Text(end, 1.1 * most, str(end), "center", "accent", dy=3))
    total = sum(counts.counts.values())
    words = f"{total} requests by {dim}: half up to {counts.quantiles[0]:g}, the largest {counts.greatest}"
    words += "".join(f"; {name} buckets up to {', '.join(map(str, ends))}" for name, ends in buckets.items())
    x = Axis(float(low), top * 1.03, f"{dim} of a request" + (", logarithmic" if log else ""), log, _count)
    return Plot(
        "buckets", words, x, Axis(0.0, 1.2 * most, "requests", text=_count), tuple(marks), tuple(keys), WIDTH, HEIGHT
    )


def _count(value: float) -> str:
    return f"{value:,.10g}"


def _bar_edges(low: float, top: float, log: bool) -> "np.ndarray":
    """Edges of bars behind whole sizes, so that a bar holds sizes (edge before, edge]."""
    if log:
        return np.unique(np.append(low, np.floor(np.geomspace(max(low, 1.0), top, _MOST_BARS // 2)) + 0.5))
    step = max(math.ceil((top - low) / _MOST_BARS), 1)
    return np.arange(low, top + step + 1, step) + 0.5


def _apart(ends: Sequence[int], low: float, top: float, log: bool) -> list[int]:
    """Those of the edges that have room for their labels, from the greatest down."""
    room = (math.log(top / low) if log else top - low) / (WIDTH / 34)
    kept: list[int] = []
    for end in sorted(ends, reverse=True):
        if not kept or (math.log(kept[-1] / end) if log else kept[-1] - end) >= room:
            kept.append(end)
    return kept


def _draw_rates(summary: TrafficSummary) -> Plot:
    edges = [float(index) - 0.5 for index in range(len(summary.hours) + 1)]
    rates = [hour.per_second for hour in summary.hours]
    words = f"requests a second by hour: {format_plain(min(rates))} to {format_plain(max(rates))}"
    axes = _hour_axis(summary), Axis(0.0, 1.1 * max(rates), "requests a second")
    return Plot("rates", words, *axes, (Bars(edges, rates, "accent"),), (), WIDTH, HEIGHT - 60)


def _draw_hours(summary: TrafficSummary, dim: str) -> Plot:
    xs = [float(index) for index in range(len(summary.hours))]
    marks, keys = [], []
    for index, share in enumerate(QUANTILES):
        ys = [hour.sizes[dim].quantiles[index] for hour in summary.hours]
        name = f"{100 * share:g} % up to"
        marks.append(Line(xs, ys, SERIES[index], kind="quantile", title=name))
        keys.append(Key(name, SERIES[index]))
    top = max(max(mark.ys) for mark in marks)
    words = f"{dim} by hour: " + "; ".join(f"{key.text} {mark.ys[-1]:g}" for key, mark in zip(keys, marks, strict=True))
    axes = _hour_axis(summary), Axis(0.0, 1.1 * top, f"{dim} of a request")
    return Plot("hours", words, *axes, tuple(marks), tuple(keys), WIDTH, HEIGHT)


def _hour_axis(summary: TrafficSummary) -> Axis:
    names = [hour.name[-5:] if summary.start else hour.name for hour in summary.hours]
    step = math.ceil(len(names) / 9)
    ticks = tuple((float(index), names[index]) for index in range(0, len(names), step))
    return Axis(-0.5, len(names) - 0.5, f"UTC, from {summary.start}" if summary.start else "", ticks=ticks)


def _draw_pair(pair: PairCounts) -> Plot:
    rows = sorted(pair.counts, key=lambda row: -row[2])[:_MOST_POINTS]
    most = rows[0][2]
    points = [
        Point(f"{a} x {b}: {count} requests", max(a, 0.5), max(b, 0.5), 0.4 * count / most) for a, b, count in rows
    ]
    x = Axis(*span_axis([point.x for point in points], log=True, least=0.3), f"{pair.dims[0]} of a request", log=True)
    y = Axis(*span_axis([point.y for point in points], log=True, least=0.3), f"{pair.dims[1]} of a request", log=True)
    plot = loglog(points, [], x, y, f"{pair.dims[0]} against {pair.dims[1]} of requests: {len(pair.counts)} pairs")
    return Plot(plot.kind, plot.words, plot.x, plot.y, plot.marks, plot.legend, WIDTH, plot.height)


def _draw_costs(plans: Sequence[BucketPlan]) -> Plot:
    rows = []
    for plan in plans:
        saved = "" if plan.saved is None else f"; chosen saves {percent_text(plan.saved.value).removeprefix('+')}"
        seconds = plan.seconds
        name = f"{plan.name} ({plan.profiles})"
        rows.append(Interval(name, f"{seconds_text(seconds.value)}{saved}", seconds.low, seconds.high, seconds.value))
    ends = [0.0, *(end for plan in plans for end in (plan.seconds.low, plan.seconds.high))]
    low, high = span_axis(ends)
    plot = intervals(rows, Axis(low, high, "engine time of a request, 95 %", text=seconds_text), "What buckets cost")
    return Plot(plot.kind, plot.words, plot.x, plot.y, plot.marks, plot.legend, WIDTH, plot.height)
