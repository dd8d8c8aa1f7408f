"""Recorded traffic against two engines, one request after the other, to both.

Interleaved: each request goes to both engines, one right after the other, in an order that a seeded generator draws, so
that what the machine does meanwhile happens to both.

Open loop: a request's latency counts from when it was to arrive, whether or not the engine was free then. A client that
waits for an answer before it sends again hides exactly the latencies that matter (coordinated omission; Tene, "How NOT
to Measure Latency", 2013). Each engine is a server of its own that takes one request at a time: its queue follows from
the recorded arrivals and its own measured service times (Lindley's recursion, Proc. Cambridge Phil. Soc. 48, 1952),
start = max(arrival, end of the request before), so that waiting for the *other* engine counts for neither.

`validation.canary.concurrent` has the replay with several requests in flight. Traffic without times is sent one request
after the other, and its latency is the time of service alone.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from enginery.core.types import Session, Tensors
from enginery.recording.traffic import Difference, RecordedRequest, RecordedTraffic, difference, digest_of_outputs

WARMUP = 20


@dataclass(frozen=True)
class ReplayClock:
    """Time in seconds, and waiting. Tests have another one."""

    now: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep


class ServedRequest(NamedTuple):
    """What came of one request. service: seconds.  outputs: None where it failed.  error: '' for none."""

    service: float
    outputs: Tensors | None
    error: str


@runtime_checkable
class RemoteSession(Protocol):
    """An engine in another process, which measures its own time. died: what ended that process; '' while it lives."""

    died: str

    def serve(self, inputs: Tensors) -> ServedRequest:
        """Run once. Whatever goes wrong is the request's error."""
        ...


@dataclass(frozen=True)
class ReplayPace:
    """scale: how many times as dense as recorded.  duration: seconds; None plays the file once.  seed: of the order.

    in_flight: how many requests an engine may have at once; None: as many as the record shows (`concurrent`).
    """

    scale: float = 1.0
    duration: float | None = None
    seed: int = 0
    warmup: int = WARMUP
    in_flight: int | None = 1


@dataclass(frozen=True)
class ReplayAnswer:
    """One engine's answer. latency, service: seconds, with and without waiting in its queue.  error: '' for none."""

    latency: float
    service: float
    error: str
    output: str | None

    @property
    def ok(self) -> bool:
        """Whether the request was answered."""
        return not self.error


@dataclass(frozen=True)
class ReplayedPair:
    """One request on both sides. at: seconds after the start when it was to arrive.  first: who came first.

    segment: in which turn of both it was sent (`concurrent`); None: interleaved.
    """

    request: int
    at: float
    candidate: ReplayAnswer
    baseline: ReplayAnswer
    difference: Difference | None
    first: str
    segment: int | None = None

    def lines(self) -> tuple[dict[str, object], dict[str, object]]:
        """The two observations, as JSON."""
        found = []
        for answer in (self.candidate, self.baseline):
            line: dict[str, object] = {
                "time": self.at,
                "latency": answer.latency,
                "ok": answer.ok,
                "request": self.request,
                "service": answer.service,
                "output": answer.output,
                "error": answer.error or None,
                "segment": self.segment,
            }
            found.append({key: value for key, value in line.items() if value is not None})
        if self.difference:
            found[0] |= {"sqnr_db": round(self.difference.sqnr_db, 2), "flipped": self.difference.flipped}
        return found[0], found[1]


def replay(
    candidate: Session | RemoteSession,
    baseline: Session | RemoteSession,
    traffic: RecordedTraffic,
    pace: ReplayPace | None = None,
    clock: ReplayClock | None = None,
) -> Iterator[ReplayedPair]:
    """Send traffic to both engines and give what came of each request. The first requests warm both up, unobserved."""
    pace, clock = pace or ReplayPace(), clock or ReplayClock()
    for request in traffic.requests[: pace.warmup]:
        for session in (candidate, baseline):
            serve(session, request.inputs, clock)
    order = np.random.default_rng(pace.seed)
    free = [0.0, 0.0]
    begun = clock.now()
    for index, (at, request) in enumerate(traffic.arrivals(pace.scale, pace.duration)):
        if not traffic.timed:
            at = clock.now() - begun  # it arrives when the one before is done
        elif (early := at - (clock.now() - begun)) > 0:
            clock.sleep(early)
        first = int(order.integers(2))
        yield _pair(index, at, request, (candidate, baseline), first, free, clock)


def _pair(
    index: int,
    at: float,
    request: RecordedRequest,
    sessions: tuple[Session | RemoteSession, Session | RemoteSession],
    first: int,
    free: list[float],
    clock: ReplayClock,
) -> ReplayedPair:
    answers: list[ReplayAnswer | None] = [None, None]
    outputs: list[Tensors | None] = [None, None]
    for turn in (first, 1 - first):
        service, outputs[turn], error = serve(sessions[turn], request.inputs, clock)
        free[turn] = max(at, free[turn]) + service
        found = outputs[turn]
        digest = None if found is None else digest_of_outputs(found)
        answers[turn] = ReplayAnswer(free[turn] - at, service, error, digest)
    ours, theirs = answers
    assert ours is not None and theirs is not None  # noqa: S101 - both turns were taken
    return pair_of(index, at, (ours, theirs), (outputs[0], outputs[1]), first)


def pair_of(
    index: int,
    at: float,
    answers: tuple[ReplayAnswer, ReplayAnswer],
    outputs: tuple[Tensors | None, Tensors | None],
    first: int,
    segment: int | None = None,
) -> ReplayedPair:
    """One request on both sides; the candidate leads each tuple. first: 0 where it was also sent to first.  segment:
    see `ReplayedPair`."""
    unlike = None if outputs[0] is None or outputs[1] is None else difference(outputs[0], outputs[1])
    return ReplayedPair(index, at, *answers, unlike, ("candidate", "baseline")[first], segment)


def serve(session: Session | RemoteSession, inputs: Tensors, clock: ReplayClock) -> ServedRequest:
    """Run once; whatever an engine raises is a failed request. service: above 0, without the way to another process."""
    if isinstance(session, RemoteSession):
        served = session.serve(inputs)
        return served._replace(service=max(served.service, 1e-9))
    begun = clock.now()
    try:
        outputs: Tensors | None = session.run(inputs)
        error = ""
    except Exception as failure:
        outputs, error = None, f"{type(failure).__name__}: {failure}"[:1000]
    service = clock.now() - begun
    return ServedRequest(service if math.isfinite(service) and service > 0 else 1e-9, outputs, error)
