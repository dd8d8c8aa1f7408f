"""Plots as plain values (axes and marks in the units of the data), and the kinds of chart that pages have.

Coordinates may be -inf and inf, which are the ends of an axis; marks beyond an axis are drawn at its end. Colours are
names, to which a page gives values for light and for dark. Each kind of chart returns a `Plot`, which `svg` draws.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

from validation.plots.texts import number_text

Colour = Literal["ink", "muted", "line", "card", "accent", "proven-soft", "failed", "failed-fill", "proven-fill",
                 "unproven-fill", "refused-fill", "c1", "c2", "c3", "c4", "c5", "c6"]  # fmt: skip
Anchor = Literal["left", "center", "right"]
# Each name stands in a drawing as a colour that nothing else has; `svg` puts the page's own in its place.
SENTINELS = {name: f"#0e0d{index:02x}" for index, name in enumerate(get_args(Colour))}
# Colours of curves side by side, in this order; further curves repeat them with dashes.
SERIES: tuple[Colour, ...] = ("c1", "c2", "c3", "c4", "c5", "c6")
WIDTH, HEIGHT = 420, 250


@dataclass(frozen=True)
class Axis:
    """An axis from low to high; both above 0 where it is logarithmic (`log`).

    label: what is measured, with its unit.  ticks: (place, label); None for about five round numbers, labelled by
    `text`; () for none.
    """

    low: float
    high: float
    label: str = ""
    log: bool = False
    text: Callable[[float], str] = number_text
    ticks: tuple[tuple[float, str], ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Something drawn. kind: its class in the SVG.  title: the text of its tooltip."""

    opacity: float = 1.0
    kind: str = ""
    title: str = ""


@dataclass(frozen=True)
class Line(Mark):
    """A line through points; NaN leaves a gap. steps: a stair, along and then up.  width: in pixels."""

    xs: Sequence[float]
    ys: Sequence[float]
    colour: Colour = "accent"
    width: float = 2.0
    dash: bool = False
    steps: bool = False


@dataclass(frozen=True)
class Bars(Mark):
    """The area between the lower end of the axis and a stair: heights [n] between edges [n + 1]; none where NaN."""

    edges: Sequence[float]
    heights: Sequence[float]
    colour: Colour = "accent"


@dataclass(frozen=True)
class Dot(Mark):
    """A point; hollow: a ring around it. radius: in pixels."""

    x: float
    y: float
    colour: Colour = "accent"
    radius: float = 4.0
    hollow: bool = False


@dataclass(frozen=True)
class Text(Mark):
    """A text at a place, moved by dx, dy pixels (dy upwards), and cut to at most `most` pixels."""

    x: float
    y: float
    text: str
    anchor: Anchor = "left"
    colour: Colour = "muted"
    dx: float = 0.0
    dy: float = 0.0
    bold: bool = False
    most: float = WIDTH


@dataclass(frozen=True)
class Key:
    """An entry of the legend."""

    text: str
    colour: Colour
    dash: bool = False
    dot: bool = False


@dataclass(frozen=True)
class Plot:
    """One picture. kind: its class in the SVG.  words: its text alternative.  width, height: view box, in pixels.

    Text is 12 pixels high at the picture's own size, 10 pixels at a width of 356 (a card in a window of 420 pixels).
    standalone: a file of its own, which has no page to take colours from.
    """

    kind: str
    words: str
    x: Axis
    y: Axis
    marks: tuple[Mark, ...]
    legend: tuple[Key, ...] = ()
    width: int = WIDTH
    height: int = HEIGHT
    standalone: bool = False


# Ends of axes, so far out that sums and powers of them stay finite.
_DECADES = 150.0
_FARTHEST = 1e140
_QUARTERS = tuple((part / 4, f"{25 * part} %") for part in range(5))


@dataclass(frozen=True)
class Curve:
    """A distribution function: the share (0 to 1, rising) of values up to each x. colour: None: the next of SERIES."""

    name: str
    xs: Sequence[float]
    shares: Sequence[float]
    colour: Colour | None = None
    dash: bool = False


@dataclass(frozen=True)
class Interval:
    """A row of an interval chart. value: text at its right end.  low, high: None: no interval.  tone: of the dot."""

    name: str
    value: str
    low: float | None
    high: float | None
    point: float | None = None
    tone: Colour = "accent"


@dataclass(frozen=True)
class Point:
    """A point of a scatter plot. size: its area, as a share of the greatest, 0 to 1."""

    name: str
    x: float
    y: float
    size: float = 0.3
    colour: Colour = "c1"


def span_axis(
    values: Sequence[float], *, log: bool = False, pad: float = 0.04, least: float = 0.0
) -> tuple[float, float]:
    """Ends (low, high) of an axis around the finite values (the positive ones, if logarithmic).

    pad: added at both ends, as a share of the width.  least: width at least, in units of the axis; in decades, if
    logarithmic. Without values it is (0, 1), or (1, 10) if logarithmic. Values beyond 1e140 either way, or nearer to 0
    than 1e-140 on a logarithmic axis, count as those.
    """
    known = [value for value in values if math.isfinite(value) and (not log or value > 0)]
    if not known:
        return (1.0, 10.0) if log else (0.0, 1.0)
    known = [min(max(value, 1 / _FARTHEST if log else -_FARTHEST), _FARTHEST) for value in known]
    low, high = (math.log10(min(known)), math.log10(max(known))) if log else (min(known), max(known))
    wide = max(high - low, least, 1e-9 * max(abs(low), abs(high)), 1e-12)
    middle = (low + high) / 2
    low, high = middle - wide * (0.5 + pad), middle + wide * (0.5 + pad)
    if not log:
        return low, high
    return 10.0 ** max(low, -_DECADES), 10.0 ** min(high, _DECADES)


