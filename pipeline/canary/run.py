"""A canary from start to verdict: replay recorded traffic against two engines, judge at planned looks, stop when one
decides. Each engine has as many requests in flight as the recorded traffic shows."""

import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path

from enginesmith.core.codec import encode
from enginesmith.core.errors import DataError, InputError, digest_of_file
from enginesmith.core.hardware.cpu_kinds import this_kind
from enginesmith.core.names import Reference
from enginesmith.core.parsing import find
from enginesmith.core.types import Session, Target
from enginesmith.recording.json_lines import LineFile
from enginesmith.recording.recorder import end_of, header_of
from enginesmith.recording.traffic import RecordedTraffic, read_traffic
from enginesmith.registry.manifest import Manifest, load_pinned
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.files import make_folder, reachable
from pipeline.canary.engines import ChosenEngine, IsolatedSession, check_shared_gpu, choose, open_isolated
from pipeline.canary.verdicts import WrittenReport, circumstances, thresholds_of, write_report
from validation.canary.judging.judge import LEAST_STEP, Looks, judge
from validation.canary.judging.pairing import evidence_of
from validation.canary.judging.thresholds import QualityThresholds, Thresholds
from validation.canary.observations import ObservationTable, add_to, read_observations
from validation.canary.replay import (
    MOST_IN_FLIGHT,
    RemoteSession,
    ReplayClock,
    ReplayedPair,
    ReplayPace,
    SegmentSession,
    peak,
    replay,
    replay_concurrently,
    serve,
)
from validation.canary.report import TrafficReplayed, make_report
from validation.plotting import seconds_text

SIDES = ("candidate", "baseline")
# Minimum number of new requests of a look.
LEAST_PER_LOOK = 100
# Of a file of observations: no limit.
MOST_BYTES = 1 << 40
Say = Callable[[str], None]
Sessions = tuple[Session | RemoteSession, Session | RemoteSession]


@dataclass(frozen=True)
class InFlight:
    """How many requests an engine has at once, at most, and in words what that number is from."""

    count: int
    source: str


def in_flight_of(
    traffic: RecordedTraffic,
    pace: ReplayPace,
    log_path: Path | None,
    baseline: Session | RemoteSession,
    clock: ReplayClock,
) -> InFlight:
    """How many requests to have in flight: `pace.in_flight`, else the peak of recorded requests that overlap.

    A request lasts from its arrival for its latency: that of the log `log_path`, else the one in the traffic, else the
    median time that the baseline takes alone for a request of the warm-up.

    Raises InputError for several requests in flight of traffic without times, DataError for an invalid log.
    """
    if not traffic.timed:
        if pace.duration is not None or pace.in_flight not in (None, 1):
            raise InputError(
                "this traffic has no times, so it can be replayed once, one request after the other; record `at`"
            )
        return InFlight(1, "the traffic has no times, and was sent one request after the other, without any queue")
    if pace.in_flight is not None:
        return InFlight(pace.in_flight, "as was asked for")
    pairs = [(request.at / pace.scale, request.latency) for request in traffic.requests]
    if log_path is not None:
        log, source = read_observations(log_path), f"the most in {log_path.name}"
        spans = [(at_s, latency) for at_s, latency in zip(log.time, log.latency, strict=True) if latency > 0]
    elif all(latency is not None for _, latency in pairs):
        spans, source = [(at_s, latency or 0.0) for at_s, latency in pairs], "the most by the latencies in the traffic"
    else:
        warmup = traffic.requests[: max(pace.warmup, 1)]
        median_s = statistics.median(serve(baseline, request.inputs, clock).service for request in warmup)
        source = f"the most if each took {seconds_text(median_s)}, as the baseline's do by themselves"
        spans = [(at_s, median_s) for at_s, _ in pairs]
    peak_count = max(1, peak([at_s for at_s, _ in spans], [latency for _, latency in spans]))
    if peak_count > MOST_IN_FLIGHT:
        return InFlight(MOST_IN_FLIGHT, f"{source} is {peak_count}; at most {MOST_IN_FLIGHT} are replayed")
    return InFlight(peak_count, source)


@dataclass(frozen=True)
class CanaryRun:
    """The engines to compare, the traffic, and the folder for the results.

    looks: how often to judge, the end included.  observed: a log of production that shows how many requests were in
    flight; None: the traffic itself does.
    precision: of both engines; None for the one that fits best.
    """

    candidate: Reference
    baseline: Reference
    target: Target
    traffic: Path
    out: Path
    precision: str | None = None
    pace: ReplayPace = field(default_factory=ReplayPace)
    looks: int = 4
    observed: Path | None = None


