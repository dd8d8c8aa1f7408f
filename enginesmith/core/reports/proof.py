"""The validation report of an engine: checks, the distribution of errors, drift along sequences, and the verdict."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median_low
from typing import Literal, NoReturn

from enginesmith.core.codec import decode, encode_document, explain_damage
from enginesmith.core.errors import digest_of
from enginesmith.core.text import join_first, pluralize

# The drift of a model with state from its reference along sequences, as values. No numpy.

# The name of the case with streams side by side, which repeats the steps of the other sequences.
SIDE_BY_SIDE = "sequences side by side"


@dataclass(frozen=True)
class SequenceDrift:
    """One sequence, which the graph or engine and its reference ran with their own states. sqnr_db: over all its steps.

    first: the first step (from 0) whose decision differs: the likeliest element along the last axis, or an integer;
    None if all are equal.
    """

    case: str
    steps: int
    sqnr_db: float
    first: int | None


@dataclass(frozen=True)
class FreeRunning:
    """The drift of one output at one stage along sequences. decides: whether the output has decisions.

    starts: the first step of each part of the sequences.  free_db, single_db: SQNR of the steps in each part, with the
    stage's own states, and with the reference's states (NaN if not measured).
    """

    stage: str
    output: str
    decides: bool
    sequences: tuple[SequenceDrift, ...]
    starts: tuple[int, ...]
    free_db: tuple[float, ...]
    single_db: tuple[float, ...]

    @property
    def worst(self) -> SequenceDrift:
        """The sequence with the lowest SQNR; NaN counts as the lowest."""
        return min(self.sequences, key=lambda drift: -math.inf if math.isnan(drift.sqnr_db) else drift.sqnr_db)

    @property
    def decisions(self) -> str:
        """The step and the sequence of the first decision that differs, as text; '' for an output without decisions."""
        single_sequences = [drift for drift in self.sequences if drift.case != SIDE_BY_SIDE]
        if not self.decides:
            return ""
        drifts = [drift for drift in self.sequences if drift.first is not None]
        if not drifts:
            return "no decision differs"
        first_drift = min(drifts, key=lambda drift: drift.first or 0)
        first_steps = [drift.first for drift in single_sequences if drift.first is not None]
        median_text = f"; median of the sequences: step {median_low(first_steps)}" if first_steps else ""
        return (
            f"decisions first differ at step {first_drift.first} ({first_drift.case}{median_text}); "
            f"{len(single_sequences) - len(first_steps)} of {len(single_sequences)} sequences without a difference"
        )

    @property
    def course(self) -> str:
        """SQNR of the first and the last part as text: free running, and step by step where that was measured."""
        free_text = f"{self.free_db[0]:.0f} dB at the beginning, {self.free_db[-1]:.0f} dB at the end"
        ends = self.single_db[0], self.single_db[-1]
        if all(math.isnan(level) for level in ends):
            return free_text
        first, last = ("not measured" if math.isnan(level) else f"{level:.0f} dB" for level in ends)
        return f"{free_text} (step by step: {first} and {last})"

    @property
    def text(self) -> str:
        """'worst sequence 2, 48.1 dB; 52 dB at the beginning, 49 dB at the end; decisions first differ at ...'."""
        if self.worst.sqnr_db == math.inf:
            return "no difference in any step"
        worst_text = f"worst {self.worst.case}, {self.worst.sqnr_db:.1f} dB"
        return "; ".join(filter(None, [worst_text, self.course, self.decisions]))


# The validation report of an engine: checks, the distribution of errors, and the verdict. No numpy.
#
# Only `approve` creates an `Approved`. JSON has no NaN and no infinities: they are written as the strings 'nan', 'inf'
# and '-inf'.


@dataclass(frozen=True)
class Worst:
    """A sample with a large error. case, sample: name of the golden case and index in it.  index: of the element with
    the largest error.  expected, actual: the values of that element.

    sqnr_db: of the sample; NaN if it is not finite. unequal: number of unequal elements, for an integer output.
    """

    case: str
    sample: int
    index: tuple[int, ...]
    expected: float
    actual: float
    sqnr_db: float | None = None
    unequal: int | None = None

    @property
    def fine(self) -> bool:
        """Whether the sample has no error."""
        return self.unequal == 0 if self.sqnr_db is None else self.sqnr_db == math.inf

    @property
    def badness(self) -> tuple[float, float]:
        """Sort key: larger is worse; values that are not finite are the worst."""
        if self.sqnr_db is None:
            return float(self.unequal or 0), 0.0
        deviation = abs(self.actual - self.expected)
        return (math.inf if math.isnan(self.sqnr_db) else -self.sqnr_db), (
            math.inf if math.isnan(deviation) else deviation
        )


@dataclass(frozen=True)
class Spread:
    """The distribution of one output's errors at one stage: one or two kilobytes of JSON for any number of elements.
    `validation.metrics.tally` measures it.

    elements, samples: numbers over the golden cases.  equal: elements without any error.  nonfinite: elements left out
    of the quantiles.  abs_error: quantiles 0 to 100 % of |actual - expected|; empty for integer outputs.  sqnr_db:
    quantiles over samples, rising.
    """

    stage: str
    output: str
    elements: int
    samples: int
    equal: int
    nonfinite: int
    abs_error: tuple[float, ...]
    sqnr_db: tuple[float, ...]
    worst: tuple[Worst, ...]

    def round_numbers(self) -> "Spread":
        """A copy rounded for the report: four significant digits per number, seven for single elements."""
        elements = (
            replace(
                element,
                expected=_round(element.expected, 7),
                actual=_round(element.actual, 7),
                sqnr_db=None if element.sqnr_db is None else _round(element.sqnr_db, 7),
            )
            for element in self.worst
        )
        error_quantiles, sqnr_quantiles = (
            tuple(_round(value, 4) for value in values) for values in (self.abs_error, self.sqnr_db)
        )
        return replace(self, abs_error=error_quantiles, sqnr_db=sqnr_quantiles, worst=tuple(elements))


def _round(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")


# Proven with generated inputs only: real requests may use other parts of the model.
ON_RANDOM: Literal["proven on random inputs"] = "proven on random inputs"
Verdict = Literal["proven", "proven on random inputs", "unproven", "failed"]
# The verdicts of an engine that ran and passed every check.
PASSED: tuple[Verdict, ...] = ("proven", ON_RANDOM)
# The drift metric of decisions: the share of rows with the same argmax.
DECISIONS = "argmax_agreement"
# Checks of a narrow graph's decisions against the model's: the share that changed, changed decisions that were no near
# ties, classes that lose more than half of their rows, and classes that are the answer of no golden sample.
CHANGED, CLEAR_CHANGED, LOST_CLASSES = "max_decisions_changed", "max_clear_decisions_changed", "max_classes_lost"
UNSEEN_CLASSES = "unseen_classes"
# The check of the rows that a quantized graph selects and the model does not.
SELECTED = "max_selected_changed"
# The check of `validation.data.joined`, whose value describes the samples, not a drift.
OVERLAP = "calibration overlap"
# The check of `validation.calls.checks`, whose value describes rules of the spec.
PADDING = "padding"
# The check of a golden set whose inputs are random numbers.
RANDOM_INPUTS = "random inputs"
# The name of a check that measured nothing. It has no value and no limit, and its engine is not proven.
UNMEASURED = "not measured"
# The check of calls that a time limit ended before all were made.
CUT_SHORT = "cut short"
_KEY = object()


@dataclass(frozen=True)
class PackedArray:
    """An array as text. dtype: as numpy writes it ('<f4').  data: its bytes, compressed by zlib, in base64."""

    dtype: str
    shape: tuple[int, ...]
    data: str


# The outputs of sessions in a proof's calls (`validation.gpu.devices`): by digest of the inputs, then by name.
Answers = Mapping[str, Mapping[str, PackedArray]]


@dataclass(frozen=True)
class Check:
    """One measured value and its limit; `limit` None means that it was measured and not judged.

    stage: export, quantization, engine or task.  name: the metric.  output: the tensor's name.  case: the
    input on which it was measured.  waived: the limit on drift that the value breaks, but that does not count because
    the spec lets a task metric decide; None for all others.
    passed: whether the limit holds; True without one.  note: a remark for people, or ''.
    """

    stage: str
    name: str
    output: str
    case: str
    value: float | None
    limit: float | None
    passed: bool
    note: str = ""
    waived: float | None = None


@dataclass(frozen=True)
class Report:
    """All checks of one unit. engine: its digest, None when there is no engine.  golden: digest of the golden set.

    created_at: ISO 8601, UTC.  host: the machine that the checks ran on.  versions: of compiler and runtime.
    spreads: the distribution of errors per stage and output, where that was measured.
    free_running: of a model with state, the drift of its outputs along sequences.
    """

    unit: str
    target: str
    precision: str
    backend: str
    engine: str | None
    golden: str
    checks: tuple[Check, ...]
    verdict: Verdict
    reason: str
    created_at: str
    host: Mapping[str, str]
    versions: Mapping[str, str]
    spreads: tuple[Spread, ...] = ()
    free_running: tuple[FreeRunning, ...] = ()

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks that did not pass."""
        return tuple(check for check in self.checks if not check.passed)

    @property
    def counts(self) -> dict[str, int]:
        """The numbers of `passed` and `failed` checks, and of `not_measured` ones if there are any."""
        failed_count, unmeasured_count = len(self.failed), len(find_unmeasured(self.checks))
        counts_by_result = {"passed": len(self.checks) - failed_count - unmeasured_count, "failed": failed_count}
        return {**counts_by_result, "not_measured": unmeasured_count} if unmeasured_count else counts_by_result

    @property
    def sqnr_db(self) -> float | None:
        """The least SQNR of the quantized graph's and the engine's outputs, at most `MOST_DB`; None without one."""
        return least_sqnr_db(self.checks)

    @cached_property
    def digest(self) -> str:
        """Digest of the report's canonical JSON."""
        return digest_of(self.to_json())

    def to_json(self) -> dict[str, object]:
        """A JSON object that `from_json` reads back, without bare NaN."""
        return encode_document(self)

    @classmethod
    def from_json(cls, data: object) -> "Report":
        """The report that `to_json` wrote. Raises IntegrityError for other data."""
        with explain_damage("the report", "validate the engine again"):
            return decode(data, cls)


