"""Parts of a comparison: task metrics, free running, coverage."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from builders.onnx_graphs.structure import Dependence
from enginesmith.arrays import Array
from enginesmith.core.errors import DataError, EnginesmithError
from enginesmith.core.reports.proof import CHANGED, CLEAR_CHANGED, LOST_CLASSES, SELECTED, Check, Spread, unmeasured
from enginesmith.core.text import join_first
from enginesmith.core.types import Session, Tensors
from validation.comparison.sessions import NOTED, Constancy, Opener, drift_checks, run
from validation.golden.free_running import FreeRunningSession, RecordedSession
from validation.golden.golden_set import Case, GoldenSequences, GoldenSet, case_kinds, case_names
from validation.limits.budget import HONEST_DB, LEAST_DB, Budgets, StagedLimits, at_most, within
from validation.limits.measured import MeasuredDrift, of_golden, still_share
from validation.limits.rounding import lost_classes
from validation.limits.terms import Budget
from validation.metrics.drift import Drift, is_exact, measure
from validation.metrics.tally import Along, Spreads, StepSpreads, samples_of
from validation.metrics.tasks.boxes import BoxSet
from validation.metrics.tasks.classes_and_texts import Accuracy, Score, TaskValue
from validation.metrics.tasks.terms import TaskMetric
from validation.metrics.tasks.vectors_and_masks import score_of
from validation.statistics.rates import count_needed, lower

# A golden set does not measure an output or expected answer that is the same in all samples: an engine that always
# returns this answer agrees with the model on all samples.
#
# Such an output has the check `UNMEASURED`, with which no engine is proven. Outputs that depend on no input, and inputs
# that the graph returns unchanged, are exempt (`builders.onnx_graphs.structure`). They are compared like all others.

STAGE = "export"
_REMEDY = "give golden data that varies it"


def unmeasured_checks(
    golden: GoldenSet, dependences: Mapping[str, Dependence], metrics: Sequence[TaskMetric] = ()
) -> Iterator[Check]:
    """A check for each output and each metric that the golden cases do not measure.

    dependences: of the exported model's outputs; an output without an entry counts as computed. Raises DataError for
    outputs or labels of a shape that a metric does not accept, InputError for a metric's output that the model lacks.
    """
    outputs: dict[str, _Variation] = {}
    for case in golden.of_kind("golden"):
        for name, value in case.expected.items():
            if dependences.get(name, "computed") == "computed":
                sample_count = samples_of(case.inputs.values(), value)
                outputs.setdefault(name, _Variation(value.dtype)).add(value, sample_count)
    for name, variation in outputs.items():
        if reason := variation.why_unmeasured():
            yield unmeasured(STAGE, name, "golden", f"{reason}; {_REMEDY}")
    for metric in metrics:
        if reason := _why_no_answers(golden, metric):
            yield unmeasured(STAGE, metric.output, "golden", f"{metric.name}: {reason}")


@dataclass
class _Variation:
    """The variation of one output over the golden cases. number: the value of all elements of the last case; None if
    the elements differ."""

    dtype: np.dtype
    samples: int = 0
    constancy: Constancy = field(default_factory=Constancy)
    drift: Drift | None = None
    number: float | None = None

    def add(self, value: Array, samples: int) -> None:
        """Add the output of a case."""
        self.samples += samples
        self.constancy.add(value, samples)
        is_constant = value.size and (value == value.flat[0]).all()
        self.number = float(value.flat[0]) if is_constant else None
        drift = measure(value, value, samples=samples)
        self.drift = self.drift.merge(drift) if self.drift else drift

    def why_unmeasured(self) -> str:
        """The reason why the output is not measured; '' if it is. A single sample must vary between its elements; a
        single number must not be 0."""
        drift = self.drift or Drift()
        samples_text = f"in all {self.samples} golden samples" if self.samples > 1 else "in the one golden sample"
        if not drift.count:
            return "" if drift.nonfinite else f"{'infinite' if drift.infinite else 'empty'} {samples_text}"
        if drift.infinite:  # a mask of infinities may vary although the finite elements do not
            return f"the same {samples_text}" if self.constancy.constant else ""
        if self.samples == 1:
            shows_nothing = self.number is not None and (drift.count > 1 or not self.number)
            return f"{self.number:g} throughout {samples_text}" if shows_nothing else ""
        is_still = (
            not is_exact(np.empty(0, self.dtype))
            and not MeasuredDrift(of_golden(drift), Budget(), still_share(self.dtype)).moves
        )
        return f"the same {samples_text}" if self.constancy.constant or is_still else ""


def _why_no_answers(golden: GoldenSet, metric: TaskMetric) -> str:
    """The reason why a metric's expected answers measure nothing; '' if two answers differ, if there is only one, or if
    the metric measures likelihoods without labels."""
    score = score_of(metric)
    has_labels = metric.against == "labels" and golden.labels is not None
    if has_labels:
        arrays: Iterable[Any] = [score.read_labels(np.atleast_1d(np.asarray(golden.labels)))]
    else:
        arrays = (score.read_wanted(case.expected) for case in golden.of_kind("golden"))
    ignored_values = [value for name in ("ignore", "pad") if (value := getattr(metric, name, None)) is not None]
    distinct_answers, count = set[object](), 0
    for batch in arrays:
        answers = batch[~np.isin(batch, ignored_values)] if isinstance(batch, np.ndarray) else batch
        if not isinstance(answers, np.ndarray | list):
            return ""
        count += np.size(answers) if isinstance(answers, np.ndarray) else len(answers)
        distinct_answers |= {*_some_answers(answers)}
        if len(distinct_answers) > 1:
            return ""
    subject = "labels" if has_labels else "answers of the original model"
    return f"all {count} {subject} are equal; give golden data with several" if count > 1 else ""


def _some_answers(answers: Array | list[Any]) -> Iterator[object]:
    """Values that differ if any two answers of a case differ: an array's minimum and maximum, texts, images' boxes."""
    if isinstance(answers, np.ndarray):
        yield from (answers.min().item(), answers.max().item()) if answers.size else ()
        return
    for answer in answers:
        yield (answer.classes.tobytes(), answer.corners.tobytes()) if isinstance(answer, BoxSet) else tuple(answer)


# The name of the case in these checks.
FREE_RUNNING = "free running"


def free_running_checks(
    stage: str,
    reference: Session | None,
    candidate: Session,
    sequences: GoldenSet,
    limits: Budgets | StagedLimits,
    along: Along | None = None,
) -> tuple[Check, ...]:
    """`drift_checks` on the golden set's whole sequences, under limits that were measured on sequences.

    along: receives the drift along the sequences; the note of an output's SQNR or agreement describes it.
    reference, candidate: sessions that run whole sequences.
    """
    along = along or Along()
    checks = drift_checks(stage, reference, candidate, sequences, limits, along)
    drift_texts = {course.output: course.text for course in along.at(stage)}
    free_checks = []
    for check in checks:
        case_name = FREE_RUNNING if check.case == "golden" else f"{FREE_RUNNING}, {check.case}"
        texts = [drift_texts.get(check.output) if check.name in NOTED else "", check.note]
        free_checks.append(replace(check, case=case_name, note="; ".join(filter(None, texts))))
    return tuple(free_checks)


def step_spreads(golden: GoldenSet, along: Along) -> Spreads:
    """An empty `Spreads` for a golden set; for a model with state, one that adds the drift of its steps to `along`."""
    if (sequences := golden.sequences) is None:
        return Spreads()
    names = [name for name, kind in zip(case_names(golden), case_kinds(golden), strict=True) if kind == "golden"]
    return StepSpreads(along, dict(zip(names, sequences.places, strict=False)))


def check_free_running(
    stage: str,
    pair: tuple[RecordedSession, Session],
    sequences: GoldenSequences | None,
    opener: Opener,
    limits: Callable[[Session, GoldenSet, Opener], StagedLimits],
    along: Along,
) -> tuple[Check, ...]:
    """The checks of the second session against the first on sequences; none for a model without state.

    opener: opens an ONNX file without optimization.  limits: returns the limits for a reference session, a golden set
    and an opener of graphs as sessions of sequences.  along: as in `free_running_checks`.
    """
    if sequences is None:
        return ()

    @contextmanager
    def rolled(path: Path) -> Iterator[Session]:
        with opener(path) as session:
            yield FreeRunningSession(session, sequences)

    expected, actual = pair[0].free_running(sequences), FreeRunningSession(pair[1], sequences)
    free_limits = limits(expected, sequences.golden, rolled)
    return free_running_checks(stage, expected, actual, sequences.golden, free_limits, along)


# A few golden cases may suffice to show that a candidate breaks the limits for all: most trials of a search break them.
#
# Errors only add up. If the error energy of some cases exceeds the limit for all cases, the other cases cannot
# compensate it, even without errors; the same is true of the greatest error.

# Metrics that can only get worse with further cases, once the signal of all cases is known.
_ADDING_UP = ("sqnr_db", "centered_sqnr_db", "max_rel", "max_abs")

OutputLimit = tuple[str, str, float]


def list_limits(checks: Iterable[Check]) -> list[OutputLimit]:
    """(output, metric, limit) of each check of the golden cases whose metric adds up over the cases."""
    golden = (check for check in checks if check.case == "golden" and check.name in _ADDING_UP)
    return [(check.output, check.name, check.limit) for check in golden if check.limit is not None]


def find_broken(
    candidate: Session, cases: Iterable[Case], golden_drift: Mapping[str, Drift], limits: Sequence[OutputLimit]
) -> Check | None:
    """The failed check of a limit for all golden cases that some cases already break; None if they break none.

    The cases run in turn until a limit is broken. The check's value is that of all cases if the others had no error.
    cases: with the expected outputs.  golden_drift: of all golden cases, as `golden_drifts` returns it.
    None also if the candidate cannot be run or compared, which the checks of all cases explain.
    limits: each with its output and metric.
    """
    drifts: dict[str, Drift] = defaultdict(Drift)
    with suppress(EnginesmithError, KeyError, ValueError):
        for case in cases:
            actual = run(candidate, case.inputs)
            for name in {output for output, *_ in limits}:
                drifts[name] = drifts[name].merge(measure(case.expected[name], actual[name]))
            for name, metric, limit in limits:
                scaled_drift = drifts[name].scale_to(golden_drift[name].exponent)
                best_drift = replace(golden_drift[name], error_sq=scaled_drift.error_sq, max_abs=scaled_drift.max_abs)
                value: float = getattr(best_drift, metric)
                if not within(metric, value, limit):
                    return Check("quantization", metric, name, "golden", value, limit, False, "of some cases")
    return None


# The task metrics of a spec over a golden set, as checks; and the limits on drift that still apply if a metric decides.
#
# A share that passes on few samples may be lower on others. The check's note has a lower bound (Clopper and Pearson,
# Biometrika 26, 1934), and the number of samples without an error that would prove the limit.

# The probability that a share is below the bound in its note.
LEVEL = 0.05
# The checks of numeric drift: those of a budget's limits, the agreement of integers, and the decisions of graphs.
_NUMERIC = {*(item.name for item in fields(Budget)), "agreement", CHANGED, CLEAR_CHANGED, LOST_CLASSES, SELECTED}


@dataclass
class _Measured:
    """One metric over some cases. labels: expected answers of all cases; None: the original model's are expected.

    failure: why the candidate could not be measured; '' if it could.
    """

    metric: TaskMetric
    labels: Any = None
    failure: str = ""
    score: Score[Any, Any] = field(init=False)
    answers: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.score = score_of(self.metric)

    def add(self, case: Case, outputs: Tensors) -> None:
        """Add the candidate's outputs for a case. Raises the errors of reading the original model's outputs."""
        expected_answers = self.score.read_wanted(case.expected)
        count, start = len(expected_answers), self.answers
        self.answers += count
        labels = None if self.labels is None else self.labels[start : self.answers]
        if labels is not None and len(labels) != count:  # too few labels; `_measure_original` raises the error
            return
        try:
            expected_answers = expected_answers if labels is None else self.score.join(expected_answers, labels)
            answers = self.score.read_answers(outputs)
            if len(answers) != count:
                raise DataError(f"it gives {len(answers)} answers where the original model gives {count}")
            self.score.add(expected_answers, answers)
        except EnginesmithError as error:
            self.failure = self.failure or str(error)

    def values(self) -> list[TaskValue]:
        """The values of the metric; without numbers after a failure."""
        if self.failure:
            return [TaskValue(name, None, self.failure) for name in self.metric.values]
        return self.score.values()


def task_checks(session: Session, golden: GoldenSet, metrics: Sequence[TaskMetric]) -> list[Check]:
    """The task metrics of a session over all golden cases: each value as a check against its limit, if any.

    A metric that decides is also measured over all edge cases together, against the original model's outputs and with
    looser limits (`_loosen`). With a floor of accuracy by labels, classes must not lose over half of their right
    answers. A session's error is a failed check. Raises DataError if the numbers of labels and answers differ or an
    output has a shape that the metric does not accept, and InputError for an output that the model lacks.
    """
    label_sets = [_read_labels(golden, metric) for metric in metrics]
    originals = [_measure_original(golden, *pair) for pair in zip(metrics, label_sets, strict=True)]
    golden_sides = [_Measured(*pair) for pair in zip(metrics, label_sets, strict=True)]
    edge_measures = [_Measured(metric) for metric in metrics if metric.decides]
    for case in golden.of_kind("golden") if metrics else ():
        _add(case, session, golden_sides)
    for case in golden.of_kind("edge") if edge_measures else ():
        _add(case, session, edge_measures)
    pairs = zip(golden_sides, originals, strict=True)
    checks = [check for tally, original in pairs for check in _checks(tally, "golden", original)]
    return checks + [check for tally in edge_measures if tally.answers for check in _checks(tally, "edges", None)]


def _add(case: Case, session: Session, sides: Sequence[_Measured]) -> None:
    try:
        outputs = run(session, case.inputs)
    except EnginesmithError as error:
        for tally in sides:
            tally.failure = tally.failure or str(error)
        return
    for tally in sides:
        tally.add(case, outputs)


def _read_labels(golden: GoldenSet, metric: TaskMetric) -> Any:
    if metric.against != "labels":
        return None
    if golden.labels is None:
        raise DataError("the golden set has no labels; name them in golden.labels")
    score, labels = score_of(metric), np.atleast_1d(golden.labels)
    metric_labels, case = score.read_labels(labels), next(iter(golden.of_kind("golden")), None)
    count = score.count_classes(case.expected) if case else None
    is_beyond = labels.size and (labels.max() >= (count or 0) or (labels.min() < 0 and not score.takes_negative))
    if count is not None and is_beyond:
        label_range = f"labels are {labels.min():g}..{labels.max():g}, the output has {count} classes"
        raise DataError(f"metric {metric.name}: {label_range}, which are 0..{count - 1}")
    return metric_labels


def _measure_original(golden: GoldenSet, metric: TaskMetric, labels: Any) -> _Measured | None:
    """The original model's own values against the labels; None without labels."""
    if labels is None:
        return None
    tally = _Measured(metric, labels)
    for case in golden.of_kind("golden"):
        tally.add(case, case.expected)
    if tally.answers != len(labels):
        counts_text = f"gives {tally.answers} answers, but there are {len(labels)} labels"
        raise DataError(f"output {metric.output!r} {counts_text}; give one label for each answer")
    if tally.failure:
        raise DataError(f"metric {metric.name}: the labels do not fit the outputs: {tally.failure}")
    return tally


