"""Fuzzing one engine: its outputs against those of the graph it was built from, and failing cases made small.

Elements that are not finite in the reference are not judged, nor are cases of extremes or denormals where float32
itself breaks the limits against float64. The answer to a sample of NaN or infinities is judged where the graph asks for
these (IsNaN, IsInf): elsewhere kernels may drop a NaN, as many a maximum does, and only the other samples are judged.
Real values that are larger, negated or permuted are judged more loosely, and not at all where the reference itself
moves as far when its inputs do by one rounding (it is ill-conditioned there).

Shrinking is greedy over sizes, then over kinds of values (as in Hughes and Claessen's QuickCheck, 2000): it ends at a
case of which no smaller size that was tried fails.
"""

import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core.errors import DataError, EnginesmithError
from enginesmith.core.reports.proof import Check, describe
from enginesmith.core.types import QUANTIZED, Dim, Precision, Session, Tensors, TensorSpec
from validation.comparison.sessions import case_checks, edge_checks, run
from validation.data.batches import leading_dim
from validation.fuzz.cases import IN_ONE_SAMPLE, MOVED, NOT_FINITE, REAL, FuzzCase, Values, list_masks, make, reach
from validation.golden.golden_set import CaseKind, GoldenSet
from validation.limits.budget import HONEST_DB, LEAST_DB, ROUNDING_DB, OutputLimits, StagedLimits
from validation.limits.terms import Budget
from validation.metrics.drift import Drift, is_exact, measure
from validation.metrics.tally import samples_of

# Decibels below its limits that an engine may be for real values that were moved: ten times the amplitude.
MOVED_DB = 20.0
# Where a sample changes, answers to the others change by less if the graph keeps samples apart.
APART_DB = 100.0
# Runs that shrinking a failure may take, failures that are shrunk (others most likely have the same cause), and seconds
# after which no other run of one is begun: honest rounding on a mixture takes minutes to measure in a large model.
MOST_TRIES, MOST_SHRUNK, MOST_SHRINKING_S = 100, 3, 100.0

# How many elements of an answer to NaN or infinities are finite on one side alone: measured, not judged.
FINITE = "finite"

CaseVerdict = Literal["ok", "refused", "not judged", "failed"]
_Answers = tuple[Tensors, Tensors]  # of the reference and of the candidate


@dataclass(frozen=True)
class FuzzedCase:
    """A case and its verdict. case: in the words that `parse_only` reads.  outside: no profile covers the sizes.

    sizes: dim -> size.  values: their kind.  draw: number of the drawing.  outcome, reason: the verdict, and why.
    """

    sizes: Mapping[str, int]
    values: Values
    draw: int
    case: str
    outside: bool
    outcome: CaseVerdict
    reason: str
    failed: tuple[Check, ...]


@dataclass(frozen=True, kw_only=True)
class SmallestCase(FuzzedCase):
    """A failing case made small. from_: the case that was drawn.  reproduce: the command that tries this one."""

    from_: str
    reproduce: str


@dataclass(frozen=True)
class FuzzReport:
    """The report of fuzzing one engine: all cases in order. passed: no case failed, and one was judged.

    counts: of cases by verdict.  smallest: the smallest failing ones.
    """

    seed: int
    passed: bool
    counts: Mapping[CaseVerdict, int]
    cases: tuple[FuzzedCase, ...]
    smallest: tuple[SmallestCase, ...]


@dataclass(frozen=True)
class FuzzOutcome:
    """The verdict on one case, the reason for it, and the checks behind it."""

    case: FuzzCase
    verdict: CaseVerdict
    reason: str = ""
    checks: tuple[Check, ...] = ()


@dataclass(frozen=True)
class FuzzSides:
    """The graph (reference) and the engine (candidate), with their limits. exact: the model in float64, if available.

    limits: for real values.  documented: for other values.  usual: by output, the drift of the golden cases
    (`golden_drifts`), by which real values are judged as edge cases are.  other_sizes: where limits differ at sizes
    that the golden set lacks.  reads_nan: whether the graph has IsNaN or IsInf.  case_limits: measured on inputs.
    """

    reference: Session
    candidate: Session
    precision: Precision
    limits: StagedLimits
    documented: Budget
    exact: Callable[[Tensors], Tensors] | None = None
    usual: Mapping[str, Drift] = field(default_factory=dict)
    other_sizes: StagedLimits | None = None
    reads_nan: bool = False
    case_limits: Callable[[Tensors], OutputLimits] | None = None


