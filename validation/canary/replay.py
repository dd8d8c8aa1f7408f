"""Replays requests on two engines, one at a time or concurrently."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from enginesmith.core.types import Session, Tensors
from enginesmith.recording.traffic import Difference, RecordedRequest, RecordedTraffic, difference, digest_of_outputs

# Replay of recorded traffic against two engines, one request at a time.
#
# Interleaved: each request goes to both engines, one directly after the other, in a seeded random order: disturbances
# of the machine then affect both.
#
# Open loop: a request's latency counts from its recorded arrival, whether or not the engine was free then. A client
# that waits for an answer before it sends the next request hides long latencies (coordinated omission; Tene,
# "How NOT to Measure Latency", 2013). Each engine is modelled as its own server of one request at a time. Its queue is
# computed from the recorded arrivals and its own measured service times (Lindley's recursion, Proc. Cambridge Phil.
# Soc. 48, 1952): start = max(arrival, end of the previous request). Waiting for the *other* engine does not count.
#
# Traffic without times is sent one request after the other, and its latency is the time of service alone.

# The number of requests before the first observed one.
WARMUP = 20


@dataclass(frozen=True)
class ReplayClock:
    """The clock of a replay: time in seconds, and waiting. Tests simulate it."""

    now: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep


class ServedRequest(NamedTuple):
    """The result of one request. service: seconds.  outputs: None if the request failed.  error: '' for none."""

    service: float
    outputs: Tensors | None
    error: str


class Timed(NamedTuple):
    """The result of one request, and the latency: seconds from its arrival to its answer."""

    latency: float
    served: ServedRequest


@runtime_checkable
class RemoteSession(Protocol):
    """An engine in another process, which measures its own time. died: what ended that process; '' while it lives."""

    died: str

    def serve(self, inputs: Tensors) -> ServedRequest:
        """Run once. Failures are returned as the request's error."""


@dataclass(frozen=True)
class ReplayPace:
    """The rate of a replay. scale: factor on the recorded rate.  duration: seconds; None: the file once.

    seed: for the order of the engines.  warmup: number of unobserved requests at the start.  in_flight: the most
    requests at once per engine; None: the number is derived from the recorded latencies.
    """

    scale: float = 1.0
    duration: float | None = None
    seed: int = 0
    warmup: int = WARMUP
    in_flight: int | None = 1


@dataclass(frozen=True)
class ReplayAnswer:
    """One engine's answer. latency, service: seconds, with and without waiting in its queue.  error: '' for none.

    output: digest of the outputs; None if the request failed.
    """

    latency: float
    service: float
    error: str
    output: str | None


@dataclass(frozen=True)
class ReplayedPair:
    """One request on both sides. at: arrival, in seconds after the start.  first: the side that got the request first.

    segment: number of the segment in a concurrent replay; None if interleaved.  size: number of elements of the inputs.
    difference: of the outputs; None if one side failed.
    """

    request: int
    at: float
    candidate: ReplayAnswer
    baseline: ReplayAnswer
    difference: Difference | None
    first: str
    segment: int | None = None
    size: int = 0

    def lines(self) -> tuple[dict[str, object], dict[str, object]]:
        """The observations of candidate and baseline, as JSON objects."""

        def line(answer: ReplayAnswer) -> dict[str, object]:
            fields: dict[str, object] = {
                "time": self.at,
                "latency": answer.latency,
                "ok": not answer.error,
                "request": self.request,
                "size": self.size or None,
                "service": answer.service,
                "output": answer.output,
                "error": answer.error or None,
                "segment": self.segment,
            }
            return {key: value for key, value in fields.items() if value is not None}

        candidate_line = line(self.candidate)
        if self.difference:
            candidate_line |= {"sqnr_db": round(self.difference.sqnr_db, 2), "flipped": self.difference.flipped}
        return candidate_line, line(self.baseline)


def replay(
    candidate: Session | RemoteSession,
    baseline: Session | RemoteSession,
    traffic: RecordedTraffic,
    pace: ReplayPace | None = None,
    clock: ReplayClock | None = None,
) -> Iterator[ReplayedPair]:
    """Send traffic to both engines and yield each request's results. The first requests warm both up, unobserved.

    pace: rate, warm-up and seed; None for the defaults.  clock: for tests.
    """
    pace, clock = pace or ReplayPace(), clock or ReplayClock()
    for request in traffic.requests[: pace.warmup]:
        for session in (candidate, baseline):
            serve(session, request.inputs, clock)
    order = np.random.default_rng(pace.seed)
    free_s = [0.0, 0.0]
    started_s = clock.now()
    for index, (arrival_s, request) in enumerate(traffic.arrivals(pace.scale, pace.duration)):
        if not traffic.timed:
            arrival_s = clock.now() - started_s  # a request arrives when the one before is done
        elif (wait_s := arrival_s - (clock.now() - started_s)) > 0:
            clock.sleep(wait_s)
        first_side = int(order.integers(2))
        results: dict[int, Timed] = {}
        for side in (first_side, 1 - first_side):
            served_request = serve((candidate, baseline)[side], request.inputs, clock)
            free_s[side] = max(arrival_s, free_s[side]) + served_request.service
            results[side] = Timed(free_s[side] - arrival_s, served_request)
        yield pair_of(index, arrival_s, request.inputs, results[0], results[1], first_side)


