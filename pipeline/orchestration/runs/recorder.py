"""Records the state of a run in the registry while it goes on."""

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, get_args

from builders.execution.jobs import Usage
from builders.execution.scrub import scrubber
from enginesmith.core.errors import EnginesmithError, StepError, UndecidedError, canonical_json, digest_of_bytes
from enginesmith.core.parsing import this_process, user
from enginesmith.core.text import pluralize, precise_now
from enginesmith.registry.builds import runs
from enginesmith.registry.builds.build_history import Past, remember_builds, remember_totals
from enginesmith.registry.builds.runs import OVER, ItemState, RunItem, RunState, State, limit_items
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.layout import run_key, run_live_key
from pipeline.orchestration.runs.views import KeptLog
from pipeline.progress import events

if TYPE_CHECKING:
    from pipeline.values import BuildPlan


class Tracker(events.Progress):
    """Receives every event and keeps the state that follows; `RunRecorder` writes it. Jobs wait for each method, so all
    are short. scrub: replaces what is secret in a text."""

    def __init__(self, run: RunState, scrub: Callable[[str], str]) -> None:
        self._lock = threading.Lock()
        self._run, self._scrub = run, scrub
        self._items: dict[str, RunItem] = {item.name: item for item in run.items}
        self._graphs: dict[str, tuple[str, int]] = {}
        self._logs: dict[str, KeptLog] = {}
        self._closed: list[tuple[str, KeptLog]] = []
        self._pasts: list[tuple[str, str, Past]] = []
        # `changes` grows with every event except printed text, `printed` with every piece of printed text.
        self.changes = self.printed = 0

    def emit(self, event: events.Event) -> None:
        """Update the state by an event; printed text is kept without credentials."""
        match event:
            case events.Planned(plan):
                self._plan(plan)
            case events.Finished(name, state, reason):
                item_state = state if state in get_args(ItemState) else "done"
                self._note(name, state=item_state, why=self._scrub(reason), phase="")
                self._learn(name, state)
            case events.VerdictReached(name):
                self._note(name, verdict=self._scrub(event.outcome))
            case events.RunConcluded(outcome):
                failed_count = len(outcome.failed)
                reason = f"{pluralize(failed_count, 'unit')} failed" if failed_count else ""
                with self._lock:
                    reason = "no engine passed" if outcome.version is None else reason
                    self._run = replace(self._run, version=outcome.version, reason=reason)
                    self.changes += 1
            case _:
                self._follow(event)

    def _follow(self, event: events.Event) -> None:
        """Keep what happens to a step or unit before it ends."""
        match event:
            case events.Predicted(name, expectation):
                self._note(name, predicted=expectation)
            case events.Waiting(name, why):
                run_item = self._items.get(name)
                if run_item is None or (run_item.state, run_item.why) != ("waiting", why):
                    self._note(name, state="waiting", why=why, phase="")
            case events.Started(name, where):
                event_time = precise_now()
                self._note(name, state="running", where=where, why="", phase="", started_at=event_time, ended_at=None)
            case events.PhaseEntered(name, phase):
                self._note(name, phase=phase)
            case events.Printed(name, text):
                with self._lock:
                    if name not in self._logs:
                        self._logs[name] = KeptLog(self._scrub)
                    self._logs[name].feed(text)
                    self.printed += 1
            case events.Retrying(name, why):
                run_item = self._items.get(name)
                self._note(name, retries=(*(run_item.retries if run_item else ()), self._scrub(why)), phase="")
            case events.ProcessEnded(name, usage):
                self._end_process(name, usage)

    def _plan(self, plan: "BuildPlan") -> None:
        with self._lock:
            for unit in plan.units:
                request, is_refused = unit.request, unit.action == "refused"
                variant = (request.target.name, request.precision, request.backend)
                why = unit.reason if is_refused else ""
                self._items[unit.name] = RunItem(unit.name, "refused" if is_refused else "planned", *variant, why=why)
                self._graphs[unit.name] = request.model, unit.graph.shard_bytes
            self.changes += 1

    def _end_process(self, name: str, usage: Usage) -> None:
        """Keep a job's time and memory, and close its log."""
        cpu_s = None if usage.cpu_s is None else round(usage.cpu_s, 2)
        usage_fields = {"seconds": round(usage.seconds, 3), "cpu_s": cpu_s, "peak_mib": round(usage.peak_mib, 1)}
        self._note(name, **usage_fields, ended_at=precise_now())
        with self._lock:
            if log := self._logs.pop(name, None):
                log.close()
                if not log.empty:
                    self._closed.append((name, log))
                self.printed += 1

    @property
    def run(self) -> str:
        """The run's id in the registry."""
        return self._run.id

    @property
    def cached(self) -> int:
        """Units that were found built."""
        with self._lock:
            return sum(item.is_unit and item.state == "cached" for item in self._items.values())

    def end(self, error: BaseException | None) -> None:
        """Set how the run ended, and end the steps and units that still ran. error: what ended it, None for nothing."""
        with self._lock:
            # Ctrl-C, SIGTERM and Prefect's cancelling raise no Exception; the job that they kill may be reported first.
            is_cancelled = isinstance(error, StepError) and error.kind == "cancelled"
            is_stopped = is_cancelled or not isinstance(error, Exception | None)
            has_error = error is not None or bool(self._run.reason)
            state: State = "interrupted" if is_stopped else "failed" if has_error else "done"
            reason = self._scrub(str(error).strip()[:2000]) if error and not is_stopped else self._run.reason
            end_state: ItemState = "cancelled" if is_stopped or error is not None else "done"
            ended_at = self._run.ended_at or precise_now()
            for name, item in self._items.items():
                if item.state not in OVER:
                    item_end = item.ended_at or (ended_at if item.started_at else None)
                    self._items[name] = replace(item, state=end_state, phase="", ended_at=item_end)
            self._run = replace(self._run, state=state, reason=reason, ended_at=ended_at)
            self.changes += 1

    def snapshot(self, heard_at: str) -> RunState:
        """The state of the run now, with as many items as fit into a document."""
        with self._lock:
            items = limit_items(list(self._items.values()))
            return replace(self._run, heard_at=heard_at, items=items, left_out=len(self._items) - len(items))

    def live(self) -> dict[str, str]:
        """The end of what each running job has printed, by name."""
        with self._lock:
            return {name: log.last() for name, log in self._logs.items() if not log.empty}

    def closed_logs(self) -> list[tuple[str, KeptLog]]:
        """The logs of jobs that ended, each once; `note_log` takes where they were stored."""
        with self._lock:
            log_files, self._closed = self._closed, []
        return log_files

    def note_log(self, name: str, digest: str, size_bytes: int) -> None:
        """Keep the place of a job's log: the digest of its blob."""
        self._note(name, log=digest, log_bytes=size_bytes)

    def pasts(self) -> list[tuple[str, str, Past]]:
        """Builds that ended since the last time: backend, digest of the graph, and what it took, with the
        bytes of the graph's shards alone."""
        with self._lock:
            past_builds, self._pasts = self._pasts, []
        return past_builds

    def _note(self, name: str, **fields: object) -> None:
        with self._lock:
            run_item = self._items.get(name) or RunItem(name, "running")
            self._items[name] = replace(run_item, **fields)  # type: ignore[arg-type]
            self.changes += 1

    def _learn(self, name: str, state: str) -> None:
        item = self._items[name]
        if item.is_unit and name in self._graphs and item.seconds is not None and state != "cached":
            usage_fields = (item.seconds, item.peak_mib or 0.0)
            graph, shard_bytes = self._graphs[name]
            past = Past(self._run.model, item.target, item.precision, shard_bytes, *usage_fields, state, precise_now())
            with self._lock:
                self._pasts.append((item.backend, graph, past))


