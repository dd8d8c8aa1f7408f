"""Options of commands that run steps, and the output of published versions."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import click

from enginesmith.cli.options import EngineChoice, Option, Selection, duration, log_format
from enginesmith.core.hardware.machine import match_targets, parse_targets, target_named
from enginesmith.core.names import parse_reference
from enginesmith.registry.store.base import open_store
from enginesmith.registry.versions.lookup import locate

if TYPE_CHECKING:
    from enginesmith.registry.manifest import Manifest
    from enginesmith.registry.store.base import Store
    from pipeline.canary.engines import ChosenEngine
    from pipeline.compile.composition import Run
    from pipeline.compile.run_context import RunContext
    from pipeline.orchestration.run import RunOptions
    from pipeline.progress import Progress


@dataclass(frozen=True)
class Building:
    """Where units are built."""

    executor: Annotated[Literal["local", "ray"], Option("Where to build: on this machine, or on a Ray cluster.")] = (
        "local"
    )
    ray_address: Annotated[
        str | None,
        Option(
            "Address of the Ray cluster, with --executor ray.",
            envvar="RAY_ADDRESS",
            show_envvar=True,
            shown="a cluster started for this run",
        ),
    ] = None
    wait_for_nodes: Annotated[
        timedelta,
        Option(
            "How long a unit waits for a suitable Ray node before it fails, e.g. 15m with an autoscaler.",
            type=duration,
            shown="0s",
        ),
    ] = timedelta()


def run_options(
    registry: str | None, selection: Selection, jobs: int | None, building: Building | None = None
) -> "RunOptions":
    """Options of a run. registry: None for the spec's."""
    from pipeline.orchestration.run import RunOptions

    build_options = building or Building()
    return RunOptions(
        registry,
        **vars(selection),
        jobs=jobs,
        executor=build_options.executor,
        ray_address=build_options.ray_address,
        wait_for_nodes_s=build_options.wait_for_nodes.total_seconds(),
    )


Buckets = Annotated[
    tuple[str, ...],
    Option(
        "Input sizes to time, e.g. batch=8,length=64; all: the smallest and largest size of every bucket; repeatable.",
        name="--bucket",
        shown="the smallest, the opt and the largest sizes",
    ),
]


def chosen_buckets(sizes: tuple[str, ...]) -> 'tuple[str, ...] | Literal["all", "few"]':
    """The sizes of --bucket as measurements take them. Raises click's usage error for 'all' beside sizes."""
    if "all" in sizes and len(sizes) > 1:
        raise click.UsageError("--bucket all includes every bucket; leave out the others")
    return "all" if sizes == ("all",) else sizes or "few"


def shown_progress(quiet: bool) -> AbstractContextManager["Progress"]:
    """The progress display for the command's options and for stderr, a terminal or not."""
    from pipeline.progress import progress_display

    return progress_display(quiet, json_lines=log_format() == "json")


@contextmanager
def opened_run(spec: str, registry: str | None, quiet: bool) -> Iterator["Run"]:
    """A run of a whole spec, of which the registry keeps no state, with its progress on stderr. registry: None for the
    spec's. Raises as `open_run`."""
    from pipeline.orchestration.run import RunOptions, open_run

    options = RunOptions(registry=registry)
    with shown_progress(quiet) as progress, open_run(spec, options, progress, keep_state=False) as run:
        yield run


def trusted_manifest(store: "Store", reference: str, trust: Path | None = None) -> "Manifest":
    """The manifest of a version. trust: as of `require`.

    Raises UnknownNameError for none, UntrustedError without the signatures that the trust policy requires."""
    from enginesmith.registry.trust import require

    manifest = locate(store, parse_reference(reference)).manifest
    require(store, manifest, trust)
    return manifest


def target_names(manifest: "Manifest", text: str) -> set[str]:
    """Names of a version's targets that match names separated by commas; an unknown name is returned unchanged."""
    hardware_targets = [entry.hardware for entry in manifest.engines]
    target_groups = (match_targets(name, hardware_targets) or parse_targets(name) for name in text.split(","))
    return {target.name for targets in target_groups for target in targets}


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
    registry: str, reference: str, choice: EngineChoice, quiet: bool
) -> Iterator[tuple["ChosenEngine", "RunContext"]]:
    """The engine of a version that fits the chosen target best, and the context to run it in.

    Raises UnknownNameError when nothing fits, InputError when its hardware is not here.
    """
    from pipeline.canary.engines import choose

    store = open_store(registry)
    engine_choice = choose(store, parse_reference(reference), target_named(choice.target), choice.precision)
    with local_context(store, quiet) as context:
        yield engine_choice, context
