"""What commands work on: a published version, or one of its engines."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.cli.run_options import shown_progress

if TYPE_CHECKING:
    from enginesmith.registry.manifest import Manifest
    from enginesmith.registry.store.base import Store
    from pipeline.canary.engines import ChosenEngine
    from pipeline.compile.run_context import RunContext


def trusted_manifest(store: "Store", reference: str) -> "Manifest":
    """The manifest of a version. Raises as `vouched_manifest`."""
    return vouched_manifest(store, reference)[0]


def vouched_manifest(store: "Store", reference: str, trust: Path | None = None) -> tuple["Manifest", bool]:
    """The manifest of a version, and whether signatures of it were required and held. trust: as of `require`.

    Raises UnknownNameError for none, UntrustedError without the signatures that the trust policy requires."""
    from enginesmith.core.names import parse_reference
    from enginesmith.registry.trust import require
    from enginesmith.registry.versions.lookup import locate

    manifest = locate(store, parse_reference(reference)).manifest
    return manifest, bool(require(store, manifest, trust).signers)


def target_names(manifest: "Manifest", text: str) -> set[str]:
    """The names of a version's targets that names separated by commas stand for; of one that it has not, its own."""
    from enginesmith.core.hardware.targets import match_targets, parse_targets

    known = [*(entry.hardware for entry in (*manifest.engines, *manifest.caches))]
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
