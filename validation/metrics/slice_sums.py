"""Running sums over the samples of an output that comes in blocks of features, from which its slices are made."""

from collections.abc import Sequence

import numpy as np

from enginesmith.arrays import Array
from validation.metrics.pairs import Block
from validation.metrics.slices import AxisSums, Marginals, Slices

# Width that narrow rows are folded to, because a loop over ten columns costs more than its sums.
FOLD = 512


class FeatureSums:
    """Running sums over the samples of a block, for each of its features: of d, d^2, (a - e)^2 and |e|, d = e - shift;
    and the greatest -e and e.

    shift: the first sample, flat.  rows: the number of all samples.
    """

    def __init__(self, shift: Array, rows: int) -> None:
        self._width, self._rows = shift.size, rows
        fold = max(1, min(FOLD // max(shift.size, 1), rows))
        self._shift = np.tile(shift, fold) if fold > 1 else shift
        self._sums = np.zeros((4, len(self._shift)))
        self._reach = np.stack([-self._shift, self._shift])

    def add(self, wide: Array, error: Array, values: Array) -> tuple[float, float]:
        """Take whole rows, flat and in float64, which are overwritten. Returns the least and the greatest of them.

        values: those of `wide`, flat, of any type.
        """
        whole = len(wide) // len(self._shift) * len(self._shift)
        parts = [slice(0, whole), slice(whole, len(wide))]
        ends = [self._add(wide[part], error[part], values[part]) for part in parts if part.start < part.stop]
        return min(low for low, _ in ends), max(high for _, high in ends)

    def _add(self, wide: Array, error: Array, values: Array) -> tuple[float, float]:
        length = min(len(wide), len(self._shift))
        d, off, rows = (flat.reshape(-1, length) for flat in (wide, error, values))
        total, (below, above) = self._sums[:, :length], self._reach[:, :length]
        total[2] += np.einsum("ij,ij->j", off, off)
        np.absolute(d, out=off)
        total[3] += np.add.reduce(off, axis=0)
        low, high = np.minimum.reduce(rows, axis=0), np.maximum.reduce(rows, axis=0)
        if self._rows > 1:
            np.maximum(below, -low, out=below)
            np.maximum(above, high, out=above)
            np.subtract(d, self._shift[:length], out=d)
            total[0] += np.add.reduce(d, axis=0)
            total[1] += np.einsum("ij,ij->j", d, d)
        return float(low.min()), float(high.max())

    def merge(self, other: "FeatureSums") -> None:
        """Add the sums of another with the same shift."""
        self._sums = self._fold_sums() + other._fold_sums()
        self._reach = np.maximum(self.reach(), other.reach())
        self._shift = self._shift[: self._width]

    def _fold_sums(self) -> Array:
        found = self._sums
        if found.shape[1] > self._width:
            found = found.reshape(4, -1, self._width).sum(axis=1)
        return np.asarray(found)

    def reach(self) -> Array:
        """Per feature the greatest -e and the greatest e, as an array of (2, features)."""
        return np.asarray(self._reach.reshape(2, -1, self._width).max(axis=1))

    def finish(self) -> tuple[Array, Array]:
        """Per feature the mean, and the sums of e^2, (e - m)^2, (a - e)^2 and |e| as an array of (4, features)."""
        shift, sums = self._shift[: self._width], self._fold_sums()
        if self._rows == 1:
            np.square(shift, out=sums[0])
            return shift, sums
        total, square = sums[:2]
        mean = total / self._rows
        centered_sq = square - total * mean
        np.maximum(centered_sq, 0.0, out=centered_sq)
        mean += shift
        # sum e^2 = sum (e - m)^2 + n m^2
        np.multiply(mean, mean, out=total)
        total *= self._rows
        total += centered_sq
        square[...] = centered_sq
        return mean, sums


class SliceSums:
    """The slices of an output that comes in blocks of features.

    samples: the length of axis 0 where its entries are samples; any other number makes the whole output one sample.
    """

    def __init__(self, shape: Sequence[int], samples: int) -> None:
        self.batched = bool(shape) and samples == shape[0]
        self.shape = tuple(shape[1:] if self.batched else shape)
        self.samples = samples if self.batched else 1
        self._mean, self._reach = np.zeros(self.shape), np.zeros((2, *self.shape))
        self._energies = Marginals(self.shape, 4)

    def add(self, block: Block, sums: FeatureSums) -> None:
        """Add a block of features, summed over all samples."""
        shape = np.shape(self._mean[block])
        self._reach[:, *block] = sums.reach().reshape(2, *shape)
        mean, energies = sums.finish()
        self._mean[block] = mean.reshape(shape)
        self._energies.add(block, energies.reshape(4, *shape))

    def slices(self) -> Slices:
        """The slices of all blocks."""
        axes = {}
        for axis, size in enumerate(self.shape):
            others = self.samples * self._mean.size // max(size, 1)
            count = np.full(size, float(others))
            expected_sq, centered_sq, error_sq, magnitude = self._energies.over(axis, size)
            axes[axis + self.batched] = AxisSums(expected_sq, centered_sq, error_sq, magnitude, count)
        mean, reach = (self._mean[None], self._reach[:, None]) if self.batched else (self._mean, self._reach)
        return Slices(axes, float(self._energies.total[1]), self.samples, mean, float(self.samples), reach)