# Writes a run's state into the registry, in a thread of its own that never holds up the run.
#
# It writes what changed, at most every `pace_s`, and less often where a write takes long: one hundredth of the time
# goes into it at most. Where the store is slow or down there is one warning and no record.

# Seconds between two writes into a folder and into a store elsewhere, and between two signs of life there.
PACE_S, FAR_PACE_S = 2.0, 10.0
BEAT_S, FAR_BEAT_S = 10.0, 30.0
FIRST_S = 0.5
# The share of the thread's time that writing may take.
SHARE = 0.01
# Maximum seconds that the end of a run waits for its last write.
PATIENCE_S = 10.0
# Seconds between two writes of what builds took, which are written at the end too.
LEARN_S = 30.0


def new_run(model: str, spec: str, store: Store, by: str = "") -> RunState:
    """The state of a run that begins now, in this process. by: what started it, such as a Prefect flow run."""
    beat_s, process, now = BEAT_S if store.near else FAR_BEAT_S, this_process(), precise_now()
    owner = (process.host, process.pid, user(), by)
    run_id = runs.new_id(model)
    return RunState(
        run_id, model, spec, "running", now, now, beat_s, *owner, namespace=process.namespace, began=process.began
    )


def new_tracker(run: RunState) -> Tracker:
    """The listener that keeps a run's state up to date, without credentials in what was printed."""
    return Tracker(run, scrubber())


