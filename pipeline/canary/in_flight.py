"""How many requests a canary has in flight at once: as many as the record shows."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from enginery.core.errors import InputError
from enginery.core.types import Session
from enginery.recording.traffic import RecordedTraffic
from validation.canary.concurrent import MOST_IN_FLIGHT, peak
from validation.canary.observations import read_observations
from validation.canary.replay import RemoteSession, ReplayClock, ReplayPace, serve


@dataclass(frozen=True)
class InFlight:
    """count: so many requests at once, at most.  source: what says so, in words."""

    count: int
    source: str


def in_flight_of(
    traffic: RecordedTraffic,
    pace: ReplayPace,
    observed: Path | None,
    baseline: Session | RemoteSession,
    clock: ReplayClock,
) -> InFlight:
    """What was asked for, else the peak of the record: of the log `observed`, else of latencies in the traffic, else of
    its arrivals, each answered in the median time that the baseline takes for a request of the warm-up.

    Raises InputError for several requests in flight of traffic without times, DataError for a log that is none.
    """
    if not traffic.timed:
        if pace.duration is not None or pace.in_flight not in (None, 1):
            raise InputError(
                "this traffic has no times, so it can be replayed once, one request after the other; record `at`"
            )
        return InFlight(1, "the traffic has no times, and was sent one request after the other, without any queue")
    if pace.in_flight is not None:
        return InFlight(pace.in_flight, "as was asked for")
    if observed is not None:
        log = read_observations(observed)
        seen = [(at, latency) for at, latency in zip(log.time, log.latency, strict=True) if latency > 0]
        return _peak([at for at, _ in seen], [latency for _, latency in seen], f"the most in {observed.name}")
    sent = [(request.at / pace.scale, request.latency) for request in traffic.requests]
    recorded = [latency for _, latency in sent if latency is not None]
    arrivals = [at for at, _ in sent]
    if len(recorded) == len(sent):
        return _peak(arrivals, recorded, "the most by the latencies in the traffic")
    warmup = traffic.requests[: max(pace.warmup, 1)]
    alone = statistics.median(serve(baseline, request.inputs, clock).service for request in warmup)
    return _peak(
        arrivals, [alone] * len(arrivals), f"the most if each took {alone:.3g} s, as the baseline's do by themselves"
    )


def _peak(arrivals: Sequence[float], latencies: Sequence[float], source: str) -> InFlight:
    found = max(1, peak(arrivals, latencies))
    if found > MOST_IN_FLIGHT:
        return InFlight(MOST_IN_FLIGHT, f"{source} is {found}, and {MOST_IN_FLIGHT} is the most that is replayed")
    return InFlight(found, source)
