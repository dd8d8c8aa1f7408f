"""The stages of drift in a report, and their distributions."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from enginesmith.core.reports.proof import DECISIONS, Check, FreeRunning, Report, Spread, Worst
from enginesmith.core.text import pluralize
from enginesmith.core.types import PRECISIONS
from validation.limits.budget import at_most
from validation.limits.terms import Budget
from validation.plotting import COLOURS, QUARTERS, decibels_text, draw_svg, series, set_axis, shorten, span, tag

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Drift, for the page of a version: the three stages of each output side by side, and all checks of each stage.
#
# Many units share a graph; equal results are shown once, with the names of their units.

STAGES = {
    "export": "the ONNX model against the original framework",
    "quantization": "the quantized or cast graph against the fp32 graph",
    "engine": "the compiled engine against the graph it was built from",
}
# The SQNR of a full bar, about the highest in float32 (24 bits of 6.02 dB are 144 dB).
_BAR_DB = 140.0
# A stage is named as the cause of the drift if its SQNR is this many decibels below that of the others.
_APART_DB = 6.0
Row = Mapping[str, object]  # the values of one row by a template's names
Measured = TypeVar("Measured", Spread, FreeRunning)
# Metrics with a lower limit; `format_bound` needs them if a value equals its limit.
AT_LEAST = (*(name for name, _ in Budget().items() if not at_most(name)), "agreement")


@dataclass(frozen=True)
class StageCell:
    """The checks of one output at one stage. worst: the worst check with a number, or None."""

    worst: Check | None
    checks: tuple[Check, ...]

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks that did not pass."""
        return tuple(check for check in self.checks if not check.passed)


Cells = Mapping[str, StageCell | None]


@dataclass(frozen=True)
class DriftRow:
    """One output of the units with equal results. cells: by stage, None without a measurement.

    cause: the stage that caused the drift, as text; '' if none stands out.
    """

    output: str
    cells: Cells
    units: tuple[Report, ...]
    cause: str

    @property
    def title(self) -> str:
        """The name of a single unit, or the precision of several."""
        return self.names[0] if len(self.units) == 1 else self.units[0].precision

    @property
    def more(self) -> str:
        """'3 units', or '' for a single one."""
        return pluralize(len(self.units), "unit") if len(self.units) > 1 else ""

    @property
    def names(self) -> list[str]:
        """The units' names."""
        return [unit.unit for unit in self.units]

    @property
    def failed(self) -> bool:
        """Whether a stage failed."""
        return _find_failed_stage(self.cells) is not None


def side_by_side(reports: Sequence[Report]) -> list[DriftRow]:
    """A row for each output and distinct result: failed rows first, then by precision."""
    rows: dict[tuple[str, str, str], tuple[Cells, list[Report]]] = {}
    for report in reports:
        for output, cells in _cells(report):
            key = (report.precision, output, repr([cell and cell.checks for cell in cells.values()]))
            rows.setdefault(key, (cells, []))[1].append(report)
    drift_rows = [
        DriftRow(output, cells, tuple(units), _cause(cells)) for (_, output, _), (cells, units) in rows.items()
    ]
    order: tuple[str, ...] = PRECISIONS

    def rank(row: DriftRow) -> tuple[bool, int]:
        precision = row.units[0].precision
        return not row.failed, order.index(precision) if precision in order else len(order)

    return sorted(drift_rows, key=rank)


def _cells(report: Report) -> Iterator[tuple[str, Cells]]:
    """Each output with a number at any stage, and its cell at every stage."""
    checks = [check for check in report.checks if check.stage in STAGES]
    for output in dict.fromkeys(check.output for check in checks):
        output_checks = [check for check in checks if check.output == output]
        cells = {stage: _cell([check for check in output_checks if check.stage == stage]) for stage in STAGES}
        if any(cell and cell.worst for cell in cells.values()):
            yield output, cells


