"""The buckets of least cost: exactly for one dim, by alternation with a lower bound for several.

One dim: the cost of a bucket depends on its two ends alone, so that dynamic programming over the last edge gives the
best partition into each number of buckets (as for the optimal histograms of Jagadish et al., VLDB 1998).

Several dims: with the edges of all dims but one given, that one is solved exactly; the dims take turns until nothing
changes (coordinate descent), from several starts. No partition costs less than the lower bound. Let every dim but one
have each candidate as an edge: the best partition of that one dim costs less than any real one (relaxation). Where
times rise along each dim and the increments of one dim rise along the others (supermodular, as of products of sizes),
the excess over padding nowhere is at least the sum of the dims' excesses, which is the larger bound. Both are taken for
each combination of numbers of buckets, with the price of its profiles, and the least of these is the bound.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from enginesmith.arrays import Array
from pipeline.traffic.search.interval_costs import CostModel, Partition, count_profiles, finest, total_of

MOST_ROUNDS = 20


@dataclass(frozen=True)
class Partitioned:
    """partitions: of every dim of the grid.  seconds: cost of all requests, without the price of profiles.

    bound: no partition within the limits costs less, price of profiles included.  total: cost with that price.
    """

    partitions: tuple[Partition, ...]
    seconds: float
    total: float
    bound: float

    @property
    def gap(self) -> float:
        """Share by which it may cost more than the best; 0 where it is the best."""
        return max(self.total / self.bound - 1.0, 0.0) if self.bound > 0 else 0.0


def partition_dim(costs: Array, most: int) -> list[tuple[float, Partition]]:
    """The least cost with 1, 2, ... `most` buckets, and the partition. costs: as of `CostModel.intervals`."""
    count = len(costs) - 1
    best = costs[0].copy()
    before: list[Array] = []
    found: list[tuple[float, Partition]] = [(float(best[count]), (count - 1,))]
    for _ in range(1, min(most, count)):
        sums = best[:, None] + costs
        before.append(sums.argmin(0))
        best = sums.min(0)
        found.append((float(best[count]), _trace_back(before, count)))
    return found


def _trace_back(before: Sequence[Array], count: int) -> Partition:
    ends, end = [count - 1], count
    for step in reversed(before):
        end = int(step[end])
        ends.append(end - 1)
    return tuple(reversed(ends))


def partition_grid(model: CostModel, chosen: Sequence[int], most: int, price: float) -> Partitioned:
    """The buckets of least cost for the chosen dims (indices), the candidates of the others being their buckets.

    most: profiles at most, over all dims.  price: of a profile, in seconds. Exact for one chosen dim.
    """
    whole = finest(model.grid)
    fixed = count_profiles([partition for axis, partition in enumerate(whole) if axis not in chosen])
    most = max(most // fixed, 1)
    if len(chosen) == 1:
        (axis,) = chosen
        seconds, partition = _cheapest(partition_dim(model.intervals(axis, whole), most), most, price * fixed)
        partitions = tuple(partition if index == axis else each for index, each in enumerate(whole))
        total = seconds + price * count_profiles(partitions)
        return Partitioned(partitions, seconds, total, total)
    found = min((_alternate(model, chosen, start, most, price) for start in _starts(model, chosen, most)), key=_total)
    return replace(found, bound=min(_bound(model, chosen, most, price * fixed), found.total))


def _total(found: Partitioned) -> float:
    return found.total


def _cheapest(found: Sequence[tuple[float, Partition]], most: int, price: float) -> tuple[float, Partition]:
    return min(found[:most], key=lambda each: each[0] + price * len(each[1]))


def _starts(model: CostModel, chosen: Sequence[int], most: int) -> list[tuple[Partition, ...]]:
    """Partitions to start from: each number of buckets that is a power of two, edges at equal shares of requests."""
    counts = [[k for k in (1, 2, 4, 8, 16, 32) if k <= min(most, len(model.grid.edges[axis]))] for axis in chosen]
    starts = []
    for each in itertools.product(*counts):
        if np.prod(each) <= most:
            start = list(finest(model.grid))
            for axis, count in zip(chosen, each, strict=True):
                shares = np.quantile(model.grid.places[:, axis], np.arange(1, count) / count, method="higher")
                start[axis] = tuple(sorted({*shares.astype(int).tolist(), len(model.grid.edges[axis]) - 1}))
            starts.append(tuple(start))
    return starts


def _alternate(
    model: CostModel, chosen: Sequence[int], start: tuple[Partition, ...], most: int, price: float
) -> Partitioned:
    """Each chosen dim in turn, exactly, until nothing changes. most: profiles over the chosen dims."""
    now = start
    for _ in range(MOST_ROUNDS):
        before = now
        for axis in chosen:
            others = count_profiles([now[each] for each in chosen if each != axis])
            costs = model.intervals(axis, now)
            allowed = max(most // others, 1)
            per_bucket = price * count_profiles(now) / len(now[axis])
            _, partition = _cheapest(partition_dim(costs, allowed), allowed, per_bucket)
            now = tuple(partition if each == axis else kept for each, kept in enumerate(now))
            seconds = total_of(costs, partition)
        if now == before:
            break
    total = seconds + price * count_profiles(now)
    return Partitioned(now, seconds, total, 0.0)


def _bound(model: CostModel, chosen: Sequence[int], most: int, price: float) -> float:
    """The lower bound. most: profiles over the chosen dims.  price: of one of these."""
    whole = finest(model.grid)
    relaxed = []
    for axis in chosen:
        easier = replace(model, times=_rising(model.times, [each for each in chosen if each != axis]))
        costs = easier.intervals(axis, whole, relaxed=True)
        relaxed.append([cost for cost, _ in partition_dim(costs, most)])
    adds = model.growth is None and _is_supermodular(model.times, chosen)
    nowhere = total_of(model.intervals(chosen[0], whole), whole[chosen[0]])
    bounds = []
    for counts in itertools.product(*(range(1, len(each) + 1) for each in relaxed)):
        if (profiles := int(np.prod(counts))) <= most:
            each = [costs[count - 1] for costs, count in zip(relaxed, counts, strict=True)]
            least = nowhere + sum(cost - nowhere for cost in each) if adds else max(each)
            bounds.append(max(least, *each) + price * profiles)
    return min(bounds)


def _rising(times: Array, axes: Sequence[int]) -> Array:
    """The least of the times at this size or a greater one, along each of the axes: it never falls along them."""
    for axis in axes:
        times = np.flip(np.minimum.accumulate(np.flip(times, axis), axis), axis)
    return times


def _is_supermodular(times: Array, axes: Sequence[int]) -> bool:
    """Whether times never fall along each of the axes, and their increments along one never fall along another."""
    rises = all(bool((np.diff(times, axis=axis) >= 0).all()) for axis in axes)
    pairs = itertools.combinations(axes, 2)
    return rises and all(bool((np.diff(np.diff(times, axis=a), axis=b) >= 0).all()) for a, b in pairs)
