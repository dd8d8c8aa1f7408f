"""Compares the outputs of two sessions over samples."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core.errors import EnginesmithError
from enginesmith.core.reports.proof import Check
from enginesmith.core.types import Rows, Session, Tensors
from validation.comparison.selections import Selections
from validation.golden.golden_set import Case, GoldenSet
from validation.limits.budget import Budgets, OutputLimits, StagedLimits, at_most, within
from validation.limits.measured import MeasuredDrift, Value, of_edge, of_golden, still_share
from validation.limits.terms import Budget
from validation.metrics.drift import Drift, is_exact, measure
from validation.metrics.tally import Along, Spreads, samples_of

# Compares the answers of two sides, case by case: the drift of each output, and checks of the drift.
#
# Golden cases are merged per output. Edge cases are not, since an error at one size must not vanish in an average: each
# metric is checked at its worst edge, and the note names the other edges that break the limit.

# The number of samples that `Constancy` compares at a time.
_ROWS = 1 << 10
# The metrics whose checks name the origin of the limit in their note.
NOTED = ("sqnr_db", "agreement")


@dataclass
class Constancy:
    """Whether all samples of one output are equal: the output then seems not to depend on the inputs."""

    constant: bool = True
    _first: Array | None = None

    def add(self, output: Array, samples: int) -> None:
        """Add an output of a case. samples: number of samples along axis 0; 1 if the whole array is one sample.

        Samples of different sizes are equal if all elements of both are the same number.
        """
        if not self.constant or not output.size:
            return
        rows = output if output.ndim and samples == output.shape[0] else output[None]
        first_row = self._first = np.array(rows[0]) if self._first is None else self._first
        is_single = rows.shape[1:] != first_row.shape
        constant = first_row.flat[0] if is_single else first_row
        blocks = (rows[1:2], *(rows[start : start + _ROWS] for start in range(0, len(rows), _ROWS)))
        if (is_single and not (first_row == constant).all()) or not all((block == constant).all() for block in blocks):
            self.constant, self._first = False, None


@dataclass
class OutputComparison:
    """The comparison of one output. dtype: of the expected output.  golden: drift over all golden cases.

    edges: drift by edge case.  expected, actual: whether each side is equal in all golden samples.
    """

    dtype: np.dtype
    golden: Drift | None = None
    edges: dict[str, Drift] = field(default_factory=dict)
    expected: Constancy = field(default_factory=Constancy)
    actual: Constancy = field(default_factory=Constancy)

    def add(self, case: Case, pair: tuple[Array, Array], samples: int, decisions: bool = True) -> None:
        """Add the expected and the actual output of a case.

        samples: entries along axis 0, or 1.  decisions: whether decisions are compared too.
        Raises ValueError when their shapes or kinds differ.
        """
        # Whether the output has one value for each token: as many as an input of ids, or a mask.
        is_by_token = any(
            array.shape == pair[0].shape and array.ndim > 1 and (is_exact(array) or "mask" in name.lower())
            for name, array in case.inputs.items()
        )
        token_mask = _tokens(case.inputs, pair[0].shape if is_by_token else pair[0].shape[:-1])
        drift = measure(*pair, decisions=decisions, samples=samples, counted=token_mask, elements=is_by_token)
        if case.kind == "edge":
            self.edges[case.name] = of_edge(drift, self.golden and of_golden(self.golden))
            return
        self.golden = self.golden.merge(drift) if self.golden else drift
        for side, array in zip((self.expected, self.actual), pair, strict=True):
            side.add(array, samples)


@dataclass
class StageComparison:
    """The comparison of one stage's cases so far. spreads: receives the distribution of errors, if a report shows it.

    declared: dtype by output, as the candidate declares it.  selections: receives selected rows.  failures: failed
    checks without a value.
    outputs: the measurements so far, by output.
    """

    stage: str
    spreads: Spreads | Along | None
    declared: Mapping[str, str]
    outputs: dict[str, OutputComparison] = field(default_factory=dict)
    selections: Selections = field(default_factory=lambda: Selections({}))
    failures: list[Check] = field(default_factory=list)

    def fail(self, name: str, output: str, case: str, note: str) -> None:
        """Add a failed check without a value."""
        self.failures.append(Check(self.stage, name, output, case, None, None, False, note))

    def add(self, case: Case, expected: Tensors, actual: Tensors) -> None:
        """Compare the outputs of a case; outputs that cannot be compared become failed checks."""
        selected_names = self.selections.take(case, expected, actual)
        for output, value in expected.items():
            if output in selected_names:
                continue
            if output not in actual:
                self.fail("outputs", output, case.name, "this output is missing")
            elif value.dtype != (dtype := actual[output].dtype) and not (
                value.dtype.kind == dtype.kind == "f" and dtype.name == self.declared.get(output)
            ):
                self.fail("outputs", output, case.name, f"expected {value.dtype}, got {dtype}")
            else:
                pair, sample_count = (value, actual[output]), samples_of(case.inputs.values(), value)
                try:
                    self.outputs.setdefault(output, OutputComparison(value.dtype)).add(case, pair, sample_count)
                except ValueError as error:
                    self.failures.append(_shape_check(self.stage, output, case.name, pair, str(error)))
                    continue
                if self.spreads is not None:
                    self.spreads.add(output, case.name, case.kind == "golden", pair, sample_count)
        for output in actual.keys() - expected.keys():
            self.fail("outputs", output, case.name, "the model has no such output")

    def checks(self, limits: OutputLimits) -> Iterator[Check]:
        """The checks: failures first, then the golden cases of each output, then its edges."""
        self._settle()
        yield from (*self.failures, *self._check_measured(), *self.selections.checks)
        for checks_of in (self._golden, self._edges):
            for name, output in self.outputs.items():
                yield from checks_of(name, output, limits)

    def usual(self) -> dict[str, Drift]:
        """The drift of the golden cases by output, relative to which later cases are judged (`edge_checks`)."""
        self._settle()
        return {name: of_golden(output.golden) for name, output in self.outputs.items() if output.golden}

    def _settle(self) -> None:
        for case, output, pair in self.selections.settle():
            output_comparison = self.outputs.setdefault(output, OutputComparison(pair[0].dtype))
            output_comparison.add(case, pair, len(pair[0]), decisions=False)

    def _check_measured(self) -> Iterator[Check]:
        """Failed checks of outputs whose expected values are all infinite, and of a stage without any element."""
        drift_parts = {
            name: [drift for drift in (comparison.golden, *comparison.edges.values()) if drift]
            for name, comparison in self.outputs.items()
        }
        for name, drifts in drift_parts.items():
            if any(drift.infinite for drift in drifts) and not any(drift.count or drift.nonfinite for drift in drifts):
                note = "nothing was measured: every expected value is infinite"
                yield Check(self.stage, "measured", name, "golden", 0.0, None, False, note)
        if drift_parts and all(_is_empty(drift) for drifts in drift_parts.values() for drift in drifts):
            note = "nothing was measured: every output is empty; give golden data with answers"
            yield Check(self.stage, "measured", "", "golden", 0.0, None, False, note)

    def _golden(self, name: str, output: OutputComparison, limits: OutputLimits) -> Iterator[Check]:
        if output.golden is None:
            return
        limit_pair = limits.at(name, "golden", output.golden.count)
        measured_drift = _measure_drift(self.stage, output.dtype, of_golden(output.golden), None, limit_pair)
        varies = not output.expected.constant and (measured_drift.drift.mismatches is not None or measured_drift.moves)
        if varies and output.actual.constant:
            note = "the same for every sample, where the expected output differs"
            yield Check(self.stage, "constant", name, "golden", None, None, False, note)
        for value in measured_drift.values():
            note = limits.budgets.notes.get((name, "golden"), value.note) if value.name in NOTED else value.note
            note = "nothing was measured: it is empty" if _is_empty(measured_drift.drift) else note
            yield check_of(self.stage, name, "golden", replace(value, note=note))

    def _edges(self, name: str, output: OutputComparison, limits: OutputLimits) -> Iterator[Check]:
        """The check of each metric at its worst edge case. The note names other edges that break the limit."""
        golden_drift = of_golden(output.golden) if output.golden else None
        columns: dict[str, dict[str, Value]] = {}
        for case, drift in output.edges.items():
            limit_pair = limits.at(name, "edge", drift.count, case)
            for value in _measure_drift(self.stage, output.dtype, drift, golden_drift, limit_pair).values():
                columns.setdefault(value.name, {})[case] = value
        for metric, values in columns.items():
            worst_case = min(values, key=lambda case: (_passes(values[case]), _goodness(values[case])))
            edges_text = ", ".join(case for case, value in values.items() if case != worst_case and not _passes(value))
            slice_note = values[worst_case].note if metric in ("sqnr_db", "slice_sqnr_db", "centered_sqnr_db") else ""
            note = f"also {edges_text}" if edges_text else f"worst of {len(values)} edges"
            note = f"{slice_note}; {note}" if slice_note else note
            yield check_of(self.stage, name, worst_case, replace(values[worst_case], note=note))


def _tokens(inputs: Tensors, shape: tuple[int, ...]) -> Array | None:
    """Whether each token is real, bool [shape], from an input of zeros and ones whose name contains 'mask' (1: real).

    None (all tokens are real) without such an input. shape: of the array of tokens. Names with 'padding' do not count,
    since PyTorch's padding mask has ones at padding.
    """
    for name, array in inputs.items():
        if "mask" in name.lower() and "padding" not in name.lower() and array.shape == shape:
            mask = array == 1
            return mask if mask.any() and (mask | (array == 0)).all() else None
    return None


def golden_drifts(golden: GoldenSet) -> dict[str, Drift]:
    """The energy and variation of the golden cases' expected outputs, by output, as a drift without error.

    Cases outside the golden set are judged relative to it (`edge_checks`).
    """
    drifts: dict[str, Drift] = {}
    for case in golden.of_kind("golden"):
        for name, value in case.expected.items():
            drift = measure(value, value, samples=samples_of(case.inputs.values(), value))
            drifts[name] = drifts[name].merge(drift) if name in drifts else drift
    return {name: of_golden(drift) for name, drift in drifts.items()}


def edge_checks(
    stage: str,
    case: tuple[str, Iterable[Array]],
    output: str,
    pair: tuple[Array, Array],
    usual: Drift | None,
    limits: tuple[Budget, Drift | None],
) -> tuple[Check, ...]:
    """The checks of one output of a case outside the golden set, judged like an edge case.

    case: its name and inputs.  usual: drift of the golden cases.  limits: budget and honest drift, as
    `OutputLimits.at` returns them.
    Raises ValueError when shapes or kinds differ.
    """
    name, inputs = case
    drift = of_edge(measure(*pair, decisions=True, samples=samples_of(inputs, pair[0])), usual)
    values = _measure_drift(stage, pair[0].dtype, drift, usual, limits).values()
    return tuple(check_of(stage, output, name, value) for value in values)


def _measure_drift(
    stage: str, dtype: np.dtype, drift: Drift, usual: Drift | None, limits: tuple[Budget, Drift | None]
) -> MeasuredDrift:
    budget, honest_drift = limits
    common_exponent = max(noise_drift.exponent for noise_drift in (drift, usual, honest_drift) if noise_drift)
    drift, still_level = drift.scale_to(common_exponent), still_share(dtype)
    usual, honest_drift = (
        noise_drift and noise_drift.scale_to(common_exponent) for noise_drift in (usual, honest_drift)
    )
    return MeasuredDrift(drift, budget, still_level, usual, honest_drift, stage == "engine")


def _shape_check(stage: str, output: str, case: str, pair: tuple[Array, Array], note: str) -> Check:
    """A failed check of two arrays that cannot be compared. If only one axis differs, it is named `shape` and has both
    sizes: the number of boxes that a graph selects depends on rounding."""
    pairs = [size_pair for size_pair in zip(pair[0].shape, pair[1].shape, strict=False) if size_pair[0] != size_pair[1]]
    if pair[0].ndim != pair[1].ndim or len(pairs) != 1:
        return Check(stage, "outputs", output, case, None, None, False, note)
    return Check(stage, "shape", output, case, float(pairs[0][1]), float(pairs[0][0]), False, note)


def _is_empty(drift: Drift) -> bool:
    return not (drift.count or drift.nonfinite or drift.infinite)


def check_of(stage: str, output: str, case: str, value: Value) -> Check:
    """The check of a value against its limit."""
    return Check(stage, value.name, output, case, value.value, value.limit, _passes(value), value.note)


def _passes(value: Value) -> bool:
    return value.limit is None or (value.value is not None and within(value.name, value.value, value.limit))


def _goodness(value: Value) -> float:
    """A sort key that is greater for a better value; NaN is the worst value, and None the best."""
    if value.value is None:
        return math.inf
    if math.isnan(value.value):
        return -math.inf
    if value.name == "slice_sqnr_db":  # each slice has a limit of its own
        return math.inf if value.value == math.inf else value.value - (value.limit or 0.0)
    return -value.value if at_most(value.name) else value.value


# Opens an ONNX file without optimization.
Opener = Callable[[Path], AbstractContextManager[Session]]
_REPEATS = "the session gives other outputs when the same inputs run again, so that nothing can be proven"


def drift_checks(
    stage: str,
    reference: Session | None,
    candidate: Session,
    golden: GoldenSet,
    limits: Budget | Budgets | OutputLimits | StagedLimits,
    spreads: Spreads | Along | None = None,
    usual: dict[str, Drift] | None = None,
    selected: Mapping[str, Rows] | None = None,
) -> tuple[Check, ...]:
    """The checks of a candidate on every case, against a reference or (None) against the golden set's outputs.

    The reference (or else the candidate) runs twice on the first case; outputs that differ by more than the limits are
    failed checks. So are errors of the candidate; those of the reference are raised. spreads: receives the errors.
    usual: receives the drift of the golden cases by output.  selected: outputs that are compared as sets of rows.

    limits: of the drift, for all outputs or by output.
    """
    staged_limits, output_dtypes = StagedLimits.of(limits), {spec.name: spec.dtype for spec in candidate.outputs}
    comparison = StageComparison(stage, spreads, output_dtypes, selections=Selections(selected or {}))
    for index, case in enumerate(golden.cases):
        expected = case.expected if reference is None else run(reference, case.inputs)
        reference_repeat = run(reference, case.inputs) if index == 0 and reference is not None else None
        try:
            actual = run(candidate, case.inputs)
            candidate_repeat = run(candidate, case.inputs) if index == 0 and reference is None else None
        except EnginesmithError as error:
            comparison.fail("runs", "", case.name, str(error))
            continue
        comparison.add(case, expected, actual)
        for outputs, repeat_outputs in ((expected, reference_repeat), (actual, candidate_repeat)):
            if repeat_outputs is not None:
                comparison.failures += _check_repeats(stage, case, outputs, repeat_outputs, staged_limits)
    if usual is not None:
        usual.update(comparison.usual())
    return staged_limits.judge(comparison.checks)


def expected_checks(
    stage: str,
    candidate: Session,
    golden: GoldenSet,
    limits: Budget | Budgets | OutputLimits,
    spreads: Spreads | None = None,
) -> tuple[Check, ...]:
    """The checks of a session against the golden set's expected outputs. spreads: receives the spread of the errors."""
    return drift_checks(stage, None, candidate, golden, limits, spreads)


