"""Recorded traffic against two engines with several requests in flight, one engine after the other on the same device.

Two engines that work at once would slow each other, so the traffic is cut into segments of consecutive requests, and
each segment goes to one engine and then, the same requests at the same times, to the other. A seeded generator draws
who is first in every other segment, and the one between has the opposite order: a machine that becomes slower or faster
does so to both (a randomised balanced crossover). What one request met is compared with what the same one met.

Open loop, as in `replay`: a request is sent when it arrived, whether or not earlier ones were answered, and its latency
counts from then. A segment begins with the requests that came just before it, unobserved, so that it begins with the
queue that there was.
"""

import math
import threading
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from builders.types import Session, Tensors
from validation.canary.outputs import digest_of_outputs
from validation.canary.replay import Answer, Clock, Pace, Pair, Served, pair_of, serve
from validation.canary.traffic import Traffic

# Threads of one engine, at most: more would wait for each other in Python instead of in the engine.
MOST_IN_FLIGHT = 32
# A segment has at least so many times as many requests as may be in flight: its ends, where fewer are, weigh little.
LEAST_TURNOVERS = 4
# A run has at most so many of them.
MOST_SEGMENTS = 400


class Timed(NamedTuple):
    """What came of a request. latency: seconds from its arrival to its answer."""

    latency: float
    served: Served


@dataclass
class Segment:
    """Consecutive requests. arrivals: seconds after its start, ascending.  inputs: of each."""

    arrivals: Sequence[float]
    inputs: Sequence[Tensors]
    _next: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __len__(self) -> int:
        return len(self.arrivals)

    def __reduce__(self) -> tuple[type, tuple[Sequence[float], Sequence[Tensors]]]:
        return Segment, (self.arrivals, self.inputs)

    def take(self) -> int | None:
        """The next request, in order of arrival; each goes to one thread. None: there are no more."""
        with self._lock:
            index = self._next
            self._next += 1
        return index if index < len(self.arrivals) else None


@runtime_checkable
class SegmentSession(Protocol):
    """An engine that answers a segment with as many requests in flight as it was prepared for."""

    def prepare(self, in_flight: int, warmup: Sequence[Tensors]) -> None:
        """Be ready for so many. warmup: requests that are not observed. Raises EngineryError where it cannot be."""
        ...

    def serve_segment(self, segment: Segment) -> list[Timed]:
        """What came of each request, in order. Whatever goes wrong is the request's error."""
        ...


def peak(arrivals: Sequence[float], latencies: Sequence[float]) -> int:
    """The most requests in flight at any moment, of requests that arrived at `arrivals` and took `latencies` (s)."""
    moments = [(at, 1) for at in arrivals]
    moments += [(at + latency, -1) for at, latency in zip(arrivals, latencies, strict=True)]
    now = most = 0
    for _, change in sorted(moments):  # at the same moment, ends come first
        now += change
        most = max(most, now)
    return most


def serve_requests(session: Session, segment: Segment, found: list[Timed | None], clock: Clock, begun: float) -> None:
    """One thread's share of a segment: take the next request, wait for its time, run it, until there are no more.

    found: where each request's answer goes.  begun: when the segment starts, by `clock`.
    """
    while (index := segment.take()) is not None:
        arrival = begun + segment.arrivals[index]
        if (early := arrival - clock.now()) > 0:
            clock.sleep(early)
        served = serve(session, segment.inputs[index], clock)
        found[index] = Timed(max(clock.now() - arrival, served.service), served)


def segments(count: int, in_flight: int, stops: Collection[int] = ()) -> Iterator[tuple[int, int]]:
    """Where each segment of `count` requests starts and, behind its last one, stops. stops: counts of requests after
    which one must end."""
    length = max(LEAST_TURNOVERS * in_flight, math.ceil(count / MOST_SEGMENTS))
    for start, stop in pairwise(sorted({0, count, *(item for item in stops if 0 < item < count)})):
        parts = max(1, (stop - start) // length)
        yield from pairwise(start + (stop - start) * part // parts for part in range(parts + 1))


def replay_concurrently(
    candidate: SegmentSession,
    baseline: SegmentSession,
    traffic: Traffic,
    pace: Pace,
    in_flight: int,
    stops: Collection[int] = (),
) -> Iterator[Pair]:
    """Send traffic to both engines, in turns, and give what came of each request on both sides, in order of arrival.

    in_flight: how many requests both sessions were prepared for.  stops: see `segments`.
    """
    order = np.random.default_rng(pace.seed)
    sent = list(traffic.arrivals(pace.scale, pace.duration))
    sessions, first = (candidate, baseline), 0
    for number, (start, stop) in enumerate(segments(len(sent), in_flight, stops)):
        first = 1 - first if number % 2 else int(order.integers(2))
        lead = min(start, in_flight)
        part = sent[start - lead : stop]
        answered: list[list[Timed]] = [[], []]
        for turn in (first, 1 - first):
            segment = Segment([at - part[0][0] for at, _ in part], [request.inputs for _, request in part])
            answered[turn] = sessions[turn].serve_segment(segment)[lead:]
        for offset, (ours, theirs) in enumerate(zip(*answered, strict=True)):
            index = start + offset
            outputs = ours.served.outputs, theirs.served.outputs
            yield pair_of(index, sent[index][0], (_answer(ours), _answer(theirs)), outputs, first)


def _answer(timed: Timed) -> Answer:
    served = timed.served
    digest = None if served.outputs is None else digest_of_outputs(served.outputs)
    return Answer(max(timed.latency, 1e-9), max(served.service, 1e-9), served.error, digest)
