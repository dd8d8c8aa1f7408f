"""The buckets of least cost: exactly for one dim, as the product of the dims' own buckets for several.

One dim: the cost of a bucket depends on its two ends alone, so that dynamic programming over the last edge gives the
best partition into each number of buckets (as for the optimal histograms of Jagadish et al., VLDB 1998).

Several dims: each is solved exactly with every candidate of the others as an edge. Of the numbers of buckets that stay
within the limit those are taken whose excesses over padding nowhere, added up, cost least with the price of profiles.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from enginesmith.arrays import Array
from pipeline.traffic.search.interval_costs import CostModel, Partition, count_profiles, finest, total_of


@dataclass(frozen=True)
class Partitioned:
    """partitions: of every dim of the grid.  seconds: cost of all requests.  total: with the price of profiles."""

    partitions: tuple[Partition, ...]
    seconds: float
    total: float


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
    """The buckets of the chosen dims (indices), the candidates of the others being their buckets; of least
    cost for one dim.

    most: profiles at most, over all dims.  price: of a profile, in seconds.
    """
    whole = finest(model.grid)
    fixed = count_profiles([partition for axis, partition in enumerate(whole) if axis not in chosen])
    most = max(most // fixed, 1)
    costs = [model.intervals(axis, whole) for axis in chosen]
    alone = [partition_dim(each, most) for each in costs]
    nowhere = total_of(costs[0], whole[chosen[0]])
    counts = min(
        (each for each in itertools.product(*(range(1, len(found) + 1) for found in alone)) if math.prod(each) <= most),
        key=lambda each: (
            sum(found[count - 1][0] - nowhere for found, count in zip(alone, each, strict=True))
            + price * fixed * math.prod(each)
        ),
    )
    now = list(whole)
    for axis, found, count in zip(chosen, alone, counts, strict=True):
        now[axis] = found[count - 1][1]
    seconds = total_of(model.intervals(chosen[0], now), now[chosen[0]])
    return Partitioned(tuple(now), seconds, seconds + price * count_profiles(now))