def _cell(checks: Sequence[Check]) -> StageCell | None:
    """The cell of these checks; None without any.

    It shows the worst SQNR (for integers, agreement). If that passed and another check failed, it shows the latter.
    """
    failures = [check for check in checks if not check.passed]
    worst_check = _worst(checks, "sqnr_db") or _worst(checks, "agreement")
    if failures and (worst_check is None or worst_check.passed):
        # Checks of drift are preferred to checks of the contract, whose values have other scales.
        worst_check = min(failures, key=lambda check: check.name.startswith("contract "))
    return StageCell(worst_check, tuple(checks)) if checks else None


def format_bound(check: Check) -> str:
    """'≤' or '≥': the side of its limit on which a check's value must be.

    The side follows from value and verdict; if value and limit are equal, from the metric's name (`AT_LEAST`).
    """
    if check.value is None or check.limit is None or math.isnan(check.value) or check.value == check.limit:
        is_at_least = check.name in AT_LEAST or (check.stage == "task" and not at_most(check.name))
        return "≥" if is_at_least else "≤"
    return "≤" if (check.value < check.limit) == check.passed else "≥"


def _find_failed_stage(cells: Cells) -> str | None:
    return next((stage for stage, cell in cells.items() if cell and cell.failed), None)


def _cause(cells: Cells) -> str:
    """The first stage that fails, as text, or the stage whose SQNR is `_APART_DB` below all others; '' for none."""
    if stage := _find_failed_stage(cells):
        return f"fails at {stage}"
    checks = {stage: cell.worst for stage, cell in cells.items() if cell and cell.worst}
    values = {stage: check.value for stage, check in checks.items() if check.name == "sqnr_db"}
    stage_sqnrs = sorted((value, stage) for stage, value in values.items() if value is not None)
    if len(stage_sqnrs) < 2 or stage_sqnrs[0][0] == math.inf or stage_sqnrs[1][0] - stage_sqnrs[0][0] < _APART_DB:
        return ""
    return f"nearly all at {stage_sqnrs[0][1]}"


def group_checks(stage: str, reports: Sequence[Report]) -> Iterator[Row]:
    """A row for each distinct set of checks of a stage: its units, and its worst check of each metric."""
    groups: dict[str, tuple[tuple[Check, ...], list[Report]]] = {}
    for report in reports:
        if checks := tuple(check for check in report.checks if check.stage == stage):
            groups.setdefault(repr(checks), (checks, []))[1].append(report)
    for checks, units in groups.values():
        title = ", ".join(dict.fromkeys(f"{unit.precision} {unit.backend}" for unit in units))
        if stage == "engine" and len(units) == 1:
            title = units[0].unit
        yield {
            "title": "fp32 graph" if stage == "export" else title,
            "units": [unit.unit for unit in units],
            "checks": checks,
            "failed": [check for check in checks if not check.passed],
            "sqnr": _worst(checks, "sqnr_db"),
            "max_rel": _worst(checks, "max_rel"),
            "agreement": _worst(checks, DECISIONS) or _worst(checks, "agreement"),
        }


def _worst(checks: Sequence[Check], name: str) -> Check | None:
    """The worst check of the metric `name`, failed ones first, then those whose limit a task metric lifts; None if no
    check has a value."""

    def goodness(check: Check) -> float:
        value = -math.inf if check.value is None or math.isnan(check.value) else check.value
        return -value if name.startswith("max_") else value

    named_checks = [check for check in checks if check.name == name and check.value is not None]
    return min(named_checks, key=lambda check: (check.passed, check.waived is None, goodness(check)), default=None)


def bar_percent(sqnr_db: float) -> float:
    """The length of an SQNR's bar, in percent of its full width."""
    return 0.0 if math.isnan(sqnr_db) else round(100 * min(max(sqnr_db, 0.0), _BAR_DB) / _BAR_DB, 2)


# The most outputs with pictures, curves in a picture, and rows of worst cases.
MOST_OUTPUTS, MOST_CURVES, MOST_ROWS = 4, 10, 60


