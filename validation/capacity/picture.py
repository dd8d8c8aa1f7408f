"""The picture of a forecast: cost of a million requests against the limit of latency, a line per kind of machine."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from validation.plots.charts import Axis, Key, Line, Mark, Plot, Text, series, span_axis
from validation.plots.svg import svg
from validation.plots.texts import number_text, seconds_text


@dataclass(frozen=True)
class CostCurve:
    """The line of one kind of machine. points: (seconds of the limit, cost of a million requests), rising."""

    name: str
    points: tuple[tuple[float, float], ...]


def cost_svg(curves: Sequence[CostCurve], asked_s: float, currency: str) -> str:
    """SVG, a file of its own. asked_s: the limit that was asked for, which gets a mark."""
    points = [point for curve in curves for point in curve.points]
    x = Axis(*span_axis([asked_s, *(at for at, _ in points)], log=True), "limit of p99", log=True, text=seconds_text)
    unit = f"{currency} a million requests" if currency else "cost of a million requests"
    y = Axis(*span_axis([cost for _, cost in points], log=True, least=0.3), unit, log=True, text=number_text)
    marks: list[Mark] = [Line([asked_s, asked_s], [y.low, y.high], "muted", 1.0, dash=True, title="asked for")]
    marks.append(Text(asked_s, y.high, "asked for", dx=4, dy=-12))
    keys = []
    for index, curve in enumerate(curves):
        colour, dash = series(index)
        xs, ys = [at for at, _ in curve.points], [cost for _, cost in curve.points]
        marks.append(Line(xs, ys, colour, dash=dash, kind="curve", title=curve.name))
        keys.append(Key(curve.name, colour, dash))
    words = "; ".join(
        f"{curve.name}: {number_text(min(c for _, c in curve.points))} at least" for curve in curves if curve.points
    )
    plot = Plot("costs", f"Cost of a million requests by the limit of p99. {words}", x, y, tuple(marks), tuple(keys))
    return svg(replace(plot, standalone=True))
