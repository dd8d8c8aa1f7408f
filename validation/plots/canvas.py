"""Plots drawn with matplotlib: figures and artists, never pyplot, so that no state of the process is left behind.

The only module that imports matplotlib, which takes half a second; only `svg` imports it, when there is a plot to draw.
Text is measured in DejaVu Sans, which comes with matplotlib and is wider than the fonts of browsers: what fits here
fits there, and the same data gives the same bytes on every machine.
"""

import io
import math
import threading
import warnings
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal
from unicodedata import east_asian_width

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.image import imsave
from matplotlib.legend_handler import HandlerPatch
from matplotlib.lines import Line2D
from matplotlib.patches import Circle
from matplotlib.textpath import text_to_path
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator
from matplotlib.transforms import ScaledTranslation

from enginesmith.core.text import visible
from validation.plots.charts import SENTINELS, Axis, Bars, Dot, Key, Line, Mark, Plot, Text

_STYLE = Path(__file__).with_name("plots.mplstyle")
_LABELS = ("axes.titlecolor", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor", "legend.labelcolor")
# A page's colours for light (validation/reporting/report.css), for pictures that are no text.
LIGHT: Mapping[str, str] = {
    "ink": "#1d2126", "muted": "#626a73", "line": "#e4e1dc", "card": "#ffffff", "accent": "#2f5d9e",
    "proven-soft": "#ddf2e6", "failed": "#b3261e", "failed-fill": "#d4483d", "proven-fill": "#2f9e6b",
    "unproven-fill": "#e0a437", "refused-fill": "#c4bfb6", "c1": "#2f5d9e", "c2": "#c9831a", "c3": "#2b8a72",
    "c4": "#8e4a9e", "c5": "#b0453c", "c6": "#6d7680",
}  # fmt: skip
_FONT = FontProperties(family="DejaVu Sans", size=12)
# Pixels that an entry of the legend takes beside its text, and the height of a row of entries.
_HANDLE, _ROW = 44.0, 15
# matplotlib's settings are those of the process: they are changed for one drawing at a time.
_LOCK = threading.Lock()


def draw(plot: Plot) -> tuple[str, Plot]:
    """matplotlib's SVG of a plot, and the plot with the height that its legend needs.

    The id of a mark's group is its kind, a colon, and its title.
    """
    with _settings(SENTINELS):
        figure, plot = _figure(plot, SENTINELS)
        out = io.StringIO()
        nameless = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        FigureCanvasSVG(figure).print_svg(out, metadata=nameless)  # type: ignore[no-untyped-call]
        return out.getvalue(), plot


def write_png(plots: Sequence[Plot], path: Path, scale: float = 2.0) -> None:
    """Write plots of equal width, one beneath the other, in light colours. scale: pixels for each of the plots'."""
    drawn = []
    with _settings(LIGHT):
        for plot in plots:
            figure, _ = _figure(plot, LIGHT, scale)
            figure.patch.set(visible=True, facecolor=LIGHT["card"])
            canvas = FigureCanvasAgg(figure)
            canvas.draw()  # type: ignore[no-untyped-call]
            drawn.append(np.array(canvas.buffer_rgba()))  # type: ignore[no-untyped-call]
    imsave(path, np.concatenate(drawn))


@contextmanager
def _settings(colours: Mapping[str, str]) -> Iterator[None]:
    """matplotlib's settings for one drawing."""
    own: Any = {"grid.color": colours["line"], **dict.fromkeys(_LABELS, colours["muted"])}
    with _LOCK, matplotlib.rc_context(own, _STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def _figure(plot: Plot, colours: Mapping[str, str], scale: float = 1.0) -> tuple[Figure, Plot]:
    """The figure of a plot, and the plot with the height that its legend needs. scale: pixels for each of its own."""
    columns = _columns(plot.legend, plot.width)
    rows = math.ceil(len(plot.legend) / columns)
    plot = replace(plot, height=plot.height + _ROW * max(0, rows - 1))  # no less room for the data
    figure = Figure(figsize=(plot.width / 72, plot.height / 72), dpi=72 * scale)
    axes = figure.add_subplot()
    axes.patch.set_visible(False)
    _lay(axes, "x", plot.x)
    _lay(axes, "y", plot.y)
    figure.supxlabel(fit_text(plot.x.label, plot.width - 8), size="medium", color=colours["muted"])
    axes.set_title(fit_text(plot.y.label, plot.width - 60))
    for order, mark in enumerate(plot.marks):
        gid = f"{mark.kind}:{visible(mark.title)}"
        _add(axes, plot, mark, colours, scale, zorder=10 + order, clip_on=False, gid=gid)
    if plot.legend:
        handles = [_handle(key, plot.width, colours) for key in plot.legend]
        round_keys = {Circle: HandlerPatch(lambda *, width, height, **_: Circle((width / 2, height / 2), 4))}
        figure.legend(handles=handles, handler_map=round_keys, loc="outside upper left", ncols=columns)
    return figure, plot


@lru_cache(4096)
def text_width(text: str) -> float:
    """Width of a text in pixels, at most; wide letters such as Chinese ones, which the font lacks, count as 'W'."""
    known = "".join("W" if east_asian_width(letter) in "WF" else letter for letter in text)
    width, _, _ = text_to_path.get_text_width_height_descent(known, _FONT, ismath=False)
    return float(width)


def fit_text(text: str, most: float) -> str:
    """The text, or as much of its beginning as fits into `most` pixels with an ellipsis."""
    text = visible(" ".join(text.split()))
    if text_width(text) <= most:
        return text
    return text[: bisect_right(range(len(text)), most, key=lambda end: text_width(text[: end + 1] + "…"))] + "…"


def _lay(axes: Axes, name: Literal["x", "y"], axis: Axis) -> None:
    """Set scale, ticks and limits of one axis."""
    side = axes.xaxis if name == "x" else axes.yaxis
    if axis.log:
        axes.set(**{f"{name}scale": "log"})
    if axis.ticks is None:
        decades = math.log10(axis.high / axis.low) if axis.log else 0.0
        subs = (1.0, 2.0, 5.0) if decades < 1.6 else (1.0, 3.0) if decades < 3 else (1.0,)
        linear = MaxNLocator(6, steps=[1, 2, 2.5, 5, 10])
        side.set_major_locator(linear if decades < 0.7 else LogLocator(subs=subs, numticks=7))
        side.set_major_formatter(lambda value, _: axis.text(value))
    else:
        side.set_ticks([place for place, _ in axis.ticks], [label for _, label in axis.ticks])
    side.set_minor_locator(NullLocator())
    axes.set(**{f"{name}lim": (axis.low, axis.high)})


def _add(axes: Axes, plot: Plot, mark: Mark, colours: Mapping[str, str], scale: float, **common: Any) -> None:
    """Draw one mark; what lies beyond the axes is drawn at their ends."""

    def within(values: Any, axis: Axis) -> Any:
        return np.clip(np.asarray(values, float), axis.low, axis.high)

    if not isinstance(mark, Text):
        common |= {"alpha": mark.opacity}
    match mark:
        case Line(xs, ys, colour, width):
            common |= {"linestyle": "--" if mark.dash else "-", "drawstyle": "steps-post" if mark.steps else "default"}
            axes.plot(within(xs, plot.x), within(ys, plot.y), color=colours[colour], linewidth=width, **common)
        case Bars(edges, heights, colour):
            tops, base = within(heights, plot.y), plot.y.low
            axes.stairs(tops, within(edges, plot.x), baseline=base, fill=True, color=colours[colour], **common)
        case Dot(x, y, colour, radius):
            data: Any = axes.transData  # typed too narrowly by ScaledTranslation
            place = ScaledTranslation(within(x, plot.x), within(y, plot.y), data)
            look: Any = {"fill": False, "linewidth": 2, "edgecolor": colours[colour]}
            look = look if mark.hollow else {"facecolor": colours[colour]}
            axes.add_artist(Circle((0, 0), radius * scale, transform=place, **look, **common))
        case Text(x, y, text, anchor, colour):
            axes.annotate(
                fit_text(text, mark.most),
                (within(x, plot.x), within(y, plot.y)),
                (mark.dx * scale, mark.dy * scale),
                textcoords="offset pixels",
                annotation_clip=False,
                ha=anchor,
                color=colours[colour],
                weight="bold" if mark.bold else "normal",
                **common,
            )


def _columns(keys: Sequence[Key], width: float) -> int:
    """The number of columns in which matplotlib's legend fits into `width` pixels."""
    widths = [_HANDLE + text_width(fit_text(key.text, width - _HANDLE)) for key in keys]
    fits = (count for count in range(len(keys), 1, -1) if sum(map(max, np.array_split(widths, count))) <= width)
    return next(fits, 1)


def _handle(key: Key, width: float, colours: Mapping[str, str]) -> Artist:
    label = fit_text(key.text, width - _HANDLE)
    if key.dot:
        return Circle((0, 0), facecolor=colours[key.colour], label=label)
    return Line2D([], [], color=colours[key.colour], linewidth=2.5, linestyle="--" if key.dash else "-", label=label)
