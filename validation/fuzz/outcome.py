"""What came of a case: whether the engine said what its graph says, wherever the graph says anything.

An element that is not finite in the reference is required of nobody: both sides have left the numbers. A case of
extremes or denormals where float32 itself, against float64, breaks the limits is not judged.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from enginery.arrays.arrays import Array
from enginery.core.errors import DataError, EngineryError
from enginery.core.reports.proof import Check, describe
from enginery.core.types import Precision, Session, Tensors
from validation.comparison.outputs import edge_checks
from validation.comparison.sessions import case_checks, run
from validation.fuzz.cases import FuzzCase
from validation.fuzz.report import CaseVerdict
from validation.fuzz.values import reach
from validation.limits.budget import Budget
from validation.limits.on_demand import OutputLimits, StagedLimits
from validation.metrics.drift import Drift, is_exact


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