def narrow(session: Session, inputs: Tensors) -> dict[str, Array]:
    """The inputs, cast to float16 if the session takes the input in float16."""
    half_names = {spec.name for spec in session.inputs if spec.dtype == "float16"}
    return {name: array.astype(np.float16) if name in half_names else array for name, array in inputs.items()}


def run(session: Session, inputs: Tensors) -> dict[str, Array]:
    """Run a session on inputs of the original model, cast by `narrow`.

    Raises EnginesmithError for any error of the session, and if its answer is not a mapping of names to plain arrays.
    """
    session_inputs = narrow(session, inputs)
    try:
        answer: Any = session.run(session_inputs)
    except EnginesmithError:
        raise
    except Exception as error:  # runtimes raise errors of any type
        raise EnginesmithError(f"the session raised {type(error).__name__}: {error}") from error
    is_mapping = isinstance(answer, Mapping)
    if not is_mapping or not all(isinstance(value, np.ndarray | np.generic) for value in answer.values()):
        type_names = sorted({type(value).__name__ for value in answer.values()}) if is_mapping else []
        answer_text = f"a {type(answer).__name__}" + (f" of {', '.join(type_names)}" if type_names else "")
        raise EnginesmithError(f"the session answered {answer_text}; it should give an array for each output, by name")
    arrays = {str(name): np.asanyarray(value) for name, value in answer.items()}
    for name, array in arrays.items():
        is_masked = hasattr(array, "mask")  # an array of numpy.ma, which takes time to import
        if array.dtype.hasobject or is_masked:
            answer_text = "a masked array" if is_masked else "an array of Python objects"
            raise EnginesmithError(f"the session answered {answer_text} for {name}; it should give plain numbers")
    return arrays


