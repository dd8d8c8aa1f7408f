"""Histograms of float32 values, and the cost of rounding the counted values to a number format.

The bits of a value determine its bin: sign, exponent and 7 leading bits of the mantissa. Such a histogram needs no
range beforehand, has a fixed size, and resolves every value to one part in 128. The sum of two histograms is exactly
the histogram of both data sets, in any order. A linear histogram must be widened, and thereby rounded, for each larger
value.

The cost of rounding (`Levels`) is integrated over a histogram, so no sample is run again. Values are assumed to be
spread evenly within a bin, between the observed extremes; for that distribution the integral of the squared distance to
the nearest level is exact, clipping included. For continuous data the result is within 0.2 dB of quantizing the values
themselves (tests/pipeline/quantization/record); data with few distinct values, such as an image's 17 grey levels, can
differ by more, because a bin does not record their positions.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from enginesmith.arrays import Array
from enginesmith.core.errors import digest_of_bytes

# One for each pattern of the 16 leading bits of a float32.
BINS = 1 << 16
# Number of values measured at a time: later passes find them, and 8 more bytes for each, in the core's cache.
CHUNK = 1 << 15
_SIGN, _INFINITY = 0x8000, 0x7F80

Floats = NDArray[np.float64]
# A bin below this share of a step counts as a point: the difference of two integrals would be rounding noise.
THIN = 1e-6
_FP8: Floats = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
_CODES: dict[int, Floats] = {
    TensorProto.INT8: np.arange(-128.0, 128),
    TensorProto.UINT8: np.arange(0.0, 256),
    TensorProto.FLOAT8E4M3FN: np.unique(_FP8[np.isfinite(_FP8)]),
}
NAMES: dict[int, str] = {TensorProto.INT8: "int8", TensorProto.UINT8: "uint8", TensorProto.FLOAT8E4M3FN: "fp8"}


@dataclass(frozen=True, eq=False)
class LogHistogram:
    """Counts by the top 16 bits of a float32. keys: the bins that hold values, rising.  counts: of each."""

    keys: NDArray[np.uint16]
    counts: NDArray[np.int64]

    @classmethod
    def of(cls, values: Array) -> "LogHistogram":
        """Count an array of float32."""
        dense_counts = empty_counts()
        count_into(dense_counts, values)
        return cls.from_dense(dense_counts)

    @classmethod
    def from_dense(cls, dense: NDArray[np.int64]) -> "LogHistogram":
        """The histogram with these counts of all bins, [65536]."""
        keys = np.flatnonzero(dense)
        return cls(keys.astype(np.uint16), dense[keys])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LogHistogram):
            return NotImplemented
        return np.array_equal(self.keys, other.keys) and np.array_equal(self.counts, other.counts)

    __hash__ = None  # type: ignore[assignment]

    def dense(self) -> NDArray[np.int64]:
        """The counts of all bins, [65536]."""
        counts = empty_counts()
        counts[self.keys] = self.counts
        return counts

    def merge(self, other: "LogHistogram") -> "LogHistogram":
        """The histogram of both data sets together: exact, associative and commutative."""
        return LogHistogram.from_dense(self.dense() + other.dense())

    @property
    def total(self) -> int:
        """The number of counted values, including infinities and NaN."""
        return int(self.counts.sum())

    @property
    def nonfinite(self) -> int:
        """The number of infinities and NaN."""
        return int(self.counts[_special(self.keys)].sum())

    @cached_property
    def digest(self) -> str:
        """SHA-256 over bins and counts."""
        return digest_of_bytes(self.keys.astype("<u2").tobytes() + self.counts.astype("<i8").tobytes())

    @cached_property
    def bins(self) -> tuple[Floats, Floats, Floats]:
        """(lower edge, upper edge, count) of the finite bins in rising order of their values.

        Zeros and subnormals below 9.2e-41 are one bin without width at 0.
        """
        finite_mask = ~_special(self.keys)
        keys, counts = self.keys[finite_mask], self.counts[finite_mask].astype(np.float64)
        near_edges, far_edges = _edge(keys.astype(np.uint32)), _edge(keys.astype(np.uint32) + 1)
        negative_mask = keys >= _SIGN
        near_edges[(keys & 0x7FFF) == 0] = far_edges[(keys & 0x7FFF) == 0] = 0.0
        low, high = np.where(negative_mask, far_edges, near_edges), np.where(negative_mask, near_edges, far_edges)
        order = np.argsort(low + high, kind="stable")
        return low[order], high[order], counts[order]

    def magnitudes(self) -> "LogHistogram":
        """The histogram of the absolute values."""
        dense_counts = self.dense()
        dense_counts[:_SIGN] += dense_counts[_SIGN:]
        dense_counts[_SIGN:] = 0
        return LogHistogram.from_dense(dense_counts)

    def quantile(self, share: float) -> float:
        """The value that `share` (0 to 1) of the finite values do not exceed, linear within a bin; 0 when empty."""
        low, high, counts = self.bins
        if not len(counts):
            return 0.0
        counts_below = np.concatenate(([0.0], np.cumsum(counts)))
        target_count = share * counts_below[-1]
        index = min(int(np.searchsorted(counts_below[1:], target_count)), len(counts) - 1)
        fraction = (target_count - counts_below[index]) / counts[index]
        return float(low[index] + (high[index] - low[index]) * min(max(fraction, 0.0), 1.0))

    def share_outside(self, low: float, high: float) -> float:
        """The share of the finite values below `low` or above `high`, linear within a bin; 0 when empty."""
        lower, upper, counts = self.bins
        width = np.maximum(upper - lower, np.finfo(np.float32).tiny)
        outside_shares = np.clip((low - lower) / width, 0.0, 1.0) + np.clip((upper - high) / width, 0.0, 1.0)
        total = float(counts.sum())
        return float((counts * np.minimum(outside_shares, 1.0)).sum()) / total if total else 0.0


def empty_counts() -> NDArray[np.int64]:
    """Zeros for all 65536 bins."""
    return np.zeros(BINS, np.int64)


def count_into(dense: NDArray[np.int64] | None, values: Array) -> tuple[float, float]:
    """Add an array of float32 to the counts of all bins, if any are given, and return its extremes: NaN if it contains
    one, (inf, -inf) if it is empty."""
    flat_values = np.ascontiguousarray(values, np.dtype("<f4")).reshape(-1)
    bins, low, high = np.empty(min(CHUNK, flat_values.size), np.int64), np.float32(np.inf), np.float32(-np.inf)
    for start in range(0, flat_values.size, CHUNK):
        chunk = flat_values[start : start + CHUNK]
        low, high = np.minimum(low, chunk.min()), np.maximum(high, chunk.max())
        if dense is not None:
            bins[: chunk.size] = chunk.view(np.uint16)[1::2]
            np.add.at(dense, bins[: chunk.size], 1)
    return float(low) + 0.0, float(high) + 0.0  # no negative zero, which depends on the order


def _special(keys: NDArray[np.uint16]) -> NDArray[np.bool_]:
    is_special: NDArray[np.bool_] = (keys & _INFINITY) == _INFINITY
    return is_special


def _edge(keys: NDArray[np.uint32]) -> Floats:
    """The floats with these top 16 bits. The edge behind the last finite bin is 2**128, which float32 lacks."""
    edges = (keys << np.uint32(16)).view(np.float32).astype(np.float64)
    return np.where(np.isinf(edges), np.copysign(2.0**128, edges), edges)


@dataclass(frozen=True, eq=False)
class Levels:
    """The values of all codes of a number format, rising, [codes]."""

    values: Floats

    @classmethod
    def of(cls, element_type: int, scale: float, zero_point: float = 0.0) -> "Levels":
        """The levels of a format (a key of NAMES) with a scale and zero point. A runtime saturates at both ends."""
        return cls((_CODES[element_type] - zero_point) * scale)

    @property
    def span(self) -> tuple[float, float]:
        """The lowest and the highest level."""
        return float(self.values[0]), float(self.values[-1])

    @property
    def reach(self) -> tuple[float, float]:
        """The limits beyond which saturation adds error: half a step beyond the last level at either end."""
        margin_below, margin_above = np.diff(self.values[:2])[0] / 2, np.diff(self.values[-2:])[0] / 2
        return float(self.values[0] - margin_below), float(self.values[-1] + margin_above)

    def clipped(self, histogram: LogHistogram, extremes: tuple[float, float]) -> float:
        """The share of the values that saturate. extremes: the least and the greatest value."""
        low, high = self.reach
        if low <= extremes[0] and extremes[1] <= high:
            return 0.0
        return histogram.share_outside(max(low, extremes[0]), min(high, extremes[1]))

    def sqnr_db(self, histogram: LogHistogram, extremes: tuple[float, float]) -> float:
        """Signal to quantization noise of this tensor alone, in decibels; inf without loss, NaN without a signal.

        The method is in the module's docstring.
        """
        lower, upper, counts = (np.asarray(array) for array in histogram.bins)
        lower, upper = np.clip(lower, *extremes), np.clip(upper, *extremes)
        centres, width = (lower + upper) / 2, upper - lower
        signal = float((counts * (np.square(centres) + np.square(width) / 12)).sum())
        noise = float((counts * self._squared_error(lower, upper)).sum())
        return decibels(signal, noise)

    def _squared_error(self, lower: Floats, upper: Floats) -> Floats:
        """Mean squared distance to the nearest level over each interval."""
        width, centres = upper - lower, (lower + upper) / 2
        point_error = np.square(centres - self.values[np.searchsorted(self._middles, centres)])
        thin_mask = width < THIN * float(np.min(np.diff(self.values)))
        mean_error = (self._integral(upper) - self._integral(lower)) / np.where(thin_mask, 1.0, width)
        return np.where(thin_mask, point_error, mean_error)

    def _integral(self, x: Floats) -> Floats:
        """Integral of (v - nearest(v))**2 from the lowest level to x: whole cells before x, and a cube in its cell."""
        cell = np.searchsorted(self._middles, x)
        lower_bounds = np.concatenate((self.values[:1], self._middles))
        level, start = self.values[cell], lower_bounds[cell]
        return self._cells[cell] + ((x - level) ** 3 - (start - level) ** 3) / 3

    @cached_property
    def _middles(self) -> Floats:
        return np.asarray((self.values[:-1] + self.values[1:]) / 2)

    @cached_property
    def _cells(self) -> Floats:
        """The integral up to the beginning of each cell."""
        halves = (np.diff(self.values) / 2) ** 3 / 3  # the second half of a cell, and the first half of the next one
        return np.concatenate(([0.0], np.cumsum(2 * halves) - halves))


def decibels(signal: float, noise: float) -> float:
    """The ratio of two energies in decibels; inf without noise, NaN without a signal."""
    if signal <= 0:
        return math.nan
    return 10 * math.log10(signal / noise) if noise > 0 else math.inf


def rebin(histogram: LogHistogram, low: float, high: float, bins: int) -> list[float]:
    """Counts in `bins` of equal width over [low, high]; values are assumed to be spread evenly within a source bin."""
    lower, upper, counts = histogram.bins
    edges, is_wide = np.linspace(low, high, bins + 1), upper > lower
    wide_lower, wide_upper = lower[is_wide], upper[is_wide]
    clipped_edges = np.clip(edges[:, np.newaxis], wide_lower, wide_upper)
    wide_counts = (np.diff(clipped_edges, axis=0) / (wide_upper - wide_lower)) @ counts[is_wide]
    bin_indices = np.clip(np.searchsorted(edges, lower[~is_wide], side="right") - 1, 0, bins - 1)
    return [float(f"{value:.4g}") for value in wide_counts + np.bincount(bin_indices, counts[~is_wide], bins)]
