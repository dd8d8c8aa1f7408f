"""Histograms over the bits of a float32: sign, exponent and 7 leading bits of the mantissa are the number of the bin.

Such a histogram needs no range beforehand, has a fixed size, resolves every value to one part in 128 wherever it lies,
and two of them add up to exactly what one over both data sets would be, in any order. A linear histogram has to be
widened, and so rounded, whenever a larger value comes.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from enginery.arrays import Array
from enginery.core.digest import digest_of_bytes

BINS = 1 << 16
# Values counted at a time: numpy.bincount widens them to 8 bytes each, which should stay in a core's cache.
CHUNK = 1 << 17
_SIGN, _INFINITY = 0x8000, 0x7F80

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class LogHistogram:
    """Counts by the top 16 bits of a float32. keys: the bins that hold something, rising.  counts: values in each."""

    keys: NDArray[np.uint16]
    counts: NDArray[np.int64]

    @classmethod
    def of(cls, values: Array) -> "LogHistogram":
        """Count an array of float32."""
        dense = empty_counts()
        count_into(dense, values)
        return cls.from_dense(dense)

    @classmethod
    def from_dense(cls, dense: NDArray[np.int64]) -> "LogHistogram":
        """From the counts of all 65536 bins."""
        keys = np.flatnonzero(dense)
        return cls(keys.astype(np.uint16), dense[keys])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LogHistogram):
            return NotImplemented
        return np.array_equal(self.keys, other.keys) and np.array_equal(self.counts, other.counts)

    __hash__ = None  # type: ignore[assignment]

    def dense(self) -> NDArray[np.int64]:
        """The counts of all 65536 bins."""
        counts = empty_counts()
        counts[self.keys] = self.counts
        return counts

    def merge(self, other: "LogHistogram") -> "LogHistogram":
        """What one histogram over both data sets would be: exact, associative and commutative."""
        return LogHistogram.from_dense(self.dense() + other.dense())

    @property
    def total(self) -> int:
        """How many values were counted, those that are not finite included."""
        return int(self.counts.sum())

    @property
    def nonfinite(self) -> int:
        """How many of them were infinite or NaN."""
        return int(self.counts[_special(self.keys)].sum())

    @cached_property
    def digest(self) -> str:
        """SHA-256 over bins and counts."""
        return digest_of_bytes(self.keys.astype("<u2").tobytes() + self.counts.astype("<i8").tobytes())

    @cached_property
    def bins(self) -> tuple[Floats, Floats, Floats]:
        """(lower edge, upper edge, count) of the finite bins in rising order of their values.

        Zeros, subnormals below 9.2e-41 among them, are one bin without width at 0.
        """
        finite = ~_special(self.keys)
        keys, counts = self.keys[finite], self.counts[finite].astype(np.float64)
        near, far = _edge(keys.astype(np.uint32)), _edge(keys.astype(np.uint32) + 1)
        negative = keys >= _SIGN
        near[(keys & 0x7FFF) == 0] = far[(keys & 0x7FFF) == 0] = 0.0
        low, high = np.where(negative, far, near), np.where(negative, near, far)
        order = np.argsort(low + high, kind="stable")
        return low[order], high[order], counts[order]

    def magnitudes(self) -> "LogHistogram":
        """The histogram of the absolute values."""
        dense = self.dense()
        dense[:_SIGN] += dense[_SIGN:]
        dense[_SIGN:] = 0
        return LogHistogram.from_dense(dense)

    def quantile(self, share: float) -> float:
        """The value that `share` (0 to 1) of the finite values do not exceed, linear within a bin; 0 when empty."""
        low, high, counts = self.bins
        if not len(counts):
            return 0.0
        below = np.concatenate(([0.0], np.cumsum(counts)))
        wanted = share * below[-1]
        index = min(int(np.searchsorted(below[1:], wanted)), len(counts) - 1)
        part = (wanted - below[index]) / counts[index]
        return float(low[index] + (high[index] - low[index]) * min(max(part, 0.0), 1.0))

    def share_outside(self, low: float, high: float) -> float:
        """The share of the finite values below `low` or above `high`, linear within a bin; 0 when empty."""
        near, far, counts = self.bins
        width = np.maximum(far - near, np.finfo(np.float32).tiny)
        outside = np.clip((low - near) / width, 0.0, 1.0) + np.clip((far - high) / width, 0.0, 1.0)
        total = float(counts.sum())
        return float((counts * np.minimum(outside, 1.0)).sum()) / total if total else 0.0


def empty_counts() -> NDArray[np.int64]:
    """Zeros for all 65536 bins."""
    return np.zeros(BINS, np.int64)


def count_into(dense: NDArray[np.int64], values: Array) -> None:
    """Add an array of float32 to the counts of all bins."""
    bits = np.ascontiguousarray(values, np.dtype("<f4")).reshape(-1).view(np.uint16)[1::2]
    for start in range(0, len(bits), CHUNK):
        counted = np.bincount(bits[start : start + CHUNK])
        dense[: len(counted)] += counted


def holds_nan(dense: NDArray[np.int64]) -> bool:
    """Whether a NaN was counted. One whose payload lies in the low 16 bits alone looks like an infinity."""
    return bool(dense[_INFINITY + 1 : _SIGN].any() or dense[_SIGN + _INFINITY + 1 :].any())


def _special(keys: NDArray[np.uint16]) -> NDArray[np.bool_]:
    special: NDArray[np.bool_] = (keys & _INFINITY) == _INFINITY
    return special


def _edge(keys: NDArray[np.uint32]) -> Floats:
    """The float whose top 16 bits these are. The edge behind the last finite bin is 2**128, which float32 lacks."""
    edges = (keys << np.uint32(16)).view(np.float32).astype(np.float64)
    return np.where(np.isinf(edges), np.copysign(2.0**128, edges), edges)