def ecdf(curves: Sequence[Curve], x: Axis, words: str) -> Plot:
    """Distribution functions as stairs over the axis x. words: the text alternative, here and below."""
    marks: list[Mark] = []
    keys = []
    for index, curve in enumerate(curves):
        colour, dash = series(index) if curve.colour is None else (curve.colour, curve.dash)
        marks.append(Line(curve.xs, curve.shares, colour, dash=dash, steps=True, kind="curve", title=curve.name))
        keys.append(Key(curve.name, colour, dash))
    y = Axis(0.0, 1.0, "", ticks=_QUARTERS)
    return Plot("ecdf", words, x, y, tuple(marks), tuple(keys))


def series(index: int) -> tuple[Colour, bool]:
    """The colour of the curve number `index`, and whether it is dashed."""
    return SERIES[index % len(SERIES)], index % (2 * len(SERIES)) >= len(SERIES)


def intervals(
    rows: Sequence[Interval], x: Axis, words: str, limit: float | None = None, limit_text: str = "limit"
) -> Plot:
    """Rows of estimates with their intervals over one axis; the text of a row stands above its bar.

    limit: one for all rows; the area below it is shaded.
    """
    marks: list[Mark] = []
    if limit is not None:
        edge = Line([limit, limit], [-math.inf, math.inf], "failed", 1.5, dash=True, kind="limit", title=limit_text)
        marks += [Bars([-math.inf, limit], [math.inf], "proven-soft", kind="fine"), edge]
    if x.low < 0 < x.high:
        marks.append(Line([0, 0], [-math.inf, math.inf], "muted", 1.0))
    for index, row in enumerate(rows):
        marks += _row(row, len(rows) - 1 - index, x)
    keys = (Key(limit_text, "failed", dash=True),) if limit is not None else ()
    y = Axis(-0.4, max(len(rows), 1) - 0.4, ticks=())
    return Plot("intervals", words, x, y, tuple(marks), keys, height=56 + 40 * max(len(rows), 1))


def _row(row: Interval, y: float, x: Axis) -> list[Mark]:
    """The marks of a row; a thin arrow points to an interval that lies beyond an end of the axis."""
    marks: list[Mark] = [
        Text(-math.inf, y, row.name, colour="ink", dx=2, dy=9, bold=True, most=210, title=row.name),
        Text(math.inf, y, row.value, "right", dx=-2, dy=9, most=190),
    ]
    if row.low is not None and row.high is not None:
        words, inwards = f"{row.name}: {row.value}", x.high - x.low
        if row.low > x.high or row.high < x.low:
            end, inwards = (x.high, -inwards) if row.low > x.high else (x.low, inwards)
            marks.append(Line([end + 0.12 * inwards, end], [y, y], "ink", 1.5, dash=True, kind="beyond", title=words))
            base = end + 0.03 * inwards
            marks.append(Line([base, end, base], [y + 0.1, y, y - 0.1], "ink", 1.5))
        else:
            marks.append(Line([row.low, row.high], [y, y], "ink", 2.5, kind="span", title=words))
    if row.point is not None and x.low <= row.point <= x.high:
        marks += [Dot(row.point, y, "card", 6.0), Dot(row.point, y, row.tone, 4.5, kind="point")]
    return marks


def histogram(
    edges: Sequence[float], counts: Sequence[float], words: str, holds: tuple[float, float] | None = None
) -> Plot:
    """Counts on a logarithmic scale. holds: range beyond which bars have another colour."""
    low, high = (edges[0], edges[-1]) if edges[-1] > edges[0] else (edges[0] - 0.5, edges[0] + 0.5)
    start, end = holds or (-math.inf, math.inf)
    inside = [start <= (left + right) / 2 <= end for left, right in pairwise(edges)]
    most = math.log1p(max([*counts, 1.0]))
    shown = [math.log1p(count) / most for count in counts]
    marks = (
        Bars(edges, [y if within else 0.0 for y, within in zip(shown, inside, strict=True)], "accent", kind="in"),
        Bars(edges, [0.0 if within else y for y, within in zip(shown, inside, strict=True)], "failed-fill", kind="out"),
        Line([low, high], [0, 0], "line", 1.0),
    )
    return Plot("histogram", words, Axis(low, high), Axis(0.0, 1.0, ticks=()), marks, width=340, height=150)


def loglog(
    points: Sequence[Point], lines: Sequence[Line], x: Axis, y: Axis, words: str, legend: Sequence[Key] = ()
) -> Plot:
    """A scatter over two logarithmic axes, with lines such as the roofs of a roofline."""
    radii = [2.5 + 7 * math.sqrt(min(max(point.size, 0.0), 1.0)) for point in points]
    dots = [
        Dot(point.x, point.y, point.colour, radius, kind="dot", title=point.name)
        for point, radius in zip(points, radii, strict=True)
    ]
    return Plot("loglog", words, x, y, (*lines, *dots), tuple(legend), height=HEIGHT + 30)
