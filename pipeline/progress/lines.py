"""Progress as plain lines on stderr: one for each event, and a sign of life when a step takes long."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from builders.visible import visible
from pipeline.progress.clocks import Clocks
from pipeline.progress.events import Silent

if TYPE_CHECKING:
    from pipeline.history import Expectation

# A plain log says that a long step is alive, this often.
HEARTBEAT_S = 15.0


class Lines(Silent):
    """One line per event, with the time since the start; a heartbeat when a step takes long."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._lock = threading.Lock()
        self._clocks = Clocks()

    def expects(self, name: str, expectation: "Expectation") -> None:
        """Remember it for the heartbeat."""
        self._clocks.expects(name, expectation)

    def waiting(self, name: str, why: str) -> None:
        """Print what it waits for, when that is news: once for all that wait for the same."""
        if self._clocks.waiting(name, why, once=True):
            self._print(f"{name}: waiting: {why}")

    def started(self, name: str, where: str = "here") -> None:
        """Print that it began."""
        self._clocks.started(name)
        self._print(f"{name} ..." if where == "here" else f"{name} ... on {where}")

    def phase(self, name: str, phase: str) -> None:
        """Remember it for the heartbeat."""
        self._clocks.phase(name, phase)

    def retrying(self, name: str, why: str) -> None:
        """Print why."""
        self._print(f"{name}: once more: {why}")

    def finished(self, name: str, outcome: str) -> None:
        """Print how it ended."""
        self._clocks.gone(name)
        self._print(f"{name}: {outcome}")

    @contextmanager
    def watching(self, name: str) -> Iterator[None]:
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
            self._clocks.gone(name)

    def _print(self, text: str) -> None:
        with self._lock:
            print(f"[{time.monotonic() - self._begun:6.1f} s] {visible(text)}", file=sys.stderr, flush=True)
