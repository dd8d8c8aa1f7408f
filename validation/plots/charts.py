"""What a plot shows, as plain values: axes and marks in the units of the data. Nothing here knows how it is drawn.

Places may be -inf and inf, which are the ends of an axis. Marks are kept within the axes, so an axis
decides what is seen. Colours are names of `COLOURS`, which a page gives for light and for dark.

The kinds of picture that pages have: distribution functions, intervals against a limit, histograms, log-log scatter.

Each gives a `Plot`; `svg` draws it. All take what they show in words, for those who do not see it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from validation.plots.texts import number_text

Colour = Literal["ink", "muted", "line", "card", "accent", "proven-soft", "failed", "failed-fill", "proven-fill",
                 "unproven-fill", "refused-fill", "c1", "c2", "c3", "c4", "c5", "c6"]  # fmt: skip
Anchor = Literal["left", "center", "right"]
# For curves side by side, in this order; beyond them they repeat with dashes.
SERIES: tuple[Colour, ...] = ("c1", "c2", "c3", "c4", "c5", "c6")
WIDTH, HEIGHT = 420, 250


@dataclass(frozen=True)
class Axis:
    """From low to high. ticks: (place, label); None for some five round numbers, labelled by `text`; () for none.

    label: what is measured, with its unit.  log: low must be above 0 then.
    """

    low: float
    high: float
    label: str = ""
    log: bool = False
    text: Callable[[float], str] = number_text
    ticks: tuple[tuple[float, str], ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Something drawn. kind: the class in the SVG.  title: what a pointer that rests on it says."""

    opacity: float = 1.0
    kind: str = ""
    title: str = ""


@dataclass(frozen=True)
class Line(Mark):
    """A line through points; `steps`: a stair, along and then up. NaN leaves a gap."""

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
    """Words at a place, moved by dx, dy pixels (dy upwards), cut to at most `most` pixels."""

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
    """A line of the legend: the look of a mark, and what it stands for."""

    text: str
    colour: Colour
    dash: bool = False
    dot: bool = False


@dataclass(frozen=True)
class Plot:
    """One picture. words: what it shows, for those who do not see it.  width, height: its view box, in pixels.

    Drawn at its own size, text is 12 pixels high; at 356 (a card in a window of 420) it is 10 pixels high.
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


# Axes end where what is reckoned with their ends stays finite.
_DECADES = 150.0
_FARTHEST = 1e140
_QUARTERS = tuple((part / 4, f"{25 * part} %") for part in range(5))


@dataclass(frozen=True)
class Curve:
    """A distribution function: shares (0 to 1, rising) of what is at most each x. colour: None for the next in turn."""

    name: str
    xs: Sequence[float]
    shares: Sequence[float]
    colour: Colour | None = None
    dash: bool = False


@dataclass(frozen=True)
class Interval:
    """A row: an estimate with its interval. value: the row in words, at its right end.

    tone: colour of the dot. An interval without ends (None) is a row of words alone.
    """

    name: str
    value: str
    low: float | None
    high: float | None
    point: float | None = None
    tone: Colour = "accent"


@dataclass(frozen=True)
class Point:
    """A point of a scatter. size: share of the greatest, 0 to 1, as area."""

    name: str
    x: float
    y: float
    size: float = 0.3
    colour: Colour = "c1"


def span_axis(
    values: Sequence[float], *, log: bool = False, pad: float = 0.04, least: float = 0.0
) -> tuple[float, float]:
    """Ends of an axis around the finite values (the positive ones, if logarithmic), with a pad on both sides.

    least: the narrowest that the axis may be, in its units; in decades, if logarithmic. (0, 1) or (1, 10) for none.
    What lies beyond 1e140 either way, or nearer to 0 than 1e-140 on a logarithmic axis, is drawn at its end.
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
    """Distribution functions as stairs."""
    marks: list[Mark] = []
    keys = []
    for index, curve in enumerate(curves):
        colour, dash = series(index) if curve.colour is None else (curve.colour, curve.dash)
        marks.append(Line(curve.xs, curve.shares, colour, dash=dash, steps=True, kind="curve", title=curve.name))
        keys.append(Key(curve.name, colour, dash))
    y = Axis(0.0, 1.0, "", ticks=_QUARTERS)
    return Plot("ecdf", words, x, y, tuple(marks), tuple(keys))


def series(index: int) -> tuple[Colour, bool]:
    """Colour of a curve among others, and whether it is dashed."""
    return SERIES[index % len(SERIES)], index % (2 * len(SERIES)) >= len(SERIES)


def intervals(
    rows: Sequence[Interval], x: Axis, words: str, limit: float | None = None, limit_text: str = "limit"
) -> Plot:
    """Rows of estimates with their intervals over one axis; the words of a row stand above its bar.

    limit: one for all rows; what is below it is shaded as fine.
    """
    marks: list[Mark] = []
    if limit is not None:
        marks.append(Bars([-math.inf, limit], [math.inf], "proven-soft", kind="fine"))
        marks.append(
            Line([limit, limit], [-math.inf, math.inf], "failed", 1.5, dash=True, kind="limit", title=limit_text)
        )
    if x.low < 0 < x.high:
        marks.append(Line([0, 0], [-math.inf, math.inf], "muted", 1.0))
    for index, row in enumerate(rows):
        marks += _row(row, len(rows) - 1 - index, x)
    keys = (Key(limit_text, "failed", dash=True),) if limit is not None else ()
    y = Axis(-0.4, max(len(rows), 1) - 0.4, ticks=())
    return Plot("intervals", words, x, y, tuple(marks), keys, height=56 + 40 * max(len(rows), 1))


def _row(row: Interval, y: float, x: Axis) -> list[Mark]:
    marks: list[Mark] = [
        Text(-math.inf, y, row.name, colour="ink", dx=2, dy=9, bold=True, most=210, title=row.name),
        Text(math.inf, y, row.value, "right", dx=-2, dy=9, most=190),
    ]
    if row.low is not None and row.high is not None:
        marks += _spans(row.low, row.high, y, x, f"{row.name}: {row.value}")
    if row.point is not None and x.low <= row.point <= x.high:
        marks.append(Dot(row.point, y, "card", 6.0))
        marks.append(Dot(row.point, y, row.tone, 4.5, kind="point"))
    return marks


def _spans(low: float, high: float, y: float, x: Axis, words: str) -> list[Mark]:
    """An interval; a thin arrow points to one that lies beyond an end of the axis."""
    wide = x.high - x.low
    for end, beyond, inwards in ((x.high, low > x.high, -wide), (x.low, high < x.low, wide)):
        if beyond:
            shaft = Line([end + 0.12 * inwards, end], [y, y], "ink", 1.5, dash=True, kind="beyond", title=words)
            return [shaft, Line([end + 0.03 * inwards, end, end + 0.03 * inwards], [y + 0.1, y, y - 0.1], "ink", 1.5)]
    return [Line([low, high], [y, y], "ink", 2.5, kind="span", title=words)]


def histogram(
    edges: Sequence[float], counts: Sequence[float], words: str, holds: tuple[float, float] | None = None
) -> Plot:
    """Counts on a logarithmic scale; holds: the ends of what is kept, beyond which bars have another colour."""
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
