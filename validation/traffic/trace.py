"""Traces of traffic, simulated batching, service times."""

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core.errors import DataError
from enginesmith.core.reports.latency import BucketLatency
from enginesmith.core.types import TensorSpec
from enginesmith.recording.traffic import RecordedTraffic

# A dynamic batcher before one engine, simulated: how long each request waits and how long its batch runs.
#
# The policy is that of `enginesmith.Batcher` (and, for one bucket, of Triton's dynamic batcher with `max_queue_delay`):
# requests are queued by bucket; a queue is ready once it holds `most` samples or its oldest request has waited
# `wait_s`; the one worker, when free, takes the ready queue whose oldest request is the oldest, and from it requests in
# order of arrival up to `most` samples. A discrete-event simulation: no steady state or distribution is assumed.


@dataclass(frozen=True)
class BatchPolicy:
    """most: samples in a batch at most; a larger request runs alone.  wait_s: the longest that the oldest request waits
    for others while the worker is free."""

    most: int = 1
    wait_s: float = 0.0


@dataclass(frozen=True, eq=False)
class SimulatedService:
    """What the simulation gave. waited_s, service_s: of each request, float64 [requests], in the order of arrival.

    batches: samples in each batch, int64 [batches].  batch_of: index of each request's batch, int64 [requests].
    busy_s: seconds that the worker ran.  seconds: from the first arrival to the last answer.
    """

    waited_s: Array
    service_s: Array
    batches: Array
    busy_s: float
    seconds: float
    batch_of: Array

    @property
    def latency_s(self) -> Array:
        """Seconds from arrival to answer of each request, float64 [requests]."""
        return np.asarray(self.waited_s + self.service_s)

    @property
    def utilization(self) -> float:
        """Share of the time that the worker ran."""
        return self.busy_s / self.seconds if self.seconds else 0.0


def simulate_batching(
    at: Array, samples: Array, buckets: Array, curves: Sequence[Sequence[Array]], policy: BatchPolicy, seed: int = 0
) -> SimulatedService:
    """The waits and services of requests before one worker.

    at: arrival in seconds, [requests], rising.  samples: in each request, [requests], from 1 up.  buckets: index of
    each request's bucket, [requests].
    curves: of each bucket, of a batch of 1, 2, ... samples, its run times in seconds as quantiles at equal steps from 0
    to 1; a batch of more samples than there are curves takes the last. Curves of a bucket have one length. A run time
    is drawn for each batch.
    """
    if len(curves) == 1:
        return (_simulate_alone if policy.most == 1 else _simulate_one_queue)(at, samples, curves[0], policy, seed)
    tables = [[curve.tolist() for curve in of_bucket] for of_bucket in curves]
    arrivals, counts, places = at.tolist(), samples.tolist(), buckets.tolist()
    queues: list[deque[int]] = [deque() for _ in tables]
    queue_sizes = [0] * len(tables)
    draws = np.random.default_rng(seed).random(len(arrivals)).tolist()
    starts, service = [0.0] * len(arrivals), [0.0] * len(arrivals)
    batch_of, batches = [0] * len(arrivals), list[int]()
    now = busy_s = 0.0
    following, remaining_count = 0, len(arrivals)
    while remaining_count:
        while following < len(arrivals) and arrivals[following] <= now:
            queues[places[following]].append(following)
            queue_sizes[places[following]] += counts[following]
            following += 1
        bucket, wakes = _choose(queues, queue_sizes, arrivals, policy, now)
        if bucket is None:
            now = min(wakes, arrivals[following]) if following < len(arrivals) else wakes
            continue
        batch = _take(queues[bucket], counts, policy.most)
        size = sum(counts[index] for index in batch)
        queue_sizes[bucket] -= size
        seconds = _quantile(tables[bucket][min(size, len(tables[bucket])) - 1], draws[len(batches)])
        for index in batch:
            starts[index], service[index], batch_of[index] = now, seconds, len(batches)
        batches.append(size)
        now, busy_s, remaining_count = now + seconds, busy_s + seconds, remaining_count - len(batch)
    waits = np.array(starts) - at
    sizes, members = np.array(batches, np.int64), np.array(batch_of, np.int64)
    return SimulatedService(waits, np.array(service), sizes, busy_s, now - arrivals[0], members)


