"""Fuzzes one engine: compares its outputs with those of the graph it was built from, and shrinks failing cases.

Elements that are not finite in the reference are not judged. Extreme and denormal cases are not judged if float32
itself breaks the limits against float64. The answer to a sample of NaN or infinities is judged only if the graph tests
for them (IsNaN, IsInf). In other graphs kernels may drop a NaN, as a maximum may, and only the other samples are
judged. Real values that are larger, negated or permuted have looser limits. They are not judged if rounding the inputs
once changes the reference as much (the graph is ill-conditioned there).

Shrinking is greedy over sizes, then over kinds of values (as in Hughes and Claessen's QuickCheck, 2000): it ends when
no smaller case that was tried fails.
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

# The limits of moved real values are looser by this many decibels: ten times the amplitude of the error.
MOVED_DB = 20.0
# The samples of a graph are independent if its answers keep this SQNR when another sample changes.
APART_DB = 100.0
# Shrinking: the most runs per failure; the most failures (others most likely have the same cause); and the seconds
# after which no run begins, because measuring honest rounding on a mixture takes minutes for a large model.
MOST_TRIES, MOST_SHRUNK, MOST_SHRINKING_S = 100, 3, 100.0

# Metric: the number of elements that are finite on one side only, if inputs have NaN or infinities. Not judged.
FINITE = "finite"

CaseVerdict = Literal["ok", "refused", "not judged", "failed"]
_Answers = tuple[Tensors, Tensors]  # of the reference and of the candidate
_Pair = tuple[Array, Array]


@dataclass(frozen=True)
class FuzzedCase:
    """A case and its verdict. case: as text for `parse_only`.  outside: whether no profile covers the sizes.

    sizes: dim -> size.  values: their kind.  draw: number of the draw.  outcome, reason: the verdict, and why.
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
    """A failing case after shrinking. from_: the case before.  reproduce: the command that tries this case."""

    from_: str
    reproduce: str


@dataclass(frozen=True)
class FuzzReport:
    """The report of fuzzing one engine: all cases in order. passed: whether no case failed and at least one was judged.

    counts: number of cases by verdict.  smallest: failing cases after shrinking.
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

    limits: for real values.  documented: for other values.  usual: `golden_drifts` by output, to judge real values as
    edge cases.  other_sizes: limits for sizes that the golden set lacks, if these limits differ.  reads_nan: whether
    the graph has IsNaN or IsInf.  case_limits: measures limits on a case's inputs; None: no such limits.
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
    """Run both sides on a case; returns the outcome, also if a side raises an error."""
    answers = run_both(case, inputs, sides)
    return answers if isinstance(answers, FuzzOutcome) else judge_case(case, inputs, answers, sides)


def excuse_ties(checks: Sequence[Check], golden: GoldenSet, sides: FuzzSides) -> Iterator[Check]:
    """The checks of a golden set; failed checks of integers in edge cases pass if honest rounding changes as many.
    At another size a kernel sums in another order, and may decide a near tie differently than in the golden cases.
    """
    edges = {case.name: case.inputs for case in golden.of_kind("edge")}
    for check in checks:
        is_tie = not check.passed and (check.name, check.stage) == ("agreement", "engine") and check.case in edges
        is_excused = is_tie and all(try_case(FuzzCase(()), edge, sides).verdict == "ok" for edge in edges.values())
        yield replace(check, passed=True, note="honest rounding does as much to these inputs") if is_excused else check


def run_both(case: FuzzCase, inputs: Tensors, sides: FuzzSides) -> FuzzOutcome | _Answers:
    """The answers of the reference and the candidate, or the outcome if one of them raises an error.

    If the reference raises, the case is not judged. Outside of all profiles the candidate must then raise, too.
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
        if case.values in ("mixed", "lengths") and any(np.isnan(value).any() for value in expected.values()):
            return FuzzOutcome(case, "not judged", "the graph itself answers with NaN")
        try:
            return expected, run(sides.candidate, inputs)
        except DataError as error:
            return FuzzOutcome(case, "refused" if case.outside else "failed", str(error))
        except Exception as error:  # the runtime behind a session may raise any type
            return FuzzOutcome(case, "failed", f"the engine breaks instead of answering or refusing: {error}")


