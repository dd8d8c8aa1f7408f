"""Batches waiting requests."""

import math
import time
import warnings
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from numbers import Integral, Real
from threading import Condition, current_thread
from typing import Generic, TypeVar

import numpy as np

from enginesmith.arrays import Array, InputCheck
from enginesmith.core.errors import DataError, EnginesmithError, InputError
from enginesmith.core.state import Padding
from enginesmith.core.text import SelfClosing, WorkerThread, describe_error
from enginesmith.core.types import Session, Tensors
from enginesmith.serving.buckets import PadPlan, plan_padding
from enginesmith.serving.router import MOST_ROUTES, Router

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)


class BatchQueues(Generic[Key, Item]):
    """Waiting requests, by bucket: the policy of a dynamic batcher without threads and clocks, also for simulators.

    most: maximum samples of a batch.  wait_s: maximum seconds that a request waits while nothing else runs.
    """

    def __init__(self, most: int, wait_s: float) -> None:
        self._most, self._wait_s = most, wait_s
        self._queues: dict[Key, deque[tuple[float, int, Item]]] = {}
        self._samples: dict[Key, int] = {}

    def add(self, bucket: Key, request: Item, samples: int, at: float) -> None:
        """Add a request that arrived at the time `at`; those of a bucket must be added in order of arrival.

        samples: number of its rows along the batch dim.
        """
        self._queues.setdefault(bucket, deque()).append((at, samples, request))
        self._samples[bucket] = self._samples.get(bucket, 0) + samples

    def ready_at(self) -> float:
        """The time from which a queue is ready; minus infinity if one is full, infinity if all are empty."""
        if any(sample_count >= self._most for sample_count in self._samples.values()):
            return -math.inf
        return min((queue[0][0] + self._wait_s for queue in self._queues.values()), default=math.inf)

    def take(self, now: float, *, all_ready: bool = False) -> tuple[Key, list[Item]] | None:
        """The next batch and its bucket; None if no queue is ready. all_ready: whether all queues count as ready."""
        ready_buckets = [
            bucket
            for bucket, queue in self._queues.items()
            if all_ready or self._samples[bucket] >= self._most or now >= queue[0][0] + self._wait_s
        ]
        if not ready_buckets:
            return None
        bucket = min(ready_buckets, key=lambda candidate: self._queues[candidate][0][0])
        queue, items, samples = self._queues[bucket], list[Item](), 0
        while queue and (not items or samples + queue[0][1] <= self._most):
            _, count, request = queue.popleft()
            samples += count
            items.append(request)
        self._samples[bucket] -= samples
        if not queue:
            del self._queues[bucket], self._samples[bucket]
        return bucket, items


# The policy (`BatchQueues`). Requests are queued per bucket: the sizes of all named dims but the batch dim (for a
# router the padded sizes; for a session, and for requests outside all buckets of a router, the request's own). A queue
# is ready if it has at least `most` samples or its oldest request has waited `wait_s`. When the one worker thread is
# free, it chooses the ready queue with the oldest request. It takes that request, and more in order of arrival while
# all of them together have at most `most` samples; runs these as one batch; and answers them. If no queue is ready, it
# sleeps until one is. After `close` every queue is ready. An Exception in a batch is
# raised for its requests. Any other error of a runtime (SystemExit, a panic of Rust) ends the batcher: all waiting
# requests and every later `submit` fail with it.

Answer = dict[str, Array]
# Sizes of all dims except the batch dim.
_Key = tuple[int, ...]


@dataclass(frozen=True)
class BatchedRequest:
    """An answered request. bucket: sizes of the other dims in its run.  waited_s: seconds from `submit` to the start of
    its batch.  service_s: seconds from then to the answer.  samples: its own.  batch: samples of the batch.
    """

    bucket: Mapping[str, int]
    waited_s: float
    service_s: float
    samples: int
    batch: int


@dataclass(frozen=True)
class _Join:
    """How requests of the same sizes join a batch. bucket: sizes of other dims after padding.  plan: of the padding."""

    bucket: Mapping[str, int]
    plan: PadPlan
    samples: int


