"""What 0.1.0 promises by name (docs/reference/promises.md): public names with their parameters, commands with their
options, the keys of their JSON, variables, exit codes, metrics, and the keys of specs and of the chart."""

import inspect
import json
import re
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import yaml
from click.testing import CliRunner

import enginesmith
from enginesmith.cli import enginesmith as command_line
from enginesmith.cli.options import GLOBAL_OPTIONS
from enginesmith.core import errors
from enginesmith.serving.metrics import ROUTER_METRICS
from pipeline.orchestration.metrics.live import METRICS

ROOT = Path(__file__).parents[2]
ARCHIVE = Path(__file__).with_name("registry.zip")
# Registries of earlier formats lie beside it, the oldest first: `registry-1.zip` and so on.
ARCHIVES = [*sorted(ARCHIVE.parent.glob("registry-*.zip")), ARCHIVE]
FILES = Path(__file__).with_name("files.zip")
PROMISES = Path(__file__).with_name("promises.json")
PACKAGES = ("client", "compile_caches", "recording", "serving", "user_code")


def surface() -> dict[str, list[str]]:
    """Promised names, sorted, by kind."""
    documents = {name: json.loads((ROOT / f"docs/reference/{name}.schema.json").read_text()) for name in _SPECS}
    chart = yaml.safe_load((ROOT / "charts/enginesmith/values.yaml").read_text())
    commands = dict(_commands(command_line, "enginesmith"))
    options = [(path, option) for path, command in commands.items() for option in command.params]
    names = {
        "python": _python(),
        "commands": [*commands, *(f"{path} {name}" for path, option in options for name in option.opts)],
        "json": _printed(),
        "global options": (name for option in GLOBAL_OPTIONS for name in option.opts),
        "variables": _variables(*_SOURCES) & _variables(ROOT / "docs"),
        "exit codes": (f"{kind.__name__} {kind.exit_code}" for kind in _errors()),
        "metrics": (f"{metric.name}{{{','.join(metric.labels)}}}" for metric in METRICS),
        "router metrics": ROUTER_METRICS,
        "spec keys": (f"{name}: {key}" for name, schema in documents.items() for key in _keys(schema, schema, "")),
        "chart values": (path for path in members(chart, "") if "*" not in path),
    }
    return {kind: sorted(set(result)) for kind, result in names.items()}


# Commands whose JSON is promised, run on the frozen registry.
PRINTED = (
    "list", "list tiny", "show tiny@2", "pull tiny@2 --target sm_89 --explain", "registry history tiny:stable",
    "registry policy show tiny:stable", "registry fsck", "rollout status tiny:stable",
    "rollout status tiny:stable --nodes", "profile tiny --series", "status",
)  # fmt: skip
_SOURCES = [ROOT / name for name in ("enginesmith", "builders", "validation", "pipeline")]
_SPECS = ("spec", "ensemble")


def _variables(*folders: Path) -> set[str]:
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".md")]
    return {name for path in files for name in re.findall("ENGINESMITH_[A-Z_]+[A-Z]", path.read_text())}


def unpack(folder: Path, archive: Path = ARCHIVE) -> str:
    """The path of a frozen registry, the newest by default, unpacked into a new folder."""
    with zipfile.ZipFile(archive) as file:
        file.extractall(folder / "registry")
    return str(folder / "registry")


def _printed() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        registry = unpack(Path(folder))
        for words in PRINTED:
            printed_stdout = CliRunner().invoke(command_line, [*words.split(), "--json", "--registry", registry]).stdout
            yield from (f"{words}: {key}" for key in members(json.loads(printed_stdout), ""))


def members(value: object, path: str) -> Iterator[str]:
    """Dotted paths of the keys in a JSON value; '*' for an item."""
    for key, inner_value in value.items() if isinstance(value, dict) else ():
        yield f"{path}{key}"
        yield from members(inner_value, f"{path}{key}.")
    for inner_value in value if isinstance(value, list) else ():
        yield from members(inner_value, f"{path}*.")


def _python() -> Iterator[str]:
    places = [("enginesmith", enginesmith), *((f"enginesmith.{name}", getattr(enginesmith, name)) for name in PACKAGES)]
    for path, value in [
        (f"{place}.{name}", getattr(module, name)) for place, module in places for name in module.__all__
    ]:
        yield path
        if inspect.isclass(value) and value not in _errors():
            yield from (f"{path}.{member}" for member in dir(value) if not member.startswith("_"))
        if callable(value) and value not in _errors():
            yield from (f"{path}({parameter})" for parameter in inspect.signature(value).parameters)
    yield from (f"enginesmith.errors.{kind.__name__} is {kind.__bases__[0].__name__}" for kind in _errors())


def _errors() -> list[type[errors.EnginesmithError]]:
    return [
        value
        for value in vars(errors).values()
        if inspect.isclass(value) and issubclass(value, errors.EnginesmithError)
    ]


def _commands(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    yield path, command
    for name in command.list_commands(context := click.Context(command)) if isinstance(command, click.Group) else ():
        inner_command = command.get_command(context, name)
        assert inner_command is not None
        yield from _commands(inner_command, f"{path} {name}")


def _keys(schema: Mapping[str, Any], node: Any, path: str, above: tuple[str, ...] = ()) -> Iterator[str]:
    """Dotted paths of an object's keys; '*' for a key that the user chooses, and for an item."""
    if (reference := node.get("$ref", "").removeprefix("#/$defs/")) and reference not in above:
        yield from _keys(schema, schema["$defs"][reference], path, (*above, reference))
    for name, inner_value in node.get("properties", {}).items():
        yield f"{path}{name}"
        yield from _keys(schema, inner_value, f"{path}{name}.", above)
    for inner_value in (node.get("additionalProperties"), node.get("items")):
        if isinstance(inner_value, dict):
            yield from _keys(schema, inner_value, f"{path}*.", above)
    for inner_value in (*node.get("anyOf", ()), *node.get("oneOf", ())):
        yield from _keys(schema, inner_value, path, above)
