"""How far one tensor is off, as a value that is kept."""

import math
from dataclasses import replace

from enginery.arrays.arrays import Array
from validation.attribution.result import TensorError
from validation.metrics.drift import Drift, measure
from validation.metrics.slice_limits import worst_slice


def describe_drift(drift: Drift | None, note: str = "") -> TensorError:
    """The error of a measurement; without one, the note says why."""
    if drift is None:
        return TensorError(math.nan, math.nan, 0, 0.0, note or "not measured")
    if drift.mismatches is not None:
        return TensorError(unequal=1 - drift.argmax_agreement, note=note)
    worst = worst_slice(drift.slices, None) if drift.slices else None
    of_slice = (worst.sqnr_db, str(worst)) if worst else (math.inf, "")
    return TensorError(drift.sqnr_db, drift.max_rel, drift.nonfinite, 0.0, note, *of_slice)


def measure_error(expected: Array, actual: Array | None) -> TensorError:
    """How far a value is from what was expected; with a note where that cannot be said."""
    return describe_drift(*measure_pair(expected, actual))


def measure_pair(expected: Array, actual: Array | None) -> tuple[Drift | None, str]:
    """The drift of a value from what was expected, with a note in its place where it cannot be measured."""
    if actual is None:
        return None, "it is missing"
    try:
        drift = measure(expected, actual, samples=len(expected) if expected.ndim > 1 else None)
        return replace(drift, slices=drift.slices.without_means() if drift.slices else None), ""
    except ValueError as error:
        return None, str(error)