class Approved:
    """A report that allows its engine to be published; created by `approve` only (TypeError otherwise)."""

    __slots__ = ("report",)
    report: Report

    def __init__(self, report: Report, key: object = None) -> None:
        if key is not _KEY:
            raise TypeError("an Approved comes from approve(report) only")
        object.__setattr__(self, "report", report)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"an Approved cannot be changed: {name} = {value!r}")


def approve(report: Report) -> Approved | None:
    """The approval of a report; None for a failed verdict or check, for no engine, and for a verdict of `PASSED`
    without checks or with an unmeasured one."""
    if report.verdict == "failed" or report.failed or report.engine is None:
        return None
    if report.verdict in PASSED and (not report.checks or find_unmeasured(report.checks)):
        return None
    return Approved(report, _KEY)


def unmeasured(stage: str, output: str, case: str, note: str) -> Check:
    """A check that states that nothing was measured. note: the reason, and how to measure."""
    return Check(stage, UNMEASURED, output, case, None, None, True, note)


# float32 cannot distinguish higher values of SQNR.
MOST_DB = 200.0


def least_sqnr_db(checks: Iterable[Check]) -> float | None:
    """The least SQNR among the checks of a quantized graph and an engine, at most `MOST_DB`; None without one."""
    levels_db = (
        min(check.value, MOST_DB)
        for check in checks
        if check.name == "sqnr_db" and check.stage in ("quantization", "engine") and check.value is not None
    )
    return min(levels_db, default=None)


