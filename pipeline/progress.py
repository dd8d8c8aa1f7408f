"""Progress of a run, on stderr: a live table on a terminal, one plain line per event elsewhere."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import RenderableType

# A plain log says that a long step is alive, this often.
HEARTBEAT_S = 15.0


class Progress(Protocol):
    """Told about every step and unit; called from several threads."""

    def started(self, name: str) -> None:
        """A step or unit has begun."""

    def finished(self, name: str, outcome: str) -> None:
        """It has ended: 'done', 'cached', 'built', 'proven', 'failed: ...'."""

    def watching(self, name: str) -> AbstractContextManager[None]:
        """Surround long work with this, so that the display knows that it is alive."""
        ...


class Silent:
    """No progress at all: for tests and for library use."""

    def started(self, name: str) -> None:
        """Ignore it."""

    def finished(self, name: str, outcome: str) -> None:
        """Ignore it."""

    @contextmanager
    def watching(self, name: str) -> Iterator[None]:  # noqa: ARG002 - the protocol's signature
        """Do nothing around the work."""
        yield


class Lines:
    """One line per event, with the time since the start; a heartbeat when a step takes long."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._lock = threading.Lock()

    def started(self, name: str) -> None:
        """Print that it began."""
        self._print(f"{name} ...")

    def finished(self, name: str, outcome: str) -> None:
        """Print how it ended."""
        self._print(f"{name}: {outcome}")

    @contextmanager
    def watching(self, name: str) -> Iterator[None]:
        """Print a line every `HEARTBEAT_S` while the work goes on."""
        stop = threading.Event()
        begun = time.monotonic()

        def beat() -> None:
            while not stop.wait(HEARTBEAT_S):
                self._print(f"{name}: still running, {time.monotonic() - begun:.0f} s")

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def _print(self, text: str) -> None:
        with self._lock:
            print(f"[{time.monotonic() - self._begun:6.1f} s] {text}", file=sys.stderr, flush=True)


class LiveTable:
    """A table that is redrawn in place: running steps with their elapsed time, then a line for what is finished."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(stderr=True)
        self._running: dict[str, float] = {}
        self._lock = threading.Lock()
        self._live = Live(console=self._console, get_renderable=self._draw, refresh_per_second=4, transient=True)

    def __enter__(self) -> "LiveTable":
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def started(self, name: str) -> None:
        """Show it among what runs."""
        with self._lock:
            self._running[name] = time.monotonic()

    def finished(self, name: str, outcome: str) -> None:
        """Move it to the lines above."""
        with self._lock:
            begun = self._running.pop(name, None)
        said = outcome.startswith("built in")  # the compiler's own time, without the wait for its process
        took = "" if begun is None or said else f" [dim]{time.monotonic() - begun:.1f} s[/dim]"
        self._console.print(f"{_mark(outcome)} {_plain(name)}: {_plain(outcome)}{took}", highlight=False)

    @contextmanager
    def watching(self, name: str) -> Iterator[None]:  # noqa: ARG002 - the table shows elapsed time anyway
        """Do nothing around the work."""
        yield

    def _draw(self) -> "RenderableType":
        from rich.spinner import Spinner
        from rich.table import Table

        table = Table.grid(padding=(0, 1))
        with self._lock:
            running = list(self._running.items())
        for name, begun in running:
            table.add_row(Spinner("dots"), _plain(name), f"[dim]{time.monotonic() - begun:.0f} s[/dim]")
        return table


def _mark(outcome: str) -> str:
    if outcome.startswith(("failed", "error")):
        return "[red]✗[/red]"
    return "[yellow]-[/yellow]" if outcome.startswith(("refused", "unproven")) else "[green]✓[/green]"


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)


@contextmanager
def progress_display(quiet: bool = False) -> Iterator[Progress]:
    """The display that fits stderr: a live table on a terminal, else plain lines."""
    if quiet:
        yield Silent()
    elif sys.stderr.isatty():
        with LiveTable() as table:
            yield table
    else:
        yield Lines()