def _describe_lost(side: _Measured, original: _Measured | None) -> str:
    """A note that names the classes in which a candidate has less than half of the original model's right answers, if
    these are more classes than by chance; '' otherwise, and for metrics other than accuracy by labels."""
    if original is None or not (isinstance(side.score, Accuracy) and isinstance(original.score, Accuracy)):
        return ""
    names, chance_count = lost_classes(original.score.right, original.score.right - side.score.right)
    if len(names) <= chance_count:
        return ""
    return f"classes that lose over half of their right answers: {join_first([*map(str, names)])}"


def _checks(side: _Measured, case: str, original: _Measured | None) -> Iterator[Check]:
    base_values = {value.name: value.value for value in original.values()} if original else {}
    for value in side.values():
        limit = side.metric.limits.get(value.name)
        limit = _loosen(value, limit) if limit is not None and case == "edges" else limit
        is_within = limit is None or (value.value is not None and within(value.name, value.value, limit))
        is_within = is_within and not (side.failure and not side.metric.limits)
        text = "" if limit is None or side.failure else _describe_lost(side, original)
        is_within, base = is_within and not text, base_values.get(value.name)
        notes = [text, value.note, "" if base is None else f"the original model has {base:.4f}", _bound(value, limit)]
        note = "; ".join(filter(None, notes))
        yield Check("task", value.name, side.metric.output, case, value.value, limit, is_within, note)


