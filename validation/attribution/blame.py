"""The error of one tensor as a value that is kept, and the segments whose own error breaks a limit of the model."""

import math
from collections.abc import Sequence
from dataclasses import replace

from enginesmith.arrays import Array
from validation.attribution.result import SegmentRow, TensorError
from validation.limits.budget import HONEST_DB, MARGIN_DB, MOST_DB, Budget, within
from validation.metrics.drift import Drift, measure
from validation.metrics.slice_limits import worst_slice

# The ratio of a segment's noise energy to that of all others together, from which on it alone is blamed.
LONE = 10.0


def describe_drift(drift: Drift | None, note: str = "") -> TensorError:
    """The error that a drift describes; without a drift, one with the note that says why."""
    if drift is None:
        return TensorError(math.nan, math.nan, 0, 0.0, note or "not measured")
    if drift.mismatches is not None:
        return TensorError(unequal=1 - drift.agreement, note=note)
    worst = worst_slice(drift.slices, None) if drift.slices else None
    of_slice = (worst.sqnr_db, str(worst)) if worst else (math.inf, "")
    return TensorError(drift.sqnr_db, drift.max_rel, drift.nonfinite, 0.0, note, *of_slice)


def measure_pair(expected: Array, actual: Array | None) -> tuple[Drift | None, str]:
    """The drift of a value, or None and a note where it is missing or cannot be compared."""
    if actual is None:
        return None, "it is missing"
    try:
        drift = measure(expected, actual, samples=len(expected) if expected.ndim > 1 else None)
        return replace(drift, slices=drift.slices.without_means() if drift.slices else None), ""
    except ValueError as error:
        return None, str(error)


def is_of_the_cut(local: TensorError, inherited: TensorError) -> bool:
    """Whether a segment by itself is off by over twice what the whole candidate is off at the same tensor.

    Its own error is part of the whole's there, so the cut made the runtime choose another kernel: for one, for a
    product whose activation is no longer dequantized before it.
    """
    known = not (local.note or inherited.note or local.nonfinite or inherited.nonfinite)
    return known and local.sqnr_db < inherited.sqnr_db - HONEST_DB


def explain_blame(local: TensorError, budget: Budget) -> str:
    """Why a segment's own error breaks a limit of the whole model; '' where it keeps all. NaN keeps none."""
    if local.note:
        return local.note
    if local.nonfinite:
        return f"{local.nonfinite} elements are NaN or infinite and should not be"
    if local.unequal > 1 - budget.agreement:
        return f"{local.unequal:.2%} of its integers are wrong"
    if budget.sqnr_db is not None and not within("sqnr_db", local.sqnr_db, budget.sqnr_db):
        return f"{local.sqnr_db:.1f} dB by itself, limit {budget.sqnr_db:g} dB"
    if budget.max_rel is not None and not within("max_rel", local.max_rel, budget.max_rel):
        return f"an error of {local.max_rel:.2g} of its peak by itself, limit {budget.max_rel:g}"
    return ""


def blame_slice(rows: Sequence[SegmentRow], budget: Budget) -> list[SegmentRow]:
    """The rows, with the one blamed whose worst slice is off most, if that breaks the limit on slices.

    For an output that fails by one slice while the error energy of every segment keeps its limit.
    """
    if budget.slice_sqnr_db is None or not rows:
        return list(rows)
    worst = min(rows, key=lambda row: row.local.slice_sqnr_db)
    if within("slice_sqnr_db", worst.local.slice_sqnr_db, budget.slice_sqnr_db):
        return list(rows)
    why = f"{worst.local.slice}: {worst.local.slice_sqnr_db:.1f} dB by itself, limit {budget.slice_sqnr_db:g} dB"
    return [replace(row, blamed=why) if row is worst else row for row in rows]


def blame_lone(rows: Sequence[SegmentRow]) -> list[SegmentRow]:
    """The rows, with the one blamed whose noise energy is LONE times that of all others together, if there is one.

    For an engine whose segments each keep the limit: quantization behind an error enlarges it. Errors that float32
    kernels may have are not blamed.
    """
    ratios = [10 ** (-row.local.sqnr_db / 10) if row.local.sqnr_db < math.inf else 0.0 for row in rows]
    most = max(ratios, default=0.0)
    if not most > LONE * (sum(ratios) - most):
        return list(rows)
    worst = rows[ratios.index(most)]
    if worst.local.sqnr_db >= MOST_DB - MARGIN_DB["fp32"]:
        return list(rows)
    why = f"{worst.local.sqnr_db:.1f} dB by itself, within the limit; all others together add less than a tenth of that"
    return [replace(row, blamed=why) if row is worst else row for row in rows]
