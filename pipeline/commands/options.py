"""Options and output that every command shares, so that they are spelled and behave alike."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from pipeline.canary.engines import Chosen
    from pipeline.workshop import Workshop

Command = TypeVar("Command", bound=Callable[..., Any])

DEFAULT_REGISTRY = "./registry"
_UNITS = {"d": "days", "h": "hours", "m": "minutes", "s": "seconds"}


class Duration(click.ParamType[timedelta]):
    """'7d', '12h', '30m', '0s'."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> timedelta:
        """A duration. Fails as click does for what is none."""
        if isinstance(value, timedelta):
            return value
        found = re.fullmatch(r"([0-9]{1,6})([dhms])", str(value))
        if found is None:
            self.fail(f"{value!r} is no duration; give a number and d, h, m or s, as in 7d", param, ctx)
        return timedelta(**{_UNITS[found[2]]: int(found[1])})


def registry_option(command: Command) -> Command:
    """`--registry`, from ENGINERY_REGISTRY, else ./registry; passed as `registry: str`."""
    return click.option(
        "--registry",
        envvar="ENGINERY_REGISTRY",
        default=DEFAULT_REGISTRY,
        show_default=True,
        show_envvar=True,
        help="Path, file:// or s3://bucket/prefix URI of the registry.",
    )(command)


def engine_options(command: Command) -> Command:
    """`--target` and `--precision`: which of a version's engines; passed as `target: str`, `precision: str | None`."""
    precision = click.option("--precision", help="Take only engines of this precision.")
    target = click.option(
        "--target", default="auto", show_default=True, help="sm_89, a product such as l4, cpu, or auto."
    )
    return target(precision(command))


def json_option(command: Command) -> Command:
    """`--json`, passed as `as_json: bool`."""
    return click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on stdout.")(command)


def trust_option(command: Command) -> Command:
    """`--trust`, from ENGINERY_TRUST_POLICY, passed as `trust: Path | None`."""
    return click.option(
        "--trust",
        type=click.Path(path_type=Path),
        envvar="ENGINERY_TRUST_POLICY",
        show_envvar=True,
        help="Trust policy (YAML): whose signatures are needed.",
    )(command)


@contextmanager
def published_engine(
    registry: str, reference: str, target: str, precision: str | None, quiet: bool
) -> Iterator[tuple["Chosen", "Workshop"]]:
    """The engine that a command works on, and what it works with, while progress is shown.

    Raises UnknownNameError when nothing fits, InputError when its hardware is not here.
    """
    from builders.local import LocalExecutor
    from pipeline.canary.engines import choose
    from pipeline.progress import progress_display
    from pipeline.registry.machine import target_named
    from pipeline.registry.names import parse_reference
    from pipeline.registry.store import open_store
    from pipeline.workshop import Workshop

    store = open_store(registry)
    chosen = choose(store, parse_reference(reference), target_named(target), precision)
    executor = LocalExecutor()
    with progress_display(quiet) as progress:
        yield chosen, Workshop(store, executor, executor, progress)


def emit_json(value: Any) -> None:
    """Print a JSON value on stdout. NaN has no place in JSON and is a bug here."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


def say(text: str) -> None:
    """Progress and remarks, on stderr, so that stdout holds only the result."""
    click.echo(text, err=True)
