"""Quantization, for the page of a version: from quantization records to figures, rows of tables and pictures (SVG)."""

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from enginesmith.core.reports.breakdown import (
    QuantizationRecord,
    QuantizedTensor,
    RecordedSearch,
    SearchPoint,
    Span,
    TensorHistogram,
)
from enginesmith.core.text import format_bytes, format_plain, join_first
from validation.plotting import COLOURS, QUARTERS, annotate, draw_svg, number_text, set_axis, share_text, tag
from validation.plotting import decibels_text as db

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# A lower SQNR is drawn at this value: noise above ten times the signal makes no difference.
LEAST_DB = -10.0
# The SQNR in a search's JSON for outputs with NaN or infinities, or with noise instead of zeros.
BROKEN_DB = -100.0
# The number of rows to show at first and in all, and the number of histograms.
SHOWN, MOST, DRAWN = 20, 400, 6


def histogram_svg(tensor: QuantizedTensor, histogram: TensorHistogram) -> str:
    """SVG of a histogram of a tensor's values, on a log scale, with the range of values that its format can represent.

    Values outside that range, which are clipped, have another colour.
    """
    (low, high), counts = histogram.span, histogram.counts
    (start, end), (least_value, greatest_value) = tensor.range, tensor.seen or histogram.span
    width = (high - low) / len(counts) or 1.0
    alt_text = (
        f"Histogram of {tensor.name}: values from {number_text(least_value)} to "
        f"{number_text(greatest_value)}; the format holds {number_text(start)} to {number_text(end)}; "
        f"{share_text(tensor.clipped or 0.0)} are clipped."
    )
    edges = [low + index * width for index in range(len(counts) + 1)]
    inside_flags = [start <= (edge_low + edge_high) / 2 <= end for edge_low, edge_high in pairwise(edges)]
    heights = [math.log1p(count) / math.log1p(max([*counts, 1.0])) for count in counts]

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        for inside, colour, kind in ((True, "accent", "in"), (False, "failed-fill", "out")):
            histogram = [height if flag is inside else 0.0 for height, flag in zip(heights, inside_flags, strict=True)]
            axes.stairs(histogram, edges, fill=True, color=COLOURS[colour], gid=tag(kind))
        set_axis(axes, "x", (edges[0], edges[-1]))
        set_axis(axes, "y", (0.0, 1.14), ticks=())
        # A line with its value at each end of the format's range, or at the axis's end if the range reaches beyond it.
        bounds = (edges[0], edges[-1])
        width, ink = bounds[1] - bounds[0], COLOURS["ink"]
        for value in dict.fromkeys((start, end)):
            point = min(max(value, bounds[0]), bounds[1])
            axes.plot([point] * 2, [0.0, 1.04], "--", color=ink, linewidth=1.25, clip_on=False, gid=tag("range"))
            if value == start and start != end and (end - start) / width < 0.2:  # no room for two labels
                continue
            fraction = (point - bounds[0]) / width
            alignment = "left" if fraction < 0.2 else "right" if fraction > 0.8 else "center"
            axes.text(point, 1.08, number_text(value), ha=alignment, color=ink, gid=tag("halo"))

    return draw_svg("histogram", alt_text, draw, (340, 150))