def judge_case(case: FuzzCase, inputs: Tensors, answers: _Answers, sides: FuzzSides) -> FuzzOutcome:
    """The outcome of a case that both sides answered."""
    with np.errstate(all="ignore"):
        checks = sides.limits.judge(lambda limits: _checks(case, inputs, answers, sides, limits))
        failures = [check for check in checks if not check.passed]
        reason = "honest rounding does as much to these inputs" if failures else ""
        if failures and case.values in NOT_FINITE and _mixes_samples(case, inputs, sides):
            return FuzzOutcome(case, "not judged", "the graph itself mixes the samples of a batch", checks)
        if failures and sides.case_limits and case.values in (*REAL, *MOVED, *NOT_FINITE):
            # A new sample may be near a tie, as a golden one may; in fp32 only honest rounding shows a tie. Rounding
            # also depends on the length (order of sums), and attention scores grow with the square of the inputs.
            own_limits = sides.case_limits(_replace_spoiled(case, inputs) if case.values in NOT_FINITE else inputs)
            own_checks = _checks(case, inputs, answers, sides, own_limits, is_own=True)
            passed_checks = {(check.output, check.name): check for check in own_checks if check.passed}
            checks = tuple(c if c.passed else passed_checks.get((c.output, c.name), c) for c in checks)
            failures = [check for check in checks if not check.passed]
        if not failures:
            return FuzzOutcome(case, "ok", reason, checks)
        if case.values in MOVED:
            failures = [check for check in failures if not _is_ill_conditioned(check, inputs, answers[0], sides)]
            if not failures:
                reason = "the graph's own outputs change as much if its inputs change by one rounding"
                return FuzzOutcome(case, "not judged", reason, checks)
        elif case.values not in (*REAL, *NOT_FINITE) and (reason := _beyond_float32(case, inputs, answers[0], sides)):
            return FuzzOutcome(case, "not judged", reason, checks)
        return FuzzOutcome(case, "failed", describe(failures[0]), checks)


def _checks(
    case: FuzzCase, inputs: Tensors, answers: _Answers, sides: FuzzSides, limits: OutputLimits, is_own: bool = False
) -> tuple[Check, ...]:
    expected, actual = answers
    kind: CaseKind = "golden" if is_own and sides.precision != "fp32" else "edge"
    margin_db = 0.0 if is_own else _moved_db(sides.precision)
    checks: list[Check] = []
    for output, value in expected.items():
        if output not in actual:
            checks.append(Check("engine", "outputs", output, str(case), None, None, False, "this output is missing"))
        elif case.values in ("mixed", "stretched") and value.shape != actual[output].shape:
            continue  # rounding changes which boxes a graph selects
        elif value.shape != actual[output].shape or is_exact(value) != is_exact(actual[output]):
            text = f"expected {value.dtype} {value.shape}, got {actual[output].dtype} {actual[output].shape}"
            checks.append(Check("engine", "outputs", output, str(case), None, None, False, text))
        elif is_exact(value) and case.values not in REAL:  # made-up values lead to near ties, whose decision is chance
            continue
        elif case.values in REAL or (case.values in NOT_FINITE and not sides.reads_nan):
            pair, limit_pair = (value, actual[output]), limits.at(output, kind, value.size)
            checks += _check_real(case, inputs, output, pair, sides, limit_pair)
        elif case.values not in (*MOVED, *NOT_FINITE):
            judged_pair = _mask_unjudged(value, actual[output], sides)
            checks += case_checks("engine", str(case), output, *judged_pair, sides.documented)
        elif budget := _moved_budget(case, limits, output, sides, kind, margin_db):
            judged_pair = _mask_unjudged(value, actual[output], sides)
            checks += case_checks("engine", str(case), output, *judged_pair, budget)
    return tuple(checks)


def _check_real(
    case: FuzzCase, inputs: Tensors, output: str, pair: _Pair, sides: FuzzSides, limits: tuple[Budget, Drift | None]
) -> Iterator[Check]:
    """The checks of real samples, as for an edge case. If the case has NaN or infinities: FINITE, and the checks of the
    other samples, with the spoiled sample replaced (`_list_replacements`)."""
    arrays = [*inputs.values()]
    if case.values in NOT_FINITE:
        count, order = np.count_nonzero(np.not_equal(*map(np.isfinite, pair))), _list_replacements(case, inputs)
        yield Check("engine", FINITE, output, str(case), float(count), None, True)
        if samples_of(arrays, pair[0]) != len(order):
            return
        expected, actual = _mask_unjudged(*pair, sides)
        arrays, pair = [expected[order]], (expected[order], actual[order])
    yield from edge_checks("engine", (str(case), arrays), output, pair, sides.usual.get(output), limits)


def _list_sound(case: FuzzCase, inputs: Tensors) -> Array:
    """Whether each sample is sound, bool (batch,): all but the sample that the case filled with NaN or infinity. A real
    sample with a few infinities, such as a mask, is sound."""
    floats = next((np.atleast_1d(array) for array in inputs.values() if array.dtype.kind == "f"), np.zeros(1))
    rows, value = floats.reshape(len(floats), -1), IN_ONE_SAMPLE[case.values](floats)
    return np.asarray(~(np.isnan(rows) if np.isnan(value) else rows == value).all(axis=1))