def run_canary(store: Store, request: CanaryRun, say: Say) -> WrittenReport:
    """Replay, judge, and write observations, report and page into `request.out`.

    After an interruption the observations so far are there, whole, and so is the report of the last look.

    Raises InputError for a folder that has a canary already and for engines that do not run here, DataError for
    traffic that does not fit.
    """
    if any((request.out / f"{name}.jsonl").exists() for name in SIDES):
        raise InputError(
            f"{request.out} has the observations of a canary already; name another --out, or judge those: enginesmith "
            f"canary judge --candidate {request.out}/candidate.jsonl --baseline {request.out}/baseline.jsonl"
        )
    engines = [
        choose(store, reference, request.target, request.precision)
        for reference in (request.candidate, request.baseline)
    ]
    limits, source = thresholds_of(engines[0].manifest)
    check_shared_gpu(request.target)
    with ExitStack() as exit_stack:
        folders = [
            Path(exit_stack.enter_context(tempfile.TemporaryDirectory(prefix="enginesmith-canary-"))) for _ in engines
        ]
        sessions = [
            exit_stack.enter_context(open_isolated(store, role, engine, folder))
            for role, engine, folder in zip(SIDES, engines, folders, strict=True)
        ]
        dtypes = [{spec.name: spec.dtype for spec in session.inputs} for session in sessions]
        if dtypes[0] != dtypes[1]:
            raise InputError(f"the candidate takes {dtypes[0]} and the baseline {dtypes[1]}; no traffic fits both")
        traffic = _read_traffic(request.traffic, sessions[0], engines[0].manifest, store)
        return CanaryExecution(request, engines, limits, source, traffic, say).run(sessions[0], sessions[1])


def _read_traffic(path: Path, session: Session | IsolatedSession, manifest: Manifest, store: Store) -> RecordedTraffic:
    """The traffic for a version's engine. Raises as `read_traffic`; if states are missing, the error adds a remedy."""
    try:
        return read_traffic(path, session.inputs)
    except DataError as error:
        graphs = {f"{graph.name}.": load_pinned(store, graph).spec for graph in manifest.graphs} or {"": manifest.spec}
        state_names = [f"{graph}{name}" for graph, spec in graphs.items() for name in find(spec, "state", dict, {})]
        states = [name for name in state_names if repr(name) in str(error)]
        if not states:
            raise
        raise DataError(
            f"{error}. {states[0]!r} is a state: record each step with the states that the engine was given "
            "(recorder.append(streams.complete(inputs))), so that steps are compared one by one"
        ) from error


