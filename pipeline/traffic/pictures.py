"""Traffic as pictures: histograms of dims with their buckets, rates and sizes by hour."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core.text import format_plain
from pipeline.traffic.choice import BucketPlan
from pipeline.traffic.summary import QUANTILES, SizeCounts, TrafficSummary
from validation.plots.figure import COLOURS, SERIES, annotate, draw_svg, set_axis, tag

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Of one of the charts that lie beneath each other.
WIDTH, HEIGHT = 640, 260
_MOST_BARS = 160
# The axis of sizes is logarithmic where the greatest is so many times the median.
_LONG_TAIL = 8.0
# Draws one chart, and returns its words.
Chart = Callable[["Axes"], str]


def draw_traffic(summary: TrafficSummary, buckets: Mapping[str, Sequence[int]]) -> str:
    """The SVG of traffic. buckets: the upper edges that the spec has for each dim."""
    dims = [dim for dim, counts in summary.dims.items() if len(counts.counts) > 1] or [*summary.dims]
    charts: list[Chart] = [
        partial(draw_histogram, dim=dim, counts=summary.dims[dim], buckets={"present": buckets[dim]}) for dim in dims
    ]
    if len(summary.hours) > 1:
        charts += [partial(_draw_rates, summary=summary)]
        charts += [partial(_draw_hours, summary=summary, dim=dim) for dim in dims]
    return _draw(charts)


def draw_choice(sizes: Mapping[str, SizeCounts], plans: Sequence[BucketPlan], chosen: Sequence[str]) -> str:
    """The SVG of the histogram of each chosen dim with the chosen buckets and the present ones."""
    named = {plan.name: plan for plan in plans}
    names = [name for name in ("chosen", "present") if name in named]
    return _draw(
        [
            partial(
                draw_histogram, dim=dim, counts=sizes[dim], buckets={name: named[name].edges[dim] for name in names}
            )
            for dim in chosen
        ]
    )


def _draw(charts: Sequence[Chart]) -> str:
    words: list[str] = []

    def draw(figure: "Figure") -> None:
        places = figure.subplots(len(charts), squeeze=False)[:, 0]
        words.extend(chart(axes) for chart, axes in zip(charts, places, strict=True))

    return draw_svg("traffic", words, draw, (WIDTH, HEIGHT * len(charts)), standalone=True)


def draw_histogram(axes: "Axes", dim: str, counts: SizeCounts, buckets: Mapping[str, Sequence[int]]) -> str:
    """Requests by size, and the upper edges of buckets as lines. buckets: name -> edges, the strongest first."""
    top = max([counts.greatest, *(edge for edges in buckets.values() for edge in edges)])
    log = counts.least > 0 and counts.greatest / max(counts.quantiles[0], 1.0) >= _LONG_TAIL
    low = max(counts.least - 1, 0.5) if log else min(counts.least - 1, 0)
    edges = _bar_edges(low, top, log)
    heights, _ = np.histogram(list(counts.counts), edges, weights=list(counts.counts.values()))
    most = float(heights.max())
    axes.stairs(heights, edges, fill=True, color=COLOURS["muted"], alpha=0.55, label="requests", gid=tag("requests"))
    for index, (name, ends) in enumerate(buckets.items()):
        look: Any = {"color": COLOURS["c2" if index else "accent"], "linestyle": "--" if index else "-"}
        for at, end in enumerate(ends):
            gid, label = tag("edge", f"{name}: up to {end}"), None if at else f"{name} buckets"
            height = (0.95 if index else 1.1) * most
            axes.plot([end, end], [0, height], linewidth=1.6, label=label, gid=gid, **look)
    for end in _apart(next(iter(buckets.values())), low, top, log):
        annotate(axes, str(end), (end, 1.1 * most), (0, 3), ha="center", color=COLOURS["accent"])
    label = f"{dim} of a request" + (", logarithmic" if log else "")
    set_axis(axes, "x", (float(low), top * 1.03), label, log=log, text=_count)
    set_axis(axes, "y", (0.0, 1.2 * most), "requests", text=_count)
    total = sum(counts.counts.values())
    words = f"{total} requests by {dim}: half up to {counts.quantiles[0]:g}, the largest {counts.greatest}"
    return words + "".join(f"; {name} buckets up to {', '.join(map(str, ends))}" for name, ends in buckets.items())


def _count(value: float) -> str:
    return f"{value:,.10g}"


def _bar_edges(low: float, top: float, log: bool) -> Array:
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


def _draw_rates(axes: "Axes", summary: TrafficSummary) -> str:
    rates = [hour.per_second for hour in summary.hours]
    axes.stairs(rates, np.arange(len(rates) + 1) - 0.5, fill=True, color=COLOURS["accent"])
    _set_hours(axes, summary)
    set_axis(axes, "y", (0.0, 1.1 * max(rates)), "requests a second")
    return f"requests a second by hour: {format_plain(min(rates))} to {format_plain(max(rates))}"


def _draw_hours(axes: "Axes", summary: TrafficSummary, dim: str) -> str:
    words, top = [], 0.0
    for index, share in enumerate(QUANTILES):
        sizes = [hour.sizes[dim].quantiles[index] for hour in summary.hours]
        name, top = f"{100 * share:g} % up to", max(top, *sizes)
        axes.plot(range(len(sizes)), sizes, color=SERIES[index], label=name, gid=tag("quantile", name))
        words.append(f"{name} {sizes[-1]:g}")
    _set_hours(axes, summary)
    set_axis(axes, "y", (0.0, 1.1 * top), f"{dim} of a request")
    return f"{dim} by hour: {'; '.join(words)}"


def _set_hours(axes: "Axes", summary: TrafficSummary) -> None:
    names = [hour.name[-5:] if summary.start else hour.name for hour in summary.hours]
    ticks = [(float(index), names[index]) for index in range(0, len(names), math.ceil(len(names) / 9))]
    label = f"UTC, from {summary.start}" if summary.start else ""
    set_axis(axes, "x", (-0.5, len(names) - 0.5), label, ticks=ticks)
