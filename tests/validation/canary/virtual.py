"""Threads on a clock of their own: it moves on when all of them sleep, to the moment when the first one wakes."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from enginesmith.core.types import Tensors, TensorSpec
from enginesmith.recording.traffic import RecordedRequest, RecordedTraffic
from tests.validation.canary.latencies import Rng
from tests.waiting import run_threads
from validation.canary.replay import ReplayClock, Timed, TrafficSegment, serve_requests


class VirtualTime:
    """Seconds that pass only while every one of `threads` threads sleeps."""

    def __init__(self, threads: int) -> None:
        self.seconds, self._threads, self._waking = 0.0, threads, list[float]()
        self._moved = threading.Condition()

    def clock(self) -> ReplayClock:
        return ReplayClock(lambda: self.seconds, self.sleep)

    def sleep(self, duration: float) -> None:
        with self._moved:
            wake_seconds = self.seconds + duration
            self._waking.append(wake_seconds)
            self._move()
            self._moved.wait_for(lambda: self.seconds >= wake_seconds)

    def leave(self) -> None:
        """A thread ends."""
        with self._moved:
            self._threads -= 1
            self._move()

    def _move(self) -> None:
        if self._waking and len(self._waking) == self._threads:
            self.seconds = min(self._waking)
            self._waking = [wake_time for wake_time in self._waking if wake_time > self.seconds]
            self._moved.notify_all()


@dataclass
class Working:
    """An engine that takes `seconds` a request, about. locked: one request at a time, and the others wait for a lock.

    seen: when each run began, and how many were running then, itself included.
    """

    rng: Rng
    seconds: float = 0.01
    locked: bool = False
    time: Any = None
    inputs: tuple[TensorSpec, ...] = (TensorSpec("x", "float32", ("batch", 4)),)
    outputs: tuple[TensorSpec, ...] = (TensorSpec("y", "float32", ("batch", 4)),)
    seen: list[tuple[float, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._one, self._free, self._running = threading.Lock(), 0.0, 0

    def started(self, time: Any) -> None:
        """A segment starts on a clock of its own."""
        self.time, self._free = time, 0.0

    def run(self, inputs: Any) -> dict[str, np.ndarray]:
        with self._one:
            current_seconds = self.time.seconds
            self._running += 1
            self.seen.append((current_seconds, self._running))
            service = self.seconds * float(np.exp(self.rng.normal() * 0.1))
            self._free = (max(current_seconds, self._free) if self.locked else current_seconds) + service
            wait = self._free - current_seconds
        self.time.sleep(wait)
        with self._one:
            self._running -= 1
        return {"y": inputs["x"] * 2}


class Threads:
    """A `SegmentSession` of this process, its threads on virtual time. sent: the arrivals of each segment."""

    def __init__(self, engine: Working, in_flight: int) -> None:
        self.engine, self._in_flight = engine, in_flight
        self.sent: list[list[float]] = []

    def prepare(self, in_flight: int, warmup: Sequence[Tensors]) -> None:
        raise AssertionError("it is ready")

    def serve_segment(self, segment: TrafficSegment) -> list[Timed]:
        self.sent.append(list(segment.arrivals))
        time, result = VirtualTime(self._in_flight), list[Timed | None]([None] * len(segment))
        self.engine.started(time)

        def work() -> None:
            serve_requests(self.engine, segment, result, time.clock(), 0.0)
            time.leave()

        run_threads([work] * self._in_flight)
        return [item for item in result[segment.lead :] if item is not None]


def poisson_traffic(count: int, gap: float, seed: int = 0) -> RecordedTraffic:
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(gap, count))
    inputs = {"x": np.ones((1, 4), np.float32)}
    return RecordedTraffic(tuple(RecordedRequest(float(at - arrivals[0]), inputs) for at in arrivals), "0" * 64)
