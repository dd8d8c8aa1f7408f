"""Distances in units in the last place: how many representable numbers lie between what was expected and what came.

Floating-point numbers of one type have the order of their bit patterns (IEEE 754-2019, 5.10; Dawson, "Comparing
Floating Point Numbers", 2012), so a distance is a difference of integers; +0 and -0 are the same number. The type is
the expected one; values of another type are rounded to it first.
"""

from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from enginery.arrays import Array
from validation.metrics.pairs import pairs_of

CHUNK = 1 << 16
# Distances below EXACT have a bin each; above, bins are eighths of a power of two.
EXACT = 256
_EXACT_BITS, _PARTS = 8, 8
BINS = EXACT + (64 - _EXACT_BITS) * _PARTS
_UNSIGNED = {2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True)
class Ulps:
    """A histogram of the distances of elements that are finite on both sides: counts (BINS,). largest: exact."""

    counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(BINS, np.int64))
    largest: int = 0

    def merge(self, other: "Ulps") -> "Ulps":
        """The distances of both."""
        return Ulps(self.counts + other.counts, max(self.largest, other.largest))

    def percentile(self, percent: float) -> int:
        """The distance that at least `percent` percent of the elements do not exceed; 0 without elements.

        Exact below 256, above it at most an eighth too large.
        """
        total = int(self.counts.sum())
        if not total:
            return 0
        rank = max(1, -(-Fraction(percent) * total // 100))
        index = int(np.searchsorted(np.cumsum(self.counts), int(rank)))
        return min(_upper(index), self.largest)


def measure_ulps(expected: Array, actual: Array) -> Ulps:
    """The distances between floating-point arrays of one shape. Raises ValueError for a type not of 2, 4 or 8 bytes."""
    size = expected.dtype.itemsize
    if size not in _UNSIGNED:
        raise ValueError(f"{expected.dtype} has no units in the last place that are counted here")
    total = Ulps()
    for e, a in pairs_of(expected, actual, CHUNK):
        with np.errstate(over="ignore"):
            rounded = a.astype(expected.dtype)
        finite = np.isfinite(e) & np.isfinite(rounded)
        left, right = (_to_ordered_integers(np.ascontiguousarray(part[finite]), size) for part in (e, rounded))
        distance = np.where(left > right, left - right, right - left)
        counts = np.bincount(_bin(distance), minlength=BINS).astype(np.int64)
        total = total.merge(Ulps(counts, int(distance.max(initial=0))))
    return total


def _to_ordered_integers(values: Array, size: int) -> NDArray[np.uint64]:
    """The bit patterns as integers in the order of the numbers, for numbers of `size` bytes."""
    bits = values.view(_UNSIGNED[size]).astype(np.uint64)
    sign = np.uint64(1 << (8 * size - 1))
    magnitude = bits & (sign - np.uint64(1))
    middle = np.uint64(1 << 63)
    return np.asarray(np.where(bits & sign, middle - magnitude, middle + magnitude), np.uint64)


def _bin(distance: NDArray[np.uint64]) -> NDArray[np.int64]:
    found = distance.astype(np.int64)
    large = np.flatnonzero(distance >= EXACT)
    if len(large):
        found[large] = _large_bin(distance[large])
    return found


def _large_bin(distance: NDArray[np.uint64]) -> NDArray[np.int64]:
    exponent = np.frexp(distance.astype(np.float64))[1] - 1
    # float64 may round a distance up to the next power of two; the shifted integer says when.
    exponent = np.where((distance >> exponent.astype(np.uint64).clip(max=63)) == 0, exponent - 1, exponent).clip(max=63)
    part = (distance >> (exponent - 3).astype(np.uint64)).astype(np.int64) & (_PARTS - 1)
    return np.asarray(EXACT + (exponent - _EXACT_BITS) * _PARTS + part, np.int64)


def _upper(index: int) -> int:
    """The largest distance in a bin."""
    if index < EXACT:
        return index
    exponent, part = divmod(index - EXACT, _PARTS)
    exponent += _EXACT_BITS
    return ((_PARTS + part + 1) << (exponent - 3)) - 1
