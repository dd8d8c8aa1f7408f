"""Metrics of slices of outputs, and their limits."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

import numpy as np

from enginesmith.arrays import Array

# The index of a part of an array: an integer for each of the first axes, and a range of the next axis.
Block = tuple[int | slice, ...]


def pairs_of(left: Array, right: Array, size: int) -> Iterator[tuple[Array, Array]]:
    """Flat pieces of two arrays of one shape, in C order, of at most `size` elements; each may be overwritten next."""
    flags = ["external_loop", "buffered", "zerosize_ok"]
    for pair in np.nditer([left, right], flags, buffersize=size, order="C"):  # type: ignore[call-overload]
        if left.size:
            yield pair[0], pair[1]


def blocks_of(shape: Sequence[int], size: int) -> list[Block]:
    """Indices that cut an array into pieces of at most `size` consecutive elements in C order."""
    if not shape:
        return [()]
    row_size = math.prod(shape[1:])
    if row_size <= size:
        step = max(1, size // max(row_size, 1))
        return [(slice(start, min(start + step, shape[0])),) for start in range(0, shape[0], step)]
    return [(index, *tail) for index in range(shape[0]) for tail in blocks_of(shape[1:], size)]


# The drift of each slice of an output, and the output's variation over the samples, as sums that merge.
#
# A slice is one index of one axis: a channel, a class, a column of a table. The batch axis has no slices: its entries
# are samples. A feature is one position in a sample, and m below is its mean over the samples; e is the expected
# output, a the actual one. The first sample is subtracted before summing, and parts are merged by the difference of
# their means (Chan, Golub and LeVeque, "Algorithms for Computing the Sample Variance", 1983): an offset then costs no
# digits.
#
# If two parts differ in the size of an axis (sequences of other lengths), their features do not correspond, and means
# are taken over that axis too. One sample has no variation over the samples; `within` computes that within the sample.

# The number of elements of the means that are merged at a time.
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
        """The sums of both, including indices that only one of them has."""
        size = max(len(self.count), len(other.count))
        pairs = ((getattr(self, field.name), getattr(other, field.name)) for field in fields(self))
        return AxisSums(*(fit_length(one, size, 0.0) + fit_length(two, size, 0.0) for one, two in pairs))

    def scale(self, factor: float) -> "AxisSums":
        """The same sums with energies times `factor`."""
        energies = self.expected_sq * factor, self.centered_sq * factor, self.error_sq * factor
        return AxisSums(*energies, self.magnitude * math.sqrt(factor), self.count)


@dataclass(frozen=True, eq=False)
class Slices:
    """The slices of an output. axes: sums by axis.  centered_sq: of the whole output.  samples: number of samples.

    mean: m of each feature, of the output's rank, with 1 for each axis that was averaged over (the batch, and axes
    whose sizes differed); None after `without_means`.  weight: number of elements averaged in each entry of `mean`.
    reach: the greatest -e and the greatest e of each feature, as an array of (2, *mean.shape); None if `mean` is None.
    """

    axes: Mapping[int, AxisSums]
    centered_sq: float
    samples: int
    mean: Array | None
    weight: float
    reach: Array | None = None

    @property
    def freedom(self) -> float:
        """Degrees of freedom: the number of elements less the number of means; 0 for one sample."""
        return 0.0 if self.mean is None else (self.weight - 1) * self.mean.size

    def merge(self, other: "Slices") -> "Slices | None":
        """The slices of both; None if their ranks differ. Without means, the variation between the two is left out."""
        if self.mean is None or other.mean is None:
            sums = {axis: self.axes[axis].merge(other.axes[axis]) for axis in self.axes.keys() & other.axes.keys()}
            total = self.centered_sq + other.centered_sq
            return Slices(dict(sorted(sums.items())), total, self.samples + other.samples, None, 0.0)
        if self.mean.ndim != other.mean.ndim:
            return None
        own_slices, other_slices = self._pool_differing(other)
        return own_slices._join(other_slices)

    def _pool_differing(self, other: "Slices") -> tuple["Slices", "Slices"]:
        """Both sides, with means taken over the axes whose sizes differ."""
        size_pairs = zip(np.asarray(self.mean).shape, np.asarray(other.mean).shape, strict=True)
        differing_axes = [axis for axis, (size, other_size) in enumerate(size_pairs) if size != other_size]
        return self.pool(differing_axes), other.pool(differing_axes)

    def _join(self, other: "Slices") -> "Slices":
        """The slices of both sides together; their means have one shape."""
        own_mean, other_mean = np.asarray(self.mean), np.asarray(other.mean)
        weight = self.weight + other.weight
        mean, marginals = np.empty(own_mean.shape), Marginals(own_mean.shape, 1)
        for block in blocks_of(own_mean.shape, CHUNK):
            mean_gap = other_mean[block] - own_mean[block]
            mean[block] = own_mean[block] + mean_gap * (other.weight / weight if weight else 0.0)
            marginals.add(block, np.square(mean_gap)[None] * (self.weight * other.weight / weight if weight else 0.0))
        axes = {}
        for axis in self.axes.keys() & other.axes.keys():
            sums = self.axes[axis].merge(other.axes[axis])
            axes[axis] = replace(sums, centered_sq=sums.centered_sq + marginals.over(axis, len(sums.count))[0])
        total = self.centered_sq + other.centered_sq + float(marginals.total[0])
        reach = None if self.reach is None or other.reach is None else np.maximum(self.reach, other.reach)
        return Slices(dict(sorted(axes.items())), total, self.samples + other.samples, mean, weight, reach)

    def pool(self, over: Sequence[int]) -> "Slices":
        """The slices with means that are also taken over the axes `over`. The slices must have means."""
        if not over:
            return self
        means = np.asarray(self.mean)
        count = math.prod(means.shape[axis] for axis in over)
        mean, weight = means.sum(axis=tuple(over), keepdims=True) / max(count, 1), self.weight * count
        reduced_axes = tuple(axis + 1 for axis in over)
        reach = None if self.reach is None else self.reach.max(axis=reduced_axes, keepdims=True, initial=-np.inf)
        varied_slices = self._add_variation(np.square(means - mean) * self.weight)
        return replace(varied_slices, mean=mean, weight=weight, reach=reach)

    def _add_variation(self, energy: Array) -> "Slices":
        """The slices with `energy`, an array by feature, added to the variation."""
        marginals = Marginals(energy.shape, 1)
        marginals.add((slice(None),) if energy.ndim else (), energy[None])
        axes = {
            axis: replace(sums, centered_sq=sums.centered_sq + marginals.over(axis, len(sums.count))[0])
            for axis, sums in self.axes.items()
        }
        return replace(self, axes=axes, centered_sq=self.centered_sq + float(marginals.total[0]))

    def within(self) -> "Slices":
        """The slices with one mean per index of the last axis; with a single mean if each index has one feature."""
        if self.mean is None:
            return self
        lead_axes = tuple(range(self.mean.ndim - 1))
        is_single = math.prod(self.mean.shape[axis] for axis in lead_axes) <= 1
        return replace(self.pool(tuple(range(self.mean.ndim)) if is_single else lead_axes), reach=self.reach)

    def about(self, usual: "Slices") -> "Slices":
        """The slices of a case of few samples, with the variation about the means of the golden set's `usual`."""
        if self.mean is None or usual.mean is None or self.mean.ndim != usual.mean.ndim:
            return self.within()
        slices, usual_slices = self._pool_differing(usual)
        return slices._add_variation(np.square(np.asarray(slices.mean) - np.asarray(usual_slices.mean)) * slices.weight)

    def without_means(self) -> "Slices":
        """The slices without their means: a few numbers for each index, for any number of features."""
        return replace(self, mean=None, reach=None)

    @cached_property
    def centered_peaks(self) -> Mapping[int, Array]:
        """The greatest (e - m)^2 of each slice, by axis; {} without means.

        All slices of an averaged axis have the greatest value of that axis.
        """
        if self.mean is None or self.reach is None:
            return {}
        deviation_sq = np.square(np.maximum(np.maximum(self.reach[0] + self.mean, self.reach[1] - self.mean), 0.0))
        peaks = {}
        for axis, sums in self.axes.items():
            other_axes = tuple(index for index in range(deviation_sq.ndim) if index != axis)
            peaks[axis] = np.broadcast_to(deviation_sq.max(axis=other_axes, initial=0.0), len(sums.count))
        return peaks

    def scale(self, factor: float) -> "Slices":
        """The slices of the same output with all elements times `factor`, a power of two."""
        axis_sums = {axis: sums.scale(factor * factor) for axis, sums in self.axes.items()}
        mean = None if self.mean is None else self.mean * factor
        reach = None if self.reach is None else self.reach * factor
        return replace(self, axes=axis_sums, centered_sq=self.centered_sq * factor * factor, mean=mean, reach=reach)


