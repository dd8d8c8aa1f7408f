"""What buckets cost a trace, and the partition that costs least."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from enginesmith.arrays import Array
from pipeline.traffic.request_grid import RequestGrid, RunTimes
from validation.capacity.greatest_rate import Estimate
from validation.statistics.serial_dependence import block_length
from validation.traffic.batching_simulation import BatchPolicy, SimulatedService, simulate_batching

# How many requests a batch has where so many come a second, and what the batch then takes.
#
# A batch takes the requests of its bucket that arrive while its first one waits: as long as the policy lets it wait for
# others, or longer where the worker is busy. With a wait W and arrivals at a rate r that number is 1 + Poisson(r W), at
# most what a batch holds. The wait depends on the load of all buckets together, hardly on where one edge lies: it is
# taken from a simulation (`validation.traffic`) of buckets found before, and its distribution is the same for each
# bucket. So the seconds of a bucket follow from its own requests alone, and the costs of buckets add up.

# Number of parts of the time with equal numbers of requests, each with its own rate, because traffic drifts.
BINS = 24
# Quantiles of the waits of a part.
_WAITS = (0.125, 0.375, 0.625, 0.875)
# Expected numbers of further requests at which the tables are computed; between them linearly in the logarithm.
_MEANS = np.concatenate([[0.0], np.geomspace(1e-3, 1e3, 61)])


@dataclass(frozen=True, eq=False)
class BatchGrowth:
    """max_requests: in a batch.  bin_of: part of the time of each request, int64 [requests].  seconds: of each
    part, float64 [bins].  waits: of the first request of a batch, float64 [bins, quantiles], in seconds."""

    max_requests: int
    bin_of: Array
    seconds: Array
    waits: Array

    @classmethod
    def idle(cls, arrivals: Array, max_requests: int, wait_s: float) -> "BatchGrowth":
        """Before anything was simulated: a worker that is always free. arrivals: seconds, float64 [requests]."""
        count = len(arrivals)
        bin_count = max(min(BINS, count // 50), 1)
        indices = np.arange(count) * bin_count // count
        starts = arrivals[np.searchsorted(indices, np.arange(bin_count))]
        ends = np.append(starts[1:], arrivals[-1] + arrivals[-1] / max(count - 1, 1))
        return cls(max_requests, indices, np.maximum(ends - starts, 1e-9), np.full((bin_count, len(_WAITS)), wait_s))

    def after(self, service: SimulatedService) -> "BatchGrowth":
        """A copy with the waits that a simulation gave."""
        longest_waits = np.full(len(service.batches), -1.0)
        np.maximum.at(longest_waits, service.batch_of, service.waited_s)
        first_bins = np.full(len(service.batches), len(self.seconds))
        np.minimum.at(first_bins, service.batch_of, self.bin_of)
        waits = self.waits.copy()
        for index in range(len(self.seconds)):
            if (bin_waits := longest_waits[first_bins == index]).size:
                waits[index] = np.quantile(bin_waits, _WAITS)
        return BatchGrowth(self.max_requests, self.bin_of, self.seconds, waits)

    @cached_property
    def _shares(self) -> Array:
        """Probability of 1 to `most` requests in a batch for each of the means, float64 [means, most]."""
        extra_counts = np.arange(self.max_requests)
        log_factorials = np.cumsum(np.log(np.maximum(extra_counts, 1)))
        with np.errstate(divide="ignore", invalid="ignore"):
            powers = np.where(extra_counts == 0, 0.0, extra_counts * np.log(_MEANS)[:, None])
        shares = np.exp(powers - _MEANS[:, None] - log_factorials)
        shares[:, -1] = np.maximum(1.0 - shares[:, :-1].sum(1), 0.0)
        return np.asarray(shares)

    def tables(self, times: Array) -> Array:
        """Expected seconds of a batch for each of the means, [..., means]. times: of 1 to `most` requests, [..., most].

        With the numbers 1 to `most` as times, the result is the expected number of requests.
        """
        return np.asarray(times @ self._shares.T)

    def seconds_of(self, counts: Array, rates: Array, seconds: Array) -> Array:
        """Engine seconds of buckets, [...]. counts: requests, [..., groups, bins]: of one bucket each.  rates: arrivals
        per second that share its batches, likewise.  seconds: `tables` of each group, [groups, means]."""
        means = rates[..., None] * self.waits
        low, step = _MEANS[1], np.log(_MEANS[2] / _MEANS[1])
        with np.errstate(divide="ignore"):
            log_positions = 1.0 + np.log(np.maximum(means, low) / low) / step
        position = np.asarray(np.minimum(np.where(means < low, means / low, log_positions), len(_MEANS) - 1.0))
        sizes = self.tables(np.arange(1.0, self.max_requests + 1))
        batch_seconds = _between(seconds, position, np.arange(len(seconds))[:, None, None])
        batch_sizes = _between(sizes[None], position, np.zeros((1, 1, 1), np.int64))
        return np.asarray((counts * batch_seconds.mean(-1) / batch_sizes.mean(-1)).sum((-1, -2)))


def _between(tables: Array, place: Array, rows: Array) -> Array:
    """Values of tables [rows, means] at places between the means."""
    low = np.minimum(place.astype(np.int64), tables.shape[1] - 2)
    low_values = tables[rows, low]
    return np.asarray(low_values + (place - low) * (tables[rows, low + 1] - low_values))


# Cost of each possible bucket of one dim, in engine seconds of all its requests, for fixed buckets of the other dims.

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
        """Entry [i, k] (float64): the cost of a bucket of the candidates i to k - 1 of dim `axis`; inf if i >= k.

        partitions: one per dim; that of `axis` is not used."""
        positions, edges = self.grid.places, self.grid.edges
        groups, rows = self._groups(axis, partitions)
        bins = self.growth.bin_of if self.growth else np.zeros(len(self.grid), np.int64)
        shape = (len(edges[axis]), len(rows), int(bins.max()) + 1)
        flat_indices = np.ravel_multi_index((positions[:, axis], groups, bins), shape)
        counts = np.bincount(flat_indices, minlength=int(np.prod(shape))).reshape(shape).astype(np.float64)
        counts_below = np.concatenate([np.zeros((1, *shape[1:])), counts.cumsum(0)])
        times = np.moveaxis(self.times, axis, 0)
        times = times.reshape(shape[0], -1, times.shape[-1])
        if self.growth is None:
            return _alone(counts_below[..., 0], times.reshape(shape[0], -1)[:, rows])
        return self._batched(counts_below, times[:, rows], self.growth)

    def _groups(self, axis: int, partitions: Sequence[Partition]) -> tuple[Array, Array]:
        """Requests by their edges along the other dims, and by samples where each runs alone: the index of each one's
        group, and of each group its row of the times, flattened without `axis`."""
        columns, sizes = [], []
        for other_axis, partition in enumerate(partitions):
            if other_axis != axis:
                ends = np.array(partition)
                columns.append(ends[np.searchsorted(ends, self.grid.places[:, other_axis])])
                sizes.append(len(self.grid.edges[other_axis]))
        if self.growth is None:
            columns.append(np.minimum(self.grid.samples, self.times.shape[-1]) - 1)
            sizes.append(self.times.shape[-1])
        if not columns:
            return np.zeros(len(self.grid), np.int64), np.zeros(1, np.int64)
        rows, groups = np.unique(np.ravel_multi_index(tuple(columns), tuple(sizes)), return_inverse=True)
        return groups, rows

    def _batched(self, counts_below: Array, times: Array, growth: BatchGrowth) -> Array:
        count = len(times)
        tables = growth.tables(per_requests(times, float(self.grid.samples.mean()), growth.max_requests))
        costs = np.full((count + 1, count + 1), np.inf)
        for end in range(1, count + 1):
            inside_counts = counts_below[end] - counts_below[:end]
            costs[:end, end] = growth.seconds_of(inside_counts, inside_counts / growth.seconds, tables[end - 1])
        return costs


def per_requests(times: Array, samples: float, max_requests: int) -> Array:
    """Seconds of 1 to `max_requests` requests with so many samples each, [..., requests], of those of 1, 2, ...
    samples."""
    sample_positions = np.minimum(np.arange(1, max_requests + 1) * samples, times.shape[-1]) - 1
    low = np.minimum(sample_positions.astype(np.int64), max(times.shape[-1] - 2, 0))
    high = np.minimum(low + 1, times.shape[-1] - 1)
    return np.asarray(times[..., low] + (sample_positions - low) * (times[..., high] - times[..., low]))


def _alone(counts_below: Array, times: Array) -> Array:
    """Costs where each request runs alone. counts_below: requests before each candidate, [candidates + 1, groups].

    times: of each candidate and group, [candidates, groups].
    """
    count = len(times)
    seconds = counts_below @ times.T
    costs = np.full((count + 1, count + 1), np.inf)
    for end in range(1, count + 1):
        costs[:end, end] = seconds[end, end - 1] - seconds[:end, end - 1]
    return costs


def total_of(costs: Array, partition: Partition) -> float:
    """The cost of a partition, by `CostModel.intervals`."""
    begins = (0, *(end + 1 for end in partition[:-1]))
    return float(sum(costs[begin, end + 1] for begin, end in zip(begins, partition, strict=True)))


def count_profiles(partitions: Sequence[Partition]) -> int:
    """How many optimization profiles the partitions make: every combination of buckets."""
    return math.prod(map(len, partitions))


# The buckets of least cost: exactly for one dim, as the product of the dims' own buckets for several.
#
# One dim: the cost of a bucket depends on its two ends alone, so that dynamic programming over the last edge gives the
# best partition into each number of buckets (as for the optimal histograms of Jagadish et al., VLDB 1998).
#
# Several dims: each is solved exactly with every candidate of the others as an edge. Of the numbers of buckets that
# stay within the limit those are taken whose excesses over padding nowhere, added up, cost least with the price of
# profiles.


def partition_dim(costs: Array, max_buckets: int) -> list[tuple[float, Partition]]:
    """The least cost with 1, 2, ... `max_buckets` buckets, and the partition. costs: as of `CostModel.intervals`."""
    count = len(costs) - 1
    least_costs = costs[0].copy()
    argmins: list[Array] = []
    partitions: list[tuple[float, Partition]] = [(float(least_costs[count]), (count - 1,))]
    for _ in range(1, min(max_buckets, count)):
        sums = least_costs[:, None] + costs
        argmins.append(sums.argmin(0))
        least_costs = sums.min(0)
        ends, end = [count - 1], count
        for argmin in reversed(argmins):
            end = int(argmin[end])
            ends.append(end - 1)
        partitions.append((float(least_costs[count]), tuple(reversed(ends))))
    return partitions


def partition_grid(model: CostModel, axes: Sequence[int], max_profiles: int, price: float) -> tuple[Partition, ...]:
    """The partition of each dim into buckets: in the dims of `axes` (indices), of low cost, the least if there is one
    such dim; in other dims, each candidate is a bucket.

    max_profiles: over all dims.  price: of a profile, in seconds.
    """
    all_edges = tuple(tuple(range(len(edges))) for edges in model.grid.edges)
    other_profiles = count_profiles([partition for axis, partition in enumerate(all_edges) if axis not in axes])
    max_profiles = max(max_profiles // other_profiles, 1)
    costs = [model.intervals(axis, all_edges) for axis in axes]
    choices = [partition_dim(axis_costs, max_profiles) for axis_costs in costs]
    finest_cost = total_of(costs[0], all_edges[axes[0]])
    counts = min(
        (
            split
            for split in itertools.product(*(range(1, len(dim_partitions) + 1) for dim_partitions in choices))
            if math.prod(split) <= max_profiles
        ),
        key=lambda split: (
            sum(
                dim_partitions[count - 1][0] - finest_cost for dim_partitions, count in zip(choices, split, strict=True)
            )
            + price * other_profiles * math.prod(split)
        ),
    )
    chosen_edges = list(all_edges)
    for axis, dim_partitions, count in zip(axes, choices, counts, strict=True):
        chosen_edges[axis] = dim_partitions[count - 1][1]
    return tuple(chosen_edges)


# What buckets cost a trace: engine seconds of each request, by a simulated batcher, and the interval of the mean.
#
# Intervals are percentiles of resamples. Each draws blocks of consecutive requests, as traffic and batches depend on
# what came just before (`validation.statistics.serial_dependence`), and the time of each bucket, whose logarithm is
# normal with the standard deviation that the measurement gives. The resamples of two plans are the same blocks and,
# where both have a bucket of one size, the same times, so that what one saves against the other is known better than
# either.

# Of the bootstrap; and the percentiles that hold the central 95 % of them.
RESAMPLES = 1000
_CENTRAL = (0.025, 0.975)


@dataclass(frozen=True, eq=False)
class ServedTrace:
    """A trace under one plan. edges: of each dim.  bucket_of: index of each request's bucket, int64 [requests].

    sizes: of the buckets that are used, int64 [buckets, dims].  log_sd: of their times, float64 [buckets].
    seconds: engine seconds of each request, its share of its batch, float64 [requests].
    padding: share of the elements of all runs that are padding, over the dims but the batch.  batch: mean samples in a
    run.  utilization: share of the time that the engine is busy; None without times of arrival.
    service: of the simulated batcher; None without one.
    """

    edges: Mapping[str, tuple[int, ...]]
    bucket_of: Array
    sizes: Array
    log_sd: Array
    seconds: Array
    padding: float
    batch: float
    utilization: float | None
    service: SimulatedService | None = None

    @property
    def profiles(self) -> int:
        """The number of profiles: combinations of buckets."""
        return int(np.prod([len(edges) for edges in self.edges.values()]))

    @property
    def mean_s(self) -> float:
        """Engine seconds of a request."""
        return float(self.seconds.mean())


def serve_trace(
    grid: RequestGrid, edges: Mapping[str, Sequence[int]], times: RunTimes, policy: BatchPolicy | None
) -> ServedTrace:
    """The trace by the simulated batcher; without a policy each request runs alone. edges: of each dim of the grid."""
    axes = [np.array(edges[dim], np.int64) for dim in grid.dims]
    bucket_sides = np.stack([axis[np.searchsorted(axis, grid.sizes[:, index])] for index, axis in enumerate(axes)], 1)
    sizes, bucket_indices = np.unique(bucket_sides, axis=0, return_inverse=True)
    bucket_indices = bucket_indices.reshape(-1)
    max_samples = int(max(grid.samples.max(), policy.most if policy else 1))
    run_times = np.stack([times.table(bucket_sizes[:, None], max_samples).reshape(-1) for bucket_sizes in sizes])
    service = None
    if policy is None:
        seconds, batch, utilization = run_times[bucket_indices, grid.samples - 1], float(grid.samples.mean()), None
    else:
        arrivals = grid.at if grid.at is not None else np.zeros(len(grid))
        curves = [[run[None] for run in bucket] for bucket in run_times]
        service = simulate_batching(arrivals, grid.samples, bucket_indices, curves, policy)
        seconds = service.service_s * grid.samples / service.batches[service.batch_of]
        batch, utilization = float(service.batches.mean()), service.utilization
    real_sizes = np.prod(grid.sizes.astype(float), 1) * grid.samples
    padded_sizes = np.prod(bucket_sides.astype(float), 1) * grid.samples
    return ServedTrace(
        edges={dim: tuple(int(edge) for edge in edges[dim]) for dim in grid.dims},
        bucket_of=bucket_indices,
        sizes=sizes,
        log_sd=times.log_sd(sizes, max(round(batch), 1)),
        seconds=np.asarray(seconds),
        padding=float(1.0 - real_sizes.sum() / padded_sizes.sum()),
        batch=batch,
        utilization=utilization,
        service=service,
    )


def resample_plans(plans: Sequence[ServedTrace], seed: int = 0) -> Array:
    """Mean engine seconds of a request of each plan in each resample, float64 [plans, RESAMPLES]."""
    rng = np.random.default_rng(seed)
    count = len(plans[0].seconds)
    length = block_length(*(plan.seconds for plan in plans))
    starts = np.arange(0, count, length)
    blocks = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, count)))
    block_draws = rng.multinomial(len(starts), np.full(len(starts), 1 / len(starts)), RESAMPLES).astype(float)
    requests = block_draws @ np.bincount(blocks)
    errors: dict[tuple[int, ...], Array] = {}
    plan_means = []
    for plan in plans:
        shape = (len(starts), len(plan.sizes))
        flat_indices = np.ravel_multi_index((blocks, plan.bucket_of), shape)
        seconds = np.bincount(flat_indices, plan.seconds, minlength=shape[0] * shape[1]).reshape(shape)
        keys = [tuple(size) for size in plan.sizes.tolist()]
        for key in keys:
            errors.setdefault(key, rng.standard_normal(RESAMPLES))
        factors = np.exp(plan.log_sd[:, None] * np.stack([errors[key] for key in keys]))
        plan_means.append(np.einsum("rb,bk,kr->r", block_draws, seconds, factors, optimize=True) / requests)
    return np.stack(plan_means)


def interval_of(value: float, resamples: Array) -> Estimate:
    """An estimate with the percentile interval of its resamples."""
    low, high = np.quantile(resamples, _CENTRAL)
    return Estimate(value, float(min(low, value)), float(max(high, value)))


def edges_of(grid: RequestGrid, partitions: Sequence[Partition]) -> dict[str, tuple[int, ...]]:
    """The edges of each dim, of indices of candidates."""
    edge_rows = zip(grid.dims, grid.edges, partitions, strict=True)
    return {dim: tuple(int(edges[index]) for index in partition) for dim, edges, partition in edge_rows}
