"""The numbers that a quantized tensor can hold, and what rounding a distribution to them costs.

The cost is integrated over the histogram that calibration kept, so that no sample is run again. Values are taken to be
spread evenly within a bin, between the extremes that were seen; for that distribution the integral of the squared
distance to the nearest level is exact, clipping included. A bin is at most one part in 128 of its value wide. For
continuous data the result is within 0.2 dB of quantizing the values themselves (tests/pipeline/quantization/record);
data that sits on few distinct values, such as an image's 17 grey levels, can differ by more, because a bin does not
say where in it they lie.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto

from pipeline.quantization.statistics.histogram import LogHistogram

Floats = NDArray[np.float64]

# Below this share of a step a bin is a point: the difference of two integrals would be rounding noise.
THIN = 1e-6
_CODES: dict[int, Floats] = {TensorProto.INT8: np.arange(-128.0, 128), TensorProto.UINT8: np.arange(0.0, 256)}
NAMES: dict[int, str] = {TensorProto.INT8: "int8", TensorProto.UINT8: "uint8", TensorProto.FLOAT8E4M3FN: "fp8"}


@dataclass(frozen=True, eq=False)
class Levels:
    """The values of all codes of a number format, rising."""

    values: Floats

    @classmethod
    def of(cls, element_type: int, scale: float, zero_point: float = 0.0) -> "Levels":
        """Of a QuantizeLinear's format (a key of NAMES), scale and zero point. A runtime saturates at both ends."""
        codes = _CODES[element_type] if element_type in _CODES else _fp8_codes()
        return cls((codes - zero_point) * scale)

    @property
    def span(self) -> tuple[float, float]:
        """The lowest and the highest level."""
        return float(self.values[0]), float(self.values[-1])

    @property
    def reach(self) -> tuple[float, float]:
        """Where saturation begins to cost: half a step beyond the last level at either end."""
        below, above = np.diff(self.values[:2])[0] / 2, np.diff(self.values[-2:])[0] / 2
        return float(self.values[0] - below), float(self.values[-1] + above)

    def clipped(self, histogram: LogHistogram, seen: tuple[float, float]) -> float:
        """The share of the values that saturate. seen: the extremes."""
        low, high = self.reach
        if low <= seen[0] and seen[1] <= high:
            return 0.0
        return histogram.share_outside(max(low, seen[0]), min(high, seen[1]))

    def sqnr_db(self, histogram: LogHistogram, seen: tuple[float, float]) -> float:
        """Signal to quantization noise of this tensor alone, in decibels; inf without loss, NaN without a signal.

        seen: the extremes. The method is in the module's docstring.
        """
        near, far, counts = (np.asarray(item) for item in histogram.bins)
        near, far = np.clip(near, *seen), np.clip(far, *seen)
        middle, width = (near + far) / 2, far - near
        signal = float((counts * (np.square(middle) + np.square(width) / 12)).sum())
        noise = float((counts * self._squared_error(near, far)).sum())
        return decibels(signal, noise)

    def _squared_error(self, near: Floats, far: Floats) -> Floats:
        """Mean squared distance to the nearest level over each interval."""
        width, middle = far - near, (near + far) / 2
        point = np.square(middle - self._nearest(middle))
        thin = width < THIN * float(np.min(np.diff(self.values)))
        mean = (self._integral(far) - self._integral(near)) / np.where(thin, 1.0, width)
        return np.where(thin, point, mean)

    def _integral(self, x: Floats) -> Floats:
        """Of (v - nearest(v))**2 from the lowest level to x: a cube in each cell, and whole cells before it."""
        cell = np.searchsorted(self._middles, x)
        before = np.concatenate((self.values[:1], self._middles))
        level, start = self.values[cell], before[cell]
        return self._cells[cell] + ((x - level) ** 3 - (start - level) ** 3) / 3

    def _nearest(self, x: Floats) -> Floats:
        return self.values[np.searchsorted(self._middles, x)]

    @cached_property
    def _middles(self) -> Floats:
        return np.asarray((self.values[:-1] + self.values[1:]) / 2)

    @cached_property
    def _cells(self) -> Floats:
        """The integral up to the beginning of each cell."""
        halves = (np.diff(self.values) / 2) ** 3 / 3  # the second half of a cell, and the first half of the next one
        return np.concatenate(([0.0], np.cumsum(2 * halves) - halves))


def decibels(signal: float, noise: float) -> float:
    """A ratio of energies; inf without noise, NaN without a signal."""
    if signal <= 0:
        return math.nan
    return 10 * math.log10(signal / noise) if noise > 0 else math.inf


def rebin(histogram: LogHistogram, low: float, high: float, bins: int) -> list[float]:
    """Counts in bins of equal width over [low, high]; values are taken to be spread evenly within a source's bin."""
    near, far, counts = histogram.bins
    edges, total = np.linspace(low, high, bins + 1), np.zeros(bins)
    wide = far > near
    for left, right, count in zip(near[wide], far[wide], counts[wide], strict=True):
        first, last = _slots(edges, (left, right))
        inner = np.clip(edges[first : last + 2], left, right)
        total[first : last + 1] += count * np.diff(inner) / (right - left)
    for value, count in zip(near[~wide], counts[~wide], strict=True):
        total[_slots(edges, (value,))[0]] += count
    return [float(f"{value:.4g}") for value in total]


def _slots(edges: Floats, values: Sequence[float]) -> list[int]:
    found = np.searchsorted(edges, values, side="right") - 1
    return [int(np.clip(slot, 0, len(edges) - 2)) for slot in found]


def _fp8_codes() -> Floats:
    values = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return np.unique(values[np.isfinite(values)])
