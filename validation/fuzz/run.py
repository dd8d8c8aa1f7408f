"""The report of fuzzing one engine: every case with its verdict, and the smallest failing ones. Plain values.

What came of a case: whether the engine said what its graph says, wherever the graph says anything.

An element that is not finite in the reference is required of nobody: both sides have left the numbers. A case of
extremes or denormals where float32 itself, against float64, breaks the limits is not judged.

Fuzzing one engine: draw, try, and make what fails as small as it gets.

Shrinking is greedy over sizes, then over kinds of values (Hughes and Claessen's QuickCheck, 2000, does the same): it
ends at a case of which no single smaller size that was tried fails.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from enginery.arrays import Array
from enginery.core.errors import DataError, EngineryError
from enginery.core.reports.proof import Check, describe
from enginery.core.types import Dim, Precision, Session, Tensors, TensorSpec
from validation.comparison.outputs import edge_checks
from validation.comparison.sessions import case_checks, run
from validation.data.batches import leading_dim
from validation.fuzz.cases import FuzzCase, Values, make, reach
from validation.limits.budget import Budget, OutputLimits, StagedLimits
from validation.metrics.drift import Drift, is_exact

CaseVerdict = Literal["ok", "refused", "not judged", "failed"]


@dataclass(frozen=True)
class FuzzedCase:
    """A case and what came of it. case: as `parse_only` reads it.  outside: no profile covers the sizes.

    failed: the checks that broke their limit.
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
    """A failing case that was made small. from_: the case that was drawn.  reproduce: the command that tries this."""

    from_: str
    reproduce: str


@dataclass(frozen=True)
class FuzzReport:
    """All cases in order. passed: no case failed.  counts: of cases by verdict."""

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
    """The two sides: a reference, a candidate, and the model in float64 where that is known.

    limits: of real data, measured on the model.  documented: of values that they were not measured on.
    usual: by output the drift of the golden cases (`golden_drifts`), for real data to be judged as edges are.
    """

    reference: Session
    candidate: Session
    precision: Precision
    limits: StagedLimits
    documented: Budget
    exact: Callable[[Tensors], Tensors] | None = None
    usual: Mapping[str, Drift] = field(default_factory=dict)


def try_case(case: FuzzCase, inputs: Tensors, sides: FuzzSides) -> FuzzOutcome:
    """Run both sides and compare. What they raise is an outcome too."""
    with np.errstate(all="ignore"):
        try:
            expected = run(sides.reference, inputs)
        except EngineryError as error:
            return _both_refuse(case, inputs, sides, error)
        try:
            actual: object = run(sides.candidate, inputs)
        except DataError as error:
            verdict: CaseVerdict = "refused" if case.outside else "failed"
            return FuzzOutcome(case, verdict, str(error))
        except Exception as error:  # a runtime behind a session raises whatever it has
            return FuzzOutcome(case, "failed", f"the engine breaks instead of answering or refusing: {error}")
        if not isinstance(actual, Mapping):
            why = f"the engine answers with a {type(actual).__name__}, and no outputs by name"
            return FuzzOutcome(case, "failed", why)
        return _compare_case(case, inputs, expected, actual, sides)


def _both_refuse(case: FuzzCase, inputs: Tensors, sides: FuzzSides, error: EngineryError) -> FuzzOutcome:
    try:
        run(sides.candidate, inputs)
    except EngineryError:
        return FuzzOutcome(case, "refused" if case.outside else "not judged", f"the graph itself does not run: {error}")
    if not case.outside:
        return FuzzOutcome(case, "not judged", f"the graph itself does not run: {error}")
    return FuzzOutcome(case, "failed", f"the engine answers where the graph it was built from does not run: {error}")


def _compare_case(case: FuzzCase, inputs: Tensors, expected: Tensors, actual: Tensors, sides: FuzzSides) -> FuzzOutcome:
    checks = sides.limits.judge(lambda limits: _checks(case, inputs, expected, actual, sides, limits))
    failed = [check for check in checks if not check.passed]
    if not failed:
        return FuzzOutcome(case, "ok", "", checks)
    if case.values not in ("realistic", "nan") and (why := _beyond_float32(case, inputs, expected, sides)):
        return FuzzOutcome(case, "not judged", why, checks)
    return FuzzOutcome(case, "failed", describe(failed[0]), checks)


def _checks(
    case: FuzzCase, inputs: Tensors, expected: Tensors, actual: Tensors, sides: FuzzSides, limits: OutputLimits
) -> tuple[Check, ...]:
    real = case.values == "realistic"
    checks: list[Check] = []
    for output, value in expected.items():
        if output not in actual:
            checks.append(Check("engine", "outputs", output, str(case), None, None, False, "this output is missing"))
        elif value.shape != actual[output].shape or is_exact(value) != is_exact(actual[output]):
            text = f"expected {value.dtype} {value.shape}, got {actual[output].dtype} {actual[output].shape}"
            checks.append(Check("engine", "outputs", output, str(case), None, None, False, text))
        elif real:
            named, held = (str(case), inputs.values()), limits.at(output, "edge", value.size)
            checks += edge_checks("engine", named, output, (value, actual[output]), sides.usual.get(output), held)
        elif not is_exact(value):  # a decision over made-up values is one between ties
            judged = _mask_unjudged(value, actual[output], sides)
            checks += case_checks("engine", str(case), output, *judged, sides.documented)
    return tuple(checks)