def _mixes_samples(case: FuzzCase, inputs: Tensors, sides: FuzzSides) -> bool:
    """Whether the reference's answers to sound samples depend on the spoiled sample, as with a maximum over the batch:
    kernels may differ in the effect of a NaN on such a maximum."""
    if (is_sound := _list_sound(case, inputs)).all():
        return False
    real_inputs, answers = _replace_spoiled(case, inputs), list[Tensors]()
    floats = {key: x for key, x in real_inputs.items() if (x.dtype.kind, x.shape[:1]) == ("f", is_sound.shape)}
    for factor in (1, 8, -8):
        scale = np.where(is_sound, 1, factor)
        moved_inputs = {name: (array.T * scale).T.astype(array.dtype) for name, array in floats.items()}
        try:
            answers.append(run(sides.reference, {**real_inputs, **moved_inputs}))
        except EnginesmithError:
            return True
    pairs = [(value, answer[name]) for answer in answers[1:] for name, value in answers[0].items()]
    if any(value.shape != other.shape for value, other in pairs):
        return True
    judged_pairs = (pair for pair in pairs if samples_of(inputs.values(), pair[0]) == len(is_sound))
    return any(measure(value[is_sound], other[is_sound]).sqnr_db < APART_DB for value, other in judged_pairs)


def _replace_spoiled(case: FuzzCase, inputs: Tensors) -> Tensors:
    """The inputs with the spoiled sample replaced by a sound one: a graph may not accept a smaller batch."""
    order = _list_replacements(case, inputs)
    return {name: array[order] if array.shape[:1] == order.shape else array for name, array in inputs.items()}


def _list_replacements(case: FuzzCase, inputs: Tensors) -> Array:
    """The index of each sample's replacement, int (batch,): itself for a sound sample, else the sound sample of the
    greatest amplitude, because a smaller one would not change a maximum over the batch."""
    is_sound = _list_sound(case, inputs)
    floats = [x for x in inputs.values() if (x.dtype.kind, x.shape[:1]) == ("f", is_sound.shape)]
    amplitudes = sum(np.where(np.isfinite(x), np.abs(x), 0).reshape(len(x), -1).max(axis=1, initial=0) for x in floats)
    return np.where(is_sound, np.arange(len(is_sound)), np.argmax(np.where(is_sound, amplitudes, -1)))


def _moved_budget(
    case: FuzzCase, limits: OutputLimits, output: str, sides: FuzzSides, kind: CaseKind, margin_db: float
) -> Budget | None:
    """The SQNR limit of moved real values; None if the spec lifted it: the lower of the documented and the golden
    limit, less `margin_db`, since wrong magnitudes give large errors. A quantized graph has the limit from honest
    rounding if that is higher or measured on the case itself. Stretched samples always have that limit."""
    golden_db, documented_db = limits.budgets.of(output, "golden").sqnr_db, sides.documented.sqnr_db
    known_db = limits.budgets.of(output, kind if (output, kind) in limits.budgets.measured else "golden").sqnr_db
    if case.values == "stretched":
        return Budget(sqnr_db=known_db)
    if golden_db is None or documented_db is None or known_db is None:
        return None
    moved_db = max(min(golden_db, documented_db) - margin_db, LEAST_DB)
    if sides.precision in QUANTIZED:
        moved_db = max(known_db, moved_db) if margin_db else known_db
    return Budget(sqnr_db=moved_db)


def _moved_db(precision: Precision) -> float:
    return HONEST_DB if precision in QUANTIZED else MOVED_DB


def _is_ill_conditioned(check: Check, inputs: Tensors, expected: Tensors, sides: FuzzSides) -> bool:
    """Whether rounding each float input once changes the reference nearly as much as the failed check's error. Masks
    are not rounded."""
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


def _mask_unjudged(expected: Array, actual: Array, sides: FuzzSides) -> _Pair:
    """Both sides, with 0 where the reference is not finite, or where both are below the smallest normal number."""
    min_value = reach(sides.precision)[1]
    is_judged = np.isfinite(expected) & ~((np.abs(expected) < min_value) & (np.abs(actual) < min_value))
    return np.where(is_judged, expected, 0), np.where(is_judged, actual, 0)


def _beyond_float32(case: FuzzCase, inputs: Tensors, expected: Tensors, sides: FuzzSides) -> str:
    """The reason why float32 is no reference for these inputs; '' if it is one, or if float64 cannot run."""
    if sides.exact is None:
        return ""
    try:
        doubles: Mapping[str, Array] = sides.exact(inputs)
    except ValueError:
        return ""
    singles = {name: expected[name] for name in doubles if name in expected}
    checks = _checks(case, inputs, (doubles, singles), sides, sides.limits.current)
    failures = [check for check in checks if not check.passed]
    return f"float32 itself is wrong here: {describe(failures[0])} against float64" if failures else ""


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
    """Try every case and shrink the first failures; returns the report. golden: groups of real inputs.
    command: the words of a command that tries a case again; the case is appended."""

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
    is_passed = not counts["failed"] and counts["not judged"] < len(outcomes)
    return FuzzReport(seed, is_passed, counts, tuple(map(_describe_case, outcomes)), tuple(smallest))


def shrink(
    failing: FuzzOutcome, specs: Sequence[TensorSpec], dims: Sequence[Dim], attempt: Callable[[FuzzCase], FuzzOutcome]
) -> FuzzOutcome:
    """The outcome of the smallest failing case found. A case outside of all profiles is not shrunk.
    failing: the outcome to begin with.  attempt: tries a case."""
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
    """Smaller cases: one dim reduced, least size first (of many sizes, ever closer ones); then real values."""
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
