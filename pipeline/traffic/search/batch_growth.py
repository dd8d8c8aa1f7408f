"""How many requests a batch has where so many come a second, and what the batch then takes.

A batch takes the requests of its bucket that arrive while its first one waits: as long as the policy lets it wait for
others, or longer where the worker is busy. With a wait W and arrivals at a rate r that number is 1 + Poisson(r W), at
most what a batch holds. The wait depends on the load of all buckets together, hardly on where one edge lies: it is
taken from a simulation (`validation.traffic.batching`) of buckets found before, and its distribution is the same for
each bucket. So the seconds of a bucket follow from its own requests alone, and the costs of buckets add up.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from enginesmith.arrays import Array
from validation.traffic.batching import SimulatedService

# Time is cut into so many parts with equal numbers of requests, each with a rate of its own, as traffic drifts.
BINS = 24
# Quantiles of the waits of a part.
_WAITS = (0.125, 0.375, 0.625, 0.875)
# Expected numbers of further requests at which the tables are computed; between them linearly in the logarithm.
_MEANS = np.concatenate([[0.0], np.geomspace(1e-3, 1e3, 61)])


@dataclass(frozen=True, eq=False)
class BatchGrowth:
    """most: requests in a batch at most.  bin_of: part of the time of each request, int64 [requests].  seconds: of each
    part, float64 [bins].  waits: of the first request of a batch, float64 [bins, quantiles], in seconds."""

    most: int
    bin_of: Array
    seconds: Array
    waits: Array

    @classmethod
    def idle(cls, at: Array, most: int, wait_s: float) -> "BatchGrowth":
        """Before anything was simulated: a worker that is always free. at: arrivals, float64 [requests]."""
        count = len(at)
        bins = max(min(BINS, count // 50), 1)
        bin_of = np.arange(count) * bins // count
        starts = at[np.searchsorted(bin_of, np.arange(bins))]
        ends = np.append(starts[1:], at[-1] + at[-1] / max(count - 1, 1))
        return cls(most, bin_of, np.maximum(ends - starts, 1e-9), np.full((bins, len(_WAITS)), wait_s))

    def after(self, served: SimulatedService) -> "BatchGrowth":
        """With the waits of a simulation."""
        firsts = np.full(len(served.batches), -1.0)
        np.maximum.at(firsts, served.batch_of, served.waited_s)
        bins = np.full(len(served.batches), len(self.seconds))
        np.minimum.at(bins, served.batch_of, self.bin_of)
        waits = self.waits.copy()
        for index in range(len(self.seconds)):
            if (chosen := firsts[bins == index]).size:
                waits[index] = np.quantile(chosen, _WAITS)
        return BatchGrowth(self.most, self.bin_of, self.seconds, waits)

    @cached_property
    def _shares(self) -> Array:
        """Probability of 1 to `most` requests in a batch for each of the means, float64 [means, most]."""
        further = np.arange(self.most)
        logs = np.cumsum(np.log(np.maximum(further, 1)))
        with np.errstate(divide="ignore", invalid="ignore"):
            powers = np.where(further == 0, 0.0, further * np.log(_MEANS)[:, None])
        shares = np.exp(powers - _MEANS[:, None] - logs)
        shares[:, -1] = np.maximum(1.0 - shares[:, :-1].sum(1), 0.0)
        return np.asarray(shares)

    def tables(self, times: Array) -> Array:
        """Expected seconds of a batch for each of the means, [..., means]. times: of 1 to `most` requests, [..., most].

        Of times that are the numbers 1 to `most`, the expected number of requests.
        """
        return np.asarray(times @ self._shares.T)

    def seconds_of(self, counts: Array, rates: Array, seconds: Array) -> Array:
        """Engine seconds of buckets, [...]. counts: requests, [..., groups, bins]: of one bucket each.  rates: arrivals
        per second that share its batches, likewise.  seconds: `tables` of each group, [groups, means]."""
        place = self._place(rates[..., None] * self.waits)
        sizes = self.tables(np.arange(1.0, self.most + 1))
        took = _between(seconds, place, np.arange(len(seconds))[:, None, None])
        held = _between(sizes[None], place, np.zeros((1, 1, 1), np.int64))
        return np.asarray((counts * took.mean(-1) / held.mean(-1)).sum((-1, -2)))

    @staticmethod
    def _place(means: Array) -> Array:
        """Index into the means, with its fraction."""
        low, step = _MEANS[1], np.log(_MEANS[2] / _MEANS[1])
        with np.errstate(divide="ignore"):
            above = 1.0 + np.log(np.maximum(means, low) / low) / step
        return np.asarray(np.minimum(np.where(means < low, means / low, above), len(_MEANS) - 1.0))


def _between(tables: Array, place: Array, rows: Array) -> Array:
    """Values of tables [rows, means] at places between the means."""
    low = np.minimum(place.astype(np.int64), tables.shape[1] - 2)
    first = tables[rows, low]
    return np.asarray(first + (place - low) * (tables[rows, low + 1] - first))
