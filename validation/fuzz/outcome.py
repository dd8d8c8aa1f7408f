"""What came of a case: whether the engine said what its graph says, wherever the graph says anything.

An element that is not finite in the reference is required of nobody: both sides have left the numbers. A case of
extremes or denormals where float32 itself, against float64, breaks the limits is not judged.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from enginery.arrays.npz import Array
from enginery.core.errors import DataError, EngineryError
from enginery.core.proof.report import Check, describe
from enginery.core.types import Precision, Session, Tensors
from validation.comparison.outputs import edge_checks
from validation.comparison.sessions import case_checks, run
from validation.fuzz.cases import FuzzCase
from validation.fuzz.values import reach
from validation.limits.budget import Budget
from validation.limits.on_demand import Limits, StagedLimits
from validation.metrics.drift import Drift, is_exact

Word = Literal["ok", "refused", "not judged", "failed"]


@dataclass(frozen=True)
class Outcome:
    """The word on one case, the reason for it, and the checks behind it."""

    case: FuzzCase
    word: Word
    reason: str = ""
    checks: tuple[Check, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        return {
            "sizes": dict(self.case.sizes),
            "values": self.case.values,
            "draw": self.case.draw,
            "case": str(self.case),
            "outside": self.case.outside,
            "outcome": self.word,
            "reason": self.reason,
            "failed": [check.to_json() for check in self.checks if not check.passed],
        }


@dataclass(frozen=True)
class Pair:
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


def try_case(case: FuzzCase, inputs: Tensors, pair: Pair) -> Outcome:
    """Run both sides and compare. What they raise is an outcome too."""
    with np.errstate(all="ignore"):
        try:
            expected = run(pair.reference, inputs)
        except EngineryError as error:
            return _both_refuse(case, inputs, pair, error)
        try:
            actual: Any = run(pair.candidate, inputs)
        except DataError as error:
            word: Word = "refused" if case.outside else "failed"
            return Outcome(case, word, str(error))
        except Exception as error:  # a runtime behind a session raises whatever it has
            return Outcome(case, "failed", f"the engine breaks instead of answering or refusing: {error}")
        if not isinstance(actual, Mapping):
            return Outcome(case, "failed", f"the engine answers with a {type(actual).__name__}, and no outputs by name")
        return _compared(case, inputs, expected, actual, pair)


def _both_refuse(case: FuzzCase, inputs: Tensors, pair: Pair, error: EngineryError) -> Outcome:
    try:
        run(pair.candidate, inputs)
    except EngineryError:
        return Outcome(case, "refused" if case.outside else "not judged", f"the graph itself does not run: {error}")
    if not case.outside:
        return Outcome(case, "not judged", f"the graph itself does not run: {error}")
    return Outcome(case, "failed", f"the engine answers where the graph it was built from does not run: {error}")


def _compared(case: FuzzCase, inputs: Tensors, expected: Tensors, actual: Tensors, pair: Pair) -> Outcome:
    checks = pair.limits.judge(lambda limits: _checks(case, inputs, expected, actual, pair, limits))
    failed = [check for check in checks if not check.passed]
    if not failed:
        return Outcome(case, "ok", "", checks)
    if case.values not in ("realistic", "nan") and (why := _beyond_float32(case, inputs, expected, pair)):
        return Outcome(case, "not judged", why, checks)
    return Outcome(case, "failed", describe(failed[0]), checks)


def _checks(
    case: FuzzCase, inputs: Tensors, expected: Tensors, actual: Tensors, pair: Pair, limits: Limits
) -> tuple[Check, ...]:
    real = case.values == "realistic"
    checks: list[Check] = []
    for output, value in expected.items():
        if output not in actual:
            checks.append(Check("engine", "outputs", output, str(case), None, None, False, "this output is missing"))
        elif value.shape != actual[output].shape or is_exact(value) != is_exact(actual[output]):
            told = f"expected {value.dtype} {value.shape}, got {actual[output].dtype} {actual[output].shape}"
            checks.append(Check("engine", "outputs", output, str(case), None, None, False, told))
        elif real:
            named, held = (str(case), inputs.values()), limits.at(output, "edge", value.size)
            checks += edge_checks("engine", named, output, (value, actual[output]), pair.usual.get(output), held)
        elif not is_exact(value):  # a decision over made-up values is one between ties
            sides = _judged(value, actual[output], pair)
            checks += case_checks("engine", str(case), output, *sides, pair.documented)
    return tuple(checks)


def _judged(expected: Array, actual: Array, pair: Pair) -> tuple[Array, Array]:
    """Both sides where the reference is a number; below the smallest normal one, 0 and a denormal are the same."""
    tiny = reach(pair.precision)[1]
    finite = np.isfinite(expected)
    small = finite & (np.abs(expected) < tiny) & (np.abs(actual) < tiny)
    keep = finite & ~small
    return np.where(keep, expected, 0), np.where(keep, actual, 0)


def _beyond_float32(case: FuzzCase, inputs: Tensors, expected: Tensors, pair: Pair) -> str:
    """Why float32 is no reference for these inputs; empty when it is, or when it cannot be known."""
    if pair.exact is None:
        return ""
    try:
        wide: Mapping[str, Array] = pair.exact(inputs)
    except ValueError:
        return ""
    narrow = {name: expected[name] for name in wide if name in expected}
    broken = [check for check in _checks(case, inputs, wide, narrow, pair, pair.limits.current) if not check.passed]
    return f"float32 itself is not right here: {describe(broken[0])} against float64" if broken else ""
