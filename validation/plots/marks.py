"""What a plot shows, as plain values: axes and marks in the units of the data. Nothing here knows how it is drawn.

Places may be -inf and inf, which are the ends of an axis. Marks are kept within the axes, so an axis
decides what is seen. Colours are names of `COLOURS`, which a page gives for light and for dark.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
