"""Progress for people on stderr: plain lines in a log, or a table on a terminal that is redrawn in place."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from enginesmith.core.text import join_first, visible
from pipeline.progress import events
from pipeline.progress.clocks import Clocks

if TYPE_CHECKING:
    from rich.console import RenderableType

# Seconds between the lines of a plain log which say that a long step still runs.
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


_MARKS = {"failed": "[red]✗[/red]", "unproven": "[yellow]-[/yellow]"}


class LiveTable(events.Progress):
    """What runs, with phase, elapsed and predicted time, and what waits; above it a line for what is finished."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(stderr=True)
        self._clocks = Clocks()
        self._live = Live(console=self._console, get_renderable=self._draw, refresh_per_second=4, transient=True)

    def __enter__(self) -> "LiveTable":
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def emit(self, event: events.Event) -> None:
        """Change the table, or print a line above it."""
        match event:
            case events.Predicted(name, expectation):
                self._clocks.expects(name, expectation)
            case events.Waiting(name, why):
                self._clocks.note_wait(name, why)
            case events.Started(name):
                self._clocks.start(name)
            case events.PhaseEntered(name, phase):
                self._clocks.phase(name, phase)
            case events.Retrying(name, why):
                self._console.print(f"[yellow]↻[/yellow] {_plain(name)}: once more: {_plain(why)}", highlight=False)
            case events.Finished(name, state):
                seconds = self._clocks.stop(name)
                # The words of a build have the compiler's own time, without the start of its process.
                took = "" if seconds is None or state == "built" else f" [dim]{seconds:.1f} s[/dim]"
                self._print(state, name, event.outcome, took)
            case events.VerdictReached(name, verdict):
                self._print(verdict, f"verdict on {name}", event.outcome)
            case events.VersionSettled(name, words):
                self._print("done", name, words)

    def _print(self, state: str, name: str, words: str, took: str = "") -> None:
        mark = _MARKS.get(state, "[green]✓[/green]")
        self._console.print(f"{mark} {_plain(name)}: {_plain(words)}{took}", highlight=False)

    def _draw(self) -> "RenderableType":
        from rich.spinner import Spinner
        from rich.table import Table

        table = Table.grid(padding=(0, 1))
        for clock in self._clocks.list_running():
            table.add_row(Spinner("dots"), _plain(clock.name), f"[dim]{_plain(clock.text)}[/dim]")
        for names, why in self._clocks.waits():
            told = f"{join_first(names)}: waiting: {why}"
            table.add_row("…", f"[dim]{_plain(told)}[/dim]", "")
        return table


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(visible(text))
