import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

import click
import pytest
from click.testing import CliRunner

import pipeline.cli
from enginesmith import cli
from enginesmith.cli import options
from enginesmith.core.types import PRECISIONS

# What they print is a format of its own, or goes to a file; or they are servers, or called by a container.
WITHOUT_JSON = {
    "init", "initialize", "registry metrics", "traffic record", "rollout receive", "debug schema", "site serve",
}  # fmt: skip
# Phrases that no native speaker would write, or that address a program as a person.
FOREIGN = ("no own", "says to them", "wants to", "may be given repeatedly", "as it is stored", "stands for,")


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
    items = [item for item in command.params if isinstance(item, click.Option) and name in item.opts]
    return items[0] if items else None


def test_there_are_at_most_300_options() -> None:
    listed_names = [(name, item.opts) for name, command in pages().items() for item in command.params]
    own_names = [(name, opts) for name, opts in listed_names if opts[0].startswith("-")]
    assert len(own_names) + len(options.GLOBAL_OPTIONS) + len(cli.enginesmith.params) <= 300


def test_global_options_are_explained_once_and_named_below_each_command() -> None:
    for name in ("list", "build", "canary run", "debug", "fleet"):
        text = CliRunner().invoke(cli.enginesmith, [*name.split(), "--help"]).output
        assert "Global options: enginesmith --help" in text
        assert not [item for item in ("--registry URI", "--trust FILE", "--log-format") if item in text], name
    assert "--registry URI" in help_text() and "ENGINESMITH_REGISTRY" in help_text()


@cache
def probe() -> click.Group:
    """A group with a command that prints what it gets of the global options, and one that takes none."""

    @click.group(cls=options.Group)
    def root() -> None:
        """Root."""

    @root.command()
    def shown(registry: str, stated_registry: str | None, as_json: bool, quiet: bool) -> None:
        """Show."""
        click.echo(f"{registry} {stated_registry} {as_json} {quiet} {options.log_format()}")

    @root.command()
    def other(quiet: bool) -> None:
        """Show."""
        click.echo(str(quiet))

    return root


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("shown", "./registry None False False text"),
        ("shown --registry a --json --quiet --log-format json", "a a True True json"),
        ("--registry a --json --quiet --log-format json shown", "a a True True json"),
        ("--registry a --quiet shown --registry b", "b b False True text"),
        ("--registry a other --quiet", "True"),
    ],
)
def test_a_global_option_works_before_and_after_the_command(words: str, expected: str) -> None:
    result = CliRunner().invoke(probe(), words.split())
    assert (result.exit_code, result.output.strip()) == (0, expected)


def test_a_global_options_variable_yields_to_the_command_line() -> None:
    variables = {"ENGINESMITH_REGISTRY": "env"}
    items = [
        CliRunner().invoke(probe(), words, env=variables).output.split()[0]
        for words in (["shown"], ["--registry", "a", "shown"])
    ]
    assert items == ["env", "a"]


@pytest.mark.parametrize(
    "words", ["other --json", "--json other", "other --trust p.yaml", "--trust p.yaml other", "shown --registry="]
)
def test_a_harmfully_ignored_option_is_refused(words: str) -> None:
    result = CliRunner().invoke(probe(), words.split())
    assert result.exit_code == 2 and "leave" in result.output and "out" in result.output


def test_options_of_a_dataclass_have_its_types_and_defaults() -> None:
    @dataclass(frozen=True)
    class Inner:
        wide: Annotated[bool, options.Option("Wide.")] = False
        names: Annotated[tuple[str, ...], options.Option("Names.", name="--name")] = ()

    @dataclass(frozen=True, kw_only=True)
    class Outer:
        place: Annotated[Path, options.Option("Place.")]
        count: Annotated[int | None, options.Option("Count.", shown="all")] = None
        kind: Annotated[Literal["a", "b"], options.Option("Kind.")] = "a"
        ratio: Annotated[float, options.Option("Ratio.")] = 0.0
        inner: Inner

    items: list[Outer] = []

    @options.command()
    @options.takes(Outer)
    def show(options: Outer) -> None:
        """Show."""
        items.append(options)

    assert CliRunner().invoke(show, ["--place", "x"]).exit_code == 0
    words = ["--place", "y", "--count", "3", "--kind", "b", "--ratio", "0.5", "--wide", "--name", "p", "--name", "q"]
    assert CliRunner().invoke(show, words).exit_code == 0
    assert items == [
        Outer(place=Path("x"), inner=Inner()),
        Outer(place=Path("y"), count=3, kind="b", ratio=0.5, inner=Inner(wide=True, names=("p", "q"))),
    ]
    text = CliRunner().invoke(show, ["--help"]).output
    assert "[required]" in text and "default: (all)" in text and "default: a" in text and "default: 0.0" in text
    for wrong_names in ([], ["--place", "x", "--kind", "c"], ["--place", "x", "--ratio", "nan"]):
        assert CliRunner().invoke(show, wrong_names).exit_code == 2


def help_text() -> str:
    return CliRunner().invoke(cli.enginesmith, ["--help"]).output


def test_a_person_types_one_of_at_most_24_names_and_every_command_is_in_one_table() -> None:
    placed_names = [name for section in cli.SECTIONS.values() for name in section]
    assert len(placed_names) == len(set(placed_names)) <= 24
    tables = (*cli.SECTIONS.values(), *cli.GROUPS.values(), cli.HIDDEN)
    places = {place for table in tables for place, _ in table.values() if place}
    roots = [Path(str(cli.__file__)).parent, Path(str(pipeline.cli.__file__)).parent]
    for path in (file for root in roots for file in root.rglob("*.py")):
        module = ".".join(path.relative_to(roots[0].parents[1]).with_suffix("").parts).removesuffix(".__init__")
        own_items = {
            name: item
            for name, item in vars(importlib.import_module(module)).items()
            if isinstance(item, click.Command)
        }
        parts = [
            part
            for item in own_items.values()
            if isinstance(item, click.Group)
            for part in getattr(item, "commands", {}).values()
        ]
        for name, command in own_items.items():
            flag = command.callback is None or inspect.unwrap(command.callback).__module__ == module
            assert not flag or command in parts or f"{module}:{name}" in places or command is cli.enginesmith, name


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
    if target := option(command, "--target"):
        assert str(target.help).startswith("Target: cpu, a kind of CPU (avx512-vnni), a GPU product (l4), compute")
        assert target.show_default or target.required
    precision = option(command, "--precision")
    if precision is not None:
        listed_choices = precision.type.choices if isinstance(precision.type, click.Choice) else str(precision.help)
        assert all(kind in listed_choices for kind in PRECISIONS)
        assert precision.show_default
    taken_parameters = inspect.signature(inspect.unwrap(command.callback)).parameters if command.callback else {}
    assert ("as_json" in taken_parameters) == (name not in WITHOUT_JSON)
    for shared_option in options.GLOBAL_OPTIONS:
        assert not [item for item in command.params if set(item.opts) & set(shared_option.opts)]


@pytest.mark.parametrize("name", sorted(commands()))
def test_help_explains_ref_spec_and_channel_below_the_command(name: str) -> None:
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
    entries = {}

    @options.command()
    @options.takes(options.Selection)
    def command(options: options.Selection) -> None:
        """Keep what it was given."""
        entries.update(vars(options))

    assert CliRunner().invoke(command, words).exit_code == 0
    assert entries == {"targets": targets, "precisions": precisions, "backends": None}