def case_checks(
    stage: str, case: str, output: str, expected: Array, actual: Array, budget: Budget
) -> tuple[Check, ...]:
    """The checks of one output of one case against a budget. Raises ValueError when shapes or kinds differ."""
    measured_drift = MeasuredDrift(measure(expected, actual, decisions=True), budget)
    return tuple(check_of(stage, output, case, value) for value in measured_drift.values())


def limited_checks(
    stage: str, case: tuple[str, str], output: str, pair: tuple[Array, Array], limits: OutputLimits
) -> tuple[Check, ...]:
    """`case_checks` of one output under its limits. case: name and kind."""
    name, kind = case
    return case_checks(stage, name, output, *pair, limits.budgets.of(output, kind, pair[0].size))


def _check_repeats(stage: str, case: Case, outputs: Tensors, again: Tensors, limits: StagedLimits) -> Iterator[Check]:
    """A failed check for each output that differs between two runs of one session by more than the limits allow."""
    for output, value in outputs.items():
        try:
            pair = value, again[output]
            checks = limits.judge(partial(limited_checks, stage, (case.name, case.kind), output, pair))
        except (KeyError, ValueError) as error:
            yield Check(stage, "repeats", output, case.name, None, None, False, f"{_REPEATS} ({error})")
            continue
        failed_checks = [check for check in checks if not check.passed and check.name != "nonfinite"]
        yield from (replace(check, name="repeats", note=f"{check.name}: {_REPEATS}") for check in failed_checks[:1])