def frontier_svg(search: RecordedSearch, precision: str, standalone: bool = False) -> str:
    """SVG of SQNR against the share of the multiplications in a precision.

    A line has the prediction from single groups, dots are graphs that were run, a ring is around the chosen graph.
    standalone: whether the picture is a file with its own colours.
    """
    choice, floor_db = search.chosen, search.floor_db
    predictions = [(point.share, point.predicted_db) for point in search.frontier if point.predicted_db is not None]
    points = [(point, point.sqnr_db) for point in (*search.frontier, choice) if point.sqnr_db is not None]
    plot_values = [max(value, LEAST_DB) for _, value in (*predictions, *points)]
    bounds = [*plot_values, *([floor_db] if floor_db is not None else [])] or [0.0]
    accent, least_db = COLOURS["accent"], 10 * (min(bounds) // 10)

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        shares = [share for share, _ in predictions]
        levels_db = [max(value, least_db) for _, value in predictions]
        axes.plot(shares, levels_db, color=accent, linewidth=1.5, alpha=0.55, label="predicted", gid=tag("predicted"))
        if floor_db is not None:
            axes.axhline(floor_db, color=COLOURS["failed"], linewidth=1.5, linestyle="--", gid=tag("floor"))
            annotate(axes, f"floor {db(floor_db)}", (0.0, floor_db), (8, 6), color=COLOURS["ink"], gid=tag("halo"))
        for index, (run, value) in enumerate(points):
            label = None if index else "run"
            clipped_db = max(value, least_db)
            gid = tag("run", _describe(run, precision))
            axes.plot(run.share, clipped_db, "o", color=accent, markersize=8, clip_on=False, label=label, gid=gid)
        if choice.sqnr_db is not None:
            ring_style: Any = {"markersize": 16, "markerfacecolor": "none", "markeredgewidth": 2, "clip_on": False}
            clipped_db, gid = max(choice.sqnr_db, least_db), tag("chosen", _describe(choice, precision))
            axes.plot(choice.share, clipped_db, "o", color=COLOURS["ink"], gid=gid, **ring_style)
        set_axis(axes, "x", (0.0, 1.0), f"share of the multiplications in {precision}", ticks=QUARTERS)
        set_axis(axes, "y", (least_db, 10 * (max(bounds) // 10 + 1)), text=db)

    alt_text = f"Quality against the share of the multiplications with weights in {precision}"
    return draw_svg("frontier", alt_text, draw, standalone=standalone)


def _describe(point: SearchPoint, precision: str) -> str:
    return (
        f"{100 * point.share:.1f} % in {precision}: {decibels_text(point.sqnr_db)}, {point.left} groups left in float"
    )


def decibels_text(sqnr_db: float | None) -> str:
    """An SQNR from the JSON of a search as text: '38.2 dB', 'no loss' for None, or 'broken'."""
    if sqnr_db is None:
        return "no loss"
    return "broken" if sqnr_db <= BROKEN_DB else f"{sqnr_db:.1f} dB"


POINT_COLUMNS = ("share of the multiplications", "SQNR", "answers", "latency", "weights", "")


def point_rows(search: RecordedSearch) -> Iterator[tuple[str, ...]]:
    """The rows of a search's Pareto table by `POINT_COLUMNS`, the fastest first. The last column has 'chosen', 'front'
    (no other point is as fast and better), or nothing. answers: task accuracy, or the share of unchanged decisions."""
    best_db = -math.inf
    for point in search.table:
        sqnr_db = math.inf if point.sqnr_db is None else point.sqnr_db
        mark = "chosen" if point == search.chosen else "front" if sqnr_db > best_db else ""
        best_db = max(best_db, sqnr_db)
        answers = "" if point.argmax_agreement is None else f"{100 * point.argmax_agreement:.1f} % of decisions"
        answers = answers if point.accuracy is None else f"{point.accuracy:.4f} accuracy"
        latency, weights = f"{format_plain(point.ms or 0.0)} ms", format_bytes(point.weight_bytes or 0)
        yield f"{100 * point.share:.1f} %", decibels_text(point.sqnr_db), answers, latency, weights, mark


def quantizations(records: Mapping[str, QuantizationRecord], untouched: Iterable[str] = ()) -> list[dict[str, object]]:
    """The values of `quantization.html.j2` for each quantized graph. records: by graph name.  untouched: names of
    graphs without a record, because the model already had Q/DQ nodes."""
    sections = [_section(name, record) for name, record in records.items()]
    return [*sections, *({"name": name, "untouched": True} for name in untouched)]


def _section(name: str, record: QuantizationRecord) -> dict[str, object]:
    tensors = record.tensors
    rows = [row(tensor) for tensor in tensors[:MOST]]
    histograms = [(tensor, histogram) for tensor in tensors if (histogram := tensor.histogram)][:DRAWN]
    choice_note, choice = "", record.choice
    if choice:
        floor_note = ""
        if choice.floor_db is not None:
            floor_note = f", where at least {number_text(choice.floor_db)} dB were asked for"
        quality_text = decibels_text(choice.chosen.sqnr_db)
        rule_note = f" ({choice.rule})" if choice.rule else ""
        choice_note = f"Chosen (ring): {100 * choice.chosen.share:.1f} % at {quality_text}{floor_note}{rule_note}."
    float_nodes: dict[str, list[str]] = {}
    for float_node in record.left:
        float_nodes.setdefault(float_node.reason, []).append(f"{float_node.node} ({float_node.op_type})")
    return {
        "name": name,
        "untouched": False,
        "facts": list(facts(record)),
        "rows": rows[:SHOWN],
        "rest": rows[SHOWN:],
        "omitted": max(0, len(tensors) - MOST),
        "pictures": [(row(tensor), histogram_svg(tensor, histogram)) for tensor, histogram in histograms],
        "sampled": any(tensor.measured == "rows" for tensor in tensors),
        "frontier": frontier_svg(choice, record.precision) if choice else "",
        "chosen": choice_note,
        "points": list(point_rows(choice)) if choice else [],
        "latency": choice.latency if choice else "",
        "float_nodes": float_nodes,
    }


def facts(record: QuantizationRecord) -> Iterator[tuple[str, str]]:
    """The headline figures of a record: (value, its meaning)."""
    if record.macs_share is not None:
        yield f"{100 * record.macs_share:.1f} %", f"of the multiplications with weights in {record.precision}"
    verb = "node computes" if record.quantized == 1 else "nodes compute"
    yield str(record.quantized), f"{verb} in {record.precision}, {len(record.left)} left in float"
    sqnr_values = [tensor.sqnr_db for tensor in record.tensors if tensor.sqnr_db is not None]
    if sqnr_values:
        yield f"{sqnr_values[0]:.1f} dB", f"lowest SQNR of {len(record.tensors)} tensors"
    yield str(record.samples), f"calibration samples, ranges by {record.method}"


def row(tensor: QuantizedTensor) -> dict[str, str]:
    """A tensor as text: a row of the page's table and of `enginesmith show --quantization`."""
    return {
        "name": tensor.name,
        "kind": f"{tensor.role}, {tensor.format}",
        "sqnr": sqnr_text(tensor),
        "clipped": "" if tensor.clipped is None else share_text(tensor.clipped),
        "seen": _span(tensor.seen),
        "range": _span(tensor.range),
        "scale": number_text(tensor.scale),
        "readers": join_first(tensor.readers, 2),
    }


def sqnr_text(tensor: QuantizedTensor) -> str:
    """A tensor's SQNR in dB; with '≈' if only some rows were measured."""
    if tensor.sqnr_db is None:
        return "no loss" if tensor.measured else "not measured"
    return f"{'≈ ' if tensor.measured == 'rows' else ''}{tensor.sqnr_db:.1f} dB"


def _span(pair: Span | None) -> str:
    return "" if pair is None else f"{number_text(pair[0])} to {number_text(pair[1])}"
