"""One compilation of what an address names: of several runs on the same thing at once, one works."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from builders.digest import digest_of
from pipeline.compile import Runner, compile_model
from pipeline.intake.addresses import Found
from pipeline.intake.bundle import bundle_of
from pipeline.progress import Progress
from pipeline.publication import Outcome
from pipeline.registry.store import Store
from pipeline.run import Executors, Run, RunOptions, opened
from pipeline.waiting import shown_turn


@dataclass(frozen=True)
class Compiled:
    """How it ended, and in which registry."""

    outcome: Outcome
    store: Store


def compile_once(
    address: str | Found,
    options: RunOptions,
    runner: Runner,
    progress: Progress,
    executors: Executors | None = None,
) -> Compiled:
    """Export, quantize, build, prove and publish. Whoever waited for its turn finds the steps on record.

    Raises what `opened` and `compile_model` raise.
    """
    with _its_turn(address, options, progress, executors) as run:
        return Compiled(compile_model(run.spec, run.selection, run.shop, runner), run.shop.store)


@contextmanager
def _its_turn(
    address: str | Found, options: RunOptions, progress: Progress, executors: Executors | None
) -> Iterator[Run]:
    with opened(address, options, progress, executors) as run:
        wanted = {
            "bundle": bundle_of(run.spec).digest,
            "targets": options.targets,
            "precisions": options.precisions,
            "backends": options.backends,
        }
        with shown_turn(run.shop, digest_of(wanted), f"compiling {run.spec.model}"):
            yield run