@dataclass(frozen=True)
class _SharedSpread:
    """A spread of errors that several units share, with its name and colour in pictures."""

    spread: Spread
    name: str
    colour: str


@dataclass(frozen=True)
class WorstRow:
    """A sample with an error. off: the sample's SQNR, or the kind of error, as text."""

    name: str
    output: str
    worst: Worst
    off: str


def distributions(reports: Sequence[Report]) -> list[Row]:
    """The errors of the `MOST_OUTPUTS` worst outputs, the one with the lowest median SQNR first.

    pictures: SVG.  omitted: number of curves left out.  exact: names of the curves without error.
    """
    outputs: dict[str, list[_SharedSpread]] = {}
    for shared_spread in _collect_spreads(reports):
        if shared_spread.spread.abs_error:
            outputs.setdefault(shared_spread.spread.output, []).append(shared_spread)
    worst_outputs = sorted(outputs, key=lambda output: min(map(_median, outputs[output])))
    return [_pictures(output, outputs[output]) for output in worst_outputs[:MOST_OUTPUTS]]


def worst_cases(reports: Sequence[Report]) -> list[WorstRow]:
    """The worst sample of each graph and engine, worst first, then other samples; at most `MOST_ROWS` rows."""
    spreads = list(_collect_spreads(reports))
    first_rows = [_row(curve, curve.spread.worst[0]) for curve in spreads if curve.spread.worst]
    other_rows = [_row(curve, sample) for curve in spreads for sample in curve.spread.worst[1:]]

    def rank(row: WorstRow) -> tuple[float, float]:
        row_badness, size = row.worst.badness
        return -row_badness, -size

    return (sorted(first_rows, key=rank) + sorted(other_rows, key=rank))[:MOST_ROWS]


def courses(reports: Sequence[Report]) -> list[Row]:
    """The drift along the sequences of models with state, by stage; equal results of several engines are one row.

    parts: (first step, dB in free running, dB step by step) of each part.
    """
    rows: list[Row] = []
    for course, units in _group_equal((report, course) for report in reports for course in report.free_running):
        points = tuple(zip(course.starts, course.free_db, course.single_db, strict=True))
        name = "export" if course.stage == "export" else _name(course, units)
        rows.append({"name": name, "course": course, "parts": points})
    return rows


def _group_equal(pairs: Iterable[tuple[Report, Measured]]) -> list[tuple[Measured, list[Report]]]:
    """Each distinct value with the reports that have it, in the order of the stages."""
    groups: dict[str, tuple[Measured, list[Report]]] = {}
    for report, value in pairs:
        groups.setdefault(repr(value), (value, []))[1].append(report)
    return sorted(groups.values(), key=lambda group: list(STAGES).index(group[0].stage))


def _collect_spreads(reports: Sequence[Report]) -> list[_SharedSpread]:
    """Each distinct spread of the reports, in the order of the stages."""
    spread_groups = _group_equal((report, spread) for report in reports for spread in report.spreads)
    name_counts = Counter((spread.output, _name(spread, units)) for spread, units in spread_groups)
    # Units of one graph have the same colour, which relates an engine to its graph.
    graphs = {
        report.unit: repr((report.precision, [spread for spread in report.spreads if spread.stage == "quantization"]))
        for report in reports
    }
    order = list(dict.fromkeys(graphs.values()))
    colours = {unit: series(order.index(graph))["color"] for unit, graph in graphs.items()}
    shared_spreads = []
    for spread, units in spread_groups:
        if spread.stage == "export":
            shared_spreads.append(_SharedSpread(spread, "export", COLOURS["muted"]))
            continue
        is_repeated = name_counts[spread.output, _name(spread, units)] > 1
        shared_spreads.append(_SharedSpread(spread, _name(spread, units, is_repeated), colours[units[0].unit]))
    return shared_spreads


