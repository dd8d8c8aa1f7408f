"""Output for people: tables, and the progress bar of a download."""

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from enginesmith.client.pull import silent
from enginesmith.core.text import format_bytes, format_checks, format_metric, visible

if TYPE_CHECKING:
    from rich.progress import ProgressColumn

    from enginesmith.client.pull import Progress
    from enginesmith.registry.manifest import EngineEntry

# Widths in characters of the columns of a download's bar: '1,023.9/1,023.9 MiB', ' 1023.9 MiB/s' and ' 0:00:00'.
_BYTES, _SPEED, _LEFT = 19, 13, 8
_WIDEST_BAR, _SHORTEST_BAR = 40, 4


@contextmanager
def download_bar(quiet: bool = False) -> Iterator["Progress"]:
    """A progress bar that disappears when it is done; none if stderr is no terminal."""
    if quiet or not sys.stderr.isatty():
        yield silent
        return
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(*_columns(console.width), console=console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done_bytes, total_bytes: bar.update(task, completed=done_bytes, total=total_bytes)


def _columns(width: int) -> "list[ProgressColumn]":
    """The columns of the bar that fit into one line of `width` characters; the least important are left out first."""
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

    size_column = DownloadColumn(binary_units=True, table_column=whole())
    time_column = TimeRemainingColumn(table_column=whole())
    bar_width = min(_WIDEST_BAR, width - _BYTES - _SPEED - _LEFT - 1)
    if bar_width >= _SHORTEST_BAR:
        return [BarColumn(bar_width), size_column, Speed(whole()), time_column]
    return [size_column, time_column] if width >= _BYTES + _LEFT else [TaskProgressColumn(table_column=whole())]


if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

    Cells = Sequence["Text"]

_PIPE_COLUMNS = 240
_GAP = 2
# The minimum width of a column of sentences; a column of names, numbers or states is never wrapped.
_LEAST_PROSE = 24
# A text with a bracket that is longer than this is a sentence, not a value with its interval.
_LONGEST_BRACKET = 40


def echo(text: str = "", *, err: bool = False, nl: bool = True) -> None:
    """Write a line on stdout (err: on stderr), with control characters as visible escapes."""
    click.echo(visible(text), err=err, nl=nl)


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    title: str = "",
    note: str = "",
    styles: Mapping[str, str] | None = None,
    red: Collection[int] = (),
    pipe_columns: int = _PIPE_COLUMNS,
) -> None:
    """Print a table that fits the terminal: sentences are wrapped, then brackets get their own line; if that does not
    fit either, each row becomes a block of lines 'column  value'. In a pipe it has its natural width, and no line ends
    with blanks.

    columns: headings; none are printed if all are empty.  note: a line below.  styles: rich's style by the text of a
    cell.  red: indices of rows in red.  pipe_columns: the width in a pipe, unless the table needs more.
    """
    from rich.console import Console
    from rich.text import Text

    headings = [Text(column.replace("_", " ")) for column in columns]
    cells = [
        [Text(visible(text), "red" if index in red else (styles or {}).get(text, "")) for text in row]
        for index, row in enumerate(rows)
    ]
    console = Console(markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = max(pipe_columns, _format_needed(_least_widths(headings, cells)))
    with console.capture() as console_output:
        if title:
            console.print(Text(visible(title), "italic"))
        for rows_of_cells in (cells, [[_in_two_lines(cell) for cell in row] for row in cells]):
            min_widths = _least_widths(headings, rows_of_cells)
            if _format_needed(min_widths) <= console.width:
                console.print(_table(headings, rows_of_cells, min_widths))
                break
        else:
            console.print(*_blocks(headings, cells), sep="\n")
        if note:
            console.print(Text(visible(note), "dim italic"))
    text = console_output.get()
    if not console.is_terminal:
        text = "\n".join(line.rstrip() for line in text.split("\n"))
    click.echo(text, nl=False, color=console.is_terminal or None)  # FORCE_COLOR also makes it a terminal


def _least_widths(headings: "Cells", rows: "Sequence[Cells]") -> list[int]:
    widths = []
    for index, heading in enumerate(headings):
        cells = [row[index] for row in rows]
        max_width = max(_width(cell) for cell in (heading, *cells))
        has_prose = any(_width(cell) > _LEAST_PROSE and " " in cell.plain for cell in cells)
        widths.append(max(_LEAST_PROSE, _width(heading)) if has_prose else max_width)
    return widths


def _format_needed(widths: Sequence[int]) -> int:
    return sum(widths) + _GAP * (len(widths) - 1)


def _in_two_lines(cell: "Text") -> "Text":
    """A value such as '38.1 µs (37.9 to 38.4)' with its bracket below; a sentence unchanged."""
    from rich.text import Text

    value, _, bracket_text = cell.plain.partition(" (")
    return Text(f"{value}\n({bracket_text}", cell.style) if bracket_text and _width(cell) <= _LONGEST_BRACKET else cell


def _width(cell: "Text") -> int:
    from rich.cells import cell_len

    return max(map(cell_len, cell.plain.split("\n")))


def _table(headings: "Cells", rows: "Sequence[Cells]", least_widths: Sequence[int]) -> "RenderableType":
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), collapse_padding=True)
    table.show_header = any(heading.plain for heading in headings)
    for heading, width in zip(headings, least_widths, strict=True):
        table.add_column(heading, min_width=width, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _blocks(headings: "Cells", rows: "Sequence[Cells]") -> "Iterator[RenderableType]":
    """Each row as lines of heading and value, without empty values."""
    from rich.table import Table

    has_headings = any(heading.plain for heading in headings)
    for index, row in enumerate(rows):
        block = Table.grid(padding=(0, _GAP, 0, 0))
        block.add_column(no_wrap=True, style="bold" if has_headings else "")
        block.add_column(overflow="fold")
        for heading, cell in zip(headings, row, strict=True):
            if cell.plain:
                block.add_row(heading, cell)
        if index:
            yield ""
        yield block


# rich's style of a unit's status or action.
STYLES = {
    "build": "cyan",
    "cached": "green",
    "proven": "green",
    "proven on random inputs": "yellow",
    "unproven": "yellow",
    "refused": "dim",
    "failed": "red",
}


def print_engines(engines: "Sequence[tuple[EngineEntry, Mapping[str, float]]]", title: str = "") -> None:
    """Print the engines of a version, each with its task metrics, for build, show and validate."""
    metric_texts = [
        ({} if engine.sqnr_db is None else {"SQNR": format_metric("sqnr_db", engine.sqnr_db)})
        | {name: format_metric(name, value) for name, value in sorted(values.items())}
        for engine, values in engines
    ]
    metric_names = list(dict.fromkeys(name for texts in metric_texts for name in texts))
    rows = [
        [
            *(engine.target, engine.precision, engine.backend, engine.status),
            *(format_bytes(engine.size_bytes), format_checks(engine.checks)),
            *(texts.get(name, "") for name in metric_names),
            engine.reason,
        ]
        for (engine, _), texts in zip(engines, metric_texts, strict=True)
    ]
    note = f"{', '.join(metric_names)}: measured on the engine if it ran, else on its graph" if metric_names else ""
    columns = ("target", "precision", "backend", "status", "size", "checks", *metric_names, "why")
    print_table(columns, rows, title=title, note=note, styles=STYLES)


def print_fields(columns: Sequence[str], rows: Sequence[object]) -> None:
    """Print a table with a row for each value. columns: names of attributes."""
    print_table(columns, [[cell(getattr(row, column)) for column in columns] for row in rows])


def cell(value: object) -> str:
    """A value as the text of a cell: a mapping without its empty items, '' for None."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {entry}" for key, entry in value.items() if entry)
    return "" if value is None else str(value)
