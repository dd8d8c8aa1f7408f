"""The noise floor: how far a model's float32 outputs are from exact ones, which no engine is to blame for.

The model is run in float64 and in float32 on cases of the golden set. What an engine may differ by follows from that
(`budget`): a rounding unit of float16 is 2^13 times that of float32 and one of bfloat16 2^16 times (Higham,
"Accuracy and Stability of Numerical Algorithms", 2002, chapters 2 and 3: to first order, errors grow with the unit).
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice

from enginery.core.types import Tensors
from validation.metrics.drift import Drift, is_exact, measure

# Of each kind. float64 in numpy costs several inferences each.
MOST_CASES = 2


@dataclass(frozen=True)
class OutputFloor:
    """Of one output over some cases, float32 against float64: the least SQNR, in decibels, and the greatest max_rel."""

    sqnr_db: float
    max_rel: float


@dataclass(frozen=True)
class Noise:
    """The floor of each output, by kind of case ('golden', 'edge'). reason: why there is none; empty when there is."""

    floors: Mapping[str, Mapping[str, OutputFloor]] = field(default_factory=dict)
    reason: str = ""

    def of(self, output: str, kind: str) -> OutputFloor | None:
        """The floor of an output in a kind of case; None where it was not measured, or is no number."""
        return self.floors.get(output, {}).get(kind)


def noise_floor(
    exact: Callable[[Tensors], Tensors],
    single: Callable[[Tensors], Tensors],
    cases: Mapping[str, Iterable[Tensors]],
) -> Noise:
    """Compare two ways to run one model. exact: in float64.  single: in float32.  cases: inputs by kind of case.

    Where `exact` raises ValueError, no floor is known, for the reason that it gives.
    """
    floors: dict[str, dict[str, OutputFloor]] = {}
    for kind, inputs in cases.items():
        try:
            found = _drifts(exact, single, islice(inputs, MOST_CASES))
        except ValueError as error:
            return Noise(reason=str(error).splitlines()[0][:200])
        for output, drifts in found.items():
            floor = OutputFloor(min(item.sqnr_db for item in drifts), max(item.max_rel for item in drifts))
            if math.isfinite(floor.sqnr_db) and math.isfinite(floor.max_rel):
                floors.setdefault(output, {})[kind] = floor
    return Noise(floors)


def _drifts(
    exact: Callable[[Tensors], Tensors], single: Callable[[Tensors], Tensors], inputs: Iterable[Tensors]
) -> dict[str, list[Drift]]:
    found: dict[str, list[Drift]] = {}
    for tensors in inputs:
        wide, narrow = exact(tensors), single(tensors)
        for name, array in wide.items():
            if not is_exact(array) and array.shape == narrow[name].shape:
                drift = measure(array, narrow[name])
                if drift.nonfinite == 0 and drift.count:
                    found.setdefault(name, []).append(drift)
    return found
