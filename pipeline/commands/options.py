"""Options and output that every command shares, so that they are spelled and behave alike."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from builders.visible import visible_json
from pipeline.commands.tables import echo
from pipeline.registry import DEFAULT_REGISTRY

if TYPE_CHECKING:
    from pipeline.canary.engines import Chosen
    from pipeline.progress import Progress
    from pipeline.workshop import Workshop

Command = TypeVar("Command", bound=Callable[..., Any])

LOG_FORMATS = ("text", "json")
# Where the command's root context keeps it.
LOG_FORMAT = "log_format"
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


def progress_options(command: Command) -> Command:
    """`--quiet`, passed as `quiet: bool`, and `--log-format`, which `shown_progress` and `say` ask for."""
    quiet = click.option("--quiet", is_flag=True, help="No progress on stderr.")
    return log_format_option(quiet(command))


def executor_options(command: Command) -> Command:
    """Where units are built: passed as `executor`, `ray_address` and `wait_for_nodes: timedelta`."""
    for option in (
        click.option(
            "--wait-for-nodes",
            type=Duration(),
            default="0s",
            show_default=True,
            help="How long a unit waits for a Ray node that suits it to come, e.g. 15m with an autoscaler.",
        ),
        click.option(
            "--ray-address", envvar="RAY_ADDRESS", help="Ray cluster to use; default: one started for this run."
        ),
        click.option(
            "--executor",
            type=click.Choice(["local", "ray"]),
            default="local",
            show_default=True,
            help="Where units are built.",
        ),
    ):
        command = option(command)
    return command


def log_format_option(command: Command) -> Command:
    """`--log-format`: what stderr looks like."""
    return click.option(
        "--log-format",
        type=click.Choice(LOG_FORMATS),
        default="text",
        show_default=True,
        envvar="ENGINERY_LOG_FORMAT",
        show_envvar=True,
        expose_value=False,
        callback=lambda ctx, _, value: ctx.ensure_object(dict).update({LOG_FORMAT: value}),
        help="json: one JSON object on each line of stderr.",
    )(command)


def log_format() -> str:
    """The format that the running command was asked for: 'text' or 'json'."""
    context = click.get_current_context(silent=True)
    chosen = context.find_object(dict) if context else None
    return str((chosen or {}).get(LOG_FORMAT, "text"))


def shown_progress(quiet: bool) -> AbstractContextManager["Progress"]:
    """The progress display that fits the command's options and stderr."""
    from pipeline.progress import progress_display

    return progress_display(quiet, json_lines=log_format() == "json")


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
    from pipeline.registry.machine import target_named
    from pipeline.registry.names import parse_reference
    from pipeline.registry.store import open_store
    from pipeline.workshop import Workshop

    store = open_store(registry)
    chosen = choose(store, parse_reference(reference), target_named(target), precision)
    executor = LocalExecutor()
    with shown_progress(quiet) as progress:
        yield chosen, Workshop(store, executor, executor, progress)


def emit_json(value: Any) -> None:
    """Print a JSON value on stdout. NaN has no place in JSON and is a bug here."""
    echo(visible_json(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)))


def say(text: str) -> None:
    """Progress and remarks, on stderr, so that stdout holds only the result."""
    if log_format() == "json":
        from pipeline.progress.json_lines import JsonLines

        JsonLines().tell("remark", message=text)
    else:
        echo(text, err=True)
