"""The published engine that a command works on: fuzz, profile, rebuild."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pipeline.cli.options import shown_progress

if TYPE_CHECKING:
    from pipeline.canary.engines import ChosenEngine
    from pipeline.compile.run_context import RunContext


@contextmanager
def published_engine(
    registry: str, reference: str, target: str, precision: str | None, quiet: bool
) -> Iterator[tuple["ChosenEngine", "RunContext"]]:
    """The engine that a command works on, and what it works with, while progress is shown.

    Raises UnknownNameError when nothing fits, InputError when its hardware is not here.
    """
    from builders.execution.local import LocalExecutor
    from enginery.core.hardware.machine import target_named
    from enginery.core.names import parse_reference
    from enginery.registry.store.base import open_store
    from pipeline.canary.engines import choose
    from pipeline.compile.run_context import RunContext

    store = open_store(registry)
    chosen = choose(store, parse_reference(reference), target_named(target), precision)
    executor = LocalExecutor()
    with shown_progress(quiet) as progress:
        yield chosen, RunContext(store, executor, executor, progress)
