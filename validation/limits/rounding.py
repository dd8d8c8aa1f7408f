"""What rounding by an honest kernel changes in a graph's outputs, as values that an engine's limits follow from."""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core.reports.proof import DECISIONS
from validation.metrics.drift import Drift
from validation.metrics.slices import HONEST_MARGIN, AxisSums, Slices, fit_length
from validation.statistics.rates import lower, upper
from validation.statistics.serial_dependence import beta_cdf

# The factor allowed over the measured number of changed integers: like the other errors of honest rounding, near ties
# fall to the other side in proportion to the error's amplitude.
MARGIN = 2
# Elements that one near tie changes where there are several: two change places. Of few elements that is at most one of
# LEAST_OF or part of it, and no more than half: that of one sample alone could have any answer.
PAIR, LEAST_OF = 2, 8
# The chance that a bound is wrong: one engine in a hundred.
LEVEL = 0.01
# Agreement where honest rounding changes nothing.
MOST = 1.0

# Of all decisions of a quantized graph at most this share may be others than the model's, as far as its data shows with
# a chance of LEVEL to be wrong (Clopper and Pearson, Biometrika 26, 1934): one near tie of 48 is 2 %.
MOST_CHANGED = 0.01
# The share of near ties that a single class may have.
CHANCE = 0.1


@dataclass(frozen=True)
class NearTies:
    """The limit on changed integers of a quantized graph. Quantization changes near ties, so some integers may change:
    as many as do not show, at the level LEVEL, that more than `MOST_CHANGED` of all would."""

    def limit(self, kind: str, elements: int) -> float:  # noqa: ARG002 - the same in every kind of case
        """The share of equal elements that a case of so many must have."""
        counts = range(1, elements + 1)
        allowance = bisect_right(counts, MOST_CHANGED, key=lambda count: lower(count, elements, LEVEL))
        return math.floor(1e4 * (1 - allowance / elements)) / 1e4 if elements else 1.0

    def __str__(self) -> str:
        return (
            f"quantization changes near ties: at most {MOST_CHANGED:.0%} of all integers may change, as far as the "
            f"data shows; {DECISIONS} in validation.limits sets another limit"
        )


