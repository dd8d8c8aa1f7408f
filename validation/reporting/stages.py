"""Drift, for the page of a version: the three stages of each output side by side, and all checks of each stage.

Many units share a graph, so equal results are shown once, with the units that have them.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from enginesmith.core.reports.proof import DECISIONS, Check, Report
from enginesmith.core.text import pluralize
from enginesmith.core.types import PRECISIONS
from validation.limits.budget import Budget, at_most

STAGES = {
    "export": "the ONNX model against the original framework",
    "quantization": "the quantized or cast graph against the fp32 graph",
    "engine": "the compiled engine against the graph it was built from",
}
_BAR_DB = 140.0
# A stage whose SQNR is lower than that of the others by so much is named as the cause of the drift.
_APART_DB = 6.0
# Metrics with a least value; `format_bound` needs them where a value is exactly its limit.
AT_LEAST = (*(name for name, _ in Budget().items() if not at_most(name)), "agreement")


@dataclass(frozen=True)
class PlacedCheck:
    """A check, and the places of its value and its limit on a bar, in percent of `_BAR_DB`."""

    check: Check
    at: float
    limit_at: float | None


@dataclass(frozen=True)
class StageCell:
    """The checks of one output at one stage. shown: the worst one with a number; None where none has one."""

    shown: PlacedCheck | None
    checks: tuple[Check, ...]

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks that did not pass."""
        return tuple(check for check in self.checks if not check.passed)


Cells = Mapping[str, StageCell | None]


@dataclass(frozen=True)
class DriftRow:
    """One output of the units that have these results. cells: by stage, None where nothing was measured.

    cause: the stage that caused the drift, in words; '' where none stands out.
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


@dataclass(frozen=True)
class StageGroup:
    """The checks of one stage, and the units that have them. sqnr, max_rel, agreement: the worst check of each."""

    title: str
    units: tuple[str, ...]
    checks: tuple[Check, ...]
    failed: tuple[Check, ...]
    sqnr: PlacedCheck | None
    max_rel: PlacedCheck | None
    agreement: PlacedCheck | None


@dataclass(frozen=True)
class StageSection:
    """One stage. what: what it compares, as text."""

    name: str
    what: str
    groups: tuple[StageGroup, ...]


def side_by_side(reports: Sequence[Report]) -> list[DriftRow]:
    """A row for each output and distinct result, those that failed first, then by precision."""
    rows: dict[tuple[str, str, str], tuple[Cells, list[Report]]] = {}
    for report in reports:
        for output, cells in _cells(report):
            key = (report.precision, output, repr([cell and cell.checks for cell in cells.values()]))
            rows.setdefault(key, (cells, []))[1].append(report)
    found = [DriftRow(output, cells, tuple(units), _cause(cells)) for (_, output, _), (cells, units) in rows.items()]
    order: tuple[str, ...] = PRECISIONS

    def rank(row: DriftRow) -> tuple[bool, int]:
        precision = row.units[0].precision
        return not row.failed, order.index(precision) if precision in order else len(order)

    return sorted(found, key=rank)


def _cells(report: Report) -> Iterator[tuple[str, Cells]]:
    """Each output that has a number at some stage, with its cell at every stage."""
    checks = [check for check in report.checks if check.joint in STAGES]
    for output in dict.fromkeys(check.output for check in checks):
        mine = [check for check in checks if check.output == output]
        cells = {stage: _cell([check for check in mine if check.joint == stage]) for stage in STAGES}
        if any(cell and cell.shown for cell in cells.values()):
            yield output, cells


def _cell(checks: Sequence[Check]) -> StageCell | None:
    """The cell of these checks; None without any.

    It shows the worst SQNR (of integers, agreement). Where that passed and another check failed, it shows the latter.
    """
    failed = [check for check in checks if not check.passed]
    known = _worst(checks, "sqnr_db") or _worst(checks, "agreement")
    if failed and (known is None or known.check.passed):
        # Drift before checks of the contract, whose values are on other scales.
        known = PlacedCheck(min(failed, key=lambda check: check.name.startswith("contract ")), 0.0, None)
    return StageCell(known, tuple(checks)) if checks else None


def format_bound(check: Check) -> str:
    """'≤' or '≥', whichever side of its limit a check's value must be on.

    It follows from value and verdict; where value and limit are equal, from the metric's name (`AT_LEAST`).
    """
    if check.value is None or check.limit is None or math.isnan(check.value) or check.value == check.limit:
        likeness = check.name in AT_LEAST or (check.joint == "task" and not at_most(check.name))
        return "≥" if likeness else "≤"
    return "≤" if (check.value < check.limit) == check.passed else "≥"


def _find_failed_stage(cells: Cells) -> str | None:
    return next((stage for stage, cell in cells.items() if cell and cell.failed), None)


def _cause(cells: Cells) -> str:
    """The first stage that fails, in words, or the one whose SQNR is `_APART_DB` below all others; '' for none."""
    if stage := _find_failed_stage(cells):
        return f"fails at {stage}"
    shown = {stage: cell.shown.check for stage, cell in cells.items() if cell and cell.shown}
    known = sorted(
        (check.value, stage) for stage, check in shown.items() if check.name == "sqnr_db" and check.value is not None
    )
    if len(known) < 2 or known[0][0] == math.inf or known[1][0] - known[0][0] < _APART_DB:
        return ""
    return f"nearly all at {known[0][1]}"


def stages(reports: Sequence[Report]) -> list[StageSection]:
    """Each stage with its distinct sets of checks, and the units that have them."""
    return [StageSection(stage, what, tuple(_groups(stage, reports))) for stage, what in STAGES.items()]


def _groups(stage: str, reports: Sequence[Report]) -> Iterator[StageGroup]:
    groups: dict[str, tuple[tuple[Check, ...], list[Report]]] = {}
    for report in reports:
        if checks := tuple(check for check in report.checks if check.joint == stage):
            groups.setdefault(repr(checks), (checks, []))[1].append(report)
    for checks, units in groups.values():
        title = ", ".join(dict.fromkeys(f"{unit.precision} {unit.backend}" for unit in units))
        if stage == "engine" and len(units) == 1:
            title = units[0].unit
        yield StageGroup(
            "fp32 graph" if stage == "export" else title,
            tuple(unit.unit for unit in units),
            checks,
            tuple(check for check in checks if not check.passed),
            _worst(checks, "sqnr_db"),
            _worst(checks, "max_rel"),
            _worst(checks, DECISIONS) or _worst(checks, "agreement"),
        )


def _worst(checks: Sequence[Check], name: str) -> PlacedCheck | None:
    """The worst check of the metric `name`, failed ones first, then those whose limit a task metric lifts; None where
    none has a value."""

    def goodness(check: Check) -> float:
        value = -math.inf if check.value is None or math.isnan(check.value) else check.value
        return -value if name.startswith("max_") else value

    found = [check for check in checks if check.name == name and check.value is not None]
    if not found:
        return None
    worst = min(found, key=lambda check: (check.passed, check.waived is None, goodness(check)))
    return PlacedCheck(worst, _bar(worst.value), None if worst.limit is None else _bar(worst.limit))


def _bar(value: float | None) -> float:
    if value is None or math.isnan(value):
        return 0.0
    return round(100 * min(max(value, 0.0), _BAR_DB) / _BAR_DB, 2)
