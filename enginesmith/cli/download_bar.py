"""The bar of a download: bytes, speed and time left on one line of stderr, however narrow it is, if a person looks."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from enginesmith.client.fetch import silent

if TYPE_CHECKING:
    from rich.progress import ProgressColumn

    from enginesmith.client.fetch import Progress

# Widths in characters of the columns of a download's bar: '1,023.9/1,023.9 MiB', ' 1023.9 MiB/s' and ' 0:00:00'.
_BYTES, _SPEED, _LEFT = 19, 13, 8
_WIDEST_BAR, _SHORTEST_BAR = 40, 4


@contextmanager
def download_bar(quiet: bool = False) -> Iterator["Progress"]:
    """A bar that is gone when it is done; nothing where stderr is no terminal."""
    if quiet or not sys.stderr.isatty():
        yield silent
        return
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(*_columns(console.width), console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda there, whole: bar.update(task, completed=there, total=whole)


def _columns(width: int) -> "list[ProgressColumn]":
    """The columns of the bar that fit into one line of `width` characters; the least needed are left out first."""
    from rich.progress import BarColumn, DownloadColumn, ProgressColumn, Task, TaskProgressColumn, TimeRemainingColumn
    from rich.table import Column
    from rich.text import Text

    def whole() -> Column:
        return Column(no_wrap=True)

    class Speed(ProgressColumn):
        """MiB per second, the unit of the sizes beside it."""

        def render(self, task: Task) -> Text:
            speed = task.finished_speed or task.speed
            return Text("" if speed is None else f"{speed / (1 << 20):.1f} MiB/s", style="progress.data.speed")

    size = DownloadColumn(binary_units=True, table_column=whole())
    left = TimeRemainingColumn(table_column=whole())
    bar = min(_WIDEST_BAR, width - _BYTES - _SPEED - _LEFT - 1)
    if bar >= _SHORTEST_BAR:
        return [BarColumn(bar), size, Speed(whole()), left]
    return [size, left] if width >= _BYTES + _LEFT else [TaskProgressColumn(table_column=whole())]
