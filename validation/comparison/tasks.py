"""The task metrics of a spec over a golden set, as checks; and what their decisions leave of the limits on drift.

A share that passes on few samples may be lower on others. Its check says how much lower (the bound of Clopper and
Pearson, Biometrika 26, 1934), and how many samples without a wrong one would show its limit.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from enginesmith.core.errors import DataError, EnginesmithError
from enginesmith.core.reports.proof import Check, Spread
from enginesmith.core.types import Session, Tensors
from validation.comparison.sessions import CHANGED, run
from validation.golden.golden_set import Case, GoldenSet
from validation.limits.budget import HONEST_DB, LEAST_DB, Budget, Budgets, StagedLimits, at_most, within
from validation.metrics.tasks.measures import score_of
from validation.metrics.tasks.scores import Score, TaskValue
from validation.metrics.tasks.terms import VALUES, TaskMetric, sets_of
from validation.statistics.rates import count_needed, lower

# The chance that a share is below the bound that its note gives.
LEVEL = 0.05
# The checks of numeric drift: all that a budget limits, of integers their agreement, of graphs the changed decisions.
_NUMERIC = {*(item.name for item in fields(Budget)), "agreement", CHANGED}


@dataclass
class _Measured:
    """One metric over some cases. labels: the right answers of all of them; None for those of the original model.

    failure: why the candidate could not be measured; '' where it could.
    """

    metric: TaskMetric
    labels: Any = None
    failure: str = ""
    score: Score[Any, Any] = field(init=False)
    answers: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.score = score_of(self.metric.terms)

    def add(self, case: Case, outputs: Tensors) -> None:
        """Take what the candidate gave for a case. Raises what is wrong with the original model's own outputs."""
        wanted = self.score.read_wanted(case.expected)
        count, before = len(wanted), self.answers
        self.answers += count
        labels = None if self.labels is None else self.labels[before : self.answers]
        if labels is not None and len(labels) != count:  # too few labels, which `_measure_original` says
            return
        try:
            wanted = wanted if labels is None else self.score.join(wanted, labels)
            found = self.score.read_answers(outputs)
            if len(found) != count:
                raise DataError(f"it gives {len(found)} answers where the original model gives {count}")
            self.score.add(wanted, found)
        except EnginesmithError as error:
            self.failure = self.failure or str(error)

    def values(self) -> list[TaskValue]:
        """What was measured; after a failure each value without a number."""
        if self.failure:
            return [TaskValue(name, None, self.failure) for name in VALUES[self.metric.terms.name]]
        return self.score.values()


def task_checks(session: Session, golden: GoldenSet, metrics: Sequence[TaskMetric]) -> list[Check]:
    """The task metrics of a session over all golden cases, each value as a check against its limit, if any.

    One that decides is measured over the edge cases, too, all together and against the original model's outputs, with
    limits that are `_loosen`ed. A session that fails is a failed check. Raises DataError without as many labels as
    answers, or for outputs of a shape that the metric does not take, and InputError for an output that the model lacks.
    """
    labelled = [_read_labels(golden, metric) for metric in metrics]
    originals = [_measure_original(golden, *pair) for pair in zip(metrics, labelled, strict=True)]
    found = [_Measured(*pair) for pair in zip(metrics, labelled, strict=True)]
    edges = [_Measured(metric) for metric in metrics if metric.decides]
    for kind, sides in (("golden", found), ("edge", edges)):
        for case in golden.of_kind("golden" if kind == "golden" else "edge") if sides else ():
            _add(case, session, sides)
    checks = [check for side, own in zip(found, originals, strict=True) for check in _checks(side, "golden", own)]
    return checks + [check for side in edges if side.answers for check in _checks(side, "edges", {})]


def _add(case: Case, session: Session, sides: Sequence[_Measured]) -> None:
    try:
        outputs = run(session, case.inputs)
    except EnginesmithError as error:
        for side in sides:
            side.failure = side.failure or str(error)
        return
    for side in sides:
        side.add(case, outputs)


def _read_labels(golden: GoldenSet, metric: TaskMetric) -> Any:
    if metric.against == "original":
        return None
    if golden.labels is None:
        raise DataError("the golden set has no labels; name them in golden.labels")
    score, labels = score_of(metric.terms), np.atleast_1d(golden.labels)
    found, case = score.read_labels(labels), next(iter(golden.of_kind("golden")), None)
    count = score.count_classes(case.expected) if case else None
    is_beyond = labels.size and (labels.max() >= (count or 0) or (labels.min() < 0 and not score.takes_negative))
    if count is not None and is_beyond:
        have = f"labels are {labels.min():g}..{labels.max():g}, the output has {count} classes"
        raise DataError(f"metric {metric.terms.name}: {have}, which are 0..{count - 1}")
    return found


