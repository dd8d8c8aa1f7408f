"""Errors in detail, for the page of a version: distribution functions of each output, and the worst samples."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from enginesmith.core.reports.free_running import FreeRunning
from enginesmith.core.reports.proof import Report, Spread, Worst
from validation.plots.figure import COLOURS, QUARTERS, draw_svg, series, set_axis, shorten, span, tag
from validation.plots.texts import decibels_text
from validation.reporting.stages import STAGES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Outputs with pictures, curves in a picture, and rows of worst cases.
MOST_OUTPUTS, MOST_CURVES, MOST_ROWS = 4, 10, 60


@dataclass(frozen=True)
class _SharedSpread:
    """A spread of errors that some units share, and its name and colour in pictures."""

    spread: Spread
    name: str
    colour: str


@dataclass(frozen=True)
class ErrorDistribution:
    """The errors of one output. pictures: SVG.  omitted: curves that they leave out.  exact: names of curves without
    error."""

    output: str
    samples: int
    elements: int
    omitted: int
    exact: tuple[str, ...]
    pictures: tuple[str, ...]


@dataclass(frozen=True)
class WorstRow:
    """A sample with an error. name: of its graph or engine.  off: its SQNR as text, or why there is none."""

    name: str
    output: str
    worst: Worst
    off: str


def distributions(reports: Sequence[Report]) -> list[ErrorDistribution]:
    """The errors of the `MOST_OUTPUTS` worst outputs, the one with the lowest median SQNR first."""
    outputs: dict[str, list[_SharedSpread]] = {}
    for found in _collect_spreads(reports):
        if found.spread.abs_error:
            outputs.setdefault(found.spread.output, []).append(found)
    worst = sorted(outputs, key=lambda output: min(map(_median, outputs[output])))
    return [_pictures(output, outputs[output]) for output in worst[:MOST_OUTPUTS]]


def worst_cases(reports: Sequence[Report]) -> list[WorstRow]:
    """The worst sample of each graph and engine, worst first, then their other samples; at most `MOST_ROWS` in all."""
    found = list(_collect_spreads(reports))
    firsts = [_row(item, item.spread.worst[0]) for item in found if item.spread.worst]
    others = [_row(item, worst) for item in found for worst in item.spread.worst[1:]]

    def rank(row: WorstRow) -> tuple[float, float]:
        quality, size = row.worst.badness
        return -quality, -size

    return (sorted(firsts, key=rank) + sorted(others, key=rank))[:MOST_ROWS]


@dataclass(frozen=True)
class CourseRow:
    """The drift of an output along sequences. name: of its graph or engine.  parts: (first step, free running dB,
    dB of single steps) of each part."""

    name: str
    found: FreeRunning
    parts: tuple[tuple[int, float, float], ...]


def courses(reports: Sequence[Report]) -> list[CourseRow]:
    """The drift along sequences of models with state, by stage; what several engines share is shown once."""
    groups: dict[str, tuple[FreeRunning, list[Report]]] = {}
    for report in reports:
        for found in report.free_running:
            groups.setdefault(repr(found), (found, []))[1].append(report)
    ordered = sorted(groups.values(), key=lambda item: list(STAGES).index(item[0].joint))
    return [
        CourseRow(
            "export" if found.joint == "export" else _name(found, units),
            found,
            tuple(zip(found.starts, found.free_db, found.single_db, strict=True)),
        )
        for found, units in ordered
    ]


def _collect_spreads(reports: Sequence[Report]) -> list[_SharedSpread]:
    """Each distinct spread of the reports, in the order of the stages."""
    groups: dict[str, tuple[Spread, list[Report]]] = {}
    for report in reports:
        for spread in report.spreads:
            groups.setdefault(repr(spread), (spread, []))[1].append(report)
    found = sorted(groups.values(), key=lambda item: list(STAGES).index(item[0].joint))
    short = Counter((spread.output, _name(spread, units)) for spread, units in found)
    # Units of one graph have one colour, so that an engine is seen beside its graph.
    graphs = {
        report.unit: repr((report.precision, [item for item in report.spreads if item.joint == "quantization"]))
        for report in reports
    }
    order = list(dict.fromkeys(graphs.values()))
    colours = {unit: series(order.index(graph))["color"] for unit, graph in graphs.items()}
    return [
        _SharedSpread(spread, "export", COLOURS["muted"])
        if spread.joint == "export"
        else _SharedSpread(
            spread, _name(spread, units, short[spread.output, _name(spread, units)] > 1), colours[units[0].unit]
        )
        for spread, units in found
    ]


def _name(spread: Spread | FreeRunning, units: Sequence[Report], long: bool = False) -> str:
    """'int8 graph' or 'cpu int8 onnxruntime'. long: with backends, where graphs of one precision differ."""
    if spread.joint == "engine" and len(units) == 1:
        return units[0].unit
    names = [f"{unit.precision} {unit.backend}" if long else unit.precision for unit in units]
    return f"{', '.join(dict.fromkeys(names))} {'graph' if spread.joint == 'quantization' else 'engines'}"


def _median(found: _SharedSpread) -> float:
    values = found.spread.sqnr_db
    return values[len(values) // 2] if values else -math.inf


def _pictures(output: str, found: Sequence[_SharedSpread]) -> ErrorDistribution:
    shown = sorted(sorted(found, key=_median)[:MOST_CURVES], key=lambda item: list(found).index(item))
    return ErrorDistribution(
        output,
        samples=max(item.spread.samples for item in found),
        elements=max(item.spread.elements for item in found),
        omitted=len(found) - len(shown),
        exact=tuple(item.name for item in shown if not item.spread.abs_error[-1]),
        pictures=tuple(_draw(output, shown)),
    )


def _draw(output: str, found: Sequence[_SharedSpread]) -> Iterator[str]:
    """The share of samples up to each SQNR, and of elements up to each absolute error."""
    sqnr = [value for item in found for value in item.spread.sqnr_db]
    if any(map(math.isfinite, sqnr)):  # samples without error lie beyond the right end
        ends = span(sqnr, least=10.0)
        rows = [item for item in found if any(map(math.isfinite, item.spread.sqnr_db))]

        def draw_sqnr(figure: "Figure") -> None:
            axes = figure.subplots()
            for item in rows:
                values = item.spread.sqnr_db
                shares = [(at + 1) / len(values) for at in range(len(values))]
                _step(axes, item, [values[0], *values], [0.0, *shares], ends)
            set_axis(axes, "x", ends, "SQNR of a sample; further left is worse", text=decibels_text)

        words = f"Share of the samples whose SQNR is at most so many decibels, output {output}"
        yield draw_svg("ecdf", words, draw_sqnr)
    errors = [value for item in found for value in item.spread.abs_error if value > 0]
    if errors:
        low, high = span(errors, log=True, pad=0.02, least=0.5)

        def draw_errors(figure: "Figure") -> None:
            axes = figure.subplots()
            for item in found:
                values = item.spread.abs_error  # at equal steps from 0 to 100 %
                if values[-1] > 0:
                    shares = [at / max(len(values) - 1, 1) for at in range(len(values))]
                    _step(axes, item, [values[0], *values], [0.0, *shares], (low, high))
            set_axis(axes, "x", (low, high), "absolute error, logarithmic; further right is worse", log=True)

        words = f"Share of the elements whose absolute error is at most so much, output {output}"
        yield draw_svg("ecdf", words, draw_errors)


def _step(
    axes: "Axes", item: _SharedSpread, xs: Sequence[float], shares: Sequence[float], ends: tuple[float, float]
) -> None:
    """A stair through shares; those of engines are dashed, and values beyond the ends of the axis are drawn there."""
    dash, name = "--" if item.spread.joint == "engine" else "-", shorten(item.name)
    places = [min(max(x, ends[0]), ends[1]) for x in xs]
    axes.step(places, shares, dash, where="post", color=item.colour, label=name, gid=tag("curve", item.name))
    set_axis(axes, "y", (0.0, 1.0), ticks=QUARTERS)


def _row(found: _SharedSpread, worst: Worst) -> WorstRow:
    off = f"{worst.unequal} unequal" if worst.sqnr_db is None else "not finite" if math.isnan(worst.sqnr_db) else ""
    return WorstRow(found.name, found.spread.output, worst, off or f"{worst.sqnr_db:.1f} dB")
