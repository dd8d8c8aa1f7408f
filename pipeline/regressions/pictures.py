"""A series of latencies as a picture: its points with their intervals, the levels between changes, and what came with
each change."""

import html
import math
from collections.abc import Sequence
from itertools import pairwise

from enginesmith.core.text import visible
from enginesmith.registry.latency_series import SeriesPoint
from pipeline.regressions.trend import Trend, TrendChange, Value, describe_change, value_of
from validation.plots.charts import Axis, Dot, Line, Mark, Plot, Text, span_axis
from validation.plots.svg import svg
from validation.plots.texts import seconds_text

WIDTH, HEIGHT = 720, 260
_LEVEL = "the median between changes"


def draw_trend(trend: Trend, *, standalone: bool = False) -> str:
    """The picture of a series as SVG: of the ratio to the reference where there is one, else of the medians."""
    value: Value = "relative" if any(point.relative for point in trend.series.points) else "median"
    known = [(i, point, number) for i, point in enumerate(trend.series.points) if (number := _number(point, value))]
    changes = [change for change in trend.changes or () if change.value == value]
    marks = [mark for i, point, number in known for mark in _point(i, point, number, value)]
    marks += _levels(known, changes)
    low, high = span_axis([number for _, _, number in known], pad=0.12, least=0.02 if value == "relative" else 0.0)
    name = "times the reference" if value == "relative" else "median"
    text = (lambda number: f"{number:.3f}") if value == "relative" else seconds_text
    words = f"{trend.series.model} {trend.series.unit} at {trend.series.bucket}: {len(known)} points"
    last = max(len(trend.series.points) - 1, 1)
    ticks = [(i, trend.series.points[i].at[:10]) for i in sorted({0, last // 2, len(trend.series.points) - 1})]
    x = Axis(-0.02 * last, 1.02 * last, ticks=tuple((float(i), label) for i, label in ticks))
    plot = Plot(
        "trend",
        words,
        x,
        Axis(low, high, name, text=text),
        tuple(marks),
        width=WIDTH,
        height=HEIGHT,
        standalone=standalone,
    )
    return svg(plot)


def _number(point: SeriesPoint, value: Value) -> float | None:
    return point.relative if value == "relative" else point.median_s


def _point(index: int, point: SeriesPoint, number: float, value: Value) -> list[Mark]:
    """A point with its interval; hollow where it was measured on a busy machine."""
    ends = (point.relative_low, point.relative_high) if value == "relative" else (point.low_s, point.high_s)
    title = f"{point.at}, version {point.version}: {number:.4g}" + (", busy machine" if point.busy else "")
    marks: list[Mark] = []
    low, high = ends
    if low is not None and high is not None:
        marks.append(Line([index, index], [low, high], "line", 1.5, title=title))
    hollow = bool(point.busy) and value_of(point, value) is None
    return [*marks, Dot(index, number, "muted" if hollow else "accent", 2.5, hollow=hollow, title=title)]


def _levels(known: Sequence[tuple[int, SeriesPoint, float]], changes: Sequence[TrendChange]) -> list[Mark]:
    marks: list[Mark] = []
    ends = [0, *(change.index for change in changes), math.inf]
    for start, end in pairwise(ends):
        numbers = sorted(number for i, _, number in known if start <= i < end)
        if numbers:
            last = max(i for i, _, _ in known if i < end)
            marks.append(Line([start, last], [numbers[len(numbers) // 2]] * 2, "ink", 2.0, title=_LEVEL))
    middle = known[-1][0] / 2 if known else 0
    for row, change in enumerate(changes):
        late = change.index > middle
        label = "; ".join(change.came_with) or "nothing recorded"
        text = f"{100 * (change.ratio - 1):+.1f} %: {label}"
        at = change.index - 0.5
        marks.append(Line([at, at], [-math.inf, math.inf], "failed", 1.0, dash=True, title=describe_change(change)))
        beside = Text(
            at,
            math.inf,
            text,
            "right" if late else "left",
            "failed",
            dx=-4 if late else 4,
            dy=-12 - 14 * (row % 3),
            most=WIDTH / 2,
        )
        marks.append(beside)
    return marks


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
