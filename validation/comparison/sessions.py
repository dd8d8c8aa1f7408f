"""Runs two sessions over a golden set, case by case, and turns their drift into checks.

Whether a quantized graph decides as the model does is judged by a lower bound of the changed decisions (Clopper and
Pearson, Biometrika 26, 1934), because a golden set is small and one near tie of 48 is 2 %: a graph fails when the data
shows, at LEVEL, that it changes more than MOST of all decisions.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core.errors import EnginesmithError
from enginesmith.core.reports.proof import DECISIONS, Check
from enginesmith.core.types import Session, Tensors
from validation.comparison.outputs import StageComparison, check_of
from validation.golden.golden_set import Case, GoldenSet
from validation.limits.budget import Budget, Budgets, OutputLimits, StagedLimits
from validation.limits.measured import MeasuredDrift
from validation.metrics.along import Along
from validation.metrics.drift import Drift, measure
from validation.metrics.tally import Spreads
from validation.metrics.tasks.terms import TaskMetric
from validation.statistics.rates import lower

# The greatest share of changed decisions, and the chance that a graph that keeps it fails.
MOST, LEVEL = 0.01, 0.01
# Opens an ONNX file as it is written.
Opener = Callable[[Path], AbstractContextManager[Session]]
CHANGED = "max_decisions_changed"
_REPEATS = "the same session answers the same inputs otherwise when it runs again, so that nothing can be proven"


def drift_checks(
    stage: str,
    reference: Session | None,
    candidate: Session,
    golden: GoldenSet,
    limits: Budget | Budgets | OutputLimits | StagedLimits,
    spreads: Spreads | Along | None = None,
    usual: dict[str, Drift] | None = None,
) -> tuple[Check, ...]:
    """The checks of a candidate against a reference on every case; without one, against the golden set's outputs.

    The reference, or without one the candidate, runs twice on the first case and must give the same. Errors of the
    candidate are failed checks; those of the reference raise. spreads: is filled with how the errors spread.  usual: is
    filled with the drift of the golden cases by output.
    """
    held = StagedLimits.of(limits)
    found = StageComparison(stage, spreads, {spec.name: spec.dtype for spec in candidate.outputs})
    for index, case in enumerate(golden.cases):
        expected = case.expected if reference is None else run(reference, case.inputs)
        again = run(reference, case.inputs) if index == 0 and reference is not None else None
        try:
            actual = run(candidate, case.inputs)
            twice = run(candidate, case.inputs) if index == 0 and reference is None else None
        except EnginesmithError as error:
            found.fail("runs", "", case.name, str(error))
            continue
        found.add(case, expected, actual)
        for first, second in ((expected, again), (actual, twice)):
            if second is not None:
                found.failures += _check_repeats(stage, case, first, second, held)
    if usual is not None:
        usual.update(found.usual())
    return held.judge(found.checks)


def expected_checks(
    stage: str,
    candidate: Session,
    golden: GoldenSet,
    limits: Budget | Budgets | OutputLimits,
    spreads: Spreads | None = None,
) -> tuple[Check, ...]:
    """The checks of a session against the golden set's own expected outputs."""
    return drift_checks(stage, None, candidate, golden, limits, spreads)


def run(session: Session, inputs: Tensors) -> dict[str, Array]:
    """Run a session on inputs of the original model, converted to float16 where the session takes that.

    Raises EnginesmithError for whatever the session raises, and for an answer other than plain arrays by name.
    """
    halves = {spec.name for spec in session.inputs if spec.dtype == "float16"}
    narrowed = {name: array.astype(np.float16) for name, array in inputs.items() if name in halves}
    try:
        answer: Any = session.run({**inputs, **narrowed})
    except EnginesmithError:
        raise
    except Exception as error:  # whatever a runtime raises
        raise EnginesmithError(f"the session raised {type(error).__name__}: {error}") from error
    if not isinstance(answer, Mapping) or not all(
        isinstance(item, np.ndarray | np.generic) for item in answer.values()
    ):
        kinds = {type(item).__name__ for item in answer.values()} if isinstance(answer, Mapping) else ""
        what = f"a {type(answer).__name__}" + (f" of {', '.join(sorted(kinds))}" if kinds else "")
        raise EnginesmithError(f"the session answered {what}; it should give an array for each output, by name")
    arrays = {str(name): np.asanyarray(item) for name, item in answer.items()}
    for name, array in arrays.items():
        masked = hasattr(array, "mask")  # of numpy.ma, which takes time to import
        if array.dtype.hasobject or masked:
            what = "a masked array" if masked else "an array of Python objects"
            raise EnginesmithError(f"the session answered {what} for {name}; it should give plain numbers")
    return arrays


def case_checks(
    stage: str, case: str, output: str, expected: Array, actual: Array, budget: Budget
) -> tuple[Check, ...]:
    """The checks of one output of one case against a budget. Raises ValueError when shapes or kinds differ."""
    found = MeasuredDrift(measure(expected, actual, decisions=True), budget)
    return tuple(check_of(stage, output, case, value) for value in found.values())


def limited_checks(
    stage: str, case: tuple[str, str], output: str, pair: tuple[Array, Array], limits: OutputLimits
) -> tuple[Check, ...]:
    """`case_checks` of a case, given by its name and kind, under the limits of its output."""
    name, kind = case
    return case_checks(stage, name, output, *pair, limits.budgets.of(output, kind, pair[0].size))


def _check_repeats(stage: str, case: Case, first: Tensors, again: Tensors, limits: StagedLimits) -> Iterator[Check]:
    """Failed checks of the outputs by which two runs of one session differ more than the limits allow."""
    for output, value in first.items():
        try:
            pair = value, again[output]
            checks = limits.judge(partial(limited_checks, stage, (case.name, case.kind), output, pair))
        except (KeyError, ValueError) as error:
            yield Check(stage, "repeats", output, case.name, None, None, False, f"{_REPEATS} ({error})")
            continue
        broken = [check for check in checks if not check.passed and check.name != "nonfinite"]
        yield from (replace(check, name="repeats", note=f"{check.name}: {_REPEATS}") for check in broken[:1])


def decision_checks(
    checks: Sequence[Check], golden: GoldenSet, metrics: Sequence[TaskMetric], limits: Mapping[str, object]
) -> list[Check]:
    """The checks that a graph changes few of the model's decisions on the outputs of an accuracy, which has labels.

    checks: of the graph's drift.  limits: the spec's; where they have one on decisions, that is checked in its place.
    """
    if golden.labels is None or DECISIONS in limits:
        return []
    judged = [metric.terms.output for metric in metrics if metric.terms.name == "accuracy"]
    found = [check for check in checks if check.case == "golden" and check.name == DECISIONS]
    pairs = [(check.output, check.value) for check in found if check.output in judged and check.value is not None]
    return [_check_changed(output, agreement, int(golden.labels.size)) for output, agreement in pairs]


def _check_changed(output: str, agreement: float, rows: int) -> Check:
    changed = round((1 - agreement) * rows)
    bound = lower(changed, rows, LEVEL)
    note = f"{changed} of {rows} decisions are others; of all decisions at least this share, with 99 % confidence"
    return Check("quantization", CHANGED, output, "golden", bound, MOST, bound <= MOST, note)
