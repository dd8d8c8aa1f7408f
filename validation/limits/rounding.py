"""Errors and changed decisions that an honest kernel's rounding causes in outputs: the basis of an engine's limits."""

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

# The factor over the measured number of changed integers: the number of near ties that change is proportional to the
# amplitude of the error, for which other limits have the same factor.
MARGIN = 2
# A near tie between two elements changes PAIR elements, because they swap. With few elements, the allowance for a near
# tie is at most one of LEAST_OF (rounded up) and at most half: otherwise a single sample could have any answer.
PAIR, LEAST_OF = 2, 8
# The probability that a bound is wrong: for one engine in a hundred.
LEVEL = 0.01
# The agreement if honest rounding changes nothing.
MOST = 1.0

# The share of a quantized graph's decisions that may differ from the model's. A check fails only if the data shows more
# at level LEVEL (Clopper and Pearson, Biometrika 26, 1934), because one near tie of 48 is already 2 %.
MOST_CHANGED = 0.01
# The probability with which near ties change a row of a class.
CHANCE = 0.1


@dataclass(frozen=True)
class NearTies:
    """The limit on changed integers of a quantized graph. Quantization changes near ties. Some integers may change, as
    long as their number does not show, at level LEVEL, a share of changes over `MOST_CHANGED`."""

    def limit(self, kind: str, elements: int) -> float:  # noqa: ARG002 - the same in every kind of case
        """The share of equal elements that a case with `elements` elements must have."""
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
    """The number of integers of one output that honest rounding changes in the golden cases, under the way of rounding
    that changes most; it determines the agreement that an engine must have.

    changed, elements: of the measured cases.  together: the most that changed in one sample, since one near tie may
    move all elements sorted behind it.  unmeasured: elements of the other golden cases.  case: elements of one case; 0
    if all measured elements are of one case.
    """

    changed: int
    elements: int
    together: int = 1
    unmeasured: int = 0
    case: int = 0

    def limit(self, kind: str, elements: int) -> float:
        """The share of equal elements that an engine must have in a case of `elements` elements, at most MOST.

        kind: 'golden' or 'edge'. Edge cases are made of golden samples: without near ties in golden cases, they have
        none. Otherwise the allowance per repetition of a golden case is the number of changes that 99 of 100 edges do
        not exceed (binomial distribution with the golden cases' share).
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

        Measured elements: twice the number that changed, or that number and one near tie if this is more. Other
        elements: the upper bound of Clopper and Pearson (Biometrika 26, 1934), because a few elements without a near
        tie do not prove that the rest has none. Elements that change together count as one observation, as a design
        effect of that size (Korn and Graubard, Survey Methodology 24, 1998).
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


# The normal quantile of 0.999, in standard errors, and the factor for the variation of the other sample (`_chance`).
_THOUSANDTH, _OTHER = 3.09, 1.3
# `sqnr_of_most` leaves out `count // ONE_OF - LESS` of the samples, and needs FEWEST_SAMPLES samples.
ONE_OF, LESS, FEWEST_SAMPLES = 8, 2, 16


@dataclass(frozen=True)
class Honest:
    """The errors of honest rounding: the drift by output and kind of case ('golden', 'edge', or the name of one edge).

    most_samples: by output, the SQNR in decibels of most golden samples (`sqnr_of_most`).  decisions: by integer
    output.  reason: why nothing was measured, or ''.
    """

    drifts: Mapping[tuple[str, str], Drift] = field(default_factory=dict)
    most_samples: Mapping[str, float] = field(default_factory=dict)
    decisions: Mapping[str, Decisions] = field(default_factory=dict)
    reason: str = ""


def greatest(drifts: Sequence[Drift], usual: Drift) -> Drift:
    """A drift with the worst value of each metric, and in each slice the greatest error energy per element.

    usual: the drift of the golden set, whose variation over the samples is used, since an edge may have one sample.
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

    None with fewer than FEWEST_SAMPLES samples. In a small net, an element that rounds to the other quantization step
    changes few samples, and a fault changes most: the energy of the whole shows the former, a quartile of the samples
    the latter. In a large net such elements change all samples. Another kernel changes other samples. If samples
    change with one probability in both kernels, whatever its value, then in at most 7 of 1,000 engines over a quarter
    of the samples change although most do not here; with 48 samples or more in 2 to 4 (sums of two binomial
    distributions at the worst probability).
    """
    if drift.samples is None or (count := drift.samples.samples) < FEWEST_SAMPLES:
        return None
    return drift.sample_sqnr_db(count - (count // ONE_OF - LESS))


def sqnr_of_worst(drift: Drift) -> float:
    """The SQNR of the worst sample against the variation, for runs of few samples in which rounding changes all."""
    return drift.sample_sqnr_db(drift.samples.samples) if drift.samples else math.inf


def with_chance(drift: Drift, filled: int, magnitudes: Mapping[int, Array] | None = None) -> Drift:
    """The drift with error energies raised, in the whole and in each slice, if few elements determine them (`_chance`).

    filled: number of elements that are not zero on both sides; in a sparse output only these can have errors.
    magnitudes: by axis of the slices, the sum of |a - e| of each, arrays of (size of the axis,). If few elements have
    most of a slice's energy (for a class of a softmax: the few places where it is uncertain), their number is the
    participation ratio (sum |a - e|)^2 / sum (a - e)^2.
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
    """The factor for the mean energy of `count` errors: another sample of errors exceeds HONEST_MARGIN times the
    result in one of a thousand cases. 1 from 17 elements on.

    The mean of squared normal errors is chi-squared over its degrees of freedom; its quantile is that of Wilson and
    Hilferty, "The Distribution of Chi-Square", 1931. _OTHER: for the other sample (some fifty elements).
    """
    variance = 2 / (9 * np.maximum(count, 1.0))
    low = np.maximum(1 - variance - _THOUSANDTH * np.sqrt(variance), 0.05) ** 3
    return np.asarray(np.maximum(1.0, _OTHER / (HONEST_MARGIN * low)))


def _greatest_slices(slice_sets: Sequence[Slices]) -> Slices | None:
    """Slices with the greatest error energy per element of all sets; all other sums are 1."""
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
    """The classes with more than half of their rows changed, and the number of such classes that chance explains: if
    each row changes with probability `CHANCE`, more have a probability below `LEVEL` (binomial; Poisson's approximation
    for their number). class_counts, change_counts: rows by class."""
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
    """The probability that more than half of `count` rows change; from 40 rows on it is below 1e-9, returned as 0."""
    if count >= 40:
        return 0.0
    shares = (math.comb(count, k) * CHANCE**k * (1 - CHANCE) ** (count - k) for k in range(count // 2 + 1, count + 1))
    return math.fsum(shares)
