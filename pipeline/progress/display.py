"""Which display a command shows."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.progress.events import Progress
from pipeline.progress.json_lines import JsonLines
from pipeline.progress.lines import Lines
from pipeline.progress.table import LiveTable


@contextmanager
def progress_display(quiet: bool = False, json_lines: bool = False) -> Iterator[Progress]:
    """The display that fits stderr: JSON lines if asked for, a live table on a terminal, else plain lines."""
    if quiet:
        yield Progress()
    elif json_lines:
        yield JsonLines()
    elif sys.stderr.isatty():
        with LiveTable() as table:
            yield table
    else:
        yield Lines()