def try_case(case: FuzzCase, inputs: Tensors, sides: FuzzSides) -> FuzzOutcome:
    """The outcome of running both sides on a case, or of their errors."""
    answers = run_both(case, inputs, sides)
    return answers if isinstance(answers, FuzzOutcome) else judge_case(case, inputs, answers, sides)


def excuse_ties(checks: Sequence[Check], golden: GoldenSet, sides: FuzzSides) -> Iterator[Check]:
    """The checks of a golden set. Integers that differ at its edges pass where honest rounding on these inputs changes
    as many: at another size a kernel adds up otherwise, and may decide a near tie that it does not decide so in the
    golden cases."""
    edges = {case.name: case.inputs for case in golden.of_kind("edge")}
    for check in checks:
        is_tie = not check.passed and (check.name, check.stage) == ("agreement", "engine") and check.case in edges
        is_excused = is_tie and all(try_case(FuzzCase(()), edge, sides).verdict == "ok" for edge in edges.values())
        yield replace(check, passed=True, note="honest rounding does as much to these inputs") if is_excused else check


def run_both(case: FuzzCase, inputs: Tensors, sides: FuzzSides) -> FuzzOutcome | _Answers:
    """What the reference and the candidate answer, or the outcome of their errors.

    Where the reference raises, a case is not judged; outside of all profiles the candidate must raise too.
    """
    with np.errstate(all="ignore"):
        try:
            expected = run(sides.reference, inputs)
        except EnginesmithError as error:
            verdict: CaseVerdict = "refused" if case.outside else "not judged"
            unfit_outcome = FuzzOutcome(case, verdict, f"the graph itself does not run: {error}")
            try:
                run(sides.candidate, inputs)
            except EnginesmithError:
                return unfit_outcome
            reason = f"the engine answers where the graph it was built from does not run: {error}"
            return FuzzOutcome(case, "failed", reason) if case.outside else unfit_outcome
        if case.values == "mixed" and any(np.isnan(value).any() for value in expected.values()):
            return FuzzOutcome(case, "not judged", "the graph itself answers with NaN")
        try:
            return expected, run(sides.candidate, inputs)
        except DataError as error:
            return FuzzOutcome(case, "refused" if case.outside else "failed", str(error))
        except Exception as error:  # a runtime behind a session raises whatever it has
            return FuzzOutcome(case, "failed", f"the engine breaks instead of answering or refusing: {error}")


def judge_case(case: FuzzCase, inputs: Tensors, answers: _Answers, sides: FuzzSides) -> FuzzOutcome:
    """The outcome of a case that both sides answered."""
    with np.errstate(all="ignore"):
        checks = sides.limits.judge(lambda limits: _checks(case, inputs, answers, sides, limits))
        failures = [check for check in checks if not check.passed]
        reason = "honest rounding does as much to these inputs" if failures else ""
        if failures and sides.case_limits and case.values in (*REAL, *MOVED):
            # A new sample may be near a tie as a golden one may; in fp32 none is, unless honest rounding shows it. At
            # another length rounding adds up otherwise, and scores of attention grow with the square of the inputs.
            own_checks = _checks(case, inputs, answers, sides, sides.case_limits(inputs), measured=True)
            passed_checks = {(check.output, check.name): check for check in own_checks if check.passed}
            checks = tuple(c if c.passed else passed_checks.get((c.output, c.name), c) for c in checks)
            failures = [check for check in checks if not check.passed]
        if not failures:
            return FuzzOutcome(case, "ok", reason, checks)
        if case.values in MOVED:
            failures = [check for check in failures if not _is_ill_conditioned(check, inputs, answers[0], sides)]
            if not failures:
                reason = "the graph itself moves as far when its inputs do by one rounding"
                return FuzzOutcome(case, "not judged", reason, checks)
        elif case.values in NOT_FINITE and _mixes_samples(case, inputs, sides):
            return FuzzOutcome(case, "not judged", "the graph itself mixes the samples of a batch", checks)
        elif case.values not in (*REAL, *NOT_FINITE) and (reason := _beyond_float32(case, inputs, answers[0], sides)):
            return FuzzOutcome(case, "not judged", reason, checks)
        return FuzzOutcome(case, "failed", describe(failures[0]), checks)