@dataclass(frozen=True)
class _Waiting:
    """A request in a queue. at: its arrival by `time.perf_counter`."""

    inputs: Tensors
    join: _Join
    at: float
    future: "Future[Answer]" = field(default_factory=lambda: Future())


class Batcher(SelfClosing):
    """A dynamic batcher with one worker thread; `submit` is thread-safe.

    session: a router, or an opened engine.  most: maximum samples of a batch.  wait_s: maximum seconds that a request
    waits for others while the worker is free.  dim: of the batch; every input and output has it as an axis.
    record: called by the worker with each answered request.  log: number of the last ones that are kept in `served`.
    Raises InputError for limits out of range, for more samples than any engine of a router takes, and for an input or
    output without the batch dim.
    """

    def __init__(
        self,
        session: Session,
        *,
        most: int,
        wait_s: float,
        dim: str = "batch",
        record: Callable[[BatchedRequest], object] | None = None,
        log: int = 10_000,
    ) -> None:
        _check_arguments(session, most, wait_s)
        if unbatched_names := [spec.name for spec in (*session.inputs, *session.outputs) if dim not in spec.shape]:
            raise InputError(
                f"{unbatched_names[0]!r} has no axis {dim!r}, so requests cannot be joined; name the batch dim"
            )
        if isinstance(session, Router) and most > (largest := session.largest(dim)):
            raise InputError(
                f"most is {most}, but the router's engines accept at most {dim}={largest}; give that or less"
            )
        self._session, self._dim = session, dim
        self._record, self._check, self._joins = record, InputCheck(session.inputs), dict[_Key, _Join]()
        self._axes = {spec.name: spec.shape.index(dim) for spec in (*session.inputs, *session.outputs)}
        self.served: deque[BatchedRequest] = deque(maxlen=log)
        self._changed, self._closed, self._ended = Condition(), False, ""
        self._running: Sequence[_Waiting] = ()
        self._queues = BatchQueues[_Key, _Waiting](most, wait_s)
        self._worker = WorkerThread("enginesmith-batcher", self._work, self._fail)
        self._worker.start()

    def submit(self, inputs: Tensors) -> "Future[Answer]":
        """The outputs of a request, after its batch has run. An error of the batch is raised for all its requests.

        The caller must not change the arrays before the answer. Raises DataError for inputs that do not fit the model,
        EnginesmithError, with the reason, if the batcher is closed or has stopped.
        """
        sizes = self._check(inputs).sizes
        key = tuple(sizes.values())
        join = self._joins.get(key) or self._make_join(key, sizes)
        request = _Waiting(inputs, join, time.perf_counter())
        with self._changed:
            if not self._closed and not self._worker.is_alive():
                self._ended, self._closed = "the batcher was made before a fork, and its thread ended there", True
            if self._closed:
                raise EnginesmithError(f"{self._ended or 'the batcher is closed'}; make another one")
            self._queues.add(tuple(join.bucket.values()), request, join.samples, request.at)
            self._changed.notify()
        return request.future

    def close(self) -> None:
        """Answer waiting requests, and end the worker."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if current_thread() is not self._worker:  # a callback in it may close the batcher
            self._worker.join()

    def _make_join(self, key: _Key, sizes: Mapping[str, int]) -> _Join:
        session, padding, padded_sizes = self._session, Padding(), dict(sizes)
        if isinstance(session, Router):
            padding = session.padding
            padded_sizes = {**(session.padded_sizes(sizes) or sizes), self._dim: sizes[self._dim]}
        plan = plan_padding(session.inputs, session.outputs, padding, sizes, padded_sizes)
        bucket = {dim: size for dim, size in padded_sizes.items() if dim != self._dim}
        join = _Join(bucket, plan, sizes[self._dim])
        if len(self._joins) >= MOST_ROUTES:
            self._joins.clear()
        self._joins[key] = join
        return join

    def _work(self) -> None:
        while (batch := self._take()) is not None:
            start_s = time.perf_counter()
            self._running = batch
            running_requests = [request for request in batch if request.future.set_running_or_notify_cancel()]
            try:
                for request, answer in zip(running_requests, self._run(running_requests), strict=True):
                    request.future.set_result(answer)
            except Exception as error:  # any error of a runtime
                for request in running_requests:
                    if not request.future.done():
                        request.future.set_exception(error)
            self._log(running_requests, start_s, time.perf_counter())

    def _fail(self, error: BaseException) -> None:
        """Fail all waiting and later requests, because the batcher has stopped."""
        with self._changed:
            self._ended, self._closed = f"the batcher ended: {describe_error(error)}", True
            waiting_requests = list(self._running)
            while (queue_batch := self._queues.take(math.inf, all_ready=True)) is not None:
                waiting_requests += queue_batch[1]
        for request in waiting_requests:
            if not request.future.done():
                with suppress(BaseException):  # errors of the future's callbacks
                    request.future.set_exception(EnginesmithError(self._ended))

    def _take(self) -> list[_Waiting] | None:
        """The next batch; None if the batcher is closed and no request waits."""
        with self._changed:
            while True:
                now_s = time.perf_counter()
                if (queue_batch := self._queues.take(now_s, all_ready=self._closed)) is not None:
                    return queue_batch[1]
                if self._closed:
                    return None
                ready_at = self._queues.ready_at()
                self._changed.wait(None if ready_at == math.inf else max(ready_at - now_s, 0.0))

    def _run(self, requests: Sequence[_Waiting]) -> list[Answer]:
        """The outputs of each request, at its own sizes: views of the batch's outputs."""
        if not requests:
            return []
        padded_inputs = [request.join.plan.pad(request.inputs) for request in requests]
        if len(requests) == 1:
            return [requests[0].join.plan.crop(self._call(requests, padded_inputs[0]))]
        input_names = [spec.name for spec in self._session.inputs]
        batch_inputs = {
            name: np.concatenate([inputs[name] for inputs in padded_inputs], self._axes[name]) for name in input_names
        }
        outputs, answers, offset = self._call(requests, batch_inputs), list[Answer](), 0
        sample_count = sum(request.join.samples for request in requests)
        if wrong_outputs := [
            name for name, array in outputs.items() if array.shape[self._axes.get(name, 0) :][:1] != (sample_count,)
        ]:
            raise DataError(
                f"output {wrong_outputs[0]!r} does not have one entry for each of {sample_count} samples along the "
                "batch dim"
            )
        for request in requests:
            span = slice(offset, offset := offset + request.join.samples)
            output_rows = {
                name: array[(slice(None),) * self._axes.get(name, 0) + (span,)] for name, array in outputs.items()
            }
            answers.append(request.join.plan.crop(output_rows))
        return answers

    def _call(self, requests: Sequence[_Waiting], inputs: Tensors) -> Answer:
        if isinstance(self._session, Router):
            elements = sum(request.join.plan.own_elements for request in requests)
            return self._session.run_joined(inputs, len(requests), elements)
        return self._session.run(inputs)

    def _log(self, requests: Sequence[_Waiting], started: float, ended: float) -> None:
        batch_size = sum(request.join.samples for request in requests)
        for request in requests:
            join, waited_s = request.join, started - request.at
            record = BatchedRequest(join.bucket, waited_s, ended - started, join.samples, batch_size)
            self.served.append(record)
            if self._record is not None:
                try:
                    self._record(record)
                except Exception as error:  # an error in the caller's function: requests continue
                    with suppress(UserWarning):  # if warnings are errors
                        warnings.warn(f"record of a batcher raised {describe_error(error)}", stacklevel=2)


def _check_arguments(session: object, most: object, wait_s: object) -> None:
    """Raise InputError for an invalid session, and for limits of a wrong type or out of range."""
    if not hasattr(session, "inputs"):
        raise InputError(f"session is a {type(session).__name__}; give a router, or an opened engine")
    is_in_range = isinstance(most, Integral) and isinstance(wait_s, Real) and int(most) >= 1 and float(wait_s) >= 0
    if not is_in_range:
        raise InputError(f"most is {most} and wait_s {wait_s}; give at least 1 sample and 0 seconds")
