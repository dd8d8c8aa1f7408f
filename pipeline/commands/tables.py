"""Tables on stdout, for commands that list things."""

import unicodedata
from collections.abc import Sequence
from typing import Any

_PIPE_COLUMNS = 240


def printable(text: str) -> str:
    """Text that others wrote, without what a terminal would obey: control characters but tabs and ends of lines."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n")
    return "".join(char for char in lines if char in "\n\t" or unicodedata.category(char) != "Cc")


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on stdout; into a pipe it is as wide as it needs, so that nothing is cut."""
    from rich.console import Console
    from rich.table import Table

    console = Console(markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = _PIPE_COLUMNS
    table = Table(*(column.replace("_", " ") for column in columns), box=None, pad_edge=False)
    for column in table.columns:
        column.overflow = "fold"
    for row in rows:
        table.add_row(*map(printable, row))
    console.print(table)


def cell(value: Any) -> str:
    """A value as a table shows it: an object without what is empty or 0, and nothing for null."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items() if item)
    return "" if value is None else str(value)