class Marginals:
    """Sums over each slice of every axis, for several arrays of one shape that are added in blocks."""

    def __init__(self, shape: Sequence[int], arrays: int) -> None:
        self._shape = tuple(shape)
        self._sums = [np.zeros((arrays, size)) for size in shape]
        self.total = np.zeros(arrays)

    def add(self, block: Block, values: Array) -> None:
        """Add the arrays' values in a block: (arrays, ...), where each array is indexed by the block."""
        if not values.size:
            return
        array_count, lead_count = len(self.total), len(block) - 1
        for axis in range(len(self._shape) - 1, max(lead_count, 0), -1):
            self._sums[axis] += values.reshape(array_count, -1, self._shape[axis]).sum(axis=1)
            values = values.sum(axis=-1)
        total = values.reshape(array_count, -1).sum(axis=1)
        self.total += total
        if block:
            self._sums[lead_count][:, block[lead_count]] += values
        for axis in range(lead_count):
            self._sums[axis][:, block[axis]] += total

    def over(self, axis: int, size: int) -> Array:
        """The sums of an axis: (arrays, size); if its `size` indices were averaged to one, equal shares of the sum."""
        sums = self._sums[axis]
        return sums if sums.shape[1] == size else np.repeat(sums.sum(axis=1, keepdims=True) / max(size, 1), size, 1)


