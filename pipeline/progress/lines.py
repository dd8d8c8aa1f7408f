"""Progress as plain lines on stderr: one for each event, and a sign of life when a step takes long."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from enginery.core.visible import visible
from pipeline.progress import events
from pipeline.progress.clocks import Clocks

# A plain log says that a long step is alive, this often.
HEARTBEAT_S = 15.0


class Lines(events.Progress):
    """One line per event, with the time since the start; a heartbeat when a step takes long."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._lock = threading.Lock()
        self._clocks = Clocks()

    def emit(self, event: events.Event) -> None:
        """Print what is news; a wait once for all that wait for the same."""
        match event:
            case events.Predicted(name, expectation):
                self._clocks.expects(name, expectation)
            case events.Waiting(name, why):
                if self._clocks.note_wait(name, why, once=True):
                    self._print(f"{name}: waiting: {why}")
            case events.Started(name, where):
                self._clocks.start(name)
                self._print(f"{name} ..." if where == "here" else f"{name} ... on {where}")
            case events.PhaseEntered(name, phase):
                self._clocks.phase(name, phase)
            case events.Retrying(name, why):
                self._print(f"{name}: once more: {why}")
            case events.Finished(name):
                self._clocks.stop(name)
                self._print(f"{name}: {event.outcome}")
            case events.VerdictReached(name):
                self._print(f"verdict on {name}: {event.outcome}")
            case events.VersionSettled(name, words):
                self._print(f"{name}: {words}")

    @contextmanager
    def watch(self, name: str) -> Iterator[None]:
        """Print a line every `HEARTBEAT_S` while the work goes on."""
        stop = threading.Event()

        def beat() -> None:
            while not stop.wait(HEARTBEAT_S):
                if clock := self._clocks.of(name):
                    self._print(f"{name}: still running, {clock.text}")

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
            self._clocks.stop(name)

    def _print(self, text: str) -> None:
        with self._lock:
            print(f"[{time.monotonic() - self._begun:6.1f} s] {visible(text)}", file=sys.stderr, flush=True)