def find_unmeasured(checks: Iterable[Check]) -> tuple[Check, ...]:
    """The checks that measured nothing."""
    return tuple(check for check in checks if check.name == UNMEASURED)


def judge(checks: Sequence[Check], cannot_run: str | None = None) -> tuple[Verdict, str]:
    """The verdict on an engine and its reason. cannot_run: the reason why it was not run here; None if it was run."""
    failures = [check for check in checks if not check.passed]
    if failures:
        return "failed", describe(failures[0]) + (f" (and {len(failures) - 1} more)" if len(failures) > 1 else "")
    unmeasured_checks = find_unmeasured(checks)
    if cannot_run is not None or unmeasured_checks:
        return "unproven", "; ".join(filter(None, [cannot_run, describe_unmeasured(unmeasured_checks)]))
    if not checks:
        return "failed", "nothing was checked; give golden data"
    # Decisions of a narrow graph that were not judged: '; not judged: decisions of y, 4 classes of logits'.
    unjudged_texts = [
        f"decisions of {check.output}" for check in checks if check.name == CHANGED and check.limit is None
    ]
    unjudged_texts += [
        f"{pluralize(int(check.value or 0), 'class', 'classes')} of {check.output} without a golden sample"
        for check in checks
        if check.name == UNSEEN_CLASSES
    ]
    unjudged_texts += [f"{check.case} after {check.value:g}" for check in checks if check.name == CUT_SHORT]
    summary = f"{pluralize(len(checks), 'check')} passed"
    suffix = _describe_waived(checks) + (f"; not judged: {join_first(unjudged_texts)}" if unjudged_texts else "")
    if any(check.name == RANDOM_INPUTS for check in checks):
        return ON_RANDOM, f"{summary} with random inputs (give real ones in golden.data){suffix}"
    return "proven", summary + suffix


