"""Runs two sessions over a golden set, case by case, and turns their drift into checks.

Golden cases are merged per output. Edge cases are not: an error at one size must not vanish in the average, so each
metric reports the edge where it is worst, and the others that break the limit are named beside it.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from builders.errors import DataError, EngineryError, InputError
from builders.types import Session, Tensors
from validation.budget import Budget, Budgets, at_most, within
from validation.drift import DECISIONS, Drift, is_exact, measure
from validation.golden import Case, GoldenSet
from validation.npz import Array
from validation.report import Check
from validation.tally import Spreads, samples_of


def drift_checks(
    joint: str,
    reference: Session,
    candidate: Session,
    golden: GoldenSet,
    budget: Budget | Budgets,
    spreads: Spreads | None = None,
) -> tuple[Check, ...]:
    """Compare two sessions on every case. Errors of the reference raise; those of the candidate are failed checks.

    spreads: takes how the errors spread, for a report to show.
    """
    return _checks(joint, lambda case: run(reference, case.inputs), candidate, golden, budget, spreads)


def expected_checks(
    joint: str, candidate: Session, golden: GoldenSet, budget: Budget | Budgets, spreads: Spreads | None = None
) -> tuple[Check, ...]:
    """Compare a session with the golden set's own expected outputs."""
    return _checks(joint, lambda case: case.expected, candidate, golden, budget, spreads)


def task_check(session: Session, golden: GoldenSet, metric: Mapping[str, Any]) -> Check:
    """The task metric over all golden cases. metric: name 'accuracy', output, and floor (None: only measured).

    Accuracy is the share of labels equal to the argmax over the output's last axis (an integer output is taken as it
    is). Raises DataError without fitting labels and InputError for another metric or output; a session that does not
    answer as the original does is a failed check.
    """
    name, output, floor = metric["name"], metric["output"], metric.get("floor")
    if name != "accuracy":
        raise InputError(f"metric {name!r} is not known; known: accuracy")
    original = _accuracy((case.expected for case in golden.of_kind("golden")), output, golden.labels)
    try:
        value = _accuracy((run(session, case.inputs) for case in golden.of_kind("golden")), output, golden.labels)
    except EngineryError as error:
        return Check("task", name, output, "golden", None, floor, False, str(error))
    passed = floor is None or value >= floor
    return Check("task", name, output, "golden", value, floor, passed, f"the original model has {original:.4f}")


def run(session: Session, inputs: Tensors) -> dict[str, Array]:
    """Run a session on golden inputs, narrowed where it takes fp16: golden data is what the original model takes."""
    halves = {spec.name for spec in session.inputs if spec.dtype == "float16"}
    narrowed = {name: array.astype(np.float16) for name, array in inputs.items() if name in halves}
    return session.run({**inputs, **narrowed})


def case_checks(
    joint: str, case: str, output: str, expected: Array, actual: Array, budget: Budget
) -> tuple[Check, ...]:
    """The checks of one output of one case. Raises ValueError when shapes or kinds differ."""
    values = _values(measure(expected, actual, also=DECISIONS), budget)
    return tuple(
        Check(joint, name, output, case, value, limit, _passes(name, value, limit)) for name, limit, value in values
    )


@dataclass
class _Drifts:
    """What was found per output: golden cases in one, edges by case name; and failures that ended a comparison."""

    spreads: Spreads | None
    golden: dict[str, Drift] = field(default_factory=dict)
    edges: dict[str, dict[str, Drift]] = field(default_factory=dict)
    failures: list[Check] = field(default_factory=list)

    def add(self, case: Case, output: str, drift: Drift, pair: tuple[Array, Array]) -> None:
        if self.spreads is not None:
            samples = samples_of(case.inputs.values(), pair[0])
            self.spreads.add(output, case.name, case.kind == "golden", pair, samples)
        if case.kind == "golden":
            self.golden[output] = self.golden.get(output, Drift()).merge(drift)
        else:
            self.edges.setdefault(output, {})[case.name] = drift