def _simulate_alone(
    at: Array, samples: Array, curves: Sequence[Array], _policy: BatchPolicy, seed: int
) -> SimulatedService:
    """The same of one bucket where each request runs alone, in whole arrays (Lindley, Proc. Cambridge Philosophical
    Society 48, 1952): it begins when it arrives or the one before ends, whichever is later."""
    rows = np.stack(curves)[np.minimum(samples, len(curves)) - 1]
    low, parts = _places(np.random.default_rng(seed).random(len(at)), len(curves[0]))
    ends = np.take_along_axis(rows, np.stack([low, np.minimum(low + 1, len(curves[0]) - 1)], 1), 1)
    service = ends[:, 0] + parts * (ends[:, 1] - ends[:, 0])
    before = np.cumsum(service) - service
    starts = before + np.maximum.accumulate(at - before)
    last = float(starts[-1] + service[-1])
    batches, members = samples.astype(np.int64), np.arange(len(at))
    return SimulatedService(starts - at, service, batches, float(service.sum()), last - float(at[0]), members)


def _simulate_one_queue(
    at: Array, samples: Array, curves: Sequence[Array], policy: BatchPolicy, seed: int
) -> SimulatedService:
    """The same of one bucket, some times faster: one step for each batch, whose requests are consecutive."""
    table = [[*curve.tolist(), float(curve[-1])] for curve in curves]
    cumulative_samples = np.concatenate([[0], np.cumsum(samples)])
    limits = cumulative_samples[:-1] + policy.most
    full = np.minimum(np.searchsorted(cumulative_samples, limits) - 1, len(at))
    filled = np.maximum(at, np.append(at, np.inf)[full])  # inf: so many requests never come
    ready_s = np.minimum(at + policy.wait_s, filled).tolist()
    fits = (np.searchsorted(cumulative_samples, limits, "right") - 1).tolist()
    arrivals, sums = at.tolist(), cumulative_samples.tolist()
    places, parts = (each.tolist() for each in _places(np.random.default_rng(seed).random(len(at)), len(curves[0])))
    ends, starts, took = [0], list[float](), list[float]()
    now = 0.0
    while (start := ends[-1]) < len(arrivals):
        now = max(now, ready_s[start])
        end = max(bisect_right(arrivals, now, start, max(fits[start], start)), start + 1)
        curve = table[min(sums[end] - sums[start], len(table)) - 1]
        low = curve[place := places[len(starts)]]
        seconds = low + parts[len(starts)] * (curve[place + 1] - low)
        ends.append(end)
        starts.append(now)
        took.append(seconds)
        now += seconds
    count = np.diff(ends)
    waits, service = np.repeat(starts, count) - at, np.repeat(took, count)
    batches, members = np.diff(cumulative_samples.astype(np.int64)[ends]), np.repeat(np.arange(len(count)), count)
    return SimulatedService(waits, service, batches, float(sum(took)), now - arrivals[0], members)


def _places(shares: Array, size: int) -> tuple[Array, Array]:
    """Where shares lie in a curve of `size` quantiles: the index below each, and the part of the way to the next."""
    places = shares * (size - 1)
    lows = np.minimum(places.astype(np.int64), max(size - 2, 0))
    return lows, places - lows


def _quantile(curve: Sequence[float], share: float) -> float:
    """The value of a curve of quantiles at equal steps, between two of them linearly."""
    place = share * (len(curve) - 1)
    low = min(int(place), max(len(curve) - 2, 0))
    high = min(low + 1, len(curve) - 1)
    return curve[low] + (place - low) * (curve[high] - curve[low])


def _choose(
    queues: Sequence[deque[int]], counts: Sequence[int], arrivals: Sequence[float], policy: BatchPolicy, now: float
) -> tuple[int | None, float]:
    """The ready queue whose oldest request is the oldest, or None; and when the first of the others will be ready."""
    queue_index, oldest, wakes = None, np.inf, np.inf
    for index, queue in enumerate(queues):
        if not queue:
            continue
        since = arrivals[queue[0]]
        if counts[index] >= policy.most or since + policy.wait_s <= now:
            if since < oldest:
                queue_index, oldest = index, since
        else:
            wakes = min(wakes, since + policy.wait_s)
    return queue_index, wakes


def _take(queue: deque[int], counts: Sequence[int], max_samples: int) -> list[int]:
    """Requests from the front of a queue, up to `max_samples` together, at least one."""
    batch = [queue.popleft()]
    size = counts[batch[0]]
    while queue and size + counts[queue[0]] <= max_samples:
        size += counts[queue[0]]
        batch.append(queue.popleft())
    return batch