def pair_of(
    index: int,
    arrival_s: float,
    inputs: Tensors,
    candidate: Timed,
    baseline: Timed,
    first_side: int,
    segment: int | None = None,
) -> ReplayedPair:
    """The results of one request on both sides. first_side: 0 if it was sent to the candidate first, else 1."""

    def answer(timed_request: Timed) -> ReplayAnswer:
        service_s, outputs, error = timed_request.served
        digest = None if outputs is None else digest_of_outputs(outputs)
        return ReplayAnswer(max(timed_request.latency, 1e-9), max(service_s, 1e-9), error, digest)

    candidate_outputs, baseline_outputs = candidate.served.outputs, baseline.served.outputs
    delta = (
        None
        if candidate_outputs is None or baseline_outputs is None
        else difference(candidate_outputs, baseline_outputs)
    )
    size = sum(int(np.size(array)) for array in inputs.values())
    first = ("candidate", "baseline")[first_side]
    return ReplayedPair(index, arrival_s, answer(candidate), answer(baseline), delta, first, segment, size)


def serve(session: Session | RemoteSession, inputs: Tensors, clock: ReplayClock) -> ServedRequest:
    """Run once; any error of the engine is returned as a failed request. The service time is above 0 s, and excludes
    the transfer to another process."""
    if isinstance(session, RemoteSession):
        served_request = session.serve(inputs)
        return served_request._replace(service=max(served_request.service, 1e-9))
    started_s = clock.now()
    try:
        outputs: Tensors | None = session.run(inputs)
        error = ""
    except Exception as failure:
        outputs, error = None, f"{type(failure).__name__}: {failure}"[:1000]
    service_s = clock.now() - started_s
    return ServedRequest(service_s if math.isfinite(service_s) and service_s > 0 else 1e-9, outputs, error)


# Replay of recorded traffic against two engines with several requests in flight, one engine at a time.
#
# Two engines that work at once slow each other. Therefore the traffic is cut into segments of consecutive requests, and
# each segment goes to one engine and then, with the same relative times, to the other. A seeded generator draws the
# order of the engines in every other segment, and the next segment has the opposite order: changes of the machine's
# speed then affect both (a randomised balanced crossover). Each request's two results are compared.
#
# Open loop, as in `replay`: a request is sent at its arrival, whether or not earlier ones were answered, and its
# latency counts from the arrival. To fill the queue, a segment begins with the previous requests, unobserved (the
# lead).
#
# The answers of the first engine are stored until the second engine has answered the segment. A segment ends early if
# the answers have HELD_BYTES or more.
# The most threads of one engine: more would wait for each other in Python instead of in the engine.
MOST_IN_FLIGHT = 32
# The least length of a segment, as a multiple of the requests in flight: fewer are in flight at its ends. With longer
# segments there are fewer, and a verdict depends on their number (`CanaryEvidence.design_block`).
LEAST_TURNOVERS = 2
# The greatest number of segments of a run.
MOST_SEGMENTS = 2000
# A segment ends at this many bytes of one side's answers; answers of requests in flight are not counted.
HELD_BYTES = 256 << 20


@dataclass
class TrafficSegment:
    """Consecutive requests, which threads take one by one. arrivals: seconds after the segment's start, ascending.

    lead: number of requests at the start that fill the queue; their answers are not kept.
    most_bytes: no further request is taken once the stored answers have so many bytes.
    """

    arrivals: Sequence[float]
    inputs: Sequence[Tensors]
    lead: int = 0
    most_bytes: int = HELD_BYTES
    _next: int = 0
    _held: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __len__(self) -> int:
        return len(self.arrivals)

    def __reduce__(self) -> tuple[type, tuple[Sequence[float], Sequence[Tensors], int, int]]:
        return TrafficSegment, (self.arrivals, self.inputs, self.lead, self.most_bytes)

    def take(self) -> int | None:
        """The index of the next request, returned to one thread only; None at the end, or at `most_bytes`."""
        with self._lock:
            if self._next >= len(self.arrivals) or self._held >= self.most_bytes:
                return None
            self._next += 1
            return self._next - 1

    def keep(self, index: int, served_request: ServedRequest) -> ServedRequest:
        """Count the bytes of a result's outputs and return the result; for the lead, return it without outputs."""
        if index < self.lead:
            return served_request._replace(outputs=None)
        with self._lock:
            self._held += sum(np.asarray(array).nbytes for array in (served_request.outputs or {}).values())
        return served_request


