"""What `--help` says: sections, one description of each option, plain English; and that all commands are alike."""

import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import pipeline.cli
from enginesmith import cli
from enginesmith.cli import options
from enginesmith.core.types import PRECISIONS

# What they print is a format of its own, or goes to a file; or they are servers, or called by a container.
WITHOUT_JSON = {
    "init",
    "initialize",
    "registry metrics",
    "traffic record",
    "rollout receive",
    "debug schema",
    "site serve",
}
# Phrases that no native speaker would write, or that address a program as a person.
FOREIGN = (
    "no own",
    "says to them",
    "wants to",
    "may be given repeatedly",
    "as it is stored",
    "stands for,",
)


@cache
def pages() -> dict[str, click.Command]:
    """Everything that has a --help, by what a person types: 'build', 'golden', 'golden make'."""
    return dict(_pages(cli.enginesmith, ()))


def _pages(group: click.Group, path: tuple[str, ...]) -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield " ".join((*path, name)), command
        if isinstance(command, click.Group):
            yield from _pages(command, (*path, name))


@cache
def commands() -> dict[str, click.Command]:
    """Those of them that do something by themselves."""
    items = pages().items()
    return {name: item for name, item in items if not isinstance(item, click.Group) or item.invoke_without_command}


def option(command: click.Command, name: str) -> click.Option | None:
    found = [item for item in command.params if isinstance(item, click.Option) and name in item.opts]
    return found[0] if found else None


def help_text() -> str:
    return CliRunner().invoke(cli.enginesmith, ["--help"]).output


def test_a_person_types_one_of_at_most_24_names_and_every_command_is_in_one_table() -> None:
    placed = [name for section in cli.SECTIONS.values() for name in section]
    assert len(placed) == len(set(placed)) <= 24
    listed = {place for place, _ in (*cli.COMMANDS.values(), *cli.HIDDEN.values())}
    roots = [Path(str(cli.__file__)).parent, Path(str(pipeline.cli.__file__)).parent]
    for path in (file for root in roots for file in root.rglob("*.py")):
        module = ".".join(path.relative_to(roots[0].parents[1]).with_suffix("").parts).removesuffix(".__init__")
        own = {
            name: item
            for name, item in vars(importlib.import_module(module)).items()
            if isinstance(item, click.Command)
        }
        nested = [
            part
            for item in own.values()
            if isinstance(item, click.Group)
            for part in getattr(item, "commands", {}).values()
        ]
        for name, command in own.items():
            here = command.callback is None or inspect.unwrap(command.callback).__module__ == module
            assert not here or command in nested or f"{module}:{name}" in listed or command is cli.enginesmith, name


def test_help_shows_the_sections_and_what_each_command_does_on_one_line_each() -> None:
    text = help_text()
    places = [text.index(f"\n{section}:\n") for section in cli.SECTIONS]
    assert places == sorted(places)
    for name, (_, does) in {name: entry for table in cli.SECTIONS.values() for name, entry in table.items()}.items():
        assert re.search(rf"^  {name} +{re.escape(does)}$", text, re.MULTILINE), name
    assert "130" in text and "interrupted" in text


@pytest.mark.parametrize("name", sorted(pages()))
def test_every_option_of_a_command_is_explained(name: str) -> None:
    command = pages()[name]
    assert command.help
    for item in command.params:
        assert not isinstance(item, click.Option) or item.help, f"{name} {item.opts}"
    text = " ".join(CliRunner().invoke(cli.enginesmith, [*name.split(), "--help"]).output.split())
    assert [phrase for phrase in FOREIGN if phrase in text] == []


@pytest.mark.parametrize("name", sorted(commands()))
def test_one_word_for_each_concept(name: str) -> None:
    command = commands()[name]
    for plural in ("--targets", "--precisions", "--backends"):
        assert option(command, plural) is None
    if registry := option(command, "--registry"):
        assert str(registry.help).startswith(
            "Registry: a path, file://, s3://bucket/prefix, gs://bucket/prefix, az://account/container/prefix or http://"
        )
        assert registry.show_default and registry.envvar == "ENGINESMITH_REGISTRY"
    if target := option(command, "--target"):
        assert str(target.help).startswith("Target: cpu, a kind of CPU (avx512-vnni), a GPU product (l4), compute")
        assert target.show_default or target.required
    precision = option(command, "--precision")
    if precision is not None:
        listed = precision.type.choices if isinstance(precision.type, click.Choice) else str(precision.help)
        assert all(kind in listed for kind in PRECISIONS)
        assert precision.show_default
    if name not in WITHOUT_JSON:
        assert option(command, "--json")


@pytest.mark.parametrize("name", sorted(commands()))
def test_what_ref_spec_and_channel_mean_stands_below_the_command(name: str) -> None:
    command = commands()[name]
    text = str(command.help)
    for item in command.params:
        if (
            item.name in ("reference", "references")
            and "VERSION" not in str(item.metavar)
            and "|" not in str(item.metavar)
        ):
            assert str(item.metavar).strip("[].") == "REF" and "REF: NAME@VERSION, NAME:CHANNEL, or NAME:" in text
        if item.name == "where":
            assert str(item.metavar).replace("[", "").replace("]", "") == "NAME:CHANNEL"
            assert "NAME:CHANNEL: a" in text


@pytest.mark.parametrize(
    ("words", "targets", "precisions"),
    [
        ([], None, None),
        (["--target", "cpu,l4", "--precision", "int8"], "cpu,l4", "int8"),
        (["--target", "cpu", "--target", "l4", "--precision", "fp16", "--precision", "int8"], "cpu,l4", "fp16,int8"),
    ],
)
def test_several_targets_by_commas_or_one_by_one(words: list[str], targets: str | None, precisions: str | None) -> None:
    given = {}

    @click.command()
    @options.selection_options
    def command(**chosen: str | None) -> None:
        """Keep what it was given."""
        given.update(chosen)

    assert CliRunner().invoke(command, words).exit_code == 0
    assert given == {"targets": targets, "precisions": precisions, "backends": None}