def _measure_original(golden: GoldenSet, metric: TaskMetric, labels: Any) -> dict[str, float | None]:
    """What the original model itself has against the labels, by value; nothing where it is what counts."""
    if labels is None:
        return {}
    side = _Measured(metric, labels)
    for case in golden.of_kind("golden"):
        side.add(case, case.expected)
    if side.answers != len(labels):
        output = metric.terms.output
        text = f"output {output!r} gives {side.answers} answers, but there are {len(labels)} labels; give one each"
        raise DataError(text)
    if side.failure:
        raise DataError(f"metric {metric.terms.name}: the labels do not fit the outputs: {side.failure}")
    return {item.name: item.value for item in side.values()}


def _checks(side: _Measured, case: str, original: dict[str, float | None]) -> Iterator[Check]:
    for item in side.values():
        limit = side.metric.limits.get(item.name)
        limit = _loosen(item, limit) if limit is not None and case == "edges" else limit
        passed = limit is None or (item.value is not None and within(item.name, item.value, limit))
        passed = passed and not (side.failure and not side.metric.limits)
        own = original.get(item.name)
        notes = [item.note, "" if own is None else f"the original model has {own:.4f}", _bound(item, limit)]
        note = "; ".join(filter(None, notes))
        yield Check("task", item.name, side.metric.terms.output, case, item.value, limit, passed, note)


def _loosen(item: TaskValue, limit: float) -> float:
    """The limit at the edges, which are a few golden samples: twice as far from a perfect value, in decibels twice the
    error, and of a share at least one wrong answer."""
    if at_most(item.name):
        return 2 * limit
    if item.name.endswith("_db"):
        return limit - HONEST_DB
    one = (item.total - 1) / item.total if item.total else 1.0
    return min(1 - 2 * (1 - limit), one)


def _bound(item: TaskValue, limit: float | None) -> str:
    """How low a share may be in truth, and how many samples would show its limit where these do not."""
    if item.count is None or not item.total:
        return ""
    least = lower(item.count, item.total, LEVEL)
    text = f"{item.count} of {item.total}: at least {least:.2f} of all, with {100 * (1 - LEVEL):.0f} % confidence"
    needed = count_needed(1 - limit, LEVEL) if limit is not None and least < limit else None
    return text if needed is None else f"{text}; {needed} without a wrong one would show {limit:g}"


def lift_limits(checks: Iterable[Check], metrics: Sequence[TaskMetric]) -> list[Check]:
    """The checks, without the limits on numeric drift that they break where a metric decides.

    What always counts stays: NaN, infinities, shapes (but for the number of boxes, where `detection` decides), dtypes,
    constant outputs, repeated calls, the contract.
    """
    if not any(metric.decides for metric in metrics):
        return list(checks)
    found = list(checks)
    deciding = [metric.terms for metric in metrics if metric.decides]
    counts = {_sizes(check) for check in found for terms in deciding if check.output == terms.output}
    boxes = {output for terms in deciding for output in sets_of(terms)}
    return [
        _lift(check) if _is_lifted(check) or (check.output in boxes and _sizes(check) in counts - {None}) else check
        for check in found
    ]


def limits_elsewhere(spreads: Iterable[Spread], metrics: Sequence[TaskMetric]) -> StagedLimits | None:
    """The limits on drift at sizes that no metric is measured at, where one decides; None where none does.

    Twice the error of the worst golden sample that was measured with it, since such a size may be that sample alone.
    spreads: of the engine stage.
    """
    if not any(metric.decides for metric in metrics):
        return None
    worst = {item.output: item.sqnr_db[0] for item in spreads if item.sqnr_db}
    held = {output: max(value - HONEST_DB, LEAST_DB) for output, value in worst.items() if not math.isnan(value)}
    measured = {(output, "edge"): Budget(sqnr_db=value, argmax_agreement=0.0) for output, value in held.items()}
    return StagedLimits.of(Budgets(Budget(argmax_agreement=0.0), measured))


def _sizes(check: Check) -> tuple[str, str, float | None, float | None] | None:
    """Where an output has another size along an axis than expected, and both; None of other checks. All outputs of
    `sets_of` have the same: a size that differs in one alone is no number of boxes."""
    if check.name != "shape" or check.joint not in ("quantization", "engine"):
        return None
    return check.joint, check.case, check.value, check.limit


def _is_lifted(check: Check) -> bool:
    finite = check.value is not None and check.value == check.value
    return finite and not check.passed and check.joint in ("quantization", "engine") and check.name in _NUMERIC


def _lift(check: Check) -> Check:
    limit = "" if check.limit is None else f"limit {check.limit:.4g} not applied: golden.metric decides"
    return replace(
        check, passed=True, limit=None, waived=check.limit, note="; ".join(filter(None, [check.note, limit]))
    )