def _checks(
    joint: str,
    expected_of: Callable[[Case], Tensors],
    candidate: Session,
    golden: GoldenSet,
    budget: Budget | Budgets,
    spreads: Spreads | None,
) -> tuple[Check, ...]:
    drifts = _Drifts(spreads)
    limits = budget if isinstance(budget, Budgets) else Budgets(budget)
    for case in golden.cases:
        expected = expected_of(case)
        try:
            actual = run(candidate, case.inputs)
        except EngineryError as error:
            drifts.failures.append(Check(joint, "runs", "", case.name, None, None, False, str(error)))
            continue
        for output, value in expected.items():
            _compare(joint, case, output, value, actual.get(output), drifts)
    merged = [check for output, drift in drifts.golden.items() for check in _golden(joint, output, drift, limits)]
    edges = [check for output, cases in drifts.edges.items() for check in _edges(joint, output, cases, limits)]
    return (*drifts.failures, *merged, *edges)


def _compare(joint: str, case: Case, output: str, expected: Array, actual: Array | None, drifts: _Drifts) -> None:
    if actual is None:
        drifts.failures.append(Check(joint, "outputs", output, case.name, None, None, False, "this output is missing"))
        return
    try:
        drifts.add(case, output, measure(expected, actual, also=DECISIONS), (expected, actual))
    except ValueError as error:
        drifts.failures.append(Check(joint, "outputs", output, case.name, None, None, False, str(error)))


def _golden(joint: str, output: str, drift: Drift, limits: Budgets) -> Iterator[Check]:
    for name, limit, value in _values(drift, limits.of(output, "golden")):
        note = _where(drift) if name in ("nonfinite", "max_abs") else ""
        note = limits.notes.get((output, "golden"), "") if name == "sqnr_db" else note
        yield Check(joint, name, output, "golden", value, limit, _passes(name, value, limit), note)


def _edges(joint: str, output: str, cases: Mapping[str, Drift], limits: Budgets) -> Iterator[Check]:
    columns = {case: _values(drift, limits.of(output, "edge")) for case, drift in cases.items()}
    for values in zip(*columns.values(), strict=True):
        name, limit, _ = values[0]
        found = {case: value for case, (_, _, value) in zip(columns, values, strict=True)}
        worst = min(found, key=lambda case: _goodness(name, found[case]))
        broken = [case for case, value in found.items() if not _passes(name, value, limit)]
        others = ", ".join(case for case in broken if case != worst)
        note = f"also {others}" if others else f"worst of {len(found)} edges"
        yield Check(joint, name, output, worst, found[worst], limit, not broken, note)


def _values(drift: Drift, budget: Budget) -> list[tuple[str, float | None, float]]:
    """(metric, limit, value) in order. Non-finite elements always have the limit 0."""
    finite: tuple[str, float | None, float] = ("nonfinite", 0.0, float(drift.nonfinite))
    if drift.mismatches is not None:
        limit = 1.0 if budget.argmax_agreement is None else budget.argmax_agreement
        return [finite, ("agreement", limit, drift.argmax_agreement)]
    return [finite, *((name, limit, getattr(drift, name)) for name, limit in budget.items())]


def _passes(name: str, value: float, limit: float | None) -> bool:
    return limit is None or within(name, value, limit)


def _goodness(name: str, value: float) -> float:
    """Greater is better; NaN is worst."""
    if math.isnan(value):
        return -math.inf
    return -value if at_most(name) else value


def _where(drift: Drift) -> str:
    return "" if drift.worst_index is None else f"at index {list(drift.worst_index)}"


def _accuracy(runs: Iterable[Tensors], output: str, labels: Array | None) -> float:
    if labels is None:
        raise DataError("the golden set has no labels; name them in golden.labels")
    answers = np.concatenate([_answers(tensors, output) for tensors in runs])
    if answers.size != labels.size:
        raise DataError(
            f"output {output!r} gives {answers.size} answers, but there are {labels.size} labels; give one each"
        )
    return float(np.mean(answers == labels.reshape(-1)))


def _answers(tensors: Tensors, output: str) -> Array:
    if output not in tensors:
        raise InputError(f"metric output {output!r} is not an output; known: {', '.join(tensors)}")
    value = tensors[output]
    if is_exact(value):
        return value.reshape(-1)
    # A row with NaN has no answer: its argmax would be the place of the NaN, which may happen to be the label.
    return np.where(np.isnan(value).any(axis=-1), np.nan, np.argmax(value, axis=-1)).reshape(-1)