def _loosen(value: TaskValue, limit: float) -> float:
    """The limit for edge cases, which have few golden samples: twice as far from a perfect value; for decibels, twice
    the error; for a share, at least one wrong answer is allowed."""
    if at_most(value.name):
        return 2 * limit
    if value.name.endswith("_db"):
        return limit - HONEST_DB
    one_error = (value.total - 1) / value.total if value.total else 1.0
    return min(1 - 2 * (1 - limit), one_error)


def _bound(value: TaskValue, limit: float | None) -> str:
    """A note with a share's lower bound, and if that is below the limit the number of samples to prove it; or ''."""
    if value.count is None or not value.total:
        return ""
    least_share = lower(value.count, value.total, LEVEL)
    confidence_text = f"with {100 * (1 - LEVEL):.0f} % confidence"
    text = f"{value.count} of {value.total}: the true share is at least {least_share:.2f}, {confidence_text}"
    count = count_needed(1 - limit, LEVEL) if limit is not None and least_share < limit else None
    return text if count is None else f"{text}; {count} samples without an error would be needed to show {limit:g}"


def lift_limits(checks: Iterable[Check], metrics: Sequence[TaskMetric]) -> list[Check]:
    """The checks; if a metric decides, failed checks of numeric drift pass, and their limits become notes.

    Other checks still count: NaN, infinities, shapes (except the number of boxes if `detection` decides), dtypes,
    constant outputs, repeated calls, the contract.
    """
    all_checks, deciding_metrics = list(checks), [metric for metric in metrics if metric.decides]
    if not deciding_metrics:
        return all_checks
    counts = {_sizes(check) for check in all_checks for metric in deciding_metrics if check.output == metric.output}
    boxes = {output for metric in deciding_metrics for output in metric.sets}
    return [
        _lift(check) if _is_lifted(check) or (check.output in boxes and _sizes(check) in counts - {None}) else check
        for check in all_checks
    ]