def _checks(
    case: FuzzCase, inputs: Tensors, answers: _Answers, sides: FuzzSides, limits: OutputLimits, measured: bool = False
) -> tuple[Check, ...]:
    expected, actual = answers
    kind: CaseKind = "golden" if measured and sides.precision != "fp32" else "edge"
    margin_db = 0.0 if measured else _moved_db(sides.precision)
    checks: list[Check] = []
    for output, value in expected.items():
        if output not in actual:
            checks.append(Check("engine", "outputs", output, str(case), None, None, False, "this output is missing"))
        elif case.values in ("mixed", "stretched") and value.shape != actual[output].shape:
            continue  # a graph that selects boxes selects others where it rounds
        elif value.shape != actual[output].shape or is_exact(value) != is_exact(actual[output]):
            text = f"expected {value.dtype} {value.shape}, got {actual[output].dtype} {actual[output].shape}"
            checks.append(Check("engine", "outputs", output, str(case), None, None, False, text))
        elif case.values in REAL:
            case_inputs, limit_pair = (str(case), inputs.values()), limits.at(output, kind, value.size)
            checks += edge_checks(
                "engine", case_inputs, output, (value, actual[output]), sides.usual.get(output), limit_pair
            )
        elif is_exact(value):  # a decision over made-up values is one between ties
            continue
        elif case.values not in (*MOVED, *NOT_FINITE):
            judged_pair = _mask_unjudged(value, actual[output], sides)
            checks += case_checks("engine", str(case), output, *judged_pair, sides.documented)
        elif budget := (
            Budget(sqnr_db=limits.at(output, kind, value.size)[0].sqnr_db)
            if case.values == "stretched"
            else _loosen(limits, output, sides, margin_db)
        ):
            judged_pair = _mask_unjudged(value, actual[output], sides)
            if case.values in NOT_FINITE and not sides.reads_nan:
                count = float(np.count_nonzero(np.isfinite(value) != np.isfinite(actual[output])))
                checks.append(Check("engine", FINITE, output, str(case), count, None, True))
                judged_pair = _without_spoiled(case, inputs, judged_pair)
            checks += case_checks("engine", str(case), output, *judged_pair, budget)
    return tuple(checks)


def _list_sound(case: FuzzCase, inputs: Tensors) -> Array:
    """Which samples are sound, shape (batch,): all but the one that the case filled with NaN or infinity. A sample with
    a few infinities of its own, such as a mask, is sound."""
    floats = next((np.atleast_1d(array) for array in inputs.values() if array.dtype.kind == "f"), np.zeros(1))
    rows, value = floats.reshape(len(floats), -1), IN_ONE_SAMPLE[case.values]
    return np.asarray(~(np.isnan(rows) if np.isnan(value) else rows == value).all(axis=1))


