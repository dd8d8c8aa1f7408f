"""A small dynamic batcher that runs a trace against a real session: what `bench_buckets` holds predictions to.

The policy is that of `validation.traffic`. By the wall clock the loop admits each request when its time has
come (open loop), sleeps where nothing is ready, and runs padded batches. By the CPU clock nothing sleeps: time is that
of the arrivals and of the runs, each in the CPU seconds of a session with one thread.
"""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core.types import Session
from validation.traffic.batching_simulation import BatchPolicy
from validation.traffic.trace import Trace


@dataclass(frozen=True)
class Replayed:
    """busy_s: seconds of all runs.  requests, runs: their numbers.  p99_s: latency from arrival to answer."""

    busy_s: float
    requests: int
    runs: int
    p99_s: float

    @property
    def seconds(self) -> float:
        """Engine seconds of a request."""
        return self.busy_s / self.requests


class WallStopwatch:
    """Times runs of a session by the wall clock."""

    by_cpu = False

    def __init__(self, session: Session) -> None:
        self._session = session

    def time(self, inputs: Mapping[str, Array]) -> float:
        """Seconds of a run."""
        start_s = time.perf_counter()
        self._session.run(inputs)
        return time.perf_counter() - start_s


class CpuStopwatch:
    """Times runs of a session with one thread by its CPU time, as shares of a fixed run's, which is repeated all along:
    on a machine that others use, CPU seconds too take up to twice as long from one minute to the next."""

    by_cpu = True
    _EVERY, _KEPT = 8, 5

    def __init__(self, session: Session, fixed_s: float) -> None:
        self._session, self._fixed_s = session, fixed_s
        self._inputs, self._runs = pad(np.array([96]), 96), 0
        self._fixed = deque((self.run_fixed() for _ in range(self._KEPT)), self._KEPT)

    def run_fixed(self) -> float:
        """CPU seconds of the fixed run."""
        return self._cpu_s(self._inputs)

    def time(self, inputs: Mapping[str, Array]) -> float:
        """CPU seconds of a run, where the fixed run takes `fixed_s`."""
        if self._runs % self._EVERY == 0:
            self._fixed.append(self.run_fixed())
        self._runs += 1
        return self._cpu_s(inputs) * self._fixed_s / float(np.median(self._fixed))

    def _cpu_s(self, inputs: Mapping[str, Array]) -> float:
        start_s = time.thread_time()
        self._session.run(inputs)
        return time.thread_time() - start_s


def replay(
    trace: Trace, edges: Sequence[int], policy: BatchPolicy, stopwatch: WallStopwatch | CpuStopwatch
) -> Replayed:
    """Run a trace of requests of one sample, whose sizes are those of the dim `sequence`. edges: of its buckets."""
    sizes, arrivals = trace.sizes["sequence"], trace.at.tolist()
    places = np.searchsorted(edges, sizes).tolist()
    queues: list[deque[int]] = [deque() for _ in edges]
    start_s, current_seconds, following_number, runs, busy_seconds = time.perf_counter(), 0.0, 0, 0, 0.0
    done_array = np.zeros(len(arrivals))
    while runs == 0 or following_number < len(arrivals) or any(queues):
        if not stopwatch.by_cpu:
            current_seconds = time.perf_counter() - start_s
        while following_number < len(arrivals) and arrivals[following_number] <= current_seconds:
            queues[places[following_number]].append(following_number)
            following_number += 1
        ready_bucket, wakes = _choose(queues, arrivals, policy, current_seconds)
        if ready_bucket is None:
            wakes = min(wakes, arrivals[following_number]) if following_number < len(arrivals) else wakes
            if not stopwatch.by_cpu:
                time.sleep(max(wakes - (time.perf_counter() - start_s), 0.0))
            current_seconds = wakes
            continue
        taken_items = [queues[ready_bucket].popleft() for _ in range(min(policy.most, len(queues[ready_bucket])))]
        inputs = pad(sizes[taken_items], edges[ready_bucket])
        seconds = stopwatch.time(inputs)
        runs, busy_seconds, current_seconds = runs + 1, busy_seconds + seconds, current_seconds + seconds
        done_array[taken_items] = current_seconds if stopwatch.by_cpu else time.perf_counter() - start_s
    return Replayed(busy_seconds, len(arrivals), runs, float(np.quantile(done_array - trace.at, 0.99)))


def _choose(
    queues: Sequence[deque[int]], arrivals: Sequence[float], policy: BatchPolicy, now: float
) -> tuple[int | None, float]:
    """The ready queue with the oldest request, or None; and when the next one will be."""
    heads = [(arrivals[queue[0]], index) for index, queue in enumerate(queues) if queue]
    ready_heads = [
        head for head in heads if len(queues[head[1]]) >= policy.most or head[0] + policy.wait_s <= now
    ]  # fmt: skip
    return (min(ready_heads)[1] if ready_heads else None), min((at + policy.wait_s for at, _ in heads), default=np.inf)


def pad(sizes: Array, edge: int) -> Mapping[str, Array]:
    """A batch of made-up texts of these sizes, padded to `edge`."""
    places = np.arange(edge)[None] < sizes[:, None]
    ids = np.where(places, 1 + (np.arange(edge)[None] * 7 + sizes[:, None]) % 256, 0)
    return {"input_ids": ids.astype(np.int64), "attention_mask": places.astype(np.int64)}
