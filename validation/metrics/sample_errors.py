"""How many samples are how far off: the error energy of each sample, in a histogram that merges and stays small.

A mean over samples says little of an error that each of them has, where a few hold a much greater one by right: an
element that falls to the other side of a quantization step. A quantile of the samples does not see the few.

An entry counts the samples whose mean squared error lies within 1/STEPS of a power of two (0.1 dB), as in HdrHistogram
(Tene, 2012): of ordinary errors some hundreds, and of all float64 some ten thousands, however many samples come.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from enginery.arrays.npz import Array

STEPS = 32


@dataclass(frozen=True)
class SampleErrors:
    """counts: samples by floor(STEPS log2(mean squared error)).  exact: samples without an error."""

    counts: Mapping[int, int] = field(default_factory=dict)
    exact: int = 0

    @classmethod
    def of(cls, energies: Array, exponent: int) -> "SampleErrors":
        """From the mean squared error of each sample, in units of 2^(2 exponent)."""
        known = energies[(energies > 0) & np.isfinite(energies)]
        keys = np.floor(STEPS * (np.log2(known) + 2 * exponent)).astype(np.int64)
        least = int(keys.min(initial=0))
        counts = np.bincount(keys - least)
        found = np.flatnonzero(counts)
        exact = len(energies) - int(np.count_nonzero(energies))
        return cls(dict(zip((found + least).tolist(), counts[found].tolist(), strict=True)), exact)

    @property
    def samples(self) -> int:
        """How many there are."""
        return self.exact + sum(self.counts.values())

    def merge(self, other: "SampleErrors") -> "SampleErrors":
        """Those of both."""
        return SampleErrors(Counter(self.counts) + Counter(other.counts), self.exact + other.exact)

    def log2_at(self, rank: int) -> float:
        """log2 of the mean squared error that so many samples are within; -inf where those have none."""
        if rank <= self.exact:
            return -math.inf
        seen = self.exact
        for key in sorted(self.counts):
            if (seen := seen + self.counts[key]) >= rank:
                return (key + 1) / STEPS
        return math.inf
