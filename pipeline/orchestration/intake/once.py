"""One compilation of what an address names: of several runs on the same thing at once, one works."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from enginery.core.digest import digest_of
from enginery.core.origin.presence import this_process
from enginery.registry.build_lock import is_held
from enginery.registry.store.base import Store
from pipeline.compile.composition import InProcess, StepRunner, compile_model
from pipeline.compile.only_records import NotOnRecord, OnlyRecords
from pipeline.compile.publication.publish import resolved_spec
from pipeline.compile.waiting import shown_turn
from pipeline.intake.addresses import Found
from pipeline.orchestration.run import Executors, OpenRun, RunOptions, open_run
from pipeline.outcome import Outcome
from pipeline.progress import Progress
from pipeline.progress.events import Finished, RunConcluded


@dataclass(frozen=True)
class Compiled:
    """How it ended, and in which registry."""

    outcome: Outcome
    store: Store


def compile_once(
    address: Path | str | Found,
    options: RunOptions,
    runner: StepRunner,
    progress: Progress,
    executors: Executors | None = None,
) -> Compiled:
    """Export, quantize, build, prove and publish. Whoever waited for the build lock finds the steps on record.

    Raises what `opened` and `compile_model` raise.
    """
    with open_run(address, options, progress, executors) as run:
        locks = lock_names(run, options)
        if any(is_held(run.context.store, name) for name in locks) and (outcome := _from_records(run)):
            return Compiled(outcome, run.context.store)
        with build_lock(run, locks):
            return Compiled(compile_model(run.spec, run.selection, run.context, runner), run.context.store)


def lock_names(run: OpenRun, options: RunOptions) -> tuple[str, str]:
    """The build locks of a run, by digest: of this spec and selection on every machine, and of this model on this one.

    The first saves doing the same work twice. The second is there because engines are timed: two builds of one model,
    whatever they select, would time each other.
    """
    selected = {"targets": options.targets, "precisions": options.precisions, "backends": options.backends}
    here = {"compiling": run.spec.model, "on": this_process().host}
    return digest_of({"compiling": resolved_spec(run.spec), **selected}), digest_of(here)


@contextmanager
def build_lock(run: OpenRun, names: tuple[str, ...]) -> Iterator[None]:
    """Hold the build locks of these names, in this order; while others hold one, show the wait."""
    with ExitStack() as held:
        for name in names:
            held.enter_context(shown_turn(run.context, name, f"compiling {run.spec.model}"))
        yield


def _from_records(run: OpenRun) -> Outcome | None:
    """The outcome of a run that has nothing to do, and so nothing to wait for; else None."""
    recorded = replace(run.context, local=OnlyRecords(), executor=OnlyRecords(), progress=Progress())
    try:
        outcome = compile_model(run.spec, run.selection, recorded, InProcess())
    except NotOnRecord:
        return None
    reason = "every step is on record, so there was nothing to wait for"
    run.context.progress.emit(Finished("turn", reason=reason))
    run.context.progress.emit(RunConcluded(outcome))
    return outcome
