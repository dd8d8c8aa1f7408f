"""The report's pictures, from the numbers of a record: what to show, as plots; `validation.plots` draws them."""

import math
from collections.abc import Sequence
from dataclasses import replace

from enginery.core.reports.quantization import QuantizedTensor, RecordedSearch, SearchPoint, TensorHistogram
from validation.plots.charts import histogram
from validation.plots.marks import Anchor, Axis, Dot, Key, Line, Mark, Plot, Text
from validation.plots.svg import svg
from validation.plots.texts import decibels_text as db
from validation.plots.texts import number_text, share_text

# What is worse than so many decibels is drawn there: noise ten times the signal is as bad as any other.
LEAST_DB = -10.0
# SQNR in the JSON of a choice of outputs that hold NaN, infinities, or noise where nothing was expected.
BROKEN_DB = -100.0


def histogram_svg(tensor: QuantizedTensor, drawn: TensorHistogram) -> str:
    """How a tensor's values lie within what its format holds: counts on a log scale, what is clipped in another colour.

    tensor: an activation of a quantization record.  drawn: its histogram.
    """
    (low, high), counts = drawn.span, drawn.counts
    (start, end), (least, most) = tensor.range, tensor.seen or drawn.span
    width = (high - low) / len(counts) or 1.0
    words = (
        f"Histogram of {tensor.name}: values from {number_text(least)} to "
        f"{number_text(most)}; the format holds {number_text(start)} to {number_text(end)}; "
        f"{share_text(tensor.clipped or 0.0)} are clipped."
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
        anchor: Anchor = "left" if part < 0.2 else "right" if part > 0.8 else "center"
        marks.append(Text(value, 1.08, number_text(value), anchor, "ink", kind="halo"))
    return marks


def frontier_svg(search: RecordedSearch, standalone: bool = False) -> str:
    """Quality against the share of the multiplications in int8: a line for what single groups predict, dots for what
    was run, a ring around what was chosen.

    standalone: for a file of its own.
    """
    chosen, floor_db = search.chosen, search.floor_db
    predicted = [(point.share, point.predicted_db) for point in search.frontier if point.predicted_db is not None]
    runs = [(point, point.sqnr_db) for point in (*search.frontier, chosen) if point.sqnr_db is not None]
    drawn = [max(value, LEAST_DB) for _, value in (*predicted, *runs)]
    low, high = _decades([*drawn, *([floor_db] if floor_db is not None else [])] or [0.0])
    marks: list[Mark] = []
    if predicted:
        shares_predicted, values = zip(*predicted, strict=True)
        marks.append(Line(shares_predicted, values, "accent", 1.5, opacity=0.55, kind="predicted"))
    marks += _level(floor_db) if floor_db is not None else []
    marks += [Dot(run.share, value, "accent", kind="run", title=_describe(run)) for run, value in runs]
    if chosen.sqnr_db is not None:
        ring = Dot(chosen.share, chosen.sqnr_db, "ink", 8.0, hollow=True, kind="chosen", title=_describe(chosen))
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


def _decades(values: Sequence[float]) -> tuple[float, float]:
    return 10 * (min(values) // 10), 10 * (max(values) // 10 + 1)


def _describe(point: SearchPoint) -> str:
    return f"{100 * point.share:.1f} % in int8: {decibels_text(point.sqnr_db)}, {point.left} groups left in float"


def decibels_text(sqnr_db: float | None) -> str:
    """SQNR of a model's outputs for people, as the JSON of a choice has it."""
    if sqnr_db is None:
        return "no loss"
    return "broken" if sqnr_db <= BROKEN_DB else f"{sqnr_db:.1f} dB"


def _level(value: float) -> list[Mark]:
    return [
        Line([-math.inf, math.inf], [value, value], "failed", 1.5, dash=True, kind="floor"),
        Text(-math.inf, value, f"floor {db(value)}", colour="ink", dx=8, dy=6, kind="halo"),
    ]
