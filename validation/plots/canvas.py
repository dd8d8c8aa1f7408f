"""Draws plots with matplotlib: figures and artists alone, never pyplot; nothing of the process outlives a drawing.

The only module that imports matplotlib (half a second), and only `svg` imports it, when there is a page to draw.
Text is measured in DejaVu Sans, which comes with matplotlib and is wider than the faces that browsers take: what fits
here fits there, and the same data gives the same bytes on every machine.
"""

import io
import math
import threading
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Any
from unicodedata import east_asian_width

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from matplotlib.text import Text as Words
from matplotlib.textpath import text_to_path
from matplotlib.ticker import LogLocator, MaxNLocator
from matplotlib.transforms import IdentityTransform

from enginery.core.visible import visible
from validation.plots.marks import Axis, Band, Bars, Colour, Dot, Key, Line, Mark, Plot, Text
from validation.plots.theme import SENTINELS, themed

SIZE = 12.0
_FONT = FontProperties(family="DejaVu Sans", size=SIZE)
_SETTINGS: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "enginery",
    "text.parse_math": False,
    "path.simplify": False,
    "font.family": "DejaVu Sans",
    "font.size": SIZE,
}
_SILENT = dict.fromkeys(("Date", "Creator", "Format", "Type"))
_STEPS = MaxNLocator(6, steps=[1, 2, 2.5, 5, 10])
_EDGE, _GAP, _ROW = 4.0, 10.0, 18.0
# matplotlib's settings are the process's; they are ours only while we draw.
_LOCK = threading.Lock()

Ticks = Sequence[tuple[float, str]]


def draw(plot: Plot) -> str:
    """The plot as themed SVG."""
    with _LOCK, matplotlib.rc_context(_SETTINGS), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        return _Drawing(plot).svg()


@lru_cache(4096)
def text_width(text: str) -> float:
    """Pixels that a text takes at most; letters as wide as Chinese ones, which the face lacks, count as 'W'."""
    known = "".join("W" if east_asian_width(letter) in "WF" else letter for letter in text)
    width, _, _ = text_to_path.get_text_width_height_descent(known, _FONT, ismath=False)
    return float(width)


def fitted(text: str, most: float) -> str:
    """The text, or its beginning and an ellipsis, in at most so many pixels."""
    text = visible(" ".join(text.split()))
    if text_width(text) <= most:
        return text
    low, high = 0, len(text)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if text_width(text[:middle] + "…") <= most else (low, middle - 1)
    return text[:low] + "…"


