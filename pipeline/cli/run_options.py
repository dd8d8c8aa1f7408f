"""Options of commands that run builds, and the display of their progress."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import click

from enginesmith.cli.options import Duration, combine, log_format

if TYPE_CHECKING:
    from pipeline.progress import Progress

# Where units are built; passed as `executor`, `ray_address` and `wait_for_nodes: timedelta`.
executor_options = combine(
    click.option(
        "--executor",
        type=click.Choice(["local", "ray"]),
        default="local",
        show_default=True,
        help="Where units are built.",
    ),
    click.option(
        "--ray-address",
        envvar="RAY_ADDRESS",
        show_envvar=True,
        show_default="a cluster started for this run",
        help="Ray cluster for --executor ray.",
    ),
    click.option(
        "--wait-for-nodes",
        type=Duration(),
        default="0s",
        show_default=True,
        help="How long a unit waits for a suitable Ray node, e.g. 15m with an autoscaler.",
    ),
)


def collect_run_options(command: Callable[..., object]) -> Callable[..., object]:
    """Pass the options that are fields of `RunOptions` (registry, targets, jobs, executor, ...) as one value `options`.

    It stands below all other decorators of a command.
    """

    @functools.wraps(command)
    def call(*arguments: object, **given: Any) -> object:
        from pipeline.orchestration.run import RunOptions

        if "wait_for_nodes" in given:
            given["wait_for_nodes_s"] = given.pop("wait_for_nodes").total_seconds()
        named = {field.name: given.pop(field.name) for field in fields(RunOptions) if field.name in given}
        return command(*arguments, options=RunOptions(**named), **given)

    return call


def shown_progress(quiet: bool) -> AbstractContextManager["Progress"]:
    """The progress display for the command's options and for stderr, a terminal or not."""
    from pipeline.progress import progress_display

    return progress_display(quiet, json_lines=log_format() == "json")