def _mask_unjudged(expected: Array, actual: Array, sides: FuzzSides) -> tuple[Array, Array]:
    """Both sides where the reference is a number; below the smallest normal one, 0 and a denormal are the same."""
    tiny = reach(sides.precision)[1]
    finite = np.isfinite(expected)
    small = finite & (np.abs(expected) < tiny) & (np.abs(actual) < tiny)
    keep = finite & ~small
    return np.where(keep, expected, 0), np.where(keep, actual, 0)


def _beyond_float32(case: FuzzCase, inputs: Tensors, expected: Tensors, sides: FuzzSides) -> str:
    """Why float32 is no reference for these inputs; empty when it is, or when it cannot be known."""
    if sides.exact is None:
        return ""
    try:
        wide: Mapping[str, Array] = sides.exact(inputs)
    except ValueError:
        return ""
    narrow = {name: expected[name] for name in wide if name in expected}
    broken = [check for check in _checks(case, inputs, wide, narrow, sides, sides.limits.current) if not check.passed]
    return f"float32 itself is not right here: {describe(broken[0])} against float64" if broken else ""


# Runs that one failure may cost to shrink, and failures that are shrunk: the rest is most likely the same fault.
MOST_TRIES, MOST_SHRUNK = 100, 3


@dataclass(frozen=True)
class FuzzRun:
    """All outcomes in order, and the smallest failing case of the first failures, by the case that it came from."""

    seed: int
    outcomes: tuple[FuzzOutcome, ...]
    smallest: tuple[tuple[FuzzCase, FuzzOutcome], ...]

    @property
    def failed(self) -> tuple[FuzzOutcome, ...]:
        """The cases that the engine did not answer rightly."""
        return tuple(item for item in self.outcomes if item.verdict == "failed")

    def report(self, command: Callable[[FuzzCase], str]) -> FuzzReport:
        """The report. command: the words that try one case again."""
        return FuzzReport(
            seed=self.seed,
            passed=not self.failed,
            counts=Counter(item.verdict for item in self.outcomes),
            cases=tuple(map(_describe_case, self.outcomes)),
            smallest=tuple(
                SmallestCase(**vars(_describe_case(item)), from_=str(origin), reproduce=command(item.case))
                for origin, item in self.smallest
            ),
        )


def _describe_case(item: FuzzOutcome) -> FuzzedCase:
    return FuzzedCase(
        sizes=dict(item.case.sizes),
        values=item.case.values,
        draw=item.case.draw,
        case=str(item.case),
        outside=item.case.outside,
        outcome=item.verdict,
        reason=item.reason,
        failed=tuple(check for check in item.checks if not check.passed),
    )


def fuzz(
    cases: Sequence[FuzzCase],
    specs: Sequence[TensorSpec],
    dims: Sequence[Dim],
    golden: Sequence[Tensors],
    sides: FuzzSides,
    seed: int,
) -> FuzzRun:
    """Try every case. specs: inputs of the model.  golden: groups of its real inputs."""

    def attempt(case: FuzzCase) -> FuzzOutcome:
        return try_case(case, make(case, specs, golden, seed, sides.precision), sides)

    outcomes = tuple(attempt(case) for case in cases)
    firsts: dict[tuple[Values, bool], FuzzOutcome] = {}
    for item in outcomes:
        if item.verdict == "failed":
            firsts.setdefault((item.case.values, item.case.outside), item)
    chosen = list(firsts.values())[:MOST_SHRUNK]
    return FuzzRun(seed, outcomes, tuple((item.case, shrink(item, specs, dims, attempt)) for item in chosen))


def shrink(
    failing: FuzzOutcome, specs: Sequence[TensorSpec], dims: Sequence[Dim], attempt: Callable[[FuzzCase], FuzzOutcome]
) -> FuzzOutcome:
    """The smallest case that was found to fail as well; a case outside every profile stays as it is."""
    if failing.case.outside:
        return failing
    tries = iter(range(MOST_TRIES))
    smallest, before = failing, None
    while smallest is not before:
        before = smallest
        for case in _smaller(smallest.case, specs, dims):
            if next(tries, None) is None:
                return smallest
            if (found := attempt(case)).verdict == "failed":
                smallest = found
                break
    return smallest


def _smaller(case: FuzzCase, specs: Sequence[TensorSpec], dims: Sequence[Dim]) -> Iterator[FuzzCase]:
    """Cases that are simpler by one step: each dim from its least size up, then plainer values."""
    sizes = dict(case.sizes)
    for dim in dims:
        least = max(dim.min, 2) if case.values == "nan" and dim.name == leading_dim(specs) else dim.min
        for size in _sizes_below(least, sizes[dim.name]):
            yield replace(case, sizes=tuple((sizes | {dim.name: size}).items()))
    if case.values == "realistic":
        return
    yield replace(case, values="realistic")


def _sizes_below(least: int, size: int) -> Iterator[int]:
    """All of them when they are few; else the least, and ever closer to the size."""
    if size - least <= 16:
        yield from range(least, size)
        return
    gap = size - least
    while gap:
        yield size - gap
        gap //= 2