class _Drawing:
    """One figure with one axes, and margins as wide as its labels need."""

    def __init__(self, plot: Plot) -> None:
        self.rows = _rows(plot.legend, plot.width)
        plot = replace(plot, height=int(plot.height + _ROW * max(0, len(self.rows) - 1)))  # no less room for the data
        self.plot, self.marked = plot, dict[str, tuple[str, str]]()
        self.figure = Figure(figsize=(plot.width / 72, plot.height / 72), dpi=72)
        self.canvas = FigureCanvasSVG(self.figure)
        self.figure.patch.set_visible(False)
        self.ticks = _ticks(plot.x), _ticks(plot.y)
        self.box = self._box()
        self.axes = self._axes()

    def svg(self) -> str:
        self._frame()
        for mark in self.plot.marks:
            self._mark(mark)
        out = io.StringIO()
        self.canvas.print_svg(out, metadata=_SILENT)  # type: ignore[no-untyped-call]
        return themed(out.getvalue(), self.plot, self.marked)

    def _box(self) -> tuple[float, float, float, float]:
        """Where the axes are: left, right, bottom, top, in pixels from below."""
        plot, (xs, ys) = self.plot, self.ticks
        left = max([text_width(label) + 8 for _, label in ys], default=_EDGE)
        right = max(_EDGE + 4, text_width(xs[-1][1]) / 2 if xs else 0)
        low = (_ROW if xs else _EDGE) + (_ROW if plot.x.label else 0)
        high = 8 + (_ROW if plot.y.label else 0) + _ROW * len(self.rows)
        return left, plot.width - right, low, plot.height - high

    def _axes(self) -> Axes:
        (left, right, low, high), plot = self.box, self.plot
        place = left / plot.width, low / plot.height, (right - left) / plot.width, (high - low) / plot.height
        axes = self.figure.add_axes(place)
        axes.set_axis_off()
        if plot.x.log:
            axes.set_xscale("log")
        if plot.y.log:
            axes.set_yscale("log")
        axes.set_xlim(plot.x.low, plot.x.high)
        axes.set_ylim(plot.y.low, plot.y.high)
        return axes

    def _frame(self) -> None:
        """Grid, labels of the ticks, titles of the axes, legend."""
        (left, right, low, high), plot = self.box, self.plot
        end = -math.inf
        for value, label in self.ticks[0]:
            x, _ = self._place(value, plot.y.low)
            self._stroke([(x, low), (x, high)], "line", 1.0)
            half = text_width(label) / 2
            x = min(max(x, half), plot.width - half)
            if x - half >= end:
                self._words(x, low - 14, label, "middle")
                end = x + half + _GAP
        for value, label in self.ticks[1]:
            _, y = self._place(plot.x.low, value)
            self._stroke([(left, y), (right, y)], "line", 1.0)
            self._words(left - 8, y - 4, label, "end")
        if plot.x.label:
            middle = (left + right) / 2
            text = fitted(plot.x.label, plot.width - 8)
            half = text_width(text) / 2
            self._words(min(max(middle, half), plot.width - half), _EDGE, text, "middle")
        if plot.y.label:
            self._words(0, high + 10, fitted(plot.y.label, plot.width), "start")
        for index, row in enumerate(self.rows):
            self._legend(row, plot.height - 13 - index * _ROW)

    def _legend(self, row: Sequence[tuple[float, Key]], y: float) -> None:
        for x, key in row:
            if key.dot:
                self._shape(Path.circle((x + 9, y + 4), 4), key.colour)
            else:
                self._stroke([(x, y + 4), (x + 18, y + 4)], key.colour, 2.5, dash=key.dash)
            self._words(x + 24, y, fitted(key.text, self.plot.width - x - 24), "start")

    def _mark(self, mark: Mark) -> None:
        if isinstance(mark, Line):
            self._line(mark)
        elif isinstance(mark, Band):
            self._band(mark)
        elif isinstance(mark, Bars):
            self._bars(mark)
        elif isinstance(mark, Dot):
            self._dot(mark)
        else:
            self._text(mark)

    def _line(self, mark: Line) -> None:
        points = self._stairs(mark.xs, mark.ys, mark.steps)
        if points:
            self._stroke(points, mark.colour, mark.width, mark, dash=mark.dash, opacity=mark.opacity)

    def _band(self, mark: Band) -> None:
        above, below = (self._stairs(mark.xs, ys, mark.steps) for ys in (mark.high, mark.low))
        if above and below:
            outline = [*above, *reversed(below)]
            self._shape(Path([*outline, outline[0]], closed=True), mark.colour, mark, mark.opacity)

    def _bars(self, mark: Bars) -> None:
        points: list[tuple[float, float]] = []
        for left, right, bottom, top in mark.boxes:
            (a, low), (b, high) = self._place(left, bottom), self._place(right, top)
            gap = min(mark.gap, (b - a) / 2) / 2
            high = high if abs(high - low) >= 1 or top == bottom else low + 1
            points += [(a + gap, low), (a + gap, high), (b - gap, high), (b - gap, low), (a + gap, low)]
        codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * len(mark.boxes)
        if points:
            self._shape(Path(points, codes), mark.colour, mark, mark.opacity)

    def _dot(self, mark: Dot) -> None:
        circle = Path.circle(self._place(mark.x, mark.y), mark.radius)
        if mark.hollow:
            self._add(PathPatch(circle, fill=False, edgecolor=SENTINELS[mark.colour], linewidth=2), mark)
        else:
            self._shape(circle, mark.colour, mark)

    def _text(self, mark: Text) -> None:
        x, y = self._place(mark.x, mark.y)
        room = {"start": self.plot.width - x - mark.dx, "end": x + mark.dx}.get(mark.anchor, float(self.plot.width))
        text = fitted(mark.text, min(room, mark.most or room))
        self._words(x + mark.dx, y + mark.dy, text, mark.anchor, mark)

    def _stairs(self, xs: Iterable[float], ys: Iterable[float], steps: bool) -> list[tuple[float, float]]:
        known = [(x, y) for x, y in zip(xs, ys, strict=True) if not (math.isnan(x) or math.isnan(y))]
        points = [self._place(x, y) for x, y in known]
        if not steps or not points:
            return points
        bends = [point for (_, y), (x, top) in pairwise(points) for point in ((x, y), (x, top))]
        return [points[0], *bends]

    def _place(self, x: float, y: float) -> tuple[float, float]:
        """Pixels from the lower left corner, within the axes."""
        at = _within(x, self.plot.x), _within(y, self.plot.y)
        found = self.axes.transData.transform(at)
        return float(found[0]), float(found[1])

    def _stroke(
        self,
        points: Sequence[tuple[float, float]],
        colour: Colour,
        width: float,
        mark: Mark | None = None,
        *,
        dash: bool = False,
        opacity: float = 1.0,
    ) -> None:
        style: Any = (0, (5 / width, 4 / width)) if dash else "-"
        xs, ys = zip(*points, strict=True)
        line = Line2D(xs, ys, color=SENTINELS[colour], linewidth=width, linestyle=style, alpha=opacity)
        line.set_solid_capstyle("butt" if mark is None else "round")
        self._add(line, mark)

    def _shape(self, path: Path, colour: Colour, mark: Mark | None = None, opacity: float = 1.0) -> None:
        self._add(PathPatch(path, facecolor=SENTINELS[colour], linewidth=0, alpha=opacity), mark)

    def _words(self, x: float, y: float, text: str, anchor: str, mark: Text | None = None) -> None:
        align: Any = {"start": "left", "middle": "center", "end": "right"}[anchor]
        colour: Colour = mark.colour if mark else "muted"
        words = Words(x, y, text, color=SENTINELS[colour], ha=align, va="baseline", fontproperties=_FONT.copy())
        if mark and mark.bold:
            words.set_fontweight("bold")
        kind = " ".join(filter(None, [mark.kind, "halo" if mark.halo else ""])) if mark else ""
        self._add(words, None if mark is None else Text(0, 0, "", kind=kind, title=mark.title))

    def _add(self, artist: Artist, mark: Mark | None) -> None:
        if mark and (mark.kind or mark.title):
            name = f"mark-{len(self.marked)}"
            self.marked[name] = mark.kind, mark.title
            artist.set_gid(name)
        artist.set_transform(IdentityTransform())
        artist.set_clip_on(False)
        artist.set_zorder(len(self.figure.get_children()))  # what comes later lies above
        self.figure.add_artist(artist, clip=False)


