"""What the page says about drift: the three stages of each output side by side, and every check of each stage.

Many units share a graph, so equal findings are shown once, with the units that they hold for.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from enginery.core.reports.proof import Check, Report
from enginery.core.text import pluralize
from enginery.core.types import PRECISIONS

STAGES = {
    "export": "the ONNX model against the original framework",
    "quantization": "the quantized or cast graph against the fp32 graph",
    "engine": "the compiled engine against the graph it was built from",
}
_BAR_DB = 140.0
# A stage that is so much worse than the others has made the drift.
_APART_DB = 6.0
# Metrics with a least value; `format_bound` needs them where a value is exactly its limit.
AT_LEAST = (
    *("sqnr_db", "centered_sqnr_db", "slice_sqnr_db", "quartile_sqnr_db"),
    *("cosine", "agreement", "argmax_agreement", "accuracy"),
)


@dataclass(frozen=True)
class PlacedCheck:
    """A check, and where a bar of its value ends and its limit stands, in percent (SQNR: of 140 dB)."""

    check: Check
    at: float
    limit_at: float | None


@dataclass(frozen=True)
class StageCell:
    """The checks of one output at one stage. shown: the worst of them that has a number, if one has."""

    shown: PlacedCheck | None
    checks: tuple[Check, ...]

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks that did not pass."""
        return tuple(check for check in self.checks if not check.passed)


Cells = Mapping[str, StageCell | None]


@dataclass(frozen=True)
class DriftRow:
    """One output of some units: a cell for each stage, None where nothing was measured.

    title, more, names: what the units are called: one by its name, several by their precision, how many, and all names.
    cause: the stage that made the drift, in words, where one did.
    """

    output: str
    cells: Cells
    units: tuple[Report, ...]
    cause: str

    @property
    def title(self) -> str:
        """A unit's own name, or the precision of several."""
        return self.names[0] if len(self.units) == 1 else self.units[0].precision

    @property
    def more(self) -> str:
        """How many units there are, where there are several."""
        return pluralize(len(self.units), "unit") if len(self.units) > 1 else ""

    @property
    def names(self) -> list[str]:
        """The units' names."""
        return [unit.unit for unit in self.units]

    @property
    def failed(self) -> bool:
        """Whether a stage failed."""
        return _find_failed_stage(self.cells) is not None


@dataclass(frozen=True)
class StageGroup:
    """The checks of one stage that some units share. sqnr, max_rel, agreement: the worst of each, where measured."""

    title: str
    units: tuple[str, ...]
    checks: tuple[Check, ...]
    failed: tuple[Check, ...]
    sqnr: PlacedCheck | None
    max_rel: PlacedCheck | None
    agreement: PlacedCheck | None


@dataclass(frozen=True)
class StageSection:
    """One stage. what: what it compares, in words."""

    name: str
    what: str
    groups: tuple[StageGroup, ...]


def side_by_side(reports: Sequence[Report]) -> list[DriftRow]:
    """Rows of output and units with a cell per stage, failed ones first, then by precision."""
    rows: dict[tuple[object, ...], tuple[Cells, list[Report]]] = {}
    for report in reports:
        for output, cells in _cells(report):
            key = (report.precision, output, repr([cell and cell.checks for cell in cells.values()]))
            rows.setdefault(key, (cells, []))[1].append(report)
    found = [
        DriftRow(str(output), cells, tuple(units), _cause(cells)) for (_, output, _), (cells, units) in rows.items()
    ]
    return sorted(found, key=_rank)


def _cells(report: Report) -> Iterator[tuple[str, Cells]]:
    """Per output a cell for each stage."""
    checks = [check for check in report.checks if check.joint in STAGES]
    for output in dict.fromkeys(check.output for check in checks):
        mine = [check for check in checks if check.output == output]
        cells = {stage: _cell([check for check in mine if check.joint == stage]) for stage in STAGES}
        if any(cell and cell.shown for cell in cells.values()):
            yield output, cells


