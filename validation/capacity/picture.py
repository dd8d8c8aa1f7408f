"""The picture of a forecast: cost of a million requests against the limit of latency, a line per kind of machine."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from validation.plots.figure import COLOURS, annotate, draw_svg, series, set_axis, shorten, span, tag
from validation.plots.texts import number_text, seconds_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class CostCurve:
    """The line of one kind of machine. points: (seconds of the limit, cost of a million requests), rising."""

    name: str
    points: tuple[tuple[float, float], ...]


def cost_svg(curves: Sequence[CostCurve], asked_s: float, currency: str) -> str:
    """SVG, a file of its own. asked_s: the limit that was asked for, which gets a mark."""
    points = [point for curve in curves for point in curve.points]
    unit = f"{currency} a million requests" if currency else "cost of a million requests"

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        axes.axvline(asked_s, color=COLOURS["muted"], linewidth=1.0, linestyle="--", gid=tag("asked", "asked for"))
        for index, curve in enumerate(curves):
            xs, ys = [at for at, _ in curve.points], [cost for _, cost in curve.points]
            axes.plot(xs, ys, label=shorten(curve.name), gid=tag("curve", curve.name), **series(index))
        ends = span([asked_s, *(at for at, _ in points)], log=True)
        set_axis(axes, "x", ends, "limit of p99", log=True, text=seconds_text)
        set_axis(axes, "y", span([cost for _, cost in points], log=True, least=0.3), unit, log=True)
        annotate(axes, "asked for", (asked_s, 1.0), (4, -12), top=True)

    words = "; ".join(
        f"{curve.name}: {number_text(min(c for _, c in curve.points))} at least" for curve in curves if curve.points
    )
    return draw_svg("costs", f"Cost of a million requests by the limit of p99. {words}", draw, standalone=True)