def note_run(store: Store, tracker: Tracker) -> None:
    """Write the record of a run that is over and printed nothing."""
    tracker.end(None)
    recorder = RunRecorder(store, tracker)
    recorder.start()
    recorder.stop()


@contextmanager
def record_run(store: Store, run: RunState, secure: Callable[[Iterable[str]], None]) -> Iterator[Tracker]:
    """Keep a run's state in the registry while inside; yields the listener for its events."""
    tracker = new_tracker(run)
    recorder = RunRecorder(store, tracker, secure)
    recorder.start()
    error: BaseException | None = None
    try:
        yield tracker
    except BaseException as exception:
        error = exception
        raise
    finally:
        tracker.end(error)
        recorder.stop()


class RunRecorder:
    """The thread that writes a tracker's state. secure: as for `record_run`.  pace_s: seconds between writes."""

    def __init__(
        self,
        store: Store,
        tracker: Tracker,
        secure: Callable[[Iterable[str]], None] = lambda _: None,
        *,
        pace_s: float | None = None,
    ) -> None:
        self._store, self._tracker, self._run, self._secure = store, tracker, tracker.run, secure
        self._pace_s = pace_s or (PACE_S if store.near else FAR_PACE_S)
        self._beat_s = BEAT_S if store.near else FAR_BEAT_S
        self._over = threading.Event()
        # A daemon: a store that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name="run state", daemon=True)
        self._written: bytes | None = None
        self._seen = (-1, 0)
        self._heard = self._learnt = time.monotonic()
        self._learning: dict[str, list[Past]] = {}
        self._misses = 0
        self._warned = False

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Have the end written, and wait `PATIENCE_S` for that at most."""
        self._over.set()
        self._thread.join(PATIENCE_S)
        if self._thread.is_alive():
            self._warn(f"{self._store.uri} has not answered for {PATIENCE_S:g} s")

    def _work(self) -> None:
        pause_s = min(FIRST_S, self._pace_s)
        while not self._over.wait(pause_s):
            started_s = time.thread_time()
            self._round()
            pause_s = max(self._pace_s, (time.thread_time() - started_s) / SHARE)
        self._round(last=True)

    def _round(self, *, last: bool = False) -> None:
        """Write what is new. An error here must not end the run: it is a warning."""
        try:
            self._logs()
            self._state(last)
            self._learn(last)
            printed_count = self._tracker.printed
            if last:
                with suppress(EnginesmithError):  # without the right to delete it is left to `gc`
                    self._store.remove(run_live_key(self._run))
            elif printed_count != self._seen[1]:
                data, key = canonical_json(self._tracker.live()), run_live_key(self._run)
                with suppress(UndecidedError):
                    self._store.replace(key, data, self._store.read(key))
                self._seen = (self._seen[0], printed_count)
            if last:
                runs.prune(self._store)
        except EnginesmithError as error:
            self._warn(str(error).splitlines()[0])
        except Exception as error:
            self._warn(repr(error))

    def _logs(self) -> None:
        for name, log in self._tracker.closed_logs():
            data = log.text().encode(errors="replace")
            self._secure([digest_of_bytes(data)])
            self._tracker.note_log(name, self._store.put_bytes(data), len(data))

    def _state(self, last: bool) -> None:
        changes, is_due = self._tracker.changes, time.monotonic() - self._heard > self._beat_s
        if changes == self._seen[0] and not is_due and not last:
            return
        state = self._tracker.snapshot(precise_now())
        self._seen, self._heard = (changes, self._seen[1]), time.monotonic()
        self._write(run_key(self._run), state.to_bytes())

    def _write(self, key: str, data: bytes) -> None:
        """Replace this run's document, of which this thread is the only writer; it is read only when that failed."""
        try:
            if self._store.replace(key, data, self._written):
                self._written = data
                return
        except UndecidedError:
            pass
        self._written = self._store.read(key)
        if self._written != data and self._store.replace(key, data, self._written):
            self._written = data

    def _learn(self, last: bool) -> None:
        for backend, graph_digest, past in self._tracker.pasts():
            usage = replace(past, graph_bytes=past.graph_bytes + self._store.size(graph_digest))
            self._learning.setdefault(backend, []).append(usage)
            self._misses += 1
        if last or (self._learning and time.monotonic() - self._learnt > LEARN_S):
            builds, misses = self._learning, self._misses
            self._learning, self._misses, self._learnt = {}, 0, time.monotonic()
            hits = self._tracker.cached if last else 0
            remember_builds(self._store, builds)
            if hits or misses:
                remember_totals(self._store, builds, hits, misses)

    def _warn(self, problem: str) -> None:
        if not self._warned:
            self._warned = True
            print(f"warning: the record of this run is not kept: {problem}", file=sys.stderr)
