"""What the page says about quantization, worked out from the quantization records: plain values, and pictures."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from enginery.core.reports.quantization import FloatNode, QuantizationRecord, QuantizedTensor, RecordedSearch, Span
from enginery.core.text import join_first
from validation.plots.texts import number_text, share_text
from validation.reporting.pictures import decibels_text, frontier_svg, histogram_svg

# Rows shown at once, and in all; nodes named at once behind a reason; histograms.
SHOWN, MOST, NAMED, DRAWN = 20, 400, 8, 6


@dataclass(frozen=True)
class TensorRow:
    """A tensor for people, as text."""

    name: str
    kind: str
    sqnr: str
    clipped: str
    seen: str
    range: str
    scale: str
    readers: str


@dataclass(frozen=True)
class TensorPicture:
    """The histogram of a tensor's values as SVG, and its SQNR and share of clipped values as text."""

    name: str
    sqnr: str
    clipped: str
    svg: str


@dataclass(frozen=True)
class FrontierPicture:
    """The frontier of a search as SVG, and what was chosen in a sentence."""

    svg: str
    text: str


@dataclass(frozen=True)
class LeftInFloat:
    """A reason, and the nodes that it keeps in float: those that are named at once, and the others."""

    reason: str
    nodes: tuple[str, ...]
    more: tuple[str, ...]


@dataclass(frozen=True)
class QuantizationSection:
    """One quantized graph. untouched: it came with Q/DQ of its own, and nothing else is known of it.

    facts: (value, what it is).  shown, rest, omitted: tensors.  sampled: some were measured on some rows.
    """

    name: str
    untouched: bool = False
    facts: tuple[tuple[str, str], ...] = ()
    shown: tuple[TensorRow, ...] = ()
    rest: tuple[TensorRow, ...] = ()
    omitted: int = 0
    pictures: tuple[TensorPicture, ...] = ()
    sampled: bool = False
    frontier: FrontierPicture | None = None
    searched: bool = False
    left: tuple[LeftInFloat, ...] = ()


def quantizations(
    records: Mapping[str, QuantizationRecord], untouched: Iterable[str] = ()
) -> list[QuantizationSection]:
    """One section per quantized graph: those with a record, by name, and those that came with Q/DQ of their own."""
    sections = [_section(name, record) for name, record in records.items()]
    return [*sections, *(QuantizationSection(name, untouched=True) for name in untouched)]


def _section(name: str, record: QuantizationRecord) -> QuantizationSection:
    tensors = record.tensors
    rows = tuple(row(tensor) for tensor in tensors[:MOST])
    return QuantizationSection(
        name,
        facts=tuple(facts(record)),
        shown=rows[:SHOWN],
        rest=rows[SHOWN:],
        omitted=max(0, len(tensors) - MOST),
        pictures=tuple(_pictures(tensors))[:DRAWN],
        sampled=any(tensor.measured == "rows" for tensor in tensors),
        frontier=_frontier(record.choice) if record.choice else None,
        searched=record.choice is not None,
        left=tuple(_by_reason(record.left)),
    )


def facts(record: QuantizationRecord) -> Iterator[tuple[str, str]]:
    """Headline figures: (value, what it is)."""
    if record.macs_share is not None:
        yield f"{100 * record.macs_share:.1f} %", f"of the multiplications with weights in {record.precision}"
    verb = "node computes" if record.quantized == 1 else "nodes compute"
    yield str(record.quantized), f"{verb} in {record.precision}, {len(record.left)} left in float"
    known = [tensor.sqnr_db for tensor in record.tensors if tensor.sqnr_db is not None]
    if known:
        yield f"{known[0]:.1f} dB", f"lowest SQNR of {len(record.tensors)} tensors"
    yield str(record.samples), f"calibration samples, ranges by {record.method}"


def left_lines(record: QuantizationRecord) -> list[str]:
    """What stays in float, a line per node."""
    return [f"left in float: {item}" for item in record.left]


def row(tensor: QuantizedTensor) -> TensorRow:
    """A tensor for people."""
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
    """A tensor's SQNR for people; '≈' where it is known from some rows only."""
    if tensor.sqnr_db is None:
        return "no loss" if tensor.measured else "not measured"
    return f"{'≈ ' if tensor.measured == 'rows' else ''}{tensor.sqnr_db:.1f} dB"


def _span(pair: Span | None) -> str:
    return "" if pair is None else f"{number_text(pair[0])} to {number_text(pair[1])}"


def _pictures(tensors: Sequence[QuantizedTensor]) -> Iterator[TensorPicture]:
    for tensor in tensors:
        if tensor.histogram:
            clipped = share_text(tensor.clipped or 0.0)
            yield TensorPicture(tensor.name, sqnr_text(tensor), clipped, histogram_svg(tensor, tensor.histogram))


def _frontier(choice: RecordedSearch) -> FrontierPicture:
    quality = decibels_text(choice.chosen.sqnr_db)
    asked = "" if choice.floor_db is None else f", where at least {number_text(choice.floor_db)} dB were asked for"
    return FrontierPicture(
        frontier_svg(choice), f"Chosen (ring): {100 * choice.chosen.share:.1f} % at {quality}{asked}."
    )


def _by_reason(left: Sequence[FloatNode]) -> Iterator[LeftInFloat]:
    reasons: dict[str, list[str]] = {}
    for item in left:
        reasons.setdefault(item.reason, []).append(f"{item.node} ({item.op_type})")
    for reason, nodes in reasons.items():
        yield LeftInFloat(reason, tuple(nodes[:NAMED]), tuple(nodes[NAMED:]))