def _cell(checks: Sequence[Check]) -> StageCell | None:
    """What a cell shows: the worst SQNR (of integers, agreement); a failed check of another name in their place."""
    failed = [check for check in checks if not check.passed]
    known = _worst(checks, "sqnr_db") or _worst(checks, "agreement")
    if failed and (known is None or known.check.passed):
        # Drift before promises; what they measure is on scales of their own.
        known = PlacedCheck(min(failed, key=_is_promise), 0.0, None)
    return StageCell(known, tuple(checks)) if checks else None


def _is_promise(check: Check) -> bool:
    return check.name.startswith("contract ")


def format_bound(check: Check) -> str:
    """'≤' or '≥' of a check's limit. Which it is follows from value and verdict, and where they are equal from the
    metric: nearness and shares have a least value, all else a greatest."""
    if check.value is None or check.limit is None or math.isnan(check.value) or check.value == check.limit:
        return "≥" if check.name in AT_LEAST else "≤"
    return "≤" if (check.value < check.limit) == check.passed else "≥"


def _find_failed_stage(cells: Cells) -> str | None:
    return next((stage for stage, cell in cells.items() if cell and cell.failed), None)


def _cause(cells: Cells) -> str:
    """The stage that made the drift, in words: the first that fails; else the one far below the others."""
    if stage := _find_failed_stage(cells):
        return f"fails at {stage}"
    known = sorted((level, stage) for stage, cell in cells.items() if (level := _level(cell)) is not None)
    if len(known) < 2 or known[0][0] == math.inf or known[1][0] - known[0][0] < _APART_DB:
        return ""
    return f"nearly all at {known[0][1]}"


def _level(cell: StageCell | None) -> float | None:
    check = cell.shown.check if cell and cell.shown else None
    return check.value if check and check.name == "sqnr_db" and check.value is not None else None


def _rank(row: DriftRow) -> tuple[bool, int]:
    order: tuple[str, ...] = PRECISIONS
    precision = row.units[0].precision
    return not row.failed, order.index(precision) if precision in order else len(order)


def stages(reports: Sequence[Report]) -> list[StageSection]:
    """Per stage the distinct sets of checks, each with the units it holds for: many units share a graph."""
    return [StageSection(stage, what, tuple(_groups(stage, reports))) for stage, what in STAGES.items()]


def _groups(stage: str, reports: Sequence[Report]) -> Iterator[StageGroup]:
    groups: dict[str, tuple[tuple[Check, ...], list[Report]]] = {}
    for report in reports:
        if checks := tuple(check for check in report.checks if check.joint == stage):
            groups.setdefault(repr(checks), (checks, []))[1].append(report)
    for checks, units in groups.values():
        yield StageGroup(
            _title(stage, units),
            tuple(unit.unit for unit in units),
            checks,
            tuple(check for check in checks if not check.passed),
            _worst(checks, "sqnr_db"),
            _worst(checks, "max_rel"),
            _worst(checks, "argmax_agreement") or _worst(checks, "agreement"),
        )


def _title(stage: str, reports: Sequence[Report]) -> str:
    if stage == "engine" and len(reports) == 1:
        return reports[0].unit
    if stage == "export":
        return "fp32 graph"
    return ", ".join(dict.fromkeys(f"{report.precision} {report.backend}" for report in reports))


def _worst(checks: Sequence[Check], name: str) -> PlacedCheck | None:
    """The worst check of a metric."""
    found = [check for check in checks if check.name == name and check.value is not None]
    if not found:
        return None
    worst = min(found, key=lambda check: (check.passed, _goodness(check)))
    return PlacedCheck(worst, _bar(worst.value), None if worst.limit is None else _bar(worst.limit))


def _goodness(check: Check) -> float:
    value = -math.inf if check.value is None or math.isnan(check.value) else check.value
    return -value if check.name.startswith("max_") else value


def _bar(value: float | None) -> float:
    if value is None or math.isnan(value):
        return 0.0
    return round(100 * min(max(value, 0.0), _BAR_DB) / _BAR_DB, 2)
