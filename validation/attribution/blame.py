"""How far one tensor is off, as a value that is kept.

Which segments are to blame: whose own error breaks a limit of the whole model.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from enginery.arrays import Array
from validation.attribution.result import SegmentRow, TensorError
from validation.limits.budget import HONEST_DB, MARGIN_DB, MOST_DB, Budget, within
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


# Of noise energies: a segment that is alone to blame has so many times those of all others together.
LONE = 10.0


def is_of_the_cut(local: TensorError, inherited: TensorError) -> bool:
    """Whether a segment by itself is off by over twice what the whole candidate is at the same tensor.

    A segment's own error is part of what the whole has there, so such a segment was computed by another kernel once it
    was cut off: a product whose activation is no longer dequantized before it, for one.
    """
    known = not (local.note or inherited.note or local.nonfinite or inherited.nonfinite)
    return known and local.sqnr_db < inherited.sqnr_db - HONEST_DB


def explain_blame(local: TensorError, budget: Budget) -> str:
    """Why a segment's own error breaks a limit of the whole model; '' when it keeps all. NaN keeps none."""
    if local.note:
        return local.note
    if local.nonfinite:
        return f"{local.nonfinite} elements are NaN or infinite and should not be"
    if local.unequal > 1 - (1.0 if budget.argmax_agreement is None else budget.argmax_agreement):
        return f"{local.unequal:.2%} of its integers are wrong"
    if budget.sqnr_db is not None and not within("sqnr_db", local.sqnr_db, budget.sqnr_db):
        return f"{local.sqnr_db:.1f} dB by itself, limit {budget.sqnr_db:g} dB"
    if budget.max_rel is not None and not within("max_rel", local.max_rel, budget.max_rel):
        return f"an error of {local.max_rel:.2g} of its peak by itself, limit {budget.max_rel:g}"
    return ""


def blame_slice(rows: Sequence[SegmentRow], budget: Budget) -> list[SegmentRow]:
    """The rows with the one blamed whose worst slice is off most, where that breaks the limit on slices.

    For an output that fails by one slice, while the energy of every segment keeps its limit.
    """
    if budget.slice_sqnr_db is None or not rows:
        return list(rows)
    worst = min(rows, key=lambda row: row.local.slice_sqnr_db)
    if within("slice_sqnr_db", worst.local.slice_sqnr_db, budget.slice_sqnr_db):
        return list(rows)
    why = f"{worst.local.slice}: {worst.local.slice_sqnr_db:.1f} dB by itself, limit {budget.slice_sqnr_db:g} dB"
    return [replace(row, blamed=why) if row is worst else row for row in rows]


def blame_lone(rows: Sequence[SegmentRow]) -> list[SegmentRow]:
    """The rows with the one blamed whose own noise is ten times that of all others together.

    For an engine whose segments keep the limit one by one: what is quantized behind an error makes more of it. An error
    that float32 kernels may have by right is none.
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
