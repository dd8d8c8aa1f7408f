"""Which display a command shows."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from pipeline.progress.events import Progress, Silent
from pipeline.progress.json_lines import JsonLines
from pipeline.progress.lines import Lines
from pipeline.progress.table import LiveTable

LogFormat = Literal["text", "json"]


@contextmanager
def progress_display(quiet: bool = False, log_format: LogFormat = "text") -> Iterator[Progress]:
    """The display that fits stderr: JSON lines if asked for, a live table on a terminal, else plain lines."""
    if quiet:
        yield Silent()
    elif log_format == "json":
        yield JsonLines()
    elif sys.stderr.isatty():
        with LiveTable() as table:
            yield table
    else:
        yield Lines()
