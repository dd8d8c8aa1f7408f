"""How far each slice of an output moved, and how much the output varies over the samples: sums that merge.

A slice is one index of one axis: a channel, a class, a column of a table. The batch axis has no slices: its entries are
samples. A feature is one place in a sample, and m below its mean over the samples; e is the expected output, a the
actual one. Sums are taken after the first sample is subtracted, and parts are merged by the difference of their means
(Chan, Golub and LeVeque, "Algorithms for Computing the Sample Variance", 1983), so that an offset costs no digits.

Where two parts differ in the size of an axis (sequences of other lengths), their features do not correspond: the means
are taken over that axis too. One sample has no variation over the samples; `within` gives its variation within itself.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np

from enginesmith.arrays import Array
from validation.metrics.pairs import Block, blocks_of

# Elements of the means that are merged at a time.
CHUNK = 1 << 15


@dataclass(frozen=True, eq=False)
class AxisSums:
    """Sums over each slice of one axis: float64 arrays of (size of the axis,).

    expected_sq: of e^2.  centered_sq: of (e - m)^2.  error_sq: of (a - e)^2.  magnitude: of |e|.  count: elements.
    """

    expected_sq: Array
    centered_sq: Array
    error_sq: Array
    magnitude: Array
    count: Array

    def merge(self, other: "AxisSums") -> "AxisSums":
        """The sums of both; indices that only one has are kept."""
        size = max(len(self.count), len(other.count))
        pairs = ((getattr(self, item.name), getattr(other, item.name)) for item in fields(self))
        return AxisSums(*(fit_length(one, size, 0.0) + fit_length(two, size, 0.0) for one, two in pairs))

    def scale(self, factor: float) -> "AxisSums":
        """The same sums with energies times `factor`."""
        energies = self.expected_sq * factor, self.centered_sq * factor, self.error_sq * factor
        return AxisSums(*energies, self.magnitude * math.sqrt(factor), self.count)


@dataclass(frozen=True, eq=False)
class Slices:
    """The slices of an output. axes: sums by axis.  centered_sq: over the whole output.  samples: how many.

    mean: m of each feature, of the output's rank, with 1 for each axis that was averaged over (the batch, and axes
    whose sizes differed); None after `without_means`.  weight: elements behind each entry of `mean`.
    reach: of each feature the greatest -e and the greatest e, as an array of (2, *mean.shape); None where `mean` is.
    """

    axes: Mapping[int, AxisSums]
    centered_sq: float
    samples: int
    mean: Array | None
    weight: float
    reach: Array | None = None

    @property
    def freedom(self) -> float:
        """Elements less those that their means take up: 0 for one sample."""
        return 0.0 if self.mean is None else (self.weight - 1) * self.mean.size

    def merge(self, other: "Slices") -> "Slices | None":
        """The slices of both; None where their ranks differ. Without means, variation between the two is left out."""
        if self.mean is None or other.mean is None:
            sums = {axis: self.axes[axis].merge(other.axes[axis]) for axis in self.axes.keys() & other.axes.keys()}
            total = self.centered_sq + other.centered_sq
            return Slices(dict(sorted(sums.items())), total, self.samples + other.samples, None, 0.0)
        if self.mean.ndim != other.mean.ndim:
            return None
        left, right = self._pool_differing(other)
        return left._join(right)

    def _pool_differing(self, other: "Slices") -> tuple["Slices", "Slices"]:
        """Both, with means taken over the axes in whose size they differ too."""
        shapes = zip(np.asarray(self.mean).shape, np.asarray(other.mean).shape, strict=True)
        differing = [axis for axis, (one, two) in enumerate(shapes) if one != two]
        return self.pool(differing), other.pool(differing)

    def _join(self, other: "Slices") -> "Slices":
        """Both parts together, whose means have one shape."""
        one, two = np.asarray(self.mean), np.asarray(other.mean)
        weight = self.weight + other.weight
        mean, extra = np.empty(one.shape), Marginals(one.shape, 1)
        for block in blocks_of(one.shape, CHUNK):
            apart = two[block] - one[block]
            mean[block] = one[block] + apart * (other.weight / weight if weight else 0.0)
            extra.add(block, np.square(apart)[None] * (self.weight * other.weight / weight if weight else 0.0))
        axes = {}
        for axis in self.axes.keys() & other.axes.keys():
            both = self.axes[axis].merge(other.axes[axis])
            axes[axis] = replace(both, centered_sq=both.centered_sq + extra.over(axis, len(both.count))[0])
        total = self.centered_sq + other.centered_sq + float(extra.total[0])
        reach = None if self.reach is None or other.reach is None else np.maximum(self.reach, other.reach)
        return Slices(dict(sorted(axes.items())), total, self.samples + other.samples, mean, weight, reach)

    def pool(self, over: Sequence[int]) -> "Slices":
        """The slices, which have means, with means that are taken over the axes `over` too."""
        if not over:
            return self
        means = np.asarray(self.mean)
        mean = means.mean(axis=tuple(over), keepdims=True)
        weight = self.weight * math.prod(means.shape[axis] for axis in over)
        after = tuple(axis + 1 for axis in over)
        reach = None if self.reach is None else self.reach.max(axis=after, keepdims=True, initial=-np.inf)
        varied = self._add_variation(np.square(means - mean) * self.weight)
        return replace(varied, mean=mean, weight=weight, reach=reach)

    def _add_variation(self, energy: Array) -> "Slices":
        """The slices with more variation: `energy` for each feature."""
        extra = Marginals(energy.shape, 1)
        extra.add((slice(None),) if energy.ndim else (), energy[None])
        axes = {
            axis: replace(sums, centered_sq=sums.centered_sq + extra.over(axis, len(sums.count))[0])
            for axis, sums in self.axes.items()
        }
        return replace(self, axes=axes, centered_sq=self.centered_sq + float(extra.total[0]))

    def within(self) -> "Slices":
        """The slices with a mean for each index of the last axis; with one for all where each has a single feature."""
        if self.mean is None:
            return self
        rest = tuple(range(self.mean.ndim - 1))
        alone = math.prod(self.mean.shape[axis] for axis in rest) <= 1
        return replace(self.pool(tuple(range(self.mean.ndim)) if alone else rest), reach=self.reach)

    def about(self, usual: "Slices") -> "Slices":
        """The slices of a case of few samples, with the variation about the means of `usual`, the golden set's."""
        if self.mean is None or usual.mean is None or self.mean.ndim != usual.mean.ndim:
            return self.within()
        here, there = self._pool_differing(usual)
        return here._add_variation(np.square(np.asarray(here.mean) - np.asarray(there.mean)) * here.weight)

    def without_means(self) -> "Slices":
        """The slices without their means: a few numbers for each index, however many features there are."""
        return replace(self, mean=None, reach=None)

    @cached_property
    def centered_peaks(self) -> Mapping[int, Array]:
        """By axis the greatest (e - m)^2 of each slice; none without means.

        Of an axis that was averaged over, the greatest of all is that of each of its slices.
        """
        if self.mean is None or self.reach is None:
            return {}
        away = np.square(np.maximum(np.maximum(self.reach[0] + self.mean, self.reach[1] - self.mean), 0.0))
        found = {}
        for axis, sums in self.axes.items():
            rest = tuple(at for at in range(away.ndim) if at != axis)
            found[axis] = np.broadcast_to(away.max(axis=rest, initial=0.0), len(sums.count))
        return found

    def scale(self, factor: float) -> "Slices":
        """The slices of an output whose elements are times `factor`, a power of two."""
        axes = {axis: sums.scale(factor * factor) for axis, sums in self.axes.items()}
        mean = None if self.mean is None else self.mean * factor
        reach = None if self.reach is None else self.reach * factor
        return replace(self, axes=axes, centered_sq=self.centered_sq * factor * factor, mean=mean, reach=reach)


