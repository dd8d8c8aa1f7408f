"""The report of a load test of an engine behind a router and a batcher, kept beside a version. Standard library only.

Times are in seconds. Latencies count from the intended arrival of a request, not from when it was sent: a generator or
a server that is held up delays the requests behind it, and those seconds are part of what a user waits (G. Tene, "How
NOT to Measure Latency", 2013: coordinated omission; wrk2 corrects it the same way).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from enginesmith.core.reports.latency import MachineKind, Quantile, SystemLoad

LOAD_FORMAT = 1


@dataclass(frozen=True)
class LoadTerms:
    """What was asked. rate: requests a second, outside of bursts.  burst: times as many within them, 1: none.
    burst_s, every_s: how long a burst is, and from one to the next.  arrivals: 'poisson' or 'recorded'.  batch, wait_s:
    of the batcher.  sizes: of the dims of each request; empty for recorded ones."""

    rate: float
    seconds: float
    burst: float
    burst_s: float
    every_s: float
    arrivals: str
    batch: int
    wait_s: float
    seed: int
    sizes: Mapping[str, int]


@dataclass(frozen=True)
class LoadPhase:
    """Requests that arrived in bursts, or outside of them. name: 'quiet' or 'burst'.  offered: requests a second that
    were to arrive.  unanswered: requests without an answer at the end.  failed: answered by an error.  quantiles: of
    latency, of the answered ones.  slowest_s: None where none was answered."""

    name: str
    requests: int
    offered: float
    unanswered: int
    failed: int
    quantiles: tuple[Quantile, ...]
    slowest_s: float | None


@dataclass(frozen=True)
class SendDelay:
    """How much later than intended the generator sent. late: share of requests over a millisecond late.  behind: why
    the generator could not keep up, so that part of the latencies is its own; '' where it could."""

    p50_s: float
    p99_s: float
    most_s: float
    late: float
    behind: str


@dataclass(frozen=True)
class ServerMemory:
    """Resident memory of the server's process in bytes. start: after the first answer.  peak: the most that was seen.
    by_minute: the most in each minute of the run.  growth: bytes a minute from the first third of the run to the last,
    by their medians; None for a run too short to say."""

    start: int
    peak: int
    by_minute: tuple[int, ...]
    growth: float | None


@dataclass(frozen=True)
class ServerOverhead:
    """What a server adds to the runs of its engine, in seconds: to each batch, and for each request of it."""

    batch_s: float
    request_s: float


@dataclass(frozen=True)
class LoadReport:
    """The result of a load test. engine: digest.  created_at: ISO 8601, UTC.

    seconds: how long it ran.  answered: requests a second that were answered, over that time.  cold_start_s: from the
    start of the server's process to its first answer.  first_s: that first request alone.  batch: mean samples of a
    batch.  server: what it adds to the engine's runs, timed with a session that answers at once.  interrupted: whether
    it was ended before its time.
    """

    unit: str
    engine: str
    machine: MachineKind
    created_at: str
    terms: LoadTerms
    seconds: float
    answered: float
    phases: tuple[LoadPhase, ...]
    sending: SendDelay
    memory: ServerMemory
    cold_start_s: float
    first_s: float
    batch: float
    load: SystemLoad
    server: ServerOverhead
    interrupted: bool = False
    format: int = LOAD_FORMAT

    @property
    def remarks(self) -> tuple[str, ...]:
        """What takes trust from the figures."""
        found = [*self.load.busy]
        if self.sending.behind:
            found.append(self.sending.behind)
        if lost := sum(phase.unanswered for phase in self.phases):
            found.append(
                f"{lost} requests had no answer when it ended: the server was behind, and latencies are longer"
            )
        if failed := sum(phase.failed for phase in self.phases):
            found.append(f"{failed} requests were answered by an error")
        return (*found, *(("it was interrupted",) if self.interrupted else ()))