def _name(spread: Spread | FreeRunning, units: Sequence[Report], with_backends: bool = False) -> str:
    """'int8 graph' or 'cpu int8 onnxruntime'. with_backends: whether to add the backends to the precision."""
    if spread.stage == "engine" and len(units) == 1:
        return units[0].unit
    names = [f"{unit.precision} {unit.backend}" if with_backends else unit.precision for unit in units]
    return f"{', '.join(dict.fromkeys(names))} {'graph' if spread.stage == 'quantization' else 'engines'}"


def _median(curve: _SharedSpread) -> float:
    values = curve.spread.sqnr_db
    return values[len(values) // 2] if values else -math.inf


def _pictures(output: str, spreads: Sequence[_SharedSpread]) -> Row:
    curves = sorted(sorted(spreads, key=_median)[:MOST_CURVES], key=lambda curve: list(spreads).index(curve))
    return {
        "output": output,
        "samples": max(curve.spread.samples for curve in spreads),
        "elements": max(curve.spread.elements for curve in spreads),
        "omitted": len(spreads) - len(curves),
        "exact": [curve.name for curve in curves if not curve.spread.abs_error[-1]],
        "pictures": list(_draw(output, curves)),
    }


def _draw(output: str, curves: Sequence[_SharedSpread]) -> Iterator[str]:
    """The share of samples up to each SQNR, and of elements up to each absolute error."""
    sqnr = [value for curve in curves for value in curve.spread.sqnr_db]
    if any(map(math.isfinite, sqnr)):  # samples without error lie beyond the right end
        bounds = span(sqnr, least=10.0)
        rows = [curve for curve in curves if any(map(math.isfinite, curve.spread.sqnr_db))]

        def draw_sqnr(figure: "Figure") -> None:
            axes = figure.subplots()
            for curve in rows:
                values = curve.spread.sqnr_db
                shares = [(index + 1) / len(values) for index in range(len(values))]
                _step(axes, curve, [values[0], *values], [0.0, *shares], bounds)
            set_axis(axes, "x", bounds, "SQNR of a sample; further left is worse", text=decibels_text)

        alt_text = f"Share of the samples whose SQNR is at most so many decibels, output {output}"
        yield draw_svg("ecdf", alt_text, draw_sqnr)
    errors = [value for curve in curves for value in curve.spread.abs_error if value > 0]
    if errors:
        low, high = span(errors, log=True, pad=0.02, least=0.5)

        def draw_errors(figure: "Figure") -> None:
            axes = figure.subplots()
            for curve in curves:
                values = curve.spread.abs_error  # at equal steps from 0 to 100 %
                if values[-1] > 0:
                    shares = [index / max(len(values) - 1, 1) for index in range(len(values))]
                    _step(axes, curve, [values[0], *values], [0.0, *shares], (low, high))
            set_axis(axes, "x", (low, high), "absolute error, logarithmic; further right is worse", log=True)

        alt_text = f"Share of the elements whose absolute error is at most so much, output {output}"
        yield draw_svg("ecdf", alt_text, draw_errors)


def _step(
    axes: "Axes", curve: _SharedSpread, xs: Sequence[float], shares: Sequence[float], ends: tuple[float, float]
) -> None:
    """Draw a step curve of shares, dashed for an engine. Values beyond an end of the axis are drawn at that end."""
    dash, name = "--" if curve.spread.stage == "engine" else "-", shorten(curve.name)
    clipped_xs = [min(max(x, ends[0]), ends[1]) for x in xs]
    axes.step(clipped_xs, shares, dash, where="post", color=curve.colour, label=name, gid=tag("curve", curve.name))
    set_axis(axes, "y", (0.0, 1.0), ticks=QUARTERS)


def _row(curve: _SharedSpread, sample: Worst) -> WorstRow:
    fault = (
        f"{sample.unequal} unequal" if sample.sqnr_db is None else "not finite" if math.isnan(sample.sqnr_db) else ""
    )
    return WorstRow(curve.name, curve.spread.output, sample, fault or f"{sample.sqnr_db:.1f} dB")
