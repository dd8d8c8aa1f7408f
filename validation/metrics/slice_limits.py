"""Which slice of an output is off most, measured against what it is allowed.

The error energy of a slice may be its own energy, less the limit in decibels, and half of its own variation about the
means of its features (an offset is no signal); or four times (twice the amplitude) what an honest kernel of the
precision adds to it, where that is more (of the variation only at the engine joint: elsewhere the expected output is
not rounded, and all that varies is signal). Not judged so, because the ratio says nothing there:

- a slice of fewer than `FEWEST` elements: among a thousand slices of one element each, some element is near zero.
- a slice that is zero or nearly so (`DEAD` of the output's mean energy: a millionth of its amplitude): cancellation
  leaves a rounding of the rest there. Its error is measured against the output's mean energy instead.
- a slice whose energy is that of fewer than `SEVERAL` elements, as of a column of which Relu leaves one: how large
  that is is chance. Its error is measured against the output's mean energy too, where that is more. Elements count by
  the participation ratio (sum |e|)^2 / sum e^2, which is their number where all that are not zero are equal. At an edge
  the golden set says how many there are.
- the variation of such a slice, and one of which a single element is more than half (a column that a limit holds at the
  same number but once): that element off is half of the variation lost.
- the variation of a slice that varies by no more than its rounding; and, under a limit below `FINE_DB` without a
  measured rounding, any: the logit of a class that no sample shows varies by less than a step of 8 bits.
"""

import math
from dataclasses import dataclass

import numpy as np

from enginery.arrays import Array
from validation.metrics.slices import AxisSums, Slices

FEWEST = 16
# Of 48 normal numbers behind Relu, where the error is a tenth of their deviation, 18 % of the sparse slices are within
# 8 dB of it; of those of eight elements or more 0.004 %. Sixteen normal numbers count as eight or more in 97 %.
SEVERAL = 8.0
DEAD = 1e-12
FINE_DB = 15.0
# Of energy: an answer that explains less than half of what varies is none.
VARIATION = 0.5
# Of energy: twice the amplitude of the error that an honest kernel makes.
HONEST_MARGIN = 4.0
# Of energy: an edge is a few samples, tiled. The squared error of a slice of four elements exceeds six times its mean
# in one case of ten thousand (chi-squared with four degrees of freedom).
EDGE_MARGIN = 10.0


@dataclass(frozen=True)
class WorstSlice:
    """limit_db: the SQNR that this slice is held to; None without a limit.  of_variation: whether more than half of its
    variation is lost, which sets the limit."""

    axis: int
    index: int
    sqnr_db: float
    limit_db: float | None = None
    of_variation: bool = False

    @property
    def margin_db(self) -> float:
        """SQNR beyond the limit; the SQNR itself without one."""
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
) -> WorstSlice | None:
    """The slice that is worst against what it is allowed; None where none can be judged.

    limit: SQNR in decibels that each should have; None: only measured.  usual: of the golden set, for a case that holds
    few samples: a slice has at least the energy that it has there, and may be worse by EDGE_MARGIN.  honest: errors of
    an honest kernel.  still: share of a slice's energy below which its variation is rounding.  rounded: whether the
    expected output was rounded to the same precision, so that honest rounding may be all that varies.
    """
    found = []
    for axis, sums in slices.axes.items():
        judged = np.flatnonzero(sums.count >= FEWEST)
        if not len(judged):
            continue
        shared = _is_spread(slices if usual is None else usual, axis, len(sums.count))
        sqnr_db, limits, lost = _values(sums, limit, _axis(usual, axis), _axis(honest, axis), still, rounded, shared)
        with np.errstate(invalid="ignore"):
            margins = np.where(sums.error_sq == 0, math.inf, sqnr_db - limits)
        worst = int(judged[np.argmin(margins[judged])])
        asked = None if limit is None else float(limits[worst])
        found.append(WorstSlice(axis, worst, float(sqnr_db[worst]), asked, bool(lost[worst])))
    return min(found, key=lambda item: item.margin_db, default=None)


def _axis(slices: Slices | None, axis: int) -> AxisSums | None:
    return slices.axes.get(axis) if slices else None


def _values(
    sums: AxisSums,
    limit: float | None,
    usual: AxisSums | None,
    honest: AxisSums | None,
    still: float,
    rounded: bool,
    shared: tuple[Array, Array],
) -> tuple[Array, Array, Array]:
    """Per slice the SQNR, its limit, and whether its variation sets that limit and is lost. shared: of `_is_spread`."""
    energy = _at_least("expected_sq", sums, usual)
    mean = float(energy.sum() / sums.count.sum())
    dead = energy <= DEAD * mean * sums.count
    signal = np.where(dead | ~shared[0], np.maximum(energy, mean * sums.count), energy)
    sqnr_db = _decibels(signal, sums.error_sq)
    if limit is None:
        return sqnr_db, np.zeros(len(signal)), np.zeros(len(signal), bool)
    rounding = HONEST_MARGIN * _per_element("error_sq", honest, len(signal)) * sums.count
    allowed = np.maximum(signal * 10 ** (-limit / 10), rounding) * (1.0 if usual is None else EDGE_MARGIN)
    variation = _at_least("centered_sq", sums, usual)
    varies = ~dead & shared[1] & (variation > still * energy) & (honest is not None or limit >= FINE_DB)
    half = np.where(varies, np.maximum(VARIATION * variation, rounding if rounded else 0.0), math.inf)
    lost = (half < allowed) & (half < sums.error_sq)
    return sqnr_db, _decibels(signal, np.minimum(allowed, half)), lost


def _is_spread(slices: Slices, axis: int, size: int) -> tuple[Array, Array]:
    """Whether the energy of each slice, and whether its variation, is that of several elements; so where not known."""
    sums, peak = _axis(slices, axis), slices.centered_peaks.get(axis)
    if sums is None:
        return np.ones(size, bool), np.ones(size, bool)
    energy = np.square(sums.magnitude) >= SEVERAL * sums.expected_sq
    variation = energy if peak is None else energy & (VARIATION * sums.centered_sq >= peak)
    return _pad_or_cut(energy, size, True), _pad_or_cut(variation, size, True)


def _at_least(name: str, sums: AxisSums, usual: AxisSums | None) -> Array:
    """Energy of each slice, and no less than as many elements usually have."""
    energy: Array = getattr(sums, name)
    return np.asarray(np.maximum(energy, _per_element(name, usual, len(energy)) * sums.count))


def _per_element(name: str, sums: AxisSums | None, size: int) -> Array:
    """Energy per element of the first `size` slices; 0 for those that are not there."""
    if sums is None:
        return np.zeros(size)
    energy: Array = getattr(sums, name)
    return _pad_or_cut(np.divide(energy, sums.count, out=np.zeros(len(energy)), where=sums.count > 0), size, 0.0)


def _pad_or_cut(values: Array, size: int, filling: float) -> Array:
    """The first values, and as many of another one as are missing: `numpy.pad`, which takes 40 us."""
    missing = size - len(values)
    return values[:size] if missing <= 0 else np.concatenate([values, np.full(missing, filling, values.dtype)])


def _decibels(signal: Array, error_sq: Array) -> Array:
    with np.errstate(divide="ignore", invalid="ignore"):
        found = 10 * np.log10(signal / error_sq)
    return np.where(error_sq == 0, math.inf, np.where(np.isnan(found), -math.inf, found))
