"""Writes the reference of the command line, from click: `python -m docs.commands > docs/reference/commands.md`."""

import inspect
import re
import textwrap
from collections.abc import Iterator, Sequence

import click

from enginesmith.cli import HIDDEN, SECTIONS, enginesmith
from enginesmith.cli.options import GLOBAL_OPTIONS

WIDTH = 120
HEAD = """# Commands

Generated from the command line by `make docs`; do not edit. `enginesmith COMMAND --help` prints the same text.
"""


def markdown() -> str:
    """The page as Markdown."""
    context = click.Context(enginesmith, info_name="enginesmith", terminal_width=WIDTH, max_content_width=WIDTH)
    rows = [record for option in GLOBAL_OPTIONS if (record := option.get_help_record(context))]
    parts = [
        HEAD,
        _text(enginesmith),
        "## Global options",
        "Every command takes these options, before or after its name.",
        _table(rows),
    ]
    for section, names in {**SECTIONS, "Called by KServe": HIDDEN}.items():
        parts.append(f"## {section}")
        for name in names:
            command = enginesmith.get_command(context, name)
            assert command is not None  # noqa: S101 - a name of the same table
            parts += _parts(command, name, context)
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _parts(command: click.Command, name: str, parent: click.Context, level: int = 3) -> Iterator[str]:
    context = type(parent)(command, parent=parent, info_name=name)
    yield f"{'#' * level} {context.command_path}"
    yield _text(command)
    yield f"```text\n{context.command_path} {' '.join(command.collect_usage_pieces(context))}\n```"
    options = [option for option in command.params if isinstance(option, click.Option)]
    if rows := [record for option in options if (record := option.get_help_record(context))]:
        yield _table(rows)
    for each in command.list_commands(context) if isinstance(command, click.Group) else ():
        inner = command.get_command(context, each)
        assert inner is not None  # noqa: S101 - a name of its own list
        yield from _parts(inner, each, context, level + 1)


def _text(command: click.Command) -> str:
    """The command's description; a paragraph under click's mark \\b keeps its lines, as code."""
    paragraphs = inspect.cleandoc(command.help or "").split("\n\n")
    return "\n\n".join(_paragraph(text) for text in paragraphs)


def _paragraph(text: str) -> str:
    if text.startswith("\b\n"):
        return f"```text\n{text.removeprefix(chr(8)).strip(chr(10))}\n```"
    return textwrap.fill(_plain(text), WIDTH, break_long_words=False, break_on_hyphens=False)


def _table(rows: Sequence[tuple[str, str]]) -> str:
    lines = [f"| `{option.replace('|', chr(92) + '|')}` | {_plain(text)} |" for option, text in rows]
    return "\n".join(["| option | meaning |", "|---|---|", *lines])


def _plain(text: str) -> str:
    """The text on one line, escaped for Markdown; in code spans only `|` is escaped."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()).replace("|", r"\|"))
    return "".join(part if part.startswith("`") else re.sub(r"([*<])", r"\\\1", part) for part in parts)


if __name__ == "__main__":
    print(markdown(), end="")
