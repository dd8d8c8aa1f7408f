"""Which slice of an output is off most, measured against the error that it is allowed.

The allowed error energy of a slice is the least of two: its own energy, lowered by the limit in decibels; and half of
its variation about the means of its features, since an offset is no signal. Where honest rounding is known, it is at
least four times what an honest kernel of the precision adds to the slice (twice the amplitude), and 16 times where a
graph is compared with the one that it was made of; the half of the variation is raised so only at the engine stage,
because elsewhere the expected output is not rounded and all of its variation is signal, and of a faint slice among many
(`FAINT` of the output's mean variation, `MANY` slices: a class of thousands that no sample comes near). Of so many
slices the worst, one of `ONE_OF`, may exceed honest rounding further by chance (`CHANCE_MARGIN`). The ratio says
nothing in these cases, which are judged otherwise:

- a slice of fewer than `FEWEST` elements is not judged: among a thousand slices of one element, some are near zero.
- a slice that is zero or nearly so (`DEAD` of the output's mean energy: a millionth of its amplitude), where
  cancellation leaves a rounding of the rest: its error is measured against the output's mean energy.
- a slice whose energy is that of fewer than `SEVERAL` elements, as of a column of which Relu leaves one, so that its
  energy is chance: its error is measured against the output's mean energy too, where that is more. The number of
  elements is the participation ratio (sum |e|)^2 / sum e^2, their count where all that are not zero are equal. At an
  edge it is the golden set's.
- the variation is not judged of such slices, nor of one to which a single element contributes more than half (a column
  that is clamped to the same number but once): that element off is half of the variation.
- nor is it of a slice that varies by no more than its rounding or that of the output's peak (a Sigmoid near 0 is off by
  units of 1); nor of any under a limit below `FINE_DB` without
  measured rounding: the logit of a class that no sample shows varies by less than a step of 8 bits.

At an index that honest rounding was not measured at, as of an image larger than the golden ones, it counts as the
greatest of those that it was.
"""

import math
from dataclasses import dataclass

import numpy as np

from enginesmith.arrays import Array
from validation.metrics.slices import AxisSums, Slices, fit_length

# The least number of elements of a slice that is judged.
FEWEST = 16
# The least number of elements that a slice's energy comes from. Of 48 normal numbers behind Relu, where the error is a
# tenth of their deviation, 18 % of the sparse slices are within 8 dB of it; of those of eight elements or more 0.004 %.
# Sixteen normal numbers count as eight or more in 97 %.
SEVERAL = 8.0
# The share of the output's mean energy up to which a slice counts as zero.
DEAD = 1e-12
# The least limit under which a variation is judged without measured rounding.
FINE_DB = 15.0
# The share of a slice's variation that its error energy may reach: then half of what varies is explained.
VARIATION = 0.5
# The share of the output's mean variation up to which a slice's may be lost to honest rounding (a thousandth of its
# amplitude), where an axis has so many: scores of some eighty classes beside boxes are as faint, and may not.
FAINT, MANY = 1e-6, 256
# The factor of energy over the errors of an honest kernel: twice their amplitude; and of a graph that is rounded in one
# way, which in a few samples may be as far off again.
HONEST_MARGIN, CAST_MARGIN = 4.0, 16.0
# The factor for the worst of MANY slices or more, one of so many. Of twenty draws of honest fp16 rounding in a text
# recogniser (6,625 classes), one exceeds four times the worst of four others in 2 classes (median; 15 in one of a
# hundred draws, 38 at most), and the worst itself by a factor of 87 at most.
ONE_OF, CHANCE_MARGIN = 100, 100.0
# The factor of energy for an edge case, which is a few samples, tiled: the squared error of a slice of four elements
# exceeds six times its mean in one case of ten thousand (chi-squared with four degrees of freedom).
EDGE_MARGIN = 10.0


@dataclass(frozen=True)
class WorstSlice:
    """A slice and its SQNR. limit_db: the SQNR that it must have; None without a limit.

    of_variation: whether the limit follows from its variation and is broken: more than half of that is lost.
    """

    axis: int
    index: int
    sqnr_db: float
    limit_db: float | None = None
    of_variation: bool = False

    @property
    def margin_db(self) -> float:
        """The SQNR less the limit, in decibels; the SQNR itself without one."""
        return math.inf if self.sqnr_db == math.inf else self.sqnr_db - (self.limit_db or 0.0)

    def __str__(self) -> str:
        more = ", less than half of its variation is explained" if self.of_variation else ""
        return f"axis {self.axis}, index {self.index}{more}"