def _mixes_samples(case: FuzzCase, inputs: Tensors, sides: FuzzSides) -> bool:
    """Whether the reference's answers to sound samples depend on the numbers of the spoiled one, as where a scale or a
    maximum is taken over the batch: kernels may differ in what a NaN does to such a maximum."""
    if (is_sound := _list_sound(case, inputs)).all():
        return False
    by_sample = {name: array for name, array in inputs.items() if array.shape[:1] == is_sound.shape}
    floats = {name: array for name, array in by_sample.items() if array.dtype.kind == "f"}
    amplitudes = np.zeros(len(is_sound))
    for array in floats.values():
        amplitudes += np.abs(np.where(np.isfinite(array), array, 0)).reshape(len(array), -1).max(axis=1, initial=0)
    loudest = np.argmax(np.where(is_sound, amplitudes, -1))  # a quieter sample moves no maximum
    order = np.where(is_sound, np.arange(len(is_sound)), loudest)
    real_inputs = {**inputs, **{name: array[order] for name, array in by_sample.items()}}
    answers = list[Tensors]()
    for factor in (1, 8, -8):
        scale = np.where(is_sound, 1, factor)
        moved_inputs = {name: (real_inputs[name].T * scale).T.astype(array.dtype) for name, array in floats.items()}
        try:
            answers.append(run(sides.reference, {**real_inputs, **moved_inputs}))
        except EnginesmithError:
            return True
    pairs = [(value, answer[name]) for answer in answers[1:] for name, value in answers[0].items()]
    if any(value.shape != other.shape for value, other in pairs):
        return True
    judged_pairs = (pair for pair in pairs if samples_of(inputs.values(), pair[0]) == len(is_sound))
    return any(measure(value[is_sound], other[is_sound]).sqnr_db < APART_DB for value, other in judged_pairs)


def _without_spoiled(case: FuzzCase, inputs: Tensors, pair: tuple[Array, Array]) -> tuple[Array, Array]:
    """Both sides of an output without its sample of NaN or infinities; nothing of one that is not by sample."""
    is_sound = _list_sound(case, inputs)
    is_by_sample = samples_of(inputs.values(), pair[0]) == len(is_sound)
    return (pair[0][is_sound], pair[1][is_sound]) if is_by_sample else (np.zeros(0), np.zeros(0))


def _loosen(limits: OutputLimits, output: str, sides: FuzzSides, margin_db: float) -> Budget | None:
    """The limit of real values that were moved: the lesser of the documented one and that of the golden cases, or
    what was measured on them, less `margin_db`; None where the spec lifted it. Wrong magnitudes give large errors.
    """
    golden_db, documented_db = limits.budgets.of(output, "golden").sqnr_db, sides.documented.sqnr_db
    if golden_db is None or documented_db is None:
        return None
    return Budget(sqnr_db=max(min(golden_db, documented_db) - margin_db, LEAST_DB))


def _moved_db(precision: Precision) -> float:
    return HONEST_DB if precision in QUANTIZED else MOVED_DB


def _is_ill_conditioned(check: Check, inputs: Tensors, expected: Tensors, sides: FuzzSides) -> bool:
    """Whether the reference moves nearly as far as a check fails by when each float input moves by one rounding. A mask
    was never rounded."""
    if check.name != "sqnr_db" or check.value is None:
        return False
    unit = float(np.finfo(np.float32).eps) * 10 ** (ROUNDING_DB.get(sides.precision, ROUNDING_DB["bf16"]) / 20)
    rng = np.random.default_rng(0)
    moved_inputs, masks = dict(inputs), list_masks(inputs)
    for name, array in inputs.items():
        if array.dtype.kind == "f" and name not in masks:
            moved_inputs[name] = np.asarray(array * (1 + unit * rng.choice([-1.0, 1.0], array.shape)), array.dtype)
    try:
        moved_outputs = run(sides.reference, moved_inputs)
        judged_pair = _mask_unjudged(expected[check.output], moved_outputs[check.output], sides)
        return measure(*judged_pair).sqnr_db - _moved_db(sides.precision) <= check.value
    except (EnginesmithError, ValueError):
        return True


def _mask_unjudged(expected: Array, actual: Array, sides: FuzzSides) -> tuple[Array, Array]:
    """Both sides with 0 where the reference is not finite, and where both are below the smallest normal number."""
    min_value = reach(sides.precision)[1]
    is_judged = np.isfinite(expected) & ~((np.abs(expected) < min_value) & (np.abs(actual) < min_value))
    return np.where(is_judged, expected, 0), np.where(is_judged, actual, 0)


