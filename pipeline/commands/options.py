"""Options and output that every command shares, so that they are spelled and behave alike."""

import json
import os
from collections.abc import Callable
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])

DEFAULT_REGISTRY = "./registry"


def registry_option(command: Command) -> Command:
    """`--registry`, from ENGINERY_REGISTRY, else ./registry; passed as `registry: str`."""
    return click.option(
        "--registry",
        envvar="ENGINERY_REGISTRY",
        default=DEFAULT_REGISTRY,
        show_default=True,
        show_envvar=True,
        help="Path or file:// URI of the registry.",
    )(command)


def json_option(command: Command) -> Command:
    """`--json`, passed as `as_json: bool`."""
    return click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on stdout.")(command)


def emit_json(value: Any) -> None:
    """Print a JSON value on stdout. NaN has no place in JSON and is a bug here."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


def say(text: str) -> None:
    """Progress and remarks, on stderr, so that stdout holds only the result."""
    click.echo(text, err=True)


def user() -> str:
    """Who runs this, for a channel's history; a container may have no name for its user."""
    return os.environ.get("USER") or os.environ.get("LOGNAME") or f"uid {os.getuid()}"