# The time of a run of an engine as a function of the sizes of its dims, from the sizes at which it was measured.
#
# Between measured sizes the logarithm of the median is interpolated by universal kriging over the logarithms of the
# sizes: a linear trend (t is about a * size^b) and a Gaussian process on what it leaves, whose scale and length are
# those of the greatest likelihood, on a grid (Cressie, Statistics for Spatial Data, 1993, 3.4; Rasmussen & Williams,
# Gaussian Processes for Machine Learning, 2006, 2.7 and 5.4). It gives a standard deviation with each value. Beyond the
# measured sizes nothing is predicted.

# Standard deviation of a measured median's logarithm where only one process measured it.
_ONE_PROCESS = 0.02
# Tried scales (of the logarithm of seconds) and lengths (of the logarithm of sizes) of the Gaussian process.
_SCALES = (0.02, 0.05, 0.1, 0.2, 0.4, 0.8)
_LENGTHS = (0.35, 0.7, 1.4, 2.8)


@dataclass(frozen=True, eq=False)
class ServiceTimes:
    """What was measured of an engine. sizes: int64 [points, dims], at least one point.

    curves: run times in seconds as quantiles at equal steps from 0 to 1, float64 [points, steps].
    log_sd: standard deviation of the logarithm of each point's median, float64 [points].
    """

    dims: tuple[str, ...]
    sizes: Array
    curves: Array
    log_sd: Array

    @classmethod
    def of_buckets(cls, buckets: Sequence[BucketLatency], dims: Sequence[str]) -> "ServiceTimes":
        """The times of a latency report's buckets. Raises DataError where there are none."""
        if not buckets:
            raise DataError("no bucket was timed; `enginesmith profile` times them")
        sizes = np.array([[bucket.sizes[dim] for dim in dims] for bucket in buckets], np.int64)
        curves = np.array([bucket.curve for bucket in buckets], np.float64)
        return cls(tuple(dims), sizes, curves, np.array([_log_sd(bucket.process_medians_s) for bucket in buckets]))

    def predict(self, sizes: Array) -> tuple[Array, Array]:
        """The median seconds of a run, and the standard deviation of its logarithm, float64 [rows] each.

        sizes: int64 [rows, dims]. Raises DataError for a size beyond those measured.
        """
        low, high = self.sizes.min(0), self.sizes.max(0)
        beyond = (sizes < low) | (sizes > high)
        if beyond.any():
            row, dim = (int(index) for index in np.argwhere(beyond)[0])
            raise DataError(
                f"{self.dims[dim]}={sizes[row, dim]} is beyond what was timed ({low[dim]} to {high[dim]}); time it:"
                f" enginesmith profile REF --bucket {self.dims[dim]}={sizes[row, dim]}"
            )
        return self._kriging.predict(sizes)

    def curves_at(self, sizes: Array) -> Array:
        """Quantiles of the run times at these sizes, float64 [rows, steps]: the predicted median, with the shape of the
        distribution at the nearest measured size. Raises as `predict`."""
        medians, _ = self.predict(sizes)
        distances = np.abs(np.log(sizes)[:, None] - np.log(self.sizes)[None]).sum(-1)
        shapes = self.curves / self._medians[:, None]
        return np.asarray(medians[:, None] * shapes[distances.argmin(1)])

    @cached_property
    def _medians(self) -> Array:
        return np.asarray(self.curves[:, self.curves.shape[1] // 2])

    @cached_property
    def _kriging(self) -> "_Kriging":
        return _Kriging.fit(np.log(self.sizes), np.log(self._medians), self.log_sd)


def _log_sd(process_medians_s: Sequence[float]) -> float:
    """Standard deviation of the logarithm of the median of several processes."""
    if len(process_medians_s) < 2:
        return _ONE_PROCESS
    spread = float(np.std(np.log(process_medians_s), ddof=1))
    return max(spread / math.sqrt(len(process_medians_s)), 1e-3)


@dataclass(frozen=True, eq=False)
class _Kriging:
    """A linear trend and a Gaussian process. at: [points, dims].  weights: of the residuals, [points]."""

    at: Array
    scale: float
    length: float
    trend: Array
    weights: Array
    inverse: Array
    design: Array
    information: Array

    @classmethod
    def fit(cls, at: Array, values: Array, noise: Array) -> "_Kriging":
        fits = [cls._at(at, values, noise, scale, length) for scale, length in product(_SCALES, _LENGTHS)]
        return max(fits, key=lambda candidate: candidate[0])[1]

    @classmethod
    def _at(cls, at: Array, values: Array, noise: Array, scale: float, length: float) -> tuple[float, "_Kriging"]:
        """The logarithm of the (restricted) likelihood, but for a constant, and the fit."""
        covariance = _kernel(at, at, scale, length) + np.diag(noise**2)
        inverse = np.linalg.inv(covariance)
        design = _design(at, len(at) > at.shape[1])
        information = np.linalg.pinv(design.T @ inverse @ design)
        trend = information @ design.T @ inverse @ values
        residuals = values - design @ trend
        likelihood = -0.5 * float(residuals @ inverse @ residuals + np.linalg.slogdet(covariance)[1])
        return likelihood, cls(at, scale, length, trend, inverse @ residuals, inverse, design, information)

    def predict(self, sizes: Array) -> tuple[Array, Array]:
        new = np.log(sizes)
        covariances = _kernel(new, self.at, self.scale, self.length)
        design = _design(new, self.design.shape[1] > 1)
        values = design @ self.trend + covariances @ self.weights
        residual_design = design - covariances @ self.inverse @ self.design
        variance = self.scale**2 - np.einsum("ij,jk,ik->i", covariances, self.inverse, covariances)
        variance = variance + np.einsum("ij,jk,ik->i", residual_design, self.information, residual_design)
        return np.exp(values), np.sqrt(np.maximum(variance, 0.0))


def _design(at: Array, has_slope: bool) -> Array:
    """1 and, where there are enough points, the logarithms of the sizes: [rows, terms]."""
    ones = np.ones((len(at), 1))
    return np.hstack([ones, at]) if has_slope else ones


def _kernel(points: Array, other_points: Array, scale: float, length: float) -> Array:
    """Matern's covariance with smoothness 3/2 (Rasmussen & Williams 2006, equation 4.17): [rows, columns]."""
    distances = np.sqrt(3.0) * np.linalg.norm(points[:, None] - other_points[None], axis=-1) / length
    return np.asarray(scale**2 * (1.0 + distances) * np.exp(-distances))


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests in the order of their arrival. at: seconds since the first, float64 [requests], rising; all 0 where the
    traffic has no times.  sizes: named dim -> its size in each request, int64 [requests].  start: when the first one
    came, in seconds since the epoch where that was recorded; 0 without times."""

    at: Array
    sizes: Mapping[str, Array]
    start: float = 0.0

    def __len__(self) -> int:
        return len(self.at)

    @property
    def timed(self) -> bool:
        """Whether it has times of arrival."""
        return len(self.at) > 1 and bool(self.at[-1] > 0)

    @property
    def per_second(self) -> float:
        """Mean rate of arrivals in requests a second. Raises DataError for a trace without times."""
        if not self.timed:
            raise DataError(
                "the traffic has no times of arrival, or all of them are the same; record it with `at`, or give a rate"
            )
        return (len(self.at) - 1) / float(self.at[-1])


def trace_of(traffic: RecordedTraffic, inputs: Sequence[TensorSpec]) -> Trace:
    """The trace of recorded traffic. inputs: of the model, which name the dims. Raises DataError for a dim that has two
    sizes in one request."""
    axes = [
        (spec.name, axis, dim)
        for spec in inputs
        for axis, dim in enumerate(spec.shape)
        if isinstance(dim, str) and dim.isidentifier()
    ]
    sizes: dict[str, list[int]] = {str(dim): [] for _, _, dim in axes}
    for number, request in enumerate(traffic.requests):
        dim_sizes: dict[str, int] = {}
        for name, axis, dim in axes:
            size = request.inputs[name].shape[axis]
            if dim_sizes.setdefault(str(dim), size) != size:
                raise DataError(
                    f"request {number}: dim {dim!r} is {dim_sizes[str(dim)]} in one input and {size} in {name!r}"
                )
        for dim, size in dim_sizes.items():
            sizes[dim].append(size)
    arrivals = np.array([request.at for request in traffic.requests], np.float64)
    return Trace(arrivals, {dim: np.array(values, np.int64) for dim, values in sizes.items()}, traffic.start)
