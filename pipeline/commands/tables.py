"""Tables on stdout, for commands that list things."""

import itertools
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from typing import Any

_PIPE_COLUMNS = 240


def printable(text: str) -> str:
    """Text that others wrote, without what a terminal would obey: control characters but tabs and ends of lines."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n")
    return "".join(char for char in lines if char in "\n\t" or unicodedata.category(char) != "Cc")


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    title: str = "",
    note: str = "",
    styles: Mapping[str, str] | None = None,
    red: Collection[int] = (),
    least: Sequence[int] = (),
    pipe_columns: int = _PIPE_COLUMNS,
) -> None:
    """A table on stdout; into a pipe it is as wide as it needs, so that nothing is cut.

    columns: headings; none at all where all are empty.  note: what stands below it.  styles: of cells with this text,
    as rich has them.  red: rows that stand out.
    least: widths of the first columns that are kept where the terminal is narrow.
    pipe_columns: how wide it may be in a pipe.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = pipe_columns
    table = Table(*(column.replace("_", " ") for column in columns), box=None, pad_edge=False, title_justify="left")
    table.title, table.caption, table.caption_justify = printable(title) or None, printable(note) or None, "left"
    table.show_header = any(columns)
    for column, width in itertools.zip_longest(table.columns, least):
        column.overflow, column.min_width = "fold", width
    for index, row in enumerate(rows):
        cells = (Text(printable(text), (styles or {}).get(text, "")) for text in row)
        table.add_row(*cells, style="red" if index in red else None)
    console.print(table)


def cell(value: Any) -> str:
    """A value as a table shows it: an object without what is empty or 0, and nothing for null."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items() if item)
    return "" if value is None else str(value)
