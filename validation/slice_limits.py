"""Which slice of an output is off most, measured against what it is allowed.

The error energy of a slice may be its own energy, less the limit in decibels, or four times (twice the amplitude) what
an honest kernel of the precision adds to it. Not judged, because the ratio says nothing there:

- a slice of fewer than `FEWEST` elements: among a thousand slices of one element each, some element is near zero.
- a slice that is zero or nearly so (`DEAD` of the output's mean energy: a millionth of its amplitude): cancellation
  leaves a rounding of the rest there. Its error is measured against the output's mean energy instead.
"""

import math
from dataclasses import dataclass

import numpy as np

from validation.npz import Array
from validation.slices import AxisSums, Slices

FEWEST = 16
DEAD = 1e-12
# Of energy: twice the amplitude of the error that an honest kernel makes.
HONEST_MARGIN = 4.0


@dataclass(frozen=True)
class WorstSlice:
    """sqnr_db: of the slice; where honest rounding allows it more than the limit does, better by that."""

    axis: int
    index: int
    sqnr_db: float

    def __str__(self) -> str:
        return f"axis {self.axis}, index {self.index}"


def worst_slice(
    slices: Slices, limit: float | None, usual: Slices | None = None, honest: Slices | None = None
) -> WorstSlice | None:
    """The slice that is worst against what it is allowed; None where none can be judged.

    limit: SQNR in decibels that each should have; None: only measured.  usual: of the golden set, for a case that holds
    few samples: a slice has at least the energy that it has there.  honest: errors of an honest kernel.
    """
    found = []
    for axis, sums in slices.axes.items():
        judged = np.flatnonzero(sums.count >= FEWEST)
        if len(judged):
            sqnr_db = _sqnr_db(sums, _signal(sums, _axis(usual, axis)))
            credit = np.zeros(len(sqnr_db)) if limit is None else _credit(sums, limit, _axis(honest, axis), sqnr_db)
            values = sqnr_db + credit
            worst = int(judged[np.argmin(values[judged])])
            found.append(WorstSlice(axis, worst, float(values[worst])))
    return min(found, key=lambda item: item.sqnr_db, default=None)


def _axis(slices: Slices | None, axis: int) -> AxisSums | None:
    return slices.axes.get(axis) if slices else None


def _signal(sums: AxisSums, usual: AxisSums | None) -> Array:
    """The energy that each slice is measured against."""
    signal = sums.expected_sq
    if usual is not None:
        signal = np.maximum(signal, _per_element(usual.expected_sq, usual, len(signal)) * sums.count)
    mean = float(signal.sum() / sums.count.sum())
    return np.where(signal <= DEAD * mean * sums.count, mean * sums.count, signal)


def _sqnr_db(sums: AxisSums, signal: Array) -> Array:
    with np.errstate(divide="ignore", invalid="ignore"):
        found = 10 * np.log10(signal / sums.error_sq)
    return np.where(sums.error_sq == 0, math.inf, np.where(np.isnan(found), -math.inf, found))


def _credit(sums: AxisSums, limit: float, honest: AxisSums | None, sqnr_db: Array) -> Array:
    """Decibels by which honest rounding alone goes beyond the limit."""
    if honest is None:
        return np.zeros(len(sqnr_db))
    allowed = HONEST_MARGIN * _per_element(honest.error_sq, honest, len(sqnr_db)) * sums.count
    with np.errstate(divide="ignore", invalid="ignore"):
        margin = 10 * np.log10(allowed / sums.error_sq)
    known = (allowed > 0) & np.isfinite(sqnr_db)
    return np.where(known, np.maximum(limit + margin - sqnr_db, 0.0), 0.0)


def _per_element(energy: Array, sums: AxisSums, size: int) -> Array:
    """Energy per element of the first `size` slices; 0 for those that are not there."""
    mean = np.divide(energy, sums.count, out=np.zeros(len(energy)), where=sums.count > 0)[:size]
    return np.pad(mean, (0, size - len(mean)))