def _beyond_float32(case: FuzzCase, inputs: Tensors, expected: Tensors, sides: FuzzSides) -> str:
    """Why float32 is no reference for these inputs; empty where it is one, or where float64 cannot be run."""
    if sides.exact is None:
        return ""
    try:
        doubles: Mapping[str, Array] = sides.exact(inputs)
    except ValueError:
        return ""
    singles = {name: expected[name] for name in doubles if name in expected}
    checks = _checks(case, inputs, (doubles, singles), sides, sides.limits.current)
    failures = [check for check in checks if not check.passed]
    return f"float32 itself is not right here: {describe(failures[0])} against float64" if failures else ""


def _describe_case(outcome: FuzzOutcome) -> FuzzedCase:
    return FuzzedCase(
        **{**vars(outcome.case), "sizes": dict(outcome.case.sizes)},
        case=str(outcome.case),
        outcome=outcome.verdict,
        reason=outcome.reason,
        failed=tuple(check for check in outcome.checks if not check.passed),
    )


def fuzz(
    cases: Sequence[FuzzCase],
    specs: Sequence[TensorSpec],
    dims: Sequence[Dim],
    golden: Sequence[Tensors],
    sides: FuzzSides,
    seed: int,
    command: Sequence[str],
) -> FuzzReport:
    """The report of trying every case, with the first failures made small. golden: groups of real inputs.  cases: what
    to try.  command: which tries a case again that is added to it."""

    def attempt(case: FuzzCase) -> FuzzOutcome:
        return try_case(case, make(case, specs, golden, seed, sides.precision), sides)

    outcomes, smallest = tuple(attempt(case) for case in cases), list[SmallestCase]()
    first_failures: dict[tuple[Values, bool], FuzzOutcome] = {}
    for outcome in outcomes:
        if outcome.verdict == "failed":
            first_failures.setdefault((outcome.case.values, outcome.case.outside), outcome)
    for failure in list(first_failures.values())[:MOST_SHRUNK]:
        smallest_case = _describe_case(shrink(failure, specs, dims, attempt))
        reproduce = shlex.join([*command, "--only", smallest_case.case])
        smallest.append(SmallestCase(**vars(smallest_case), from_=str(failure.case), reproduce=reproduce))
    counts = Counter(outcome.verdict for outcome in outcomes)
    passed = not counts["failed"] and counts["not judged"] < len(outcomes)
    return FuzzReport(seed, passed, counts, tuple(map(_describe_case, outcomes)), tuple(smallest))


def shrink(
    failing: FuzzOutcome, specs: Sequence[TensorSpec], dims: Sequence[Dim], attempt: Callable[[FuzzCase], FuzzOutcome]
) -> FuzzOutcome:
    """The outcome of the smallest case that was found to fail too; a case outside of all profiles stays as it is.
    failing: the outcome to begin from.  attempt: tries a case."""
    if failing.case.outside:
        return failing
    tries, end = iter(range(MOST_TRIES)), time.monotonic() + MOST_SHRINKING_S
    smallest_outcome, previous = failing, None
    while smallest_outcome is not previous:
        previous = smallest_outcome
        for case in _smaller(smallest_outcome.case, specs, dims):
            if next(tries, None) is None or time.monotonic() > end:
                return smallest_outcome
            if (outcome := attempt(case)).verdict == "failed":
                smallest_outcome = outcome
                break
    return smallest_outcome


def _smaller(case: FuzzCase, specs: Sequence[TensorSpec], dims: Sequence[Dim]) -> Iterator[FuzzCase]:
    """Cases with one dim smaller, from its least size up (of many sizes, ever closer ones), then with real values."""
    sizes = dict(case.sizes)
    for dim in dims:
        least_size = max(dim.min, 2) if case.values in IN_ONE_SAMPLE and dim.name == leading_dim(specs) else dim.min
        least_size = -(-least_size // dim.multiple) * dim.multiple
        gap = (sizes[dim.name] - least_size) // dim.multiple
        gaps = range(gap, 0, -1) if gap <= 16 else [gap >> shift for shift in range(gap.bit_length())]
        for size in (sizes[dim.name] - step * dim.multiple for step in gaps):
            yield replace(case, sizes=tuple((sizes | {dim.name: size}).items()))
    if case.values != "realistic":
        yield replace(case, values="realistic")