def _within(value: float, axis: Axis) -> float:
    return min(max(value, axis.low), axis.high)


def _ticks(axis: Axis) -> Ticks:
    """Where an axis has lines, with their labels."""
    if axis.ticks is not None:
        return [item for item in axis.ticks if axis.low <= item[0] <= axis.high]
    places = _log_ticks(axis) if axis.log else _STEPS.tick_values(axis.low, axis.high)
    slack = 1e-9 * (axis.high - axis.low)
    inside = [0.0 if abs(place) < slack else float(place) for place in places]
    return [(place, axis.text(place)) for place in inside if axis.low - slack <= place <= axis.high + slack]


def _log_ticks(axis: Axis) -> Iterable[float]:
    decades = math.log10(axis.high / axis.low)
    if decades < 0.7:
        return [float(value) for value in _STEPS.tick_values(axis.low, axis.high)]
    subs = (1.0, 2.0, 5.0) if decades < 1.6 else (1.0, 3.0) if decades < 3 else (1.0,)
    places = [float(value) for value in LogLocator(subs=subs, numticks=64).tick_values(axis.low, axis.high)]
    inside = [place for place in places if axis.low <= place * (1 + 1e-9) and place <= axis.high * (1 + 1e-9)]
    return inside[:: math.ceil(len(inside) / 7) or 1]


def _rows(legend: Sequence[Key], width: float) -> list[list[tuple[float, Key]]]:
    """The legend in rows: each key with its left edge."""
    rows: list[list[tuple[float, Key]]] = []
    x = math.inf
    for key in legend:
        need = 24 + text_width(fitted(key.text, width - 24))
        if x + need > width:
            rows.append([])
            x = 0.0
        rows[-1].append((x, key))
        x += need + 18
    return rows
