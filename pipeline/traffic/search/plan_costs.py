"""What buckets cost a trace: engine seconds of each request, by a simulated batcher, and the interval of the mean.

Intervals are percentiles of resamples. Each draws blocks of consecutive requests, as traffic and batches depend on what
came just before (`validation.statistics.serial_dependence`), and the time of each bucket, whose logarithm is normal
with the standard deviation that the measurement gives. The resamples of two plans are the same blocks and, where both
have a bucket of one size, the same times, so that what one saves against the other is known better than either.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from enginesmith.arrays import Array
from pipeline.traffic.search.interval_costs import Partition
from pipeline.traffic.search.request_grid import RequestGrid
from pipeline.traffic.search.run_times import RunTimes
from validation.statistics.serial_dependence import block_length
from validation.traffic.batching import BatchPolicy, SimulatedService, simulate_batching

RESAMPLES = 1000
_CENTRAL = (0.025, 0.975)


@dataclass(frozen=True)
class Interval95:
    """An estimate with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, eq=False)
class ServedTrace:
    """A trace under one plan. edges: of each dim.  bucket_of: index of each request's bucket, int64 [requests].

    sizes: of the buckets that are used, int64 [buckets, dims].  log_sd: of their times, float64 [buckets].
    seconds: engine seconds of each request, its share of its batch, float64 [requests].
    padding: share of the elements of all runs that are padding, over the dims but the batch.  batch: mean samples in a
    run.  utilization: share of the time that the engine is busy; None without times of arrival.
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
    padded = np.stack([axis[np.searchsorted(axis, grid.sizes[:, index])] for index, axis in enumerate(axes)], 1)
    sizes, bucket_of = np.unique(padded, axis=0, return_inverse=True)
    bucket_of = bucket_of.reshape(-1)
    most = int(max(grid.samples.max(), policy.most if policy else 1))
    runs = np.stack([times.table(each[:, None], most).reshape(-1) for each in sizes])
    service = None
    if policy is None:
        seconds, batch, utilization = runs[bucket_of, grid.samples - 1], float(grid.samples.mean()), None
    else:
        at = grid.at if grid.at is not None else np.zeros(len(grid))
        curves = [[run[None] for run in bucket] for bucket in runs]
        service = simulate_batching(at, grid.samples, bucket_of, curves, policy)
        seconds = service.service_s * grid.samples / service.batches[service.batch_of]
        batch, utilization = float(service.batches.mean()), service.utilization
    real = np.prod(grid.sizes.astype(float), 1) * grid.samples
    filled = np.prod(padded.astype(float), 1) * grid.samples
    return ServedTrace(
        edges={dim: tuple(int(edge) for edge in edges[dim]) for dim in grid.dims},
        bucket_of=bucket_of,
        sizes=sizes,
        log_sd=times.log_sd(sizes, max(round(batch), 1)),
        seconds=np.asarray(seconds),
        padding=float(1.0 - real.sum() / filled.sum()),
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
    drawn = rng.multinomial(len(starts), np.full(len(starts), 1 / len(starts)), RESAMPLES).astype(float)
    requests = drawn @ np.bincount(blocks)
    errors: dict[tuple[int, ...], Array] = {}
    found = []
    for plan in plans:
        shape = (len(starts), len(plan.sizes))
        flat = np.ravel_multi_index((blocks, plan.bucket_of), shape)
        seconds = np.bincount(flat, plan.seconds, minlength=shape[0] * shape[1]).reshape(shape)
        keys = [tuple(size) for size in plan.sizes.tolist()]
        for key in keys:
            errors.setdefault(key, rng.standard_normal(RESAMPLES))
        factors = np.exp(plan.log_sd[:, None] * np.stack([errors[key] for key in keys]))
        found.append(np.einsum("rb,bk,kr->r", drawn, seconds, factors, optimize=True) / requests)
    return np.stack(found)


def interval_of(value: float, resamples: Array) -> Interval95:
    """An estimate with the percentile interval of its resamples."""
    low, high = np.quantile(resamples, _CENTRAL)
    return Interval95(value, float(min(low, value)), float(max(high, value)))


def edges_of(grid: RequestGrid, partitions: Sequence[Partition]) -> dict[str, tuple[int, ...]]:
    """The edges of each dim, of indices of candidates."""
    named = zip(grid.dims, grid.edges, partitions, strict=True)
    return {dim: tuple(int(edges[index]) for index in partition) for dim, edges, partition in named}
