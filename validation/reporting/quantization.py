"""Quantization, for the page of a version: from quantization records to figures, rows of tables and pictures (SVG)."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from enginesmith.core.reports.quantization import (
    QuantizationRecord,
    QuantizedTensor,
    RecordedSearch,
    SearchPoint,
    Span,
    TensorHistogram,
)
from enginesmith.core.text import join_first
from validation.plots.charts import Anchor, Axis, Dot, Key, Line, Mark, Plot, Text, histogram
from validation.plots.svg import svg
from validation.plots.texts import decibels_text as db
from validation.plots.texts import number_text, share_text

# SQNR below this is drawn at this: noise ten times the signal is as bad as any other.
LEAST_DB = -10.0
# SQNR in the JSON of a search, of outputs that hold NaN or infinities, or noise where zeros were expected.
BROKEN_DB = -100.0
# Rows shown at once, and in all; histograms.
SHOWN, MOST, DRAWN = 20, 400, 6


def histogram_svg(tensor: QuantizedTensor, drawn: TensorHistogram) -> str:
    """SVG of the histogram `drawn` of a tensor's values, on a log scale, with the range that its format holds.

    What lies outside of that range, and is clipped, has another colour.
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
    """A line with its value at each end of the format's range."""
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
    """SVG of SQNR against the share of the multiplications in int8.

    A line for what single groups predict, dots for what was run, a ring around what was chosen. standalone: for a file
    of its own, with its own colours.
    """
    chosen, floor_db = search.chosen, search.floor_db
    predicted = [(point.share, point.predicted_db) for point in search.frontier if point.predicted_db is not None]
    runs = [(point, point.sqnr_db) for point in (*search.frontier, chosen) if point.sqnr_db is not None]
    drawn = [max(value, LEAST_DB) for _, value in (*predicted, *runs)]
    ends = [*drawn, *([floor_db] if floor_db is not None else [])] or [0.0]
    marks: list[Mark] = []
    if predicted:
        shares_predicted, values = zip(*predicted, strict=True)
        marks.append(Line(shares_predicted, values, "accent", 1.5, opacity=0.55, kind="predicted"))
    if floor_db is not None:
        marks += [
            Line([-math.inf, math.inf], [floor_db, floor_db], "failed", 1.5, dash=True, kind="floor"),
            Text(-math.inf, floor_db, f"floor {db(floor_db)}", colour="ink", dx=8, dy=6, kind="halo"),
        ]
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
            Axis(10 * (min(ends) // 10), 10 * (max(ends) // 10 + 1), text=db),
            tuple(marks),
            (Key("predicted", "accent"), Key("run", "accent", dot=True)),
            standalone=standalone,
        )
    )


def _describe(point: SearchPoint) -> str:
    return f"{100 * point.share:.1f} % in int8: {decibels_text(point.sqnr_db)}, {point.left} groups left in float"


def decibels_text(sqnr_db: float | None) -> str:
    """SQNR of a model's outputs, as the JSON of a search has it, as text: '38.2 dB', 'no loss' for None, 'broken'."""
    if sqnr_db is None:
        return "no loss"
    return "broken" if sqnr_db <= BROKEN_DB else f"{sqnr_db:.1f} dB"


@dataclass(frozen=True)
class TensorRow:
    """A quantized tensor as text: a row of the page's table and of `enginesmith show --quantization`."""

    name: str
    kind: str
    sqnr: str
    clipped: str
    seen: str
    range: str
    scale: str
    readers: str


@dataclass(frozen=True)
class QuantizationSection:
    """One quantized graph. untouched: it came with Q/DQ nodes of its own, and nothing else is known of it.

    facts: (value, what it is).  shown, rest: rows of tensors, at once and on request.  omitted: how many have none.
    pictures: tensors with the SVG of their histogram.  sampled: whether some SQNR was measured on some rows only.
    frontier, chosen: SVG of a mixed-precision search, and a sentence on its result.  left: nodes in float, by reason.
    """

    name: str
    untouched: bool = False
    facts: tuple[tuple[str, str], ...] = ()
    shown: tuple[TensorRow, ...] = ()
    rest: tuple[TensorRow, ...] = ()
    omitted: int = 0
    pictures: tuple[tuple[TensorRow, str], ...] = ()
    sampled: bool = False
    frontier: str = ""
    chosen: str = ""
    left: Mapping[str, Sequence[str]] = field(default_factory=dict)


