"""What rounding an honest kernel may add to a graph, as values: an engine's limits follow from it.

How many integers of an output an honest kernel decides otherwise, and the agreement that an engine is held to.

What `honest_rounding` finds.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from enginery.arrays import Array
from validation.metrics.drift import Drift
from validation.metrics.slice_limits import HONEST_MARGIN
from validation.metrics.slices import AxisSums, Slices
from validation.statistics.distributions import beta_cdf
from validation.statistics.rates import upper

# As of the other errors of honest rounding: how often near ties fall elsewhere grows with the error's amplitude.
MARGIN = 2
# Elements that one near tie moves, where there are several: two change places.
PAIR = 2
# Of a bound that is wrong: one engine in a hundred.
LEVEL = 0.01
# What no measurement makes stricter.
MOST = 1.0


@dataclass(frozen=True)
class Decisions:
    """Of one output: how many elements changed of how many, in the golden cases and by the way to round that changes
    most. together: the most that changed in one sample, since one near tie may move all that is sorted behind it.
    unmeasured: elements of the other golden cases.  case: those of one, 0 for all that were measured."""

    changed: int
    elements: int
    together: int = 1
    unmeasured: int = 0
    case: int = 0

    def limit(self, kind: str, elements: int) -> float:
        """The agreement that an engine must have on so many elements of a kind of case, at most MOST.

        Edges are made of the golden samples: where no near tie was found in all of these, none is there. Else as many
        elements as the golden cases' share gives in 99 of 100 edges (binomial), since a few may hold more than their
        share, and as often as a case is repeated in an edge that is larger.
        """
        allowed = 0.0
        if kind == "golden":
            allowed = self.share
        elif elements and (self.changed or self.unmeasured):
            distinct = min(elements, self.case or self.elements)
            allowed = self._most(distinct) / distinct
        return math.floor(1e4 * (MOST - allowed)) / 1e4

    @property
    def share(self) -> float:
        """The share of the golden cases' elements that may change.

        Of those that were measured twice as many as did, and no less than one near tie more. Of the others the upper
        bound of Clopper and Pearson (Biometrika 26, 1934), because no near tie among few elements is no proof that the
        rest has none. Elements that change together are one piece of evidence, as in a design effect of that size
        (Korn and Graubard, Survey Methodology 24, 1998).
        """
        known = max(MARGIN * self.changed, self.changed + max(self.together, PAIR))
        others = self._bound_share(self.changed, self.elements) * self.unmeasured
        return min(1.0, (known + others) / (self.elements + self.unmeasured)) if self.elements else 1.0

    def _most(self, elements: int) -> int:
        """The least count of elements that is exceeded in a case of so many with a chance of at most LEVEL."""
        ties = math.ceil(elements / self.together)
        seldom = (beta_cdf(self.share, count + 1.0, float(ties - count)) <= LEVEL for count in range(ties))
        return min(elements, self.together * next((count for count, found in enumerate(seldom) if found), ties))

    def _bound_share(self, changed: float, elements: int) -> float:
        return upper(changed / self.together, elements / self.together, LEVEL)

    def __str__(self) -> str:
        found = f"honest rounding decides {self.changed} of {self.elements} elements otherwise"
        return f"{found}; twice that, and no less than one near tie more"


_THOUSANDTH, _OTHER = 3.09, 1.3
# Of so many samples one, less two, may be further off than three of four of an engine's samples must be; from so many
# samples on. See `sqnr_of_most`.
ONE_OF, LESS, FEWEST_SAMPLES = 8, 2, 16


@dataclass(frozen=True)
class Honest:
    """By output and kind of case ('golden', 'edge'), the drift that honest rounding adds.

    most_samples: by output, the SQNR of most golden samples.  decisions: by output of integers.
    reason: why it is not known; empty where it is.
    """

    drifts: Mapping[tuple[str, str], Drift] = field(default_factory=dict)
    most_samples: Mapping[str, float] = field(default_factory=dict)
    decisions: Mapping[str, Decisions] = field(default_factory=dict)
    reason: str = ""


def greatest(drifts: Sequence[Drift], usual: Drift) -> Drift:
    """A drift that has the worst of some in each metric, of slices the most energy per element.

    usual: of the golden set, by whose variation over the samples all are measured: an edge may hold one sample.
    """
    worst = min(drifts, key=lambda drift: drift.sqnr_db)
    drifts = [item.scale_to(worst.exponent) for item in drifts]
    most = max(item.error_sq / item.count for item in drifts) * worst.count
    variation = usual.scale_to(worst.exponent).centered_sq / usual.count * worst.count
    return replace(
        worst,
        max_abs=worst.peak * max(item.max_rel for item in drifts),
        centered_sq=variation * worst.error_sq / most if most else 0.0,
        slices=_greatest_slices([item.slices for item in drifts if item.slices]),
    )


def sqnr_of_most(drift: Drift) -> float | None:
    """SQNR against the variation that most samples have at least: all but an eighth of them, less two. None of fewer
    than FEWEST_SAMPLES.

    drift: with no more elements falling to the other side of a quantization step than do by right. In a small net that
    moves few samples, where a fault moves most of them: the energy of the whole then shows rounding, and a quartile the
    fault. In a large one it moves all. Another kernel moves other samples. If each moves with the same chance in both,
    whichever chance that is, then most do not here while over a quarter does there in at most 7 of 1,000 engines, and
    of 48 samples or more in 2 to 4 (sums of two binomial distributions; in practice the chance is not the worst one).
    """
    if drift.samples is None or (count := drift.samples.samples) < FEWEST_SAMPLES:
        return None
    return drift.sample_sqnr_db(count - (count // ONE_OF - LESS))


def sqnr_of_worst(drift: Drift) -> float:
    """The same of the sample that is worst: to be asked where few samples are known, of runs that move them all."""
    return drift.sample_sqnr_db(drift.samples.samples) if drift.samples else math.inf


def with_chance(drift: Drift, filled: int) -> Drift:
    """A drift whose energies are greater where few elements show them, in the whole and in each slice.

    filled: elements of the whole that are not zero on both sides: those of a sparse output alone can be off.
    """
    slices = drift.slices and replace(
        drift.slices,
        axes={
            axis: replace(sums, error_sq=sums.error_sq * _chance(sums.count))
            for axis, sums in drift.slices.axes.items()
        },
    )
    elements = float(min(filled, drift.count))
    return replace(drift, error_sq=drift.error_sq * float(_chance(np.array(elements))), slices=slices)


def _chance(count: Array) -> Array:
    """By how much to multiply the mean energy of so many errors, so that another sample of them is seldom (one in a
    thousand) over four times that: the margin of limits hides it from 17 elements on.

    Of normal errors the mean is chi-squared over its degrees of freedom; its quantile after Wilson and Hilferty, "The
    Distribution of Chi-Square", 1931. _OTHER: what the other sample, of some fifty elements, adds.
    """
    spread = 2 / (9 * np.maximum(count, 1.0))
    low = np.maximum(1 - spread - _THOUSANDTH * np.sqrt(spread), 0.05) ** 3
    return np.asarray(np.maximum(1.0, _OTHER / (HONEST_MARGIN * low)))


def _greatest_slices(found: Sequence[Slices]) -> Slices | None:
    if not found:
        return None
    axes = {}
    for axis in sorted({axis for slices in found for axis in slices.axes}):
        sums = [slices.axes[axis] for slices in found if axis in slices.axes]
        energies = np.zeros((len(sums), max(len(item.count) for item in sums)))
        for row, item in zip(energies, sums, strict=True):
            np.divide(item.error_sq, item.count, out=row[: len(item.count)], where=item.count > 0)
        ones = np.ones(energies.shape[1])
        axes[axis] = AxisSums(ones, ones, energies.max(axis=0), ones, ones)
    return Slices(axes, 0.0, 0, None, 0.0)