def worst_slice(
    slices: Slices,
    limit: float | None,
    usual: Slices | None = None,
    honest: Slices | None = None,
    still: float = DEAD,
    rounded: bool = True,
    peak: float = 0.0,
) -> WorstSlice | None:
    """The slice with the least SQNR beyond its limit; None where no slice can be judged.

    limit: the SQNR in decibels that slices should have; None: only measured.  usual: slices of the golden set, for a
    case of few samples: a slice has at least its energy there, and its error may be EDGE_MARGIN times as large.
    honest: slices of an honest kernel's errors.  still: share of a slice's energy up to which its variation is
    rounding.  rounded: whether the expected output was rounded to the same precision, so that all of its variation may
    be honest rounding.  peak: the output's greatest magnitude; up to `still` of its square a variation is rounding too.
    """
    found = []
    for axis, sums in slices.axes.items():
        judged = np.flatnonzero(sums.count >= FEWEST)
        if not len(judged):
            continue
        shared = _is_spread(slices if usual is None else usual, axis, len(sums.count))
        known, made = (part.axes.get(axis) if part else None for part in (usual, honest))
        sqnr_db, limits, lost = _values(sums, limit, known, made, (still, still * peak * peak), rounded, shared)
        with np.errstate(invalid="ignore"):
            margins = np.where(sums.error_sq == 0, math.inf, sqnr_db - limits)
        worst = int(judged[np.argmin(margins[judged])])
        asked = None if limit is None else float(limits[worst])
        found.append(WorstSlice(axis, worst, float(sqnr_db[worst]), asked, bool(lost[worst])))
    return min(found, key=lambda item: item.margin_db, default=None)


def _values(
    sums: AxisSums,
    limit: float | None,
    usual: AxisSums | None,
    honest: AxisSums | None,
    still: tuple[float, float],
    rounded: bool,
    shared: tuple[Array, Array],
) -> tuple[Array, Array, Array]:
    """For each slice (size,): its SQNR and its limit in decibels, and whether its variation sets the limit and is lost.

    still: the share of its energy, and the energy per element, up to which a slice's variation is rounding.  shared: as
    `_is_spread` gives it.
    """
    energy = _at_least("expected_sq", sums, usual)
    mean = float(energy.sum() / sums.count.sum())
    dead = energy <= DEAD * mean * sums.count
    signal = np.where(dead | ~shared[0], np.maximum(energy, mean * sums.count), energy)
    sqnr_db = _decibels(signal, sums.error_sq)
    if limit is None:
        return sqnr_db, np.zeros(len(signal)), np.zeros(len(signal), bool)
    known = np.zeros(1) if honest is None else _per_element("error_sq", honest, len(honest.count))
    made = fit_length(known, len(signal), float(known.max(initial=0.0))) * sums.count
    rounding = made * (HONEST_MARGIN if rounded else CAST_MARGIN)
    allowed = np.maximum(signal * 10 ** (-limit / 10), rounding)
    if len(allowed) >= MANY:
        chance = np.argsort(sums.error_sq / np.maximum(allowed, np.finfo(float).tiny))[-(len(allowed) // ONE_OF) :]
        allowed[chance] = np.maximum(allowed, CHANCE_MARGIN * made)[chance]
    allowed *= 1.0 if usual is None else EDGE_MARGIN
    variation = _at_least("centered_sq", sums, usual)
    rounds = variation <= np.maximum(still[0] * energy, still[1] * sums.count)
    varies = ~dead & shared[1] & ~rounds & (honest is not None or limit >= FINE_DB)
    faint = variation <= FAINT * float(variation.sum() / sums.count.sum()) * sums.count
    lossy = rounded | (faint & (len(signal) >= MANY))
    half = np.where(varies, np.maximum(VARIATION * variation, np.where(lossy, rounding, 0.0)), math.inf)
    lost = (half < allowed) & (half < sums.error_sq)
    return sqnr_db, _decibels(signal, np.minimum(allowed, half)), lost


def _is_spread(slices: Slices, axis: int, size: int) -> tuple[Array, Array]:
    """For each slice, whether its energy and whether its variation is that of several elements; True where unknown."""
    sums, peak = slices.axes.get(axis), slices.centered_peaks.get(axis)
    if sums is None:
        return np.ones(size, bool), np.ones(size, bool)
    energy = np.square(sums.magnitude) >= SEVERAL * sums.expected_sq
    variation = energy if peak is None else energy & (VARIATION * sums.centered_sq >= peak)
    return fit_length(energy, size, True), fit_length(variation, size, True)


def _at_least(name: str, sums: AxisSums, usual: AxisSums | None) -> Array:
    """The energy of each slice, at least that of as many elements of the golden set."""
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
        found = 10 * np.log10(signal / error_sq)
    return np.where(error_sq == 0, math.inf, np.where(np.isnan(found), -math.inf, found))
