"""Writes a run's state into the registry, in a thread of its own that never holds up the run.

It writes what changed, at most every `pace_s`, and less often where a write takes long: one hundredth of the time goes
into it at most. Where the store is slow or down there is one warning and no record.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from builders.execution.scrub import scrubber
from enginesmith.core.digest import canonical_json, digest_of_bytes
from enginesmith.core.errors import EnginesmithError, UndecidedError
from enginesmith.core.origin import this_process, user
from enginesmith.core.text import precise_now
from enginesmith.registry.builds import runs
from enginesmith.registry.builds.build_history import Past, remember_builds, remember_totals
from enginesmith.registry.builds.runs import RunState
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.layout import run_key, run_live_key
from pipeline.orchestration.runs.tracker import Tracker

# Seconds between two writes into a folder and into a store elsewhere, and between two signs of life there.
PACE_S, FAR_PACE_S = 2.0, 10.0
BEAT_S, FAR_BEAT_S = 10.0, 30.0
FIRST_S = 0.5
# The share of the thread's time that writing may take.
SHARE = 0.01
# So many seconds the end of a run waits for its last write.
PATIENCE_S = 10.0
# Seconds between two writes of what builds took, which are written at the end too.
LEARN_S = 30.0


def new_run(model: str, spec: str, store: Store, by: str = "") -> RunState:
    """The state of a run that begins now, in this process. by: what started it, such as a Prefect flow run."""
    beat, me, started = BEAT_S if store.near else FAR_BEAT_S, this_process(), precise_now()
    driver = (me.host, me.pid, user(), by)
    run = runs.new_id(model)
    return RunState(
        run, model, spec, "running", started, started, beat, *driver, namespace=me.namespace, began=me.began
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
def record_run(
    store: Store,
    run: RunState,
    secure: Callable[[Iterable[str]], None],
    show: Callable[[RunState], None] = lambda _: None,
) -> Iterator[Tracker]:
    """Keep a run's state in the registry while inside; yields the listener for its events.

    secure: see `Guard.secure`.  show: called with each state that is written, in the thread that writes.
    """
    tracker = new_tracker(run)
    recorder = RunRecorder(store, tracker, secure, show)
    recorder.start()
    error: BaseException | None = None
    try:
        yield tracker
    except BaseException as found:
        error = found
        raise
    finally:
        tracker.end(error)
        recorder.stop()


class RunRecorder:
    """The thread that writes a tracker's state. secure, show: as for `record_run`.  pace_s: seconds between writes."""

    def __init__(
        self,
        store: Store,
        tracker: Tracker,
        secure: Callable[[Iterable[str]], None] = lambda _: None,
        show: Callable[[RunState], None] = lambda _: None,
        *,
        pace_s: float | None = None,
    ) -> None:
        self._store, self._tracker, self._run, self._secure = store, tracker, tracker.run, secure
        self._shown: Callable[[RunState], None] | None = show
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
        pause = min(FIRST_S, self._pace_s)
        while not self._over.wait(pause):
            begun = time.thread_time()
            self._round()
            pause = max(self._pace_s, (time.thread_time() - begun) / SHARE)
        self._round(last=True)

    def _round(self, *, last: bool = False) -> None:
        """Write what is new. An error here must not end the run: it is a warning."""
        try:
            self._logs()
            self._state(last)
            self._learn(last)
            self._live(last)
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
        changes, beat = self._tracker.changes, time.monotonic() - self._heard > self._beat_s
        if changes == self._seen[0] and not beat and not last:
            return
        state = self._tracker.snapshot(precise_now())
        self._seen, self._heard = (changes, self._seen[1]), time.monotonic()
        if self._shown is not None:
            try:
                self._shown(state)
            except Exception as error:  # what shows a run must not end it
                self._shown = None
                print(f"warning: this run is shown no more: {error!r}", file=sys.stderr)
        self._write(run_key(self._run), state.to_bytes())

    def _live(self, last: bool) -> None:
        printed = self._tracker.printed
        if last:
            with suppress(EnginesmithError):  # without the right to delete it is left to `gc`
                self._store.remove(run_live_key(self._run))
        elif printed != self._seen[1]:
            data, key = canonical_json(self._tracker.live()), run_live_key(self._run)
            with suppress(UndecidedError):
                self._store.replace(key, data, self._store.read(key))
            self._seen = (self._seen[0], printed)

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
        for backend, graph, past in self._tracker.pasts():
            whole = replace(past, graph_bytes=past.graph_bytes + self._store.size(graph))
            self._learning.setdefault(backend, []).append(whole)
            self._misses += 1
        if last or (self._learning and time.monotonic() - self._learnt > LEARN_S):
            batch, misses = self._learning, self._misses
            self._learning, self._misses, self._learnt = {}, 0, time.monotonic()
            hits = self._tracker.cached if last else 0
            remember_builds(self._store, batch)
            if hits or misses:
                remember_totals(self._store, batch, hits, misses)

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            print(f"warning: the record of this run is not kept: {what}", file=sys.stderr)
