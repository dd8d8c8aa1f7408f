"""Simulates a dynamic batcher in front of one engine: the wait of each request and the run time of its batch.

The policy is that of `enginesmith.Batcher` (and, for one bucket, of Triton's dynamic batcher with `max_queue_delay`):
requests are queued by bucket. A queue is ready once it holds `most` samples or its oldest request has waited `wait_s`.
When the single worker is free, it serves the ready queue with the oldest request: requests in order of arrival, up to
`most` samples. This is a discrete-event simulation: no steady state or distribution is assumed.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from enginesmith.arrays import Array


@dataclass(frozen=True)
class BatchPolicy:
    """The policy of a batcher. most: the most samples in a batch; a larger request runs alone.  wait_s: the longest
    time that the oldest request waits for others while the worker is free."""

    most: int = 1
    wait_s: float = 0.0


@dataclass(frozen=True, eq=False)
class SimulatedService:
    """The result of a simulation. waited_s, service_s: seconds of each request, float64 [requests], by arrival.

    batches: samples in each batch, int64 [batches].  batch_of: index of each request's batch, int64 [requests].
    busy_s: seconds in which the worker ran.  seconds: from the first arrival to the last answer.
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
        """Share of the time in which the worker ran."""
        return self.busy_s / self.seconds if self.seconds else 0.0


def simulate_batching(
    at: Array, samples: Array, buckets: Array, curves: Sequence[Sequence[Array]], policy: BatchPolicy, seed: int = 0
) -> SimulatedService:
    """Simulate the requests that one worker serves.

    at: arrival in seconds, [requests], rising.  samples: of each request, [requests], 1 or more.  buckets: index of
    each request's bucket, [requests].
    curves: by bucket, the run times in seconds of a batch of 1, 2, ... samples, each as quantiles at equal steps from 0
    to 1; the last curve is for all larger batches. Curves of a bucket have one length. Each batch draws its run time at
    random.
    """
    if len(curves) == 1:
        return (_simulate_alone if policy.most == 1 else _simulate_one_queue)(at, samples, curves[0], policy, seed)
    tables = [[curve.tolist() for curve in bucket_curves] for bucket_curves in curves]
    arrivals, counts, bucket_indices = at.tolist(), samples.tolist(), buckets.tolist()
    queues: list[deque[int]] = [deque() for _ in tables]
    queue_sizes = [0] * len(tables)
    uniforms = np.random.default_rng(seed).random(len(arrivals)).tolist()
    starts, service_s = [0.0] * len(arrivals), [0.0] * len(arrivals)
    batch_indices, batch_sizes = [0] * len(arrivals), list[int]()
    now = busy_s = 0.0
    arrival_index, remaining_count = 0, len(arrivals)
    while remaining_count:
        while arrival_index < len(arrivals) and arrivals[arrival_index] <= now:
            queues[bucket_indices[arrival_index]].append(arrival_index)
            queue_sizes[bucket_indices[arrival_index]] += counts[arrival_index]
            arrival_index += 1
        bucket, wake_s = _choose(queues, queue_sizes, arrivals, policy, now)
        if bucket is None:
            now = min(wake_s, arrivals[arrival_index]) if arrival_index < len(arrivals) else wake_s
            continue
        batch = _take(queues[bucket], counts, policy.most)
        size = sum(counts[index] for index in batch)
        queue_sizes[bucket] -= size
        seconds = _quantile(tables[bucket][min(size, len(tables[bucket])) - 1], uniforms[len(batch_sizes)])
        for index in batch:
            starts[index], service_s[index], batch_indices[index] = now, seconds, len(batch_sizes)
        batch_sizes.append(size)
        now, busy_s, remaining_count = now + seconds, busy_s + seconds, remaining_count - len(batch)
    waits = np.array(starts) - at
    sizes, members = np.array(batch_sizes, np.int64), np.array(batch_indices, np.int64)
    return SimulatedService(waits, np.array(service_s), sizes, busy_s, now - arrivals[0], members)


