"""What each possible bucket of one dim costs, in engine seconds of all its requests, the other dims' buckets given."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from enginesmith.arrays import Array
from pipeline.traffic.search.batch_growth import BatchGrowth
from pipeline.traffic.search.request_grid import RequestGrid

# The indices of a dim's chosen edges among its candidates, rising, the last one being the last candidate.
Partition = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class CostModel:
    """times: mean seconds of a run at each combination of candidates, with 1, 2, ... samples, float64 [candidates of
    each dim, in order, samples].  growth: how batches form; None where each request runs alone."""

    grid: RequestGrid
    times: Array
    growth: BatchGrowth | None

    def intervals(self, axis: int, partitions: Sequence[Partition]) -> Array:
        """The cost of a bucket over candidates i to k - 1 of the dim `axis`, float64 [i, k], inf where i >= k.

        partitions: of every dim; that of `axis` is not used.
        """
        places, edges = self.grid.places, self.grid.edges
        groups, rows = self._groups(axis, partitions)
        bins = self.growth.bin_of if self.growth else np.zeros(len(self.grid), np.int64)
        shape = (len(edges[axis]), len(rows), int(bins.max()) + 1)
        flat = np.ravel_multi_index((places[:, axis], groups, bins), shape)
        counts = np.bincount(flat, minlength=int(np.prod(shape))).reshape(shape).astype(np.float64)
        below = np.concatenate([np.zeros((1, *shape[1:])), counts.cumsum(0)])
        times = np.moveaxis(self.times, axis, 0)
        times = times.reshape(shape[0], -1, times.shape[-1])
        if self.growth is None:
            return _alone(below[..., 0], times.reshape(shape[0], -1)[:, rows])
        return self._batched(below, times[:, rows], self.growth)

    def _groups(self, axis: int, partitions: Sequence[Partition]) -> tuple[Array, Array]:
        """Requests by their edges along the other dims, and by samples where each runs alone: the index of each one's
        group, and of each group its row of the times, flattened without `axis`."""
        columns, sizes = [], []
        for other, partition in enumerate(partitions):
            if other != axis:
                ends = np.array(partition)
                columns.append(ends[np.searchsorted(ends, self.grid.places[:, other])])
                sizes.append(len(self.grid.edges[other]))
        if self.growth is None:
            columns.append(np.minimum(self.grid.samples, self.times.shape[-1]) - 1)
            sizes.append(self.times.shape[-1])
        if not columns:
            return np.zeros(len(self.grid), np.int64), np.zeros(1, np.int64)
        rows, groups = np.unique(np.ravel_multi_index(tuple(columns), tuple(sizes)), return_inverse=True)
        return groups, rows

    def _batched(self, below: Array, times: Array, growth: BatchGrowth) -> Array:
        count = len(times)
        tables = growth.tables(per_requests(times, float(self.grid.samples.mean()), growth.most))
        costs = np.full((count + 1, count + 1), np.inf)
        for end in range(1, count + 1):
            inside = below[end] - below[:end]
            costs[:end, end] = growth.seconds_of(inside, inside / growth.seconds, tables[end - 1])
        return costs


def per_requests(times: Array, samples: float, most: int) -> Array:
    """Seconds of 1 to `most` requests with so many samples each, [..., most], of those of 1, 2, ... samples."""
    wanted = np.minimum(np.arange(1, most + 1) * samples, times.shape[-1]) - 1
    low = np.minimum(wanted.astype(np.int64), max(times.shape[-1] - 2, 0))
    high = np.minimum(low + 1, times.shape[-1] - 1)
    return np.asarray(times[..., low] + (wanted - low) * (times[..., high] - times[..., low]))


def _alone(below: Array, times: Array) -> Array:
    """Costs where each request runs alone. below: requests before each candidate, [candidates + 1, groups].

    times: of each candidate and group, [candidates, groups].
    """
    count = len(times)
    seconds = below @ times.T
    costs = np.full((count + 1, count + 1), np.inf)
    for end in range(1, count + 1):
        costs[:end, end] = seconds[end, end - 1] - seconds[:end, end - 1]
    return costs


def total_of(costs: Array, partition: Partition) -> float:
    """The cost of a partition, by `CostModel.intervals`."""
    begins = (0, *(end + 1 for end in partition[:-1]))
    return float(sum(costs[begin, end + 1] for begin, end in zip(begins, partition, strict=True)))


def finest(grid: RequestGrid) -> tuple[Partition, ...]:
    """The partitions in which each candidate is an edge."""
    return tuple(tuple(range(len(edges))) for edges in grid.edges)


def count_profiles(partitions: Sequence[Partition]) -> int:
    """How many optimization profiles the partitions make: every combination of buckets."""
    return reduce(lambda count, partition: count * len(partition), partitions, 1)
