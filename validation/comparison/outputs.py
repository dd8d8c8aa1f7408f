"""Whether an output is the same for every sample: an answer that does not depend on its inputs is no answer.

What two sides answered, case by case, merged into the drift of each output, and the checks that follow.

Golden cases are merged per output. Edge cases are not: an error at one size must not vanish in the average, so each
metric reports the edge where it is worst, and the others that break the limit are named beside it.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from enginery.arrays import Array
from enginery.core.reports.proof import Check
from enginery.core.types import Tensors
from validation.golden.golden_set import Case, GoldenSet
from validation.limits.budget import Budget, OutputLimits, at_most, within
from validation.limits.measured import MeasuredDrift, Value, as_declared, of_edge, of_golden, still_share
from validation.metrics.drift import DECISIONS, Drift, measure
from validation.metrics.tally import Spreads, samples_of

# Samples that are compared together.
_ROWS = 1 << 10


@dataclass
class Constancy:
    """Looks at the samples of one output as they come. samples: how many.  constant: whether all are equal so far."""

    samples: int = 0
    constant: bool = True
    _first: Array | None = None

    def add(self, output: Array, samples: int) -> None:
        """Take an output of a case. samples: entries along axis 0 that are samples, or 1 where the whole is one."""
        self.samples += samples
        if not self.constant or not output.size:
            return
        rows = output if output.ndim and samples == output.shape[0] else output[None]
        if self._first is None:
            self._first = np.array(rows[0])
        first = self._first
        parts = (rows[1:2], *(rows[start : start + _ROWS] for start in range(0, len(rows), _ROWS)))
        if not all(_equal(part, first) for part in parts):
            self.constant, self._first = False, None


def _equal(rows: Array, first: Array) -> bool:
    """Whether all rows are `first`; where sizes differ, whether all elements are one number."""
    if rows.shape[1:] == first.shape:
        return bool((rows == first).all())
    return bool((rows == first.flat[0]).all() and (first == first.flat[0]).all())


# The checks whose lines say where limits come from.
NOTED = ("sqnr_db", "agreement")


@dataclass
class Compared:
    """What was found of one output. edges: by case.  failures: that ended a comparison."""

    dtype: np.dtype
    golden: Drift | None = None
    edges: dict[str, Drift] = field(default_factory=dict)
    expected: Constancy = field(default_factory=Constancy)
    actual: Constancy = field(default_factory=Constancy)

    def add(self, case: Case, pair: tuple[Array, Array], samples: int) -> None:
        """Take the expected and the actual output of a case."""
        drift = measure(*pair, also=DECISIONS, samples=samples)
        if case.kind == "edge":
            self.edges[case.name] = of_edge(drift, self.golden and of_golden(self.golden))
            return
        self.golden = self.golden.merge(drift) if self.golden else drift
        for side, array in zip((self.expected, self.actual), pair, strict=True):
            side.add(array, samples)


@dataclass
class StageComparison:
    """The cases of one stage, as they are compared."""

    stage: str
    spreads: Spreads | None
    declared: Mapping[str, str]
    outputs: dict[str, Compared] = field(default_factory=dict)
    failures: list[Check] = field(default_factory=list)

    def fail(self, name: str, output: str, case: str, note: str) -> None:
        """Take a failed check without a value."""
        self.failures.append(Check(self.stage, name, output, case, None, None, False, note))

    def add(self, case: Case, expected: Tensors, actual: Tensors) -> None:
        """Compare the outputs of a case."""
        for output, value in expected.items():
            if output not in actual:
                self.fail("outputs", output, case.name, "this output is missing")
            elif not as_declared(value, actual[output], self.declared.get(output)):
                self.fail("outputs", output, case.name, f"expected {value.dtype}, got {actual[output].dtype}")
            else:
                self._compare(case, output, value, actual[output])
        for output in actual.keys() - expected.keys():
            self.fail("outputs", output, case.name, "the model has no such output")

    def _compare(self, case: Case, output: str, expected: Array, actual: Array) -> None:
        samples = samples_of(case.inputs.values(), expected)
        try:
            self.outputs.setdefault(output, Compared(expected.dtype)).add(case, (expected, actual), samples)
        except ValueError as error:
            self.fail("outputs", output, case.name, str(error))
            return
        if self.spreads is not None:
            self.spreads.add(output, case.name, case.kind == "golden", (expected, actual), samples)

    def checks(self, limits: OutputLimits) -> Iterator[Check]:
        """Failures first, then the golden cases of each output, then its edges."""
        yield from (*self.failures, *self._check_measured())
        for of_kind in (self._golden, self._edges):
            for name, output in self.outputs.items():
                yield from of_kind(name, output, limits)

    def usual(self) -> dict[str, Drift]:
        """By output, the drift of the golden cases: what a case beside the golden set is judged by."""
        return {name: of_golden(output.golden) for name, output in self.outputs.items() if output.golden}

    def _check_measured(self) -> Iterator[Check]:
        """Comparisons that say nothing: of infinities alone, and of no elements at all."""
        drifts = {name: (found.golden, *found.edges.values()) for name, found in self.outputs.items()}
        known = {name: [part for part in parts if part] for name, parts in drifts.items()}
        for name, parts in known.items():
            if any(part.infinite for part in parts) and not any(part.count or part.nonfinite for part in parts):
                note = "nothing was measured: every expected value is infinite"
                yield Check(self.stage, "measured", name, "golden", 0.0, None, False, note)
        if known and all(_is_empty(part) for parts in known.values() for part in parts):
            note = "nothing was measured: every output is empty; give golden data with answers"
            yield Check(self.stage, "measured", "", "golden", 0.0, None, False, note)

    def _golden(self, name: str, output: Compared, limits: OutputLimits) -> Iterator[Check]:
        if output.golden is None:
            return
        held = limits.at(name, "golden", output.golden.count)
        found = _measure_drift(self.stage, output.dtype, of_golden(output.golden), None, held)
        varies = not output.expected.constant and (found.drift.mismatches is not None or found.moves)
        if varies and output.actual.constant:
            note = "the same for every sample, where the expected output differs"
            yield Check(self.stage, "constant", name, "golden", None, None, False, note)
        for value in found.values():
            note = limits.budgets.notes.get((name, "golden"), value.note) if value.name in NOTED else value.note
            note = "nothing was measured: it is empty" if _is_empty(found.drift) else note
            yield check_of(self.stage, name, "golden", replace(value, note=note))

    def _edges(self, name: str, output: Compared, limits: OutputLimits) -> Iterator[Check]:
        usual = of_golden(output.golden) if output.golden else None
        columns: dict[str, dict[str, Value]] = {}
        for case, drift in output.edges.items():
            held = limits.at(name, "edge", drift.count)
            for value in _measure_drift(self.stage, output.dtype, drift, usual, held).values():
                columns.setdefault(value.name, {})[case] = value
        for values in columns.values():
            yield _worst_edge(self.stage, name, values)


def golden_drifts(golden: GoldenSet) -> dict[str, Drift]:
    """By output, what the golden cases expect, without an error: what a case beside the golden set is judged by."""
    found: dict[str, Drift] = {}
    for case in golden.of_kind("golden"):
        for name, value in case.expected.items():
            drift = measure(value, value, samples=samples_of(case.inputs.values(), value))
            found[name] = found[name].merge(drift) if name in found else drift
    return {name: of_golden(drift) for name, drift in found.items()}


def edge_checks(
    stage: str,
    case: tuple[str, Iterable[Array]],
    output: str,
    pair: tuple[Array, Array],
    usual: Drift | None,
    held: tuple[Budget, Drift | None],
) -> tuple[Check, ...]:
    """The checks of one output of a case beside the golden set, judged as an edge of it is. Raises ValueError when
    shapes or kinds differ.

    case: its name and inputs.  pair: expected and actual.  usual: of the golden cases.  held: as `Limits.at` gives it.
    """
    name, inputs = case
    drift = of_edge(measure(*pair, also=DECISIONS, samples=samples_of(inputs, pair[0])), usual)
    values = _measure_drift(stage, pair[0].dtype, drift, usual, held).values()
    return tuple(check_of(stage, output, name, value) for value in values)


def _measure_drift(
    stage: str, dtype: np.dtype, drift: Drift, usual: Drift | None, held: tuple[Budget, Drift | None]
) -> MeasuredDrift:
    budget, honest = held
    common = max(part.exponent for part in (drift, usual, honest) if part)
    drift, still = drift.scale_to(common), still_share(dtype)
    usual, honest = (part and part.scale_to(common) for part in (usual, honest))
    return MeasuredDrift(drift, budget, still, usual, honest, stage == "engine")


def _is_empty(drift: Drift) -> bool:
    return not (drift.count or drift.nonfinite or drift.infinite)


def _worst_edge(stage: str, output: str, values: Mapping[str, Value]) -> Check:
    """One metric at the edge where it is worst; the others that break the limit are named beside it."""
    worst = min(values, key=lambda case: (_passes(values[case]), _goodness(values[case])))
    others = ", ".join(case for case, value in values.items() if case != worst and not _passes(value))
    where = values[worst].note if values[worst].name in ("sqnr_db", "slice_sqnr_db", "centered_sqnr_db") else ""
    note = f"also {others}" if others else f"worst of {len(values)} edges"
    return check_of(
        stage, output, worst, replace(values[worst], note="; ".join(part for part in (where, note) if part))
    )


def check_of(stage: str, output: str, case: str, value: Value) -> Check:
    """A value against its limit as a check."""
    return Check(stage, value.name, output, case, value.value, value.limit, _passes(value), value.note)


def _passes(value: Value) -> bool:
    return value.limit is None or (value.value is not None and within(value.name, value.value, value.limit))


def _goodness(value: Value) -> float:
    """Greater is better; NaN is worst, and nothing measured is best."""
    if value.value is None:
        return math.inf
    if math.isnan(value.value):
        return -math.inf
    if value.name == "slice_sqnr_db":  # each has a limit of its own
        return math.inf if value.value == math.inf else value.value - (value.limit or 0.0)
    return -value.value if at_most(value.name) else value.value