def fit_length(values: Array, size: int, filling: float) -> Array:
    """The first `size` values (n,), padded with `filling` up to `size` (`numpy.pad` takes 40 us)."""
    gap = size - len(values)
    return values[:size] if gap <= 0 else np.concatenate([values, np.full(gap, filling, values.dtype)])


# Finds the worst slice of an output: the one with the greatest error relative to its allowed error.
#
# The allowed error energy of a slice is the lesser of two: its own energy, lowered by the limit in decibels; and half
# of its variation about the means of its features, since an offset is no signal. If honest rounding is known, the first
# is at least four times the error of an honest kernel (twice the amplitude), or 16 times if a graph is compared with
# its source graph. The second has the same lower bound at the engine stage; at other stages the expected output is not
# rounded, and all of its variation is signal. It also has that bound for faint slices: among `MANY` slices up to
# `FAINT_OF_MANY` of the output's mean variation, such as one of thousands of classes that no sample is close to. Among
# `MANY` slices, the worst, one in `ONE_OF`, may exceed honest rounding further by chance (`CHANCE_MARGIN`). Exceptions:
#
# - a slice of fewer than `FEWEST` elements is not judged: among a thousand slices of one element, some are near zero.
# - a slice that is nearly zero (up to `DEAD` of the output's mean energy: a millionth of its amplitude) may be the
#   remainder of a cancellation: its error is measured against the output's mean energy.
# - a slice whose energy is that of fewer than `SEVERAL` elements, such as a column with one element after Relu, has a
#   random energy: its error is measured against the output's mean energy if that is more. The number of elements is
#   the participation ratio (sum |e|)^2 / sum e^2, which is the count of nonzero elements if these are equal. Edge cases
#   use the ratio of the golden set.
# - the variation is not judged for such slices, nor if a single element contributes more than half of it (a column that
#   is clamped to one number in all but one sample): an error of that element would be half of the variation.
# - the variation is not judged if it is at most the rounding of the slice or of the output's peak (a Sigmoid near 0 has
#   errors in units of 1).
# - under a limit below `FINE_DB` without measured rounding, a variation below `COARSE` of the output's mean is not
#   judged: the logit of a class that no sample has varies by less than a step of 8 bits.
#
# An index without measured honest rounding, such as in an image larger than the golden images, has the greatest honest
# rounding of the measured indices.