def describe_unmeasured(checks: Sequence[Check]) -> str:
    """The first unmeasured check with its reason: 'not measured: y: the same in all 8 samples'; '' if there is none."""
    if not checks:
        return ""
    text = f"{UNMEASURED}: {checks[0].output or checks[0].case}: {checks[0].note}"
    return text + (f" (and {len(checks) - 1} more)" if len(checks) > 1 else "")


def _describe_waived(checks: Sequence[Check]) -> str:
    """The task metrics that decided, and the limits that they replaced, as text; '' where all limits count."""
    waived_limits = [
        f"{check.stage} {check.name} of {check.output} {check.value:.4g} (limit {check.waived:.4g})"
        for check in checks
        if check.waived is not None
    ]
    if not waived_limits:
        return ""
    task_values = {name: check.value for name, check in name_task_checks(checks).items() if check.limit is not None}
    metric_text = ", ".join(f"{name} {value:.4g}" for name, value in task_values.items())
    return f"; judged by {metric_text} (golden.metric decides), not by {join_first(waived_limits)}"


def name_task_checks(checks: Iterable[Check]) -> dict[str, Check]:
    """The checks of task metrics over the golden cases, by the metric's name; by name and output if several outputs
    have that metric. If several of exported model, graph and engine have the check, the last one's counts."""
    task_checks = [check for check in checks if check.stage == "task" and check.case.startswith("golden")]
    task_checks = [check for check in task_checks if check.name != UNMEASURED]
    outputs_by_name: dict[str, set[str]] = {}
    for check in task_checks:
        outputs_by_name.setdefault(check.name, set()).add(check.output)
    return {
        check.name if len(outputs_by_name[check.name]) == 1 else f"{check.name} of {check.output}": check
        for check in task_checks
    }


def describe(check: Check) -> str:
    """A check as one line of text: 'engine sqnr_db of logits at golden: 12.1, limit 22'."""
    value_text = "" if check.value is None else f": {check.value:.4g}"
    limit_text = "" if check.limit is None else f", limit {check.limit:.4g}"
    note_text = f" ({check.note})" if check.note else ""
    output_text = f" of {check.output}" if check.output else ""
    return f"{check.stage} {check.name}{output_text} at {check.case}{value_text}{limit_text}{note_text}"