@runtime_checkable
class SegmentSession(Protocol):
    """An engine that answers a segment with as many requests in flight as it was prepared for."""

    def prepare(self, in_flight: int, warmup: Sequence[Tensors]) -> None:
        """Prepare for `in_flight` requests at once. warmup: inputs to run before. Raises EnginesmithError."""

    def serve_segment(self, segment: TrafficSegment) -> Iterable[Timed]:
        """The result of each request after the lead, in order, until the segment ends; the caller must read all.

        Failures are returned as the request's error.
        """


def peak(arrivals: Sequence[float], latencies: Sequence[float]) -> int:
    """The most requests in flight at any moment. arrivals, latencies: of each request, in seconds."""
    changes = [(arrival_s, 1) for arrival_s in arrivals]
    changes += [(arrival_s + latency, -1) for arrival_s, latency in zip(arrivals, latencies, strict=True)]
    in_flight = max_in_flight = 0
    for _, change in sorted(changes):  # at the same moment, ends come first
        in_flight += change
        max_in_flight = max(max_in_flight, in_flight)
    return max_in_flight


def serve_requests(
    session: Session, segment: TrafficSegment, results: list[Timed | None], clock: ReplayClock, started_s: float
) -> None:
    """Take requests of a segment until none is left; wait for each arrival and run the request. Runs in one thread.

    results: receives each request's result at its index.  started_s: when the segment started, by `clock`.
    """
    while (index := segment.take()) is not None:
        arrival = started_s + segment.arrivals[index]
        if (wait_s := arrival - clock.now()) > 0:
            clock.sleep(wait_s)
        served_request = serve(session, segment.inputs[index], clock)
        latency = max(clock.now() - arrival, served_request.service)
        results[index] = Timed(latency, segment.keep(index, served_request))


def segments(count: int, in_flight: int, stops: Collection[int] = ()) -> Iterator[tuple[int, int]]:
    """The bounds (start, stop) of segments of `count` requests. stops: counts of requests at which a segment must end.

    The number of segments between two stops is even (or 1), and both orders of the engines are equally frequent.
    """
    length = max(LEAST_TURNOVERS * in_flight, math.ceil(count / MOST_SEGMENTS))
    for start, stop in pairwise(sorted({0, count, *(stop for stop in stops if 0 < stop < count)})):
        segment_count = max(1, (stop - start) // length // 2 * 2)
        yield from pairwise(start + (stop - start) * index // segment_count for index in range(segment_count + 1))


def replay_concurrently(
    candidate: SegmentSession,
    baseline: SegmentSession,
    traffic: RecordedTraffic,
    pace: ReplayPace,
    in_flight: int,
    stops: Collection[int] = (),
) -> Iterator[ReplayedPair]:
    """Send traffic to both engines, segment by segment, and yield each request's results in order of arrival.

    in_flight: the number of requests for which both sessions were prepared.  stops: as in `segments`.
    candidate, baseline: the engines, each in a process of its own.  pace: as of `replay`.
    """
    order = np.random.default_rng(pace.seed)
    requests = list(traffic.arrivals(pace.scale, pace.duration))
    first_side = count = segment_number = 0
    for _, stop in segments(len(requests), in_flight, stops):
        while count < stop:
            first_side = 1 - first_side if segment_number % 2 else int(order.integers(2))
            lead_count = min(count, in_flight)
            segment = requests[count - lead_count : stop]
            for pair in _pairs((candidate, baseline), first_side, segment, lead_count, count, segment_number):
                count += 1
                yield pair
            segment_number += 1


def _pairs(
    sessions: tuple[SegmentSession, SegmentSession],
    first_side: int,
    part: Sequence[tuple[float, RecordedRequest]],
    lead: int,
    index: int,
    number: int,
) -> Iterator[ReplayedPair]:
    """The pairs of one segment that both sides answered. first_side: the side that begins.  part: the requests with
    their arrivals.  index: of the first request after the lead.  number: of the segment."""

    def answers(turn: int) -> Iterable[Timed]:
        arrivals, inputs = [arrival_s - part[0][0] for arrival_s, _ in part], [request.inputs for _, request in part]
        return sessions[turn].serve_segment(TrafficSegment(arrivals, inputs, lead, HELD_BYTES))

    answer_queue = deque(answers(first_side))
    for offset, other_answer in enumerate(answers(1 - first_side)):
        if not answer_queue:
            continue  # these requests are sent again with the next segment
        answer_pair = [answer_queue.popleft(), other_answer]
        candidate, baseline = reversed(answer_pair) if first_side else answer_pair
        arrival_s, request = part[lead + offset]
        yield pair_of(index + offset, arrival_s, request.inputs, candidate, baseline, first_side, number)
