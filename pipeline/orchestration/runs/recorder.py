"""Writes a run's state into the registry, from a thread of its own, and never in the way of the run.

It writes what changed, at most every `pace_s`, less often where a write takes long: it works one hundredth of the time
at most. A store that is slow or down costs a warning, once, and the record.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from builders.execution.scrub import scrubber
from enginery.core.digest import canonical_json, digest_of_bytes
from enginery.core.errors import EngineryError, UndecidedError
from enginery.core.origin import this_process, user
from enginery.core.text import precise_now
from enginery.registry import runs
from enginery.registry.build_history import Past, remember_builds, remember_totals
from enginery.registry.runs import RunState
from enginery.registry.store.base import Store
from enginery.registry.store.layout import run_key, run_live_key
from pipeline.orchestration.runs.tracker import Tracker

# Seconds between two writes into a folder, and to a store elsewhere; and between two signs of life.
PACE_S, FAR_PACE_S = 2.0, 10.0
BEAT_S, FAR_BEAT_S = 10.0, 30.0
FIRST_S = 0.5
# Of the time, what writing may take.
SHARE = 0.01
# How long the end of a run waits for its last write.
PATIENCE_S = 10.0
# Of one batch: what builds took is written this often, and at the end.
LEARN_S = 30.0
_STORE_FAILS = "the record of this run is not kept"


def new_run(model: str, spec: str, store: Store, by: str = "") -> RunState:
    """A run that begins now, in this process. by: what started it, such as a Prefect flow run."""
    beat = BEAT_S if store.near else FAR_BEAT_S
    me, started = this_process(), precise_now()
    return RunState(
        runs.new_id(model),
        model,
        spec,
        "running",
        started,
        started,
        beat,
        me.host,
        me.pid,
        user(),
        by,
        namespace=me.namespace,
        began=me.began,
    )


def new_tracker(run: RunState) -> Tracker:
    """What is told of a run."""
    return Tracker(run, scrubber())


def note_run(store: Store, tracker: Tracker) -> None:
    """Write down a run that is over and printed nothing."""
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
    """Keep a run's state in the registry while it goes on; yields whom to tell what happens.

    secure: see `Guard.secure`.  show: is shown each state that is written, in the writer's thread.
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
    """The thread. See `recorded`."""

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
        """Begin to write."""
        self._thread.start()

    def stop(self) -> None:
        """Write the end, and wait for that, not for ever."""
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
        """Write what is new. Whatever goes wrong here is not the run's business."""
        try:
            self._logs()
            self._state(last)
            self._learn(last)
            self._live(last)
            if last:
                runs.prune(self._store)
        except EngineryError as error:
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
        self._show(state)
        self._write(run_key(self._run), state.to_bytes())

    def _show(self, state: RunState) -> None:
        if self._shown is None:
            return
        try:
            self._shown(state)
        except Exception as error:  # what shows a run must not end it
            self._shown = None
            print(f"warning: this run is shown no more: {error!r}", file=sys.stderr)

    def _live(self, last: bool) -> None:
        printed = self._tracker.printed
        if last:
            with suppress(EngineryError):  # whoever may not delete leaves it to `gc`
                self._store.remove(run_live_key(self._run))
        elif printed != self._seen[1]:
            data, key = canonical_json(self._tracker.live()), run_live_key(self._run)
            with suppress(UndecidedError):
                self._store.replace(key, data, self._store.read(key))
            self._seen = (self._seen[0], printed)

    def _write(self, key: str, data: bytes) -> None:
        """This run's document has one writer; what it says is read only when that is in doubt."""
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
            self._learning.setdefault(backend, []).append(replace(past, graph_bytes=self._store.size(graph)))
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
            print(f"warning: {_STORE_FAILS}: {what}", file=sys.stderr)
