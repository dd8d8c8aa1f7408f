"""The policy of a dynamic batcher, without threads and clocks: requests in queues, and which are run together when.

Requests are queued per bucket. A queue is ready when it holds at least `most` samples or its oldest request has waited
`wait_s`. What is taken is the ready queue whose oldest request is the oldest: from it requests in order of arrival, the
first one always, and more while all of them together have at most `most` samples. `Batcher` runs it by a clock, and a
simulator of it can call the same three methods.
"""

import math
from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)


class BatchQueues(Generic[Key, Item]):
    """Waiting requests, by bucket. most: samples of a batch.  wait_s: seconds that a request waits, at most, while
    nothing else runs."""

    def __init__(self, most: int, wait_s: float) -> None:
        self._most, self._wait_s = most, wait_s
        self._queues: dict[Key, deque[tuple[float, int, Item]]] = {}
        self._samples: dict[Key, int] = {}

    def add(self, bucket: Key, item: Item, samples: int, at: float) -> None:
        """Add a request that arrived at the time `at`; those of a bucket come in order of arrival."""
        self._queues.setdefault(bucket, deque()).append((at, samples, item))
        self._samples[bucket] = self._samples.get(bucket, 0) + samples

    def ready_at(self) -> float:
        """The time from which a queue is ready; minus infinity where one is full, infinity where none has a request."""
        if any(samples >= self._most for samples in self._samples.values()):
            return -math.inf
        return min((queue[0][0] + self._wait_s for queue in self._queues.values()), default=math.inf)

    def take(self, now: float, *, all_ready: bool = False) -> tuple[Key, list[Item]] | None:
        """The next batch and its bucket; None where no queue is ready. all_ready: no request waits any more."""
        ready = [
            bucket
            for bucket, queue in self._queues.items()
            if all_ready or self._samples[bucket] >= self._most or now >= queue[0][0] + self._wait_s
        ]
        if not ready:
            return None
        bucket = min(ready, key=lambda each: self._queues[each][0][0])
        queue, items, samples = self._queues[bucket], list[Item](), 0
        while queue and (not items or samples + queue[0][1] <= self._most):
            _, count, item = queue.popleft()
            samples += count
            items.append(item)
        self._samples[bucket] -= samples
        if not queue:
            del self._queues[bucket], self._samples[bucket]
        return bucket, items