@dataclass(frozen=True)
class Decisions:
    """How many integers of one output honest rounding changes in the golden cases, by the way to round that changes
    most, and the agreement that an engine must have.

    changed, elements: of the measured cases.  together: the most that changed in one sample, since one near tie may
    move all that is sorted behind it.  unmeasured: elements of the other golden cases.  case: elements of one case; 0
    where all measured ones are one case.
    """

    changed: int
    elements: int
    together: int = 1
    unmeasured: int = 0
    case: int = 0

    def limit(self, kind: str, elements: int) -> float:
        """The share of equal elements that an engine must have in a case of `elements` elements, at most MOST.

        kind: 'golden' or 'edge'. Edges are made of the golden samples, so they hold no near tie where those hold none.
        Otherwise as many elements may change as do in 99 of 100 edges (binomial distribution with the golden cases'
        share), for each repetition of a case in a larger edge.
        """
        allowance = 0.0
        if kind == "golden":
            allowance = self.share
        elif elements and (self.changed or self.unmeasured):
            case_size = min(elements, self.case or self.elements)
            tie_count = math.ceil(case_size / self.together)
            flags = (beta_cdf(self.share, count + 1.0, float(tie_count - count)) <= LEVEL for count in range(tie_count))
            bound = self.together * next((count for count, is_rare in enumerate(flags) if is_rare), tie_count)
            allowance = min(case_size, bound) / case_size
        return math.floor(1e4 * (MOST - allowance)) / 1e4

    @property
    def share(self) -> float:
        """The share of the golden cases' elements that may change.

        Of the measured elements: twice as many as changed, and one near tie more if they are not few. Of the others:
        the upper bound of Clopper and Pearson (Biometrika 26, 1934), because no near tie among few elements does not
        prove that the rest has none. Elements that change together count as one observation, as a design effect of that
        size (Korn and Graubard, Survey Methodology 24, 1998).
        """
        if not self.elements:
            return 1.0
        tie_size = min(max(self.together, PAIR), -(-self.elements // LEAST_OF), self.elements // 2)
        changed_bound = max(MARGIN * self.changed, self.changed + tie_size)
        unmeasured_share = upper(self.changed / self.together, self.elements / self.together, LEVEL) * self.unmeasured
        return min(1.0, (changed_bound + unmeasured_share) / (self.elements + self.unmeasured))

    def __str__(self) -> str:
        summary = f"honest rounding changes {self.changed} of {self.elements} elements"
        return f"{summary}; twice as many may change, and at least one near tie more"


# The normal quantile of 0.999, in standard errors, and what the other sample adds (`_chance`).
_THOUSANDTH, _OTHER = 3.09, 1.3
# `sqnr_of_most` leaves out one of ONE_OF samples, less LESS; it needs FEWEST_SAMPLES.
ONE_OF, LESS, FEWEST_SAMPLES = 8, 2, 16


@dataclass(frozen=True)
class Honest:
    """What honest rounding adds: the drift by output and kind of case ('golden', 'edge', or the name of one edge).

    most_samples: by output, the SQNR in decibels of most golden samples (`sqnr_of_most`).  decisions: by output of
    integers.  reason: why nothing was measured; empty where it was.
    """

    drifts: Mapping[tuple[str, str], Drift] = field(default_factory=dict)
    most_samples: Mapping[str, float] = field(default_factory=dict)
    decisions: Mapping[str, Decisions] = field(default_factory=dict)
    reason: str = ""


def greatest(drifts: Sequence[Drift], usual: Drift) -> Drift:
    """A drift that has the worst of several in each metric, and in each slice their greatest energy per element.

    usual: the drift of the golden set, whose variation over the samples counts, since an edge may hold one sample.
    """
    worst_change = min(drifts, key=lambda drift: drift.sqnr_db)
    drifts = [drift.scale_to(worst_change.exponent) for drift in drifts]
    max_error_sq = max(drift.error_sq / drift.count for drift in drifts) * worst_change.count
    variation = usual.scale_to(worst_change.exponent).centered_sq / usual.count * worst_change.count
    return replace(
        worst_change,
        max_abs=worst_change.peak * max(drift.max_rel for drift in drifts),
        centered_sq=variation * worst_change.error_sq / max_error_sq if max_error_sq else 0.0,
        slices=_greatest_slices([drift.slices for drift in drifts if drift.slices]),
    )


def sqnr_of_most(drift: Drift) -> float | None:
    """The SQNR against the variation, in decibels, that all but `count // ONE_OF - LESS` of the samples have or exceed.

    None with fewer than FEWEST_SAMPLES samples. In a small net, an element that falls to the other side of a
    quantization step moves few samples and a fault moves most: the energy of the whole then shows the former, a
    quartile of the samples the latter. In a large net such elements move all samples. Another kernel moves other
    samples: if each moves with the same chance in both, whichever it is, then over a quarter of an engine's samples
    move although most do not here in at most 7 of 1,000 engines, and with 48 samples or more in 2 to 4 (sums of two
    binomial distributions at the worst chance).
    """
    if drift.samples is None or (count := drift.samples.samples) < FEWEST_SAMPLES:
        return None
    return drift.sample_sqnr_db(count - (count // ONE_OF - LESS))


def sqnr_of_worst(drift: Drift) -> float:
    """The SQNR against the variation of the worst sample, for runs of few samples in which all of them move."""
    return drift.sample_sqnr_db(drift.samples.samples) if drift.samples else math.inf


def with_chance(drift: Drift, filled: int, magnitudes: Mapping[int, Array] | None = None) -> Drift:
    """The drift with greater error energies where few elements show them, in the whole and in each slice.

    filled: elements of the whole that are not zero on both sides; only those of a sparse output can be off.
    magnitudes: by axis of the slices, the sum of |a - e| of each, arrays of (size of the axis,). Where most of a
    slice's energy is that of few elements (of a softmax's class, at the few places where it is in doubt), so many show
    it as their participation ratio is, (sum |a - e|)^2 / sum (a - e)^2.
    """
    axes = {}
    for axis, sums in drift.slices.axes.items() if drift.slices else ():
        count = sums.count
        if magnitudes is not None:
            magnitude_sq = np.square(np.ldexp(fit_length(magnitudes[axis], len(count), 0.0), -drift.exponent))
            ratio = np.divide(magnitude_sq, sums.error_sq, out=count.copy(), where=sums.error_sq > 0)
            count = np.minimum(count, ratio)
        axes[axis] = replace(sums, error_sq=sums.error_sq * _chance(count))
    slices = drift.slices and replace(drift.slices, axes=axes)
    element_count = float(min(filled, drift.count))
    return replace(drift, error_sq=drift.error_sq * float(_chance(np.array(element_count))), slices=slices)


def _chance(count: Array) -> Array:
    """The factor for the mean energy of `count` errors so that another sample of errors exceeds HONEST_MARGIN times the
    result in one of a thousand cases; 1 from 17 elements on.

    The mean of squared normal errors is chi-squared over its degrees of freedom; its quantile is that of Wilson and
    Hilferty, "The Distribution of Chi-Square", 1931. _OTHER: what the other sample, of some fifty elements, adds.
    """
    variance = 2 / (9 * np.maximum(count, 1.0))
    low = np.maximum(1 - variance - _THOUSANDTH * np.sqrt(variance), 0.05) ** 3
    return np.asarray(np.maximum(1.0, _OTHER / (HONEST_MARGIN * low)))


def _greatest_slices(slice_sets: Sequence[Slices]) -> Slices | None:
    """Slices with the greatest error energy per element of several; all other sums are 1."""
    if not slice_sets:
        return None
    axes = {}
    for axis in sorted({axis for slices in slice_sets for axis in slices.axes}):
        sums = [slices.axes[axis] for slices in slice_sets if axis in slices.axes]
        energies = np.zeros((len(sums), max(len(axis_sums.count) for axis_sums in sums)))
        for row, axis_sums in zip(energies, sums, strict=True):
            np.divide(axis_sums.error_sq, axis_sums.count, out=row[: len(axis_sums.count)], where=axis_sums.count > 0)
        ones = np.ones(energies.shape[1])
        axes[axis] = AxisSums(ones, ones, energies.max(axis=0), ones, ones)
    return Slices(axes, 0.0, 0, None, 0.0)


def lost_classes(class_counts: Mapping[int, int], change_counts: Mapping[int, int]) -> tuple[list[int], int]:
    """The classes of whose rows more than half changed, and how many chance makes of these where each row changes with
    a probability of `CHANCE`: more with a probability below `LEVEL` (binomial, and Poisson's approximation of their
    number). class_counts, change_counts: rows by class."""
    lost_names = [index for index, count in sorted(class_counts.items()) if 2 * change_counts.get(index, 0) > count]
    mean = sum(_most_change(count) for count in class_counts.values())
    allowance, term = 0, math.exp(-mean)
    low_classes = term
    while 1 - low_classes >= LEVEL and allowance < len(class_counts):
        allowance += 1
        term *= mean / allowance
        low_classes += term
    return lost_names, allowance


@lru_cache(maxsize=4096)
def _most_change(count: int) -> float:
    """The probability that more than half of so many rows change; below 1e-9 of 40 or more."""
    if count >= 40:
        return 0.0
    shares = (math.comb(count, k) * CHANCE**k * (1 - CHANCE) ** (count - k) for k in range(count // 2 + 1, count + 1))
    return math.fsum(shares)
