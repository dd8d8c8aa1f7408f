"""Replay of recorded traffic against two engines, one request at a time.

Interleaved: each request goes to both engines, one right after the other, in an order that a seeded generator draws, so
that disturbances of the machine reach both.

Open loop: a request's latency counts from its recorded arrival, whether or not the engine was free then. A client that
waits for an answer before it sends again hides exactly the latencies that matter (coordinated omission; Tene, "How NOT
to Measure Latency", 2013). Each engine counts as a server of its own that takes one request at a time: its queue
follows from the recorded arrivals and its own measured service times (Lindley's recursion, Proc. Cambridge Phil. Soc.
48, 1952), start = max(arrival, end of the request before), so that waiting for the *other* engine counts for neither.

Traffic without times is sent one request after the other, and its latency is the time of service alone.
`validation.canary.concurrent` has the replay with several requests in flight.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from enginesmith.core.types import Session, Tensors
from enginesmith.recording.traffic import Difference, RecordedTraffic, difference, digest_of_outputs

WARMUP = 20


@dataclass(frozen=True)
class ReplayClock:
    """The clock of a replay: time in seconds, and waiting. Tests simulate it."""

    now: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep


class ServedRequest(NamedTuple):
    """The result of one request. service: seconds.  outputs: None where it failed.  error: '' for none."""

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
        ...


@dataclass(frozen=True)
class ReplayPace:
    """How traffic is replayed. scale: how many times as dense as recorded.  duration: seconds; None: the file once.

    seed: of the order of the engines.  warmup: requests sent before, unobserved.  in_flight: how many requests an
    engine may have at once; None: as many as the record shows (`concurrent`).
    """

    scale: float = 1.0
    duration: float | None = None
    seed: int = 0
    warmup: int = WARMUP
    in_flight: int | None = 1


@dataclass(frozen=True)
class ReplayAnswer:
    """One engine's answer. latency, service: seconds, with and without waiting in its queue.  error: '' for none.

    output: digest of the outputs; None where it failed.
    """

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
    """One request on both sides. at: its arrival, in seconds after the start.  first: the side it was sent to first.

    segment: the number of the segment it was sent in (`concurrent`); None: interleaved.
    """

    request: int
    at: float
    candidate: ReplayAnswer
    baseline: ReplayAnswer
    difference: Difference | None
    first: str
    segment: int | None = None

    def lines(self) -> tuple[dict[str, object], dict[str, object]]:
        """The observations of candidate and baseline, as JSON objects."""

        def line(answer: ReplayAnswer) -> dict[str, object]:
            known = {"time": self.at, "latency": answer.latency, "ok": answer.ok, "request": self.request}
            others = {"service": answer.service, "output": answer.output, "error": answer.error or None}
            found: dict[str, object] = {**known, **others, "segment": self.segment}
            return {key: value for key, value in found.items() if value is not None}

        ours = line(self.candidate)
        if self.difference:
            ours |= {"sqnr_db": round(self.difference.sqnr_db, 2), "flipped": self.difference.flipped}
        return ours, line(self.baseline)


def replay(
    candidate: Session | RemoteSession,
    baseline: Session | RemoteSession,
    traffic: RecordedTraffic,
    pace: ReplayPace | None = None,
    clock: ReplayClock | None = None,
) -> Iterator[ReplayedPair]:
    """Send traffic to both engines and yield each request's results. The first requests warm both up, unobserved."""
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
        results: dict[int, Timed] = {}
        for turn in (first, 1 - first):
            served = serve((candidate, baseline)[turn], request.inputs, clock)
            free[turn] = max(at, free[turn]) + served.service
            results[turn] = Timed(free[turn] - at, served)
        yield pair_of(index, at, results[0], results[1], first)


def pair_of(
    index: int, at: float, candidate: Timed, baseline: Timed, first: int, segment: int | None = None
) -> ReplayedPair:
    """The results of one request on both sides. first: 0 if it was sent to the candidate first, else 1."""

    def answer(timed: Timed) -> ReplayAnswer:
        service, outputs, error = timed.served
        digest = None if outputs is None else digest_of_outputs(outputs)
        return ReplayAnswer(max(timed.latency, 1e-9), max(service, 1e-9), error, digest)

    ours, theirs = candidate.served.outputs, baseline.served.outputs
    unlike = None if ours is None or theirs is None else difference(ours, theirs)
    return ReplayedPair(
        index, at, answer(candidate), answer(baseline), unlike, ("candidate", "baseline")[first], segment
    )


def serve(session: Session | RemoteSession, inputs: Tensors, clock: ReplayClock) -> ServedRequest:
    """Run once; whatever an engine raises is a failed request. The time of service is above 0 s, and leaves out the
    way to another process."""
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