# The least number of elements of a slice that is judged.
FEWEST = 16
# The least number of elements that contribute a slice's energy. For 48 normal numbers after Relu with an error of a
# tenth of their deviation, 18 % of sparser slices are within 8 dB of the error; of slices with eight elements or more
# 0.004 %. Sixteen normal numbers count as eight or more in 97 %.
SEVERAL = 8.0
# The share of the output's mean energy up to which a slice counts as zero.
DEAD = 1e-12
# With a limit of FINE_DB or more, every variation is judged, even without measured rounding. With a lower limit, a
# variation is judged from the share COARSE of the output's mean variation on (a quarter of its amplitude).
FINE_DB, COARSE = 15.0, 0.05
# The share of a slice's variation that its error energy may reach: half of the variation is then explained.
VARIATION = 0.5
# Up to these shares of the output's mean variation, honest rounding may lose a slice's variation: FAINT if it is also
# that share of the slice's energy (a class of padding that is always near -13.7), FAINT_OF_MANY on an axis with MANY
# slices. Of 6,625 classes of a text recogniser's softmax, honest fp16 rounding loses some 170, the strongest with
# 3.5e-6, a probability of 1.3e-4 at most. Scores of some eighty classes beside boxes are as faint, but vary with the
# boxes' size, and must not be lost.
FAINT, FAINT_OF_MANY, MANY = 1e-6, 1e-5, 256
# Factors of energy over honest rounding: of an engine over an honest kernel (twice the amplitude), and of a graph over
# its source: another way of rounding a graph may double the amplitude again in a few samples.
HONEST_MARGIN, CAST_MARGIN = 4.0, 16.0
# With MANY slices or more, the worst, one in ONE_OF, have the factor CHANCE_MARGIN. Of twenty draws of honest fp16
# rounding in a text recogniser (6,625 classes), one exceeds four times the worst of four others in 2 classes (median;
# 15 in one of a hundred draws, 38 at most), and the worst itself by a factor of 87 at most.
ONE_OF, CHANCE_MARGIN = 100, 100.0
# The factor of energy for an edge case, which is a few samples, tiled: the squared error of a slice of four elements
# exceeds six times its mean in one case of ten thousand (chi-squared with four degrees of freedom).
EDGE_MARGIN = 10.0


@dataclass(frozen=True)
class WorstSlice:
    """A slice and its SQNR. limit_db: the least SQNR that passes; None without a limit.

    of_variation: whether the limit follows from the slice's variation and is broken.
    """

    axis: int
    index: int
    sqnr_db: float
    limit_db: float | None = None
    of_variation: bool = False

    @property
    def margin_db(self) -> float:
        """The SQNR less the limit, in decibels; the SQNR itself without a limit."""
        return math.inf if self.sqnr_db == math.inf else self.sqnr_db - (self.limit_db or 0.0)

    def __str__(self) -> str:
        suffix = ", less than half of its variation is explained" if self.of_variation else ""
        return f"axis {self.axis}, index {self.index}{suffix}"


def worst_slice(
    slices: Slices,
    limit: float | None,
    usual: Slices | None = None,
    honest: Slices | None = None,
    still: float = DEAD,
    rounded: bool = True,
    peak: float = 0.0,
) -> WorstSlice | None:
    """The slice with the lowest SQNR relative to its limit; None if no slice can be judged.

    limit: the least SQNR of slices in decibels; None: no limit.  usual: slices of the golden set, for a case of few
    samples: a slice has at least its energy in the golden set, and the error may be EDGE_MARGIN times as large.
    honest: slices of an honest kernel's errors.  still: share of a slice's energy up to which its variation is
    rounding.  rounded: whether the expected output was rounded to the same precision: all of its variation may then be
    honest rounding.  peak: the output's greatest magnitude; variation up to `still` of its square is rounding too.
    """
    worst_slices = []
    for axis, sums in slices.axes.items():
        indices = np.flatnonzero(sums.count >= FEWEST)
        if not len(indices):
            continue
        masks = _is_spread(slices if usual is None else usual, axis, len(sums.count))
        usual_sums, honest_sums = (
            noise_slices.axes.get(axis) if noise_slices else None for noise_slices in (usual, honest)
        )
        sqnr_db, limits, loss_mask = _values(
            sums, limit, usual_sums, honest_sums, (still, still * peak * peak), rounded, masks
        )
        with np.errstate(invalid="ignore"):
            margins = np.where(sums.error_sq == 0, math.inf, sqnr_db - limits)
        index = int(indices[np.argmin(margins[indices])])
        slice_limit = None if limit is None else float(limits[index])
        worst_slices.append(WorstSlice(axis, index, float(sqnr_db[index]), slice_limit, bool(loss_mask[index])))
    return min(worst_slices, key=lambda candidate: candidate.margin_db, default=None)