class CanaryExecution:
    """One run: its files, its observations so far, its looks.

    sides: candidate and baseline.  source: where the thresholds `limits` are from, in words.
    """

    def __init__(
        self,
        request: CanaryRun,
        sides: list[ChosenEngine],
        limits: Thresholds,
        source: str,
        traffic: RecordedTraffic,
        say: Say,
    ) -> None:
        self._request, self._limits, self._source, self._traffic, self._say = request, limits, source, traffic, say
        self._planned = traffic.count(request.pace.scale, request.pace.duration)
        self._looks = Looks(self._planned)
        self._lines: tuple[dict[str, object], ...] = ()
        self._in_flight = InFlight(1, "")
        self._seen = [
            ObservationTable(request.out / f"{name}.jsonl", engine.identity, planned=self._planned)
            for name, engine in zip(SIDES, sides, strict=True)
        ]

    def run(
        self, candidate: Session | RemoteSession, baseline: Session | RemoteSession, clock: ReplayClock | None = None
    ) -> WrittenReport:
        """Replay until a look decides, or to the end, and return the last look's report.

        However it ends, each file of observations ends with a line that says how its engine was stopped.
        Raises UnavailableError where `out` cannot be written, InputError for a duration without any request.
        """
        canary_run = self._request
        self._in_flight = in_flight_of(
            self._traffic, canary_run.pace, canary_run.observed, baseline, clock or ReplayClock()
        )
        with reachable(f"writing {canary_run.out}"):
            make_folder(canary_run.out)
        # Fewer looks where each would see hardly anything.
        looks = max(1, min(canary_run.looks, self._planned // LEAST_PER_LOOK))
        stops, sessions = {self._planned * look // looks for look in range(1, looks + 1)}, (candidate, baseline)
        with ExitStack() as exit_stack:
            files = [
                exit_stack.enter_context(
                    closing(LineFile(table.path, header_of(encode(table.identity), self._planned), MOST_BYTES))
                )
                for table in self._seen
            ]
            exit_stack.callback(self._end, files, sessions)
            for pair in self._pairs(candidate, baseline, stops, clock):
                self._lines = pair.lines()
                for file, table, line in zip(files, self._seen, self._lines, strict=True):
                    file.append(line)
                    add_to(table, line)
                if (self._is_over(sessions) or len(self._seen[0]) in stops) and (report_files := self._look(sessions)):
                    return report_files
        raise InputError("the traffic has no request within this duration; give a longer one")

    def _is_over(self, sessions: Sessions) -> bool:
        """Whether the candidate's process ended and the baseline's did not: later requests cannot change that."""
        if not _death(sessions[0]) or _death(sessions[1]):
            return False
        return len(self._seen[0]) > (self._looks.before or (0,))[-1] + LEAST_STEP * self._planned

    def _pairs(
        self,
        candidate: Session | RemoteSession,
        baseline: Session | RemoteSession,
        stops: set[int],
        clock: ReplayClock | None,
    ) -> Iterator[ReplayedPair]:
        """Each request on both sides: interleaved one by one, or in segments with several in flight."""
        traffic, pace, count = self._traffic, self._request.pace, self._in_flight.count
        if count == 1:
            return replay(candidate, baseline, traffic, pace, clock)
        if not (isinstance(candidate, SegmentSession) and isinstance(baseline, SegmentSession)):
            raise InputError(f"{count} requests in flight need each engine in its own process")
        for session in (candidate, baseline):
            session.prepare(count, [request.inputs for request in traffic.requests[: pace.warmup]])
        return replay_concurrently(candidate, baseline, traffic, pace, count, stops)

    def _end(self, files: list[LineFile], sessions: Sessions) -> None:
        """Write into both files that they were stopped in order, after the same request."""
        if files[0].line_count > files[1].line_count:  # interrupted between the two
            files[1].append(self._lines[1])
        for file, session in zip(files, sessions, strict=True):
            file.append(end_of(file.line_count, _death(session)))

    def _look(self, sessions: Sessions) -> WrittenReport | None:
        """Judge the observations so far; returns the report if the verdict is final, else None. Each look writes the
        report, so that an interrupted run can continue."""
        seed, quality = self._request.pace.seed, self._limits.quality or QualityThresholds()
        for table, session in zip(self._seen, sessions, strict=True):
            table.accounted, table.died = len(table), _death(session)
        candidate, baseline = self._seen
        evidence, notes = evidence_of(candidate, baseline, quality.sqnr_db)
        judgement = judge(evidence, self._limits, self._looks, seed=seed)
        for table in self._seen:
            table.digest = digest_of_file(table.path)
        target = self._request.target
        hardware_name = this_kind().name if target.is_cpu else target.sm
        conditions = circumstances(self._source, [*notes, *self._remarks()], self._about_traffic(), hardware_name)
        report = make_report(judgement, self._limits, self._looks, candidate, baseline, evidence, conditions, seed)
        report_files = write_report(report, self._request.out)
        judged_count = len(candidate)
        self._say(f"judged after {judged_count} of {self._planned} requests: {judgement.verdict}: {judgement.reason}")
        self._looks = replace(self._looks, before=(*self._looks.before, judged_count))
        return report_files if judgement.verdict != "INSUFFICIENT" or judged_count == self._planned else None

    def _about_traffic(self) -> TrafficReplayed:
        pace, traffic = self._request.pace, self._traffic
        return TrafficReplayed(
            digest=traffic.digest,
            recorded=len(traffic.requests),
            sampling=traffic.sampling,
            scale=pace.scale,
            duration=pace.duration,
            seed=pace.seed,
            in_flight=self._in_flight.count,
            made=traffic.made or None,
        )

    def _remarks(self) -> list[str]:
        """Notes of the report on the traffic."""
        remarks, traffic = [], self._traffic
        if traffic.made:
            remarks.append(f"this traffic was made up: {traffic.made}")
        if traffic.surplus:
            remarks.append(f"no inputs, and left out: {', '.join(traffic.surplus)}")
        if (share := traffic.sampling) < 1.0 and self._request.pace.scale == 1.0:
            remarks.append(f"the traffic is a sample of {share:g}; --scale {1 / share:g} replays it at full rate")
        if traffic.cut:
            remarks.append("half a line at the end of the traffic was left out")
        remarks.append(f"requests in flight: {self._in_flight.count}; {self._in_flight.source}")
        return remarks


def _death(session: Session | RemoteSession) -> str:
    return session.died if isinstance(session, RemoteSession) else ""