def _simulate_alone(
    at: Array, samples: Array, curves: Sequence[Array], _policy: BatchPolicy, seed: int
) -> SimulatedService:
    """`simulate_batching` for one bucket if each request runs alone, on whole arrays (Lindley, Proc. Cambridge
    Philosophical Society 48, 1952): a request starts on arrival or when the previous one ends, whichever is later."""
    rows = np.stack(curves)[np.minimum(samples, len(curves)) - 1]
    low, fractions = _places(np.random.default_rng(seed).random(len(at)), len(curves[0]))
    bounds = np.take_along_axis(rows, np.stack([low, np.minimum(low + 1, len(curves[0]) - 1)], 1), 1)
    service_s = bounds[:, 0] + fractions * (bounds[:, 1] - bounds[:, 0])
    prior_s = np.cumsum(service_s) - service_s
    starts = prior_s + np.maximum.accumulate(at - prior_s)
    last_end = float(starts[-1] + service_s[-1])
    batch_sizes, members = samples.astype(np.int64), np.arange(len(at))
    return SimulatedService(
        starts - at, service_s, batch_sizes, float(service_s.sum()), last_end - float(at[0]), members
    )


def _simulate_one_queue(
    at: Array, samples: Array, curves: Sequence[Array], policy: BatchPolicy, seed: int
) -> SimulatedService:
    """`simulate_batching` for one bucket, a few times faster: one step per batch, whose requests are consecutive."""
    table = [[*curve.tolist(), float(curve[-1])] for curve in curves]
    cumulative_samples = np.concatenate([[0], np.cumsum(samples)])
    limits = cumulative_samples[:-1] + policy.most
    full_indices = np.minimum(np.searchsorted(cumulative_samples, limits) - 1, len(at))
    filled_s = np.maximum(at, np.append(at, np.inf)[full_indices])  # inf: these requests never arrive
    ready_s = np.minimum(at + policy.wait_s, filled_s).tolist()
    last_fitting = (np.searchsorted(cumulative_samples, limits, "right") - 1).tolist()
    arrivals, sample_totals = at.tolist(), cumulative_samples.tolist()
    low_indices, fractions = (
        array.tolist() for array in _places(np.random.default_rng(seed).random(len(at)), len(curves[0]))
    )
    batch_ends, starts, batch_times = [0], list[float](), list[float]()
    now = 0.0
    while (start := batch_ends[-1]) < len(arrivals):
        now = max(now, ready_s[start])
        end = max(bisect_right(arrivals, now, start, max(last_fitting[start], start)), start + 1)
        curve = table[min(sample_totals[end] - sample_totals[start], len(table)) - 1]
        low = curve[low_index := low_indices[len(starts)]]
        seconds = low + fractions[len(starts)] * (curve[low_index + 1] - low)
        batch_ends.append(end)
        starts.append(now)
        batch_times.append(seconds)
        now += seconds
    count = np.diff(batch_ends)
    waits, service_s = np.repeat(starts, count) - at, np.repeat(batch_times, count)
    batch_sizes = np.diff(cumulative_samples.astype(np.int64)[batch_ends])
    members = np.repeat(np.arange(len(count)), count)
    return SimulatedService(waits, service_s, batch_sizes, float(sum(batch_times)), now - arrivals[0], members)


def _places(shares: Array, size: int) -> tuple[Array, Array]:
    """The position of each share in a curve of `size` quantiles: the index below, and the fraction up to the next."""
    positions = shares * (size - 1)
    low_indices = np.minimum(positions.astype(np.int64), max(size - 2, 0))
    return low_indices, positions - low_indices


def _quantile(curve: Sequence[float], share: float) -> float:
    """The value of a curve of quantiles at a share from 0 to 1, with linear interpolation."""
    position = share * (len(curve) - 1)
    low = min(int(position), max(len(curve) - 2, 0))
    high = min(low + 1, len(curve) - 1)
    return curve[low] + (position - low) * (curve[high] - curve[low])


def _choose(
    queues: Sequence[deque[int]], counts: Sequence[int], arrivals: Sequence[float], policy: BatchPolicy, now: float
) -> tuple[int | None, float]:
    """The ready queue with the oldest request, or None; and the time at which the next queue gets ready, or inf."""
    queue_index, oldest_arrival, wake_s = None, np.inf, np.inf
    for index, queue in enumerate(queues):
        if not queue:
            continue
        arrival = arrivals[queue[0]]
        if counts[index] >= policy.most or arrival + policy.wait_s <= now:
            if arrival < oldest_arrival:
                queue_index, oldest_arrival = index, arrival
        else:
            wake_s = min(wake_s, arrival + policy.wait_s)
    return queue_index, wake_s


def _take(queue: deque[int], counts: Sequence[int], max_samples: int) -> list[int]:
    """Remove requests from the front of a queue, up to `max_samples` samples, but at least one request."""
    batch = [queue.popleft()]
    size = counts[batch[0]]
    while queue and size + counts[queue[0]] <= max_samples:
        size += counts[queue[0]]
        batch.append(queue.popleft())
    return batch