def _values(
    sums: AxisSums,
    limit: float | None,
    usual: AxisSums | None,
    honest: AxisSums | None,
    still: tuple[float, float],
    is_rounded: bool,
    spread: tuple[Array, Array],
) -> tuple[Array, Array, Array]:
    """For each slice (size,): its SQNR and its limit in decibels, and whether its variation sets the limit and is lost.

    still: the share of a slice's energy, and the energy per element, up to which its variation is rounding.
    spread: as `_is_spread` returns it.
    """
    energy = _at_least("expected_sq", sums, usual)
    mean = float(energy.sum() / sums.count.sum())
    dead_mask = energy <= DEAD * mean * sums.count
    signal = np.where(dead_mask | ~spread[0], np.maximum(energy, mean * sums.count), energy)
    sqnr_db = _decibels(signal, sums.error_sq)
    if limit is None:
        return sqnr_db, np.zeros(len(signal)), np.zeros(len(signal), bool)
    error_energies = np.zeros(1) if honest is None else _per_element("error_sq", honest, len(honest.count))
    honest_errors = fit_length(error_energies, len(signal), float(error_energies.max(initial=0.0))) * sums.count
    rounding_errors = honest_errors * (HONEST_MARGIN if is_rounded else CAST_MARGIN)
    allowance = np.maximum(signal * 10 ** (-limit / 10), rounding_errors)
    if len(allowance) >= MANY:
        indices = np.argsort(sums.error_sq / np.maximum(allowance, np.finfo(float).tiny))[-(len(allowance) // ONE_OF) :]
        allowance[indices] = np.maximum(allowance, CHANCE_MARGIN * honest_errors)[indices]
    allowance *= 1.0 if usual is None else EDGE_MARGIN
    variation = _at_least("centered_sq", sums, usual)
    rounding_mask = variation <= np.maximum(still[0] * energy, still[1] * sums.count)
    usual_variation = float(variation.sum() / sums.count.sum()) * sums.count
    visible_mask = (honest is not None or limit >= FINE_DB) | (variation >= COARSE * usual_variation)
    varied_mask = ~dead_mask & spread[1] & ~rounding_mask & visible_mask
    faint_variation = np.minimum(FAINT * energy, FAINT * usual_variation)
    if len(signal) >= MANY:
        faint_variation = FAINT_OF_MANY * usual_variation
    lossy_mask = is_rounded | (variation <= faint_variation)
    loss_limit = np.where(
        varied_mask, np.maximum(VARIATION * variation, np.where(lossy_mask, rounding_errors, 0.0)), math.inf
    )
    loss_mask = (loss_limit < allowance) & (loss_limit < sums.error_sq)
    return sqnr_db, _decibels(signal, np.minimum(allowance, loss_limit)), loss_mask


def _is_spread(slices: Slices, axis: int, size: int) -> tuple[Array, Array]:
    """For each slice: whether several elements contribute its energy, and its variation; True if unknown."""
    sums, peak = slices.axes.get(axis), slices.centered_peaks.get(axis)
    if sums is None:
        return np.ones(size, bool), np.ones(size, bool)
    energy_mask = np.square(sums.magnitude) >= SEVERAL * sums.expected_sq
    variation_mask = energy_mask if peak is None else energy_mask & (VARIATION * sums.centered_sq >= peak)
    return fit_length(energy_mask, size, True), fit_length(variation_mask, size, True)


def _at_least(name: str, sums: AxisSums, usual: AxisSums | None) -> Array:
    """The energy of each slice, at least that of as many elements of the golden set's slice `usual`."""
    energy: Array = getattr(sums, name)
    return np.asarray(np.maximum(energy, _per_element(name, usual, len(energy)) * sums.count))


def _per_element(name: str, sums: AxisSums | None, size: int) -> Array:
    """The energy per element of the first `size` slices; 0 for missing ones."""
    if sums is None:
        return np.zeros(size)
    energy: Array = getattr(sums, name)
    return fit_length(np.divide(energy, sums.count, out=np.zeros(len(energy)), where=sums.count > 0), size, 0.0)


def _decibels(signal: Array, error_sq: Array) -> Array:
    with np.errstate(divide="ignore", invalid="ignore"):
        sqnr_db = 10 * np.log10(signal / error_sq)
    return np.where(error_sq == 0, math.inf, np.where(np.isnan(sqnr_db), -math.inf, sqnr_db))