def quantizations(
    records: Mapping[str, QuantizationRecord], untouched: Iterable[str] = ()
) -> list[QuantizationSection]:
    """One section per quantized graph: those with a record, by name, and those that came with Q/DQ of their own."""
    sections = [_section(name, record) for name, record in records.items()]
    return [*sections, *(QuantizationSection(name, untouched=True) for name in untouched)]


def _section(name: str, record: QuantizationRecord) -> QuantizationSection:
    tensors = record.tensors
    rows = tuple(row(tensor) for tensor in tensors[:MOST])
    histograms = [(tensor, tensor.histogram) for tensor in tensors if tensor.histogram]
    chosen, choice = "", record.choice
    if choice:
        asked = "" if choice.floor_db is None else f", where at least {number_text(choice.floor_db)} dB were asked for"
        quality = decibels_text(choice.chosen.sqnr_db)
        chosen = f"Chosen (ring): {100 * choice.chosen.share:.1f} % at {quality}{asked}."
    left: dict[str, list[str]] = {}
    for item in record.left:
        left.setdefault(item.reason, []).append(f"{item.node} ({item.op_type})")
    return QuantizationSection(
        name,
        facts=tuple(facts(record)),
        shown=rows[:SHOWN],
        rest=rows[SHOWN:],
        omitted=max(0, len(tensors) - MOST),
        pictures=tuple((row(tensor), histogram_svg(tensor, drawn)) for tensor, drawn in histograms[:DRAWN] if drawn),
        sampled=any(tensor.measured == "rows" for tensor in tensors),
        frontier=frontier_svg(record.choice) if record.choice else "",
        chosen=chosen,
        left=left,
    )


def facts(record: QuantizationRecord) -> Iterator[tuple[str, str]]:
    """The headline figures of a record: (value, what it is)."""
    if record.macs_share is not None:
        yield f"{100 * record.macs_share:.1f} %", f"of the multiplications with weights in {record.precision}"
    verb = "node computes" if record.quantized == 1 else "nodes compute"
    yield str(record.quantized), f"{verb} in {record.precision}, {len(record.left)} left in float"
    known = [tensor.sqnr_db for tensor in record.tensors if tensor.sqnr_db is not None]
    if known:
        yield f"{known[0]:.1f} dB", f"lowest SQNR of {len(record.tensors)} tensors"
    yield str(record.samples), f"calibration samples, ranges by {record.method}"


def left_lines(record: QuantizationRecord) -> list[str]:
    """A line for each node that stays in float."""
    return [f"left in float: {item}" for item in record.left]


def row(tensor: QuantizedTensor) -> TensorRow:
    """A tensor as a row of text."""
    return TensorRow(
        name=tensor.name,
        kind=f"{tensor.role}, {tensor.format}",
        sqnr=sqnr_text(tensor),
        clipped="" if tensor.clipped is None else share_text(tensor.clipped),
        seen=_span(tensor.seen),
        range=_span(tensor.range),
        scale=number_text(tensor.scale),
        readers=join_first(tensor.readers, 2),
    )


def sqnr_text(tensor: QuantizedTensor) -> str:
    """A tensor's SQNR in dB; with '≈' where it was measured on some rows only."""
    if tensor.sqnr_db is None:
        return "no loss" if tensor.measured else "not measured"
    return f"{'≈ ' if tensor.measured == 'rows' else ''}{tensor.sqnr_db:.1f} dB"


def _span(pair: Span | None) -> str:
    return "" if pair is None else f"{number_text(pair[0])} to {number_text(pair[1])}"
