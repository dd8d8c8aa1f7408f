"""Progress on a terminal: a table that is redrawn in place."""

from typing import TYPE_CHECKING

from builders.text import join_first
from builders.visible import visible
from pipeline.progress.clocks import Clocks
from pipeline.progress.events import Silent

if TYPE_CHECKING:
    from rich.console import RenderableType

    from pipeline.history import Expectation


class LiveTable(Silent):
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

    def expects(self, name: str, expectation: "Expectation") -> None:
        """Remember it for the row."""
        self._clocks.expects(name, expectation)

    def waiting(self, name: str, why: str) -> None:
        """Show it below what runs."""
        self._clocks.waiting(name, why)

    def started(self, name: str, where: str = "here") -> None:  # noqa: ARG002 - `enginery status` has a column for it
        """Show it among what runs."""
        self._clocks.started(name)

    def phase(self, name: str, phase: str) -> None:
        """Show it in its row."""
        self._clocks.phase(name, phase)

    def retrying(self, name: str, why: str) -> None:
        """Say why."""
        self._console.print(f"[yellow]↻[/yellow] {_plain(name)}: once more: {_plain(why)}", highlight=False)

    def finished(self, name: str, outcome: str) -> None:
        """Move it to the lines above."""
        seconds = self._clocks.gone(name)
        said = outcome.startswith("built in")  # the compiler's own time, without the wait for its process
        took = "" if seconds is None or said else f" [dim]{seconds:.1f} s[/dim]"
        self._console.print(f"{_mark(outcome)} {_plain(name)}: {_plain(outcome)}{took}", highlight=False)

    def _draw(self) -> "RenderableType":
        from rich.spinner import Spinner
        from rich.table import Table

        table = Table.grid(padding=(0, 1))
        for clock in self._clocks.running():
            table.add_row(Spinner("dots"), _plain(clock.name), f"[dim]{_plain(clock.text)}[/dim]")
        for names, why in self._clocks.waits():
            told = f"{join_first(names)}: waiting: {why}"
            table.add_row("…", f"[dim]{_plain(told)}[/dim]", "")
        return table


def _mark(outcome: str) -> str:
    if outcome.startswith(("failed", "error")):
        return "[red]✗[/red]"
    return "[yellow]-[/yellow]" if outcome.startswith(("refused", "unproven")) else "[green]✓[/green]"


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(visible(text))
