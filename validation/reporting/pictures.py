"""The report's pictures, from the numbers of a record: what to show, as plots; `validation.plots` draws them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from validation.plots.charts import histogram
from validation.plots.marks import Axis, Dot, Key, Line, Mark, Plot, Text
from validation.plots.svg import svg
from validation.plots.texts import decibels_text as db
from validation.plots.texts import number_text, share_text

Json = Mapping[str, Any]

# What is worse than so many decibels is drawn there: noise ten times the signal is as bad as any other.
LEAST_DB = -10.0
# SQNR in the JSON of a choice of outputs that hold NaN, infinities, or noise where nothing was expected.
BROKEN_DB = -100.0


def histogram_svg(tensor: Json) -> str:
    """How a tensor's values lie within what its format holds: counts on a log scale, what is clipped in another colour.

    tensor: an activation of a quantization record, with its 'histogram'.
    """
    (low, high), counts = tensor["histogram"]["span"], tensor["histogram"]["counts"]
    start, end = tensor["range"]
    width = (high - low) / len(counts) or 1.0
    words = (
        f"Histogram of {tensor['name']}: values from {number_text(tensor['seen'][0])} to "
        f"{number_text(tensor['seen'][1])}; the format holds {number_text(start)} to {number_text(end)}; "
        f"{share_text(tensor['clipped'])} are clipped."
    )
    plot = histogram([low + index * width for index in range(len(counts) + 1)], counts, words, (start, end))
    return svg(replace(plot, marks=(*plot.marks, *_ends(plot.x, start, end)), y=Axis(0.0, 1.14, ticks=())))


def _ends(axis: Axis, start: float, end: float) -> list[Mark]:
    """Where the format's range ends: a line at each end, with its value."""
    marks: list[Mark] = []
    wide = axis.high - axis.low
    for value in dict.fromkeys((start, end)):
        part = (value - axis.low) / wide
        marks.append(Line([value, value], [0.0, 1.04], "ink", 1.25, dash=True, kind="range"))
        if value == start and start != end and (end - start) / wide < 0.2:  # no room for two labels
            continue
        anchor, dx = ("start", 0.0) if part < 0.2 else ("end", 0.0) if part > 0.8 else ("middle", 0.0)
        marks.append(Text(value, 1.08, number_text(value), anchor, "ink", dx=dx, halo=True, kind="strong"))  # type: ignore[arg-type]
    return marks


def frontier_svg(points: Sequence[Json], chosen: Json, floor_db: float | None = None, standalone: bool = False) -> str:
    """Quality against the share of the multiplications in int8: a line for what single groups predict, dots for what
    was run, a ring around what was chosen.

    points, chosen: with share, predicted_db, sqnr_db (either None) and left, the number of groups in float.
    standalone: for a file of its own.
    """
    predicted = [point for point in points if point["predicted_db"] is not None]
    runs = [point for point in [*points, chosen] if point["sqnr_db"] is not None]
    values = [point["predicted_db"] for point in predicted] + [point["sqnr_db"] for point in runs]
    drawn = [max(value, LEAST_DB) for value in values]
    low, high = _decades([*drawn, *([floor_db] if floor_db is not None else [])] or [0.0])
    marks: list[Mark] = [_line(predicted)] if predicted else []
    marks += _level(floor_db) if floor_db is not None else []
    marks += [Dot(run["share"], run["sqnr_db"], "accent", kind="run", title=_told(run)) for run in runs]
    if chosen["sqnr_db"] is not None:
        ring = Dot(chosen["share"], chosen["sqnr_db"], "ink", 8.0, hollow=True, kind="chosen", title=_told(chosen))
        marks.append(ring)
    shares = tuple((step / 4, f"{25 * step} %") for step in range(5))
    return svg(
        Plot(
            "frontier",
            "Quality against the share of the weighted multiplications in int8",
            Axis(0.0, 1.0, "share of the multiplications in int8", ticks=shares),
            Axis(low, high, text=db),
            tuple(marks),
            (Key("predicted", "accent"), Key("run", "accent", dot=True)),
            standalone=standalone,
        )
    )


def _line(points: Sequence[Json]) -> Line:
    xs, ys = [point["share"] for point in points], [point["predicted_db"] for point in points]
    return Line(xs, ys, "accent", 1.5, opacity=0.55, kind="predicted")


def _decades(values: Sequence[float]) -> tuple[float, float]:
    return 10 * (min(values) // 10), 10 * (max(values) // 10 + 1)


def _told(point: Json) -> str:
    share, quality = f"{100 * point['share']:.1f} %", decibels_text(point["sqnr_db"])
    return f"{share} in int8: {quality}, {int(point['left'])} groups left in float"


def decibels_text(sqnr_db: float | None) -> str:
    """SQNR of a model's outputs for people, as the JSON of a choice has it."""
    if sqnr_db is None:
        return "no loss"
    return "broken" if sqnr_db <= BROKEN_DB else f"{sqnr_db:.1f} dB"


def _level(value: float) -> list[Mark]:
    return [
        Line([-math.inf, math.inf], [value, value], "failed", 1.5, dash=True, kind="floor"),
        Text(-math.inf, value, f"floor {db(value)}", colour="ink", dx=8, dy=6, halo=True, kind="strong"),
    ]
