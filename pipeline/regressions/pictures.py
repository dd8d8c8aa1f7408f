"""A series of latencies as a picture: its points with their intervals, the levels between changes, and what came with
each change."""

import html
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from enginesmith.core.text import visible
from enginesmith.registry.latency_series import SeriesPoint
from pipeline.regressions.trend import Trend, TrendChange, Value, describe_change, value_of
from validation.plots.figure import COLOURS, annotate, draw_svg, set_axis, shorten, span, tag
from validation.plots.texts import seconds_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE = (720, 260)
_LEVEL = "the median between changes"


def draw_trend(trend: Trend, *, standalone: bool = False) -> str:
    """The picture of a series as SVG: of the ratio to the reference where there is one, else of the medians."""
    value: Value = "relative" if any(point.relative for point in trend.series.points) else "median"
    known = [(i, point, number) for i, point in enumerate(trend.series.points) if (number := _number(point, value))]
    changes = [change for change in trend.changes or () if change.value == value]
    last = max(len(trend.series.points) - 1, 1)

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        for i, point, number in known:
            _draw_point(axes, i, point, number, value)
        _draw_levels(axes, known, changes)
        ends = span([number for _, _, number in known], pad=0.12, least=0.02 if value == "relative" else 0.0)
        name = "times the reference" if value == "relative" else "median"
        set_axis(axes, "y", ends, name, text=(lambda number: f"{number:.3f}") if value == "relative" else seconds_text)
        places = sorted({0, last // 2, len(trend.series.points) - 1})
        ticks = [(float(i), trend.series.points[i].at[:10]) for i in places]
        set_axis(axes, "x", (-0.02 * last, 1.02 * last), ticks=ticks)

    words = f"{trend.series.model} {trend.series.unit} at {trend.series.bucket}: {len(known)} points"
    return draw_svg("trend", words, draw, SIZE, standalone=standalone)


def _number(point: SeriesPoint, value: Value) -> float | None:
    return point.relative if value == "relative" else point.median_s


def _draw_point(axes: "Axes", index: int, point: SeriesPoint, number: float, value: Value) -> None:
    """A point with its interval; hollow where it was measured on a busy machine."""
    low, high = (point.relative_low, point.relative_high) if value == "relative" else (point.low_s, point.high_s)
    title = f"{point.at}, version {point.version}: {number:.4g}" + (", busy machine" if point.busy else "")
    if low is not None and high is not None:
        axes.plot([index, index], [low, high], color=COLOURS["line"], linewidth=1.5, gid=tag("interval", title))
    hollow = bool(point.busy) and value_of(point, value) is None
    colour, fill = COLOURS["muted" if hollow else "accent"], "none" if hollow else COLOURS["accent"]
    axes.plot(index, number, "o", color=colour, markersize=5, markerfacecolor=fill, gid=tag("point", title))


def _draw_levels(axes: "Axes", known: Sequence[tuple[int, SeriesPoint, float]], changes: Sequence[TrendChange]) -> None:
    """The median between changes, and a line at each change with what came with it."""
    for start, end in pairwise([0, *(change.index for change in changes), math.inf]):
        numbers = sorted(number for i, _, number in known if start <= i < end)
        if numbers:
            last, gid = max(i for i, _, _ in known if i < end), tag("level", _LEVEL)
            axes.plot([start, last], [numbers[len(numbers) // 2]] * 2, color=COLOURS["ink"], gid=gid)
    middle = known[-1][0] / 2 if known else 0
    for row, change in enumerate(changes):
        at, late = change.index - 0.5, change.index > middle
        gid = tag("change", describe_change(change))
        axes.axvline(at, color=COLOURS["failed"], linewidth=1.0, linestyle="--", gid=gid)
        text = shorten(f"{100 * (change.ratio - 1):+.1f} %: {'; '.join(change.came_with) or 'nothing recorded'}")
        place = (-4 if late else 4, -12 - 14 * (row % 3))
        annotate(axes, text, (at, 1.0), place, ha="right" if late else "left", color=COLOURS["failed"], top=True)


def draw_page(trends: Sequence[Trend]) -> str:
    """All series on one HTML page, each with its changes in words."""
    parts = []
    for trend in trends:
        title = html.escape(visible(f"{trend.series.unit} at {trend.series.bucket}, {trend.series.machine}"))
        changes = "".join(f"<li>{html.escape(visible(describe_change(change)))}</li>" for change in trend.changes or ())
        parts.append(f"<h2>{title}</h2>{draw_trend(trend, standalone=True)}<ul>{changes or '<li>no change</li>'}</ul>")
    model = html.escape(visible(trends[0].series.model))
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{model}: latencies over time</title>'
        "<style>body{font:16px system-ui,sans-serif;max-width:48rem;margin:2rem auto;padding:0 1rem}</style>"
        f"<h1>{model}: latencies over time</h1>{''.join(parts)}</html>\n"
    )
