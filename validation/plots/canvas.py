"""Draws plots with matplotlib: figures and artists alone, never pyplot; nothing of the process outlives a drawing.

The only module that imports matplotlib (half a second), and only `svg` imports it, when there is a page to draw.
Text is measured in DejaVu Sans, which comes with matplotlib and is wider than the faces that browsers take: what fits
here fits there, and the same data gives the same bytes on every machine.
"""

import io
import math
import threading
import warnings
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal
from unicodedata import east_asian_width

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.legend_handler import HandlerPatch
from matplotlib.lines import Line2D
from matplotlib.patches import Circle
from matplotlib.textpath import text_to_path
from matplotlib.ticker import Locator, LogLocator, MaxNLocator, NullLocator
from matplotlib.transforms import ScaledTranslation

from enginery.core.text import visible
from validation.plots.charts import Axis, Bars, Dot, Key, Line, Mark, Plot, Text
from validation.plots.theme import SENTINELS, apply_theme

_STYLE = Path(__file__).with_name("plots.mplstyle")
_COLOURS: Any = {
    "grid.color": SENTINELS["line"],
    "axes.titlecolor": SENTINELS["muted"],
    "axes.labelcolor": SENTINELS["muted"],
    "xtick.labelcolor": SENTINELS["muted"],
    "ytick.labelcolor": SENTINELS["muted"],
    "legend.labelcolor": SENTINELS["muted"],
}
_FONT = FontProperties(family="DejaVu Sans", size=12)
# Pixels that a key of the legend takes beside its words, and the height of a row of keys.
_HANDLE, _ROW = 44.0, 15
# matplotlib's settings are the process's; they are ours only while we draw.
_LOCK = threading.Lock()


def draw(plot: Plot) -> str:
    """The plot as themed SVG."""
    with _LOCK, matplotlib.rc_context(_COLOURS, _STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        columns = _columns(plot.legend, plot.width)
        rows = math.ceil(len(plot.legend) / columns)
        plot = replace(plot, height=plot.height + _ROW * max(0, rows - 1))  # no less room for the data
        figure = Figure(figsize=(plot.width / 72, plot.height / 72))
        axes = figure.add_subplot()
        axes.patch.set_visible(False)
        _lay(axes, "x", plot.x)
        _lay(axes, "y", plot.y)
        figure.supxlabel(fit_text(plot.x.label, plot.width - 8), size="medium", color=SENTINELS["muted"])
        axes.set_title(fit_text(plot.y.label, plot.width - 60))
        for order, mark in enumerate(plot.marks):
            _add(axes, plot, mark, zorder=10 + order, clip_on=False, gid=f"{mark.kind}:{visible(mark.title)}")
        if plot.legend:
            handles = [_handle(key, plot.width) for key in plot.legend]
            round_keys = {Circle: HandlerPatch(lambda *, width, height, **_: Circle((width / 2, height / 2), 4))}
            figure.legend(handles=handles, handler_map=round_keys, loc="outside upper left", ncols=columns)
        out = io.StringIO()
        nameless = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        FigureCanvasSVG(figure).print_svg(out, metadata=nameless)  # type: ignore[no-untyped-call]
        return apply_theme(out.getvalue(), plot)


@lru_cache(4096)
def text_width(text: str) -> float:
    """Pixels that a text takes at most; letters as wide as Chinese ones, which the face lacks, count as 'W'."""
    known = "".join("W" if east_asian_width(letter) in "WF" else letter for letter in text)
    width, _, _ = text_to_path.get_text_width_height_descent(known, _FONT, ismath=False)
    return float(width)


def fit_text(text: str, most: float) -> str:
    """The text, or its beginning and an ellipsis, in at most so many pixels."""
    text = visible(" ".join(text.split()))
    if text_width(text) <= most:
        return text
    return text[: bisect_right(range(len(text)), most, key=lambda end: text_width(text[: end + 1] + "…"))] + "…"


def _lay(axes: Axes, name: Literal["x", "y"], axis: Axis) -> None:
    """Scale, ticks and limits of one axis."""
    side = axes.xaxis if name == "x" else axes.yaxis
    if axis.log:
        axes.set(**{f"{name}scale": "log"})
    if axis.ticks is None:
        side.set_major_locator(_locator(axis))
        side.set_major_formatter(lambda value, _: axis.text(value))
    else:
        side.set_ticks([place for place, _ in axis.ticks], [label for _, label in axis.ticks])
    side.set_minor_locator(NullLocator())
    axes.set(**{f"{name}lim": (axis.low, axis.high)})


def _locator(axis: Axis) -> Locator:
    decades = math.log10(axis.high / axis.low) if axis.log else 0.0
    if decades < 0.7:
        return MaxNLocator(6, steps=[1, 2, 2.5, 5, 10])
    return LogLocator(subs=(1.0, 2.0, 5.0) if decades < 1.6 else (1.0, 3.0) if decades < 3 else (1.0,), numticks=7)


def _add(axes: Axes, plot: Plot, mark: Mark, **common: Any) -> None:
    """One mark, with its places moved to the nearest ones within the axes."""

    def within(values: Any, axis: Axis) -> Any:
        return np.clip(np.asarray(values, float), axis.low, axis.high)

    if not isinstance(mark, Text):
        common |= {"alpha": mark.opacity}
    match mark:
        case Line(xs, ys, colour, width):
            common |= {"linestyle": "--" if mark.dash else "-", "drawstyle": "steps-post" if mark.steps else "default"}
            axes.plot(within(xs, plot.x), within(ys, plot.y), color=SENTINELS[colour], linewidth=width, **common)
        case Bars(edges, heights, colour):
            tops, base = within(heights, plot.y), plot.y.low
            axes.stairs(tops, within(edges, plot.x), baseline=base, fill=True, color=SENTINELS[colour], **common)
        case Dot(x, y, colour, radius):
            data: Any = axes.transData  # typed too narrowly by ScaledTranslation
            place = ScaledTranslation(within(x, plot.x), within(y, plot.y), data)
            look: Any = {"fill": False, "linewidth": 2, "edgecolor": SENTINELS[colour]}
            look = look if mark.hollow else {"facecolor": SENTINELS[colour]}
            axes.add_artist(Circle((0, 0), radius, transform=place, **look, **common))
        case Text(x, y, text, anchor, colour):
            axes.annotate(
                fit_text(text, mark.most),
                (within(x, plot.x), within(y, plot.y)),
                (mark.dx, mark.dy),
                textcoords="offset pixels",
                annotation_clip=False,
                ha=anchor,
                color=SENTINELS[colour],
                weight="bold" if mark.bold else "normal",
                **common,
            )


def _columns(keys: Sequence[Key], width: float) -> int:
    """In how many columns matplotlib's legend of these keys fits into so many pixels."""
    widths = [_HANDLE + text_width(fit_text(key.text, width - _HANDLE)) for key in keys]
    fits = (count for count in range(len(keys), 1, -1) if sum(map(max, np.array_split(widths, count))) <= width)
    return next(fits, 1)


def _handle(key: Key, width: float) -> Artist:
    label = fit_text(key.text, width - _HANDLE)
    if key.dot:
        return Circle((0, 0), facecolor=SENTINELS[key.colour], label=label)
    return Line2D([], [], color=SENTINELS[key.colour], linewidth=2.5, linestyle="--" if key.dash else "-", label=label)
