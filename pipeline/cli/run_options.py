"""Options of commands that run steps, and how a command shows what was published."""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from enginesmith.cli.options import Duration, combine, log_format

if TYPE_CHECKING:
    from enginesmith.registry.manifest import Manifest
    from enginesmith.registry.store.base import Store
    from pipeline.canary.engines import ChosenEngine
    from pipeline.compile.run_context import RunContext
    from pipeline.progress import Progress


# Options of commands that run builds, and the display of their progress.


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


# What commands work on: a published version, or one of its engines.


def trusted_manifest(store: "Store", reference: str, trust: Path | None = None) -> "Manifest":
    """The manifest of a version. trust: as of `require`.

    Raises UnknownNameError for none, UntrustedError without the signatures that the trust policy requires."""
    from enginesmith.core.names import parse_reference
    from enginesmith.registry.trust import require
    from enginesmith.registry.versions.lookup import locate

    manifest = locate(store, parse_reference(reference)).manifest
    require(store, manifest, trust)
    return manifest


def target_names(manifest: "Manifest", text: str) -> set[str]:
    """The names of a version's targets that names separated by commas stand for; of one that it has not, its own."""
    from enginesmith.core.hardware.machine import match_targets, parse_targets

    known = [entry.hardware for entry in manifest.engines]
    found = (match_targets(name, known) or parse_targets(name) for name in text.split(","))
    return {target.name for targets in found for target in targets}


@contextmanager
def local_context(store: "Store", quiet: bool) -> Iterator["RunContext"]:
    """A context that runs every job on this machine, while progress is shown on stderr unless `quiet`."""
    from builders.execution.local import LocalExecutor
    from pipeline.compile.run_context import RunContext

    executor = LocalExecutor()
    with shown_progress(quiet) as progress:
        yield RunContext(store, executor, executor, progress)


@contextmanager
def published_engine(
    registry: str, reference: str, target: str, precision: str | None, quiet: bool
) -> Iterator[tuple["ChosenEngine", "RunContext"]]:
    """The engine of a version that fits `target` best, and the context to run it in.

    Raises UnknownNameError when nothing fits, InputError when its hardware is not here.
    """
    from enginesmith.core.hardware.machine import target_named
    from enginesmith.core.names import parse_reference
    from enginesmith.registry.store.base import open_store
    from pipeline.canary.engines import choose

    store = open_store(registry)
    chosen = choose(store, parse_reference(reference), target_named(target), precision)
    with local_context(store, quiet) as context:
        yield chosen, context