def limits_at_other_sizes(spreads: Iterable[Spread], metrics: Sequence[TaskMetric]) -> StagedLimits | None:
    """The limits on drift at sizes at which no metric is measured, if a metric decides; else None.

    They allow twice the error amplitude of the worst golden sample, since a case may consist of that sample alone.
    spreads: of the engine stage.
    """
    if not any(metric.decides for metric in metrics):
        return None
    levels = {spread.output: spread.sqnr_db[0] for spread in spreads if spread.sqnr_db}
    limits_db = {output: max(value - HONEST_DB, LEAST_DB) for output, value in levels.items() if not math.isnan(value)}
    budgets = {(output, "edge"): Budget(sqnr_db=value, argmax_agreement=0.0) for output, value in limits_db.items()}
    return StagedLimits.of(Budgets(Budget(argmax_agreement=0.0), budgets))


def _sizes(check: Check) -> tuple[str, str, float | None, float | None] | None:
    """Stage, case, actual and expected size of a check of a changed axis; None for other checks. If the number of boxes
    changed, all outputs of `Metric.sets` have equal results here; a change in a single output has another cause."""
    if check.name != "shape" or check.stage not in ("quantization", "engine"):
        return None
    return check.stage, check.case, check.value, check.limit


def _is_lifted(check: Check) -> bool:
    is_number = check.value is not None and check.value == check.value
    return is_number and not check.passed and check.stage in ("quantization", "engine") and check.name in _NUMERIC


def _lift(check: Check) -> Check:
    limit_text = "" if check.limit is None else f"limit {check.limit:.4g} not applied: golden.metric decides"
    note = "; ".join(filter(None, [check.note, limit_text]))
    return replace(check, passed=True, limit=None, waived=check.limit, note=note)
