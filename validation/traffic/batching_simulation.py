"""A dynamic batcher before one engine, simulated: how long each request waits and how long its batch runs.

The policy is that of `enginesmith.Batcher` (and, for one bucket, of Triton's dynamic batcher with `max_queue_delay`):
requests are queued by bucket; a queue is ready once it holds `most` samples or its oldest request has waited
`wait_s`; the one worker, when free, takes the ready queue whose oldest request is the oldest, and from it requests in
order of arrival up to `most` samples. A discrete-event simulation: no steady state or distribution is assumed.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from enginesmith.arrays import Array


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