class Marginals:
    """Sums over each slice of every axis, of several arrays of one shape that come in blocks."""

    def __init__(self, shape: Sequence[int], arrays: int) -> None:
        self._shape = tuple(shape)
        self._sums = [np.zeros((arrays, size)) for size in shape]
        self.total = np.zeros(arrays)

    def add(self, block: Block, values: Array) -> None:
        """Add the arrays' values in a block: (arrays, ...), as indexing with the block gives them."""
        if not values.size:
            return
        arrays, fixed = len(self.total), len(block) - 1
        for axis in range(len(self._shape) - 1, max(fixed, 0), -1):
            self._sums[axis] += values.reshape(arrays, -1, self._shape[axis]).sum(axis=1)
            values = values.sum(axis=-1)
        total = values.reshape(arrays, -1).sum(axis=1)
        self.total += total
        if block:
            self._sums[fixed][:, block[fixed]] += values
        for axis in range(fixed):
            self._sums[axis][:, block[axis]] += total

    def over(self, axis: int, size: int) -> Array:
        """The sums of an axis: (arrays, size); an equal share each where `size` indices were averaged to one."""
        sums = self._sums[axis]
        return sums if sums.shape[1] == size else np.repeat(sums.sum(axis=1, keepdims=True) / max(size, 1), size, 1)


def fit_length(values: Array, size: int, filling: float) -> Array:
    """The first `size` values (n,), followed by as many of `filling` as are missing. `numpy.pad` takes 40 us."""
    missing = size - len(values)
    return values[:size] if missing <= 0 else np.concatenate([values, np.full(missing, filling, values.dtype)])
