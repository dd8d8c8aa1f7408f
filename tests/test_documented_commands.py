import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from enginesmith.cli import enginesmith

ROOT = Path(__file__).parents[1]
# A line of a block (indented, in a fence, after a prompt), or a span in a sentence.
LINE = re.compile(r"^(?: +|\$ )?(?:\$ )?(?:[A-Z_]+=\S+ )*enginesmith +([a-z-].*)$", re.MULTILINE)
SPAN = re.compile(r"`(?:[A-Z_]+=\S+ )*enginesmith +([a-z-][^`]*)`")
# What ends a command in a line of a shell, and what stands for something else.
END = re.compile(r" [|>#&]|&&|;|\)| \.\.\.")


def pages() -> list[Path]:
    result = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    # The reference is written from the command line, and held to it by test_commands_page.
    return [ROOT / name for name in result.stdout.split() if name != "docs/reference/commands.md"]


def written(text: str) -> Iterator[tuple[list[str], bool]]:
    """The words of each command line, and whether it stands alone, so that it has to be whole."""
    text = text.replace("\\\n", " ")
    for pattern, is_whole in ((LINE, True), (SPAN, False)):
        for result in pattern.findall(text):
            words = END.split(" ".join(result.split("\n")))[0]
            try:
                yield shlex.split(words, comments=True), is_whole and "[" not in words
            except ValueError:
                yield words.split(), is_whole


def problem(words: list[str], whole: bool) -> str | None:
    """Why a command line cannot be typed; None if it can. A sentence may leave out values and arguments."""
    command: click.Command = enginesmith
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        items = [command.get_command(click.Context(command), name) for name in words[0].split("|")]
        if None in items:
            return f"{command.name} has no command {words[0]}"
        command, words = items[0], words[1:]
    context = click.Context(command, info_name=command.name)
    if not whole:
        option_names = {option for item in command.get_params(context) for option in (*item.opts, *item.secondary_opts)}
        flags = {items.group() for word in words if (items := re.match(r"--[a-z-]+", word))}
        return f"{command.name} has no {', '.join(sorted(flags - option_names))}" if flags - option_names else None
    try:
        _, rest, _ = command.make_parser(context).parse_args(list(words))
    except click.UsageError as error:
        return f"{command.name}: {error.format_message()}"
    return (
        f"{command.name} takes no argument {' '.join(rest)}" if rest and not isinstance(command, click.Group) else None
    )


def test_every_command_in_the_pages_parses() -> None:
    seen_number, wrong_texts = 0, []
    for page in pages():
        for words, whole_block in written(page.read_text(encoding="utf-8")):
            seen_number += 1
            if reason := problem(words, whole_block):
                wrong_texts.append(f"{page.relative_to(ROOT)}: enginesmith {' '.join(words)}: {reason}")
    assert not wrong_texts and seen_number > 200


@pytest.mark.parametrize(
    "text",
    [
        "    enginesmith resolve digits\n",
        "$ enginesmith build x.yaml --plan\n",
        "    enginesmith pull digits:stable --dest\n",
        "    enginesmith registry fsck digits engines/\n",
        "as `enginesmith pull --watch` does",
        "as `enginesmith rollout pause|stop` does",
    ],
)
def test_invalid_commands_are_found(text: str) -> None:
    assert [reason for words, whole_block in written(text) if (reason := problem(words, whole_block))]
