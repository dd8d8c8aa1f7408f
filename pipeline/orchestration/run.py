"""One run from its options: spec, selection, registry, executors, locks; the same for commands and Prefect flows."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from builders.backends import discovery as backends
from builders.execution.fork_client import fork_server
from builders.execution.jobs import Executor, Needs
from builders.execution.local import LocalExecutor
from enginesmith.core.errors import InputError, UnavailableError, UnknownNameError, digest_of
from enginesmith.core.hardware import cuda
from enginesmith.core.hardware.machine import match_targets
from enginesmith.core.parsing import this_process
from enginesmith.core.types import PRECISIONS, Precision, Target
from enginesmith.registry.builds.build_history import is_held
from enginesmith.registry.leases import BUILDING, hold_lease
from enginesmith.registry.store.base import Store, open_store
from pipeline.compile.composition import IN_PROCESS, Run, StepRunner, compile_model
from pipeline.compile.plan import HERE
from pipeline.compile.preflight import PRELOADED
from pipeline.compile.publication.publish import resolved_spec
from pipeline.compile.run_context import NotOnRecord, OnlyRecords, RunContext, hold_lock
from pipeline.compile.steps.engines import gpu_labels
from pipeline.intake.registration import Found, registry_of, spec_at
from pipeline.orchestration.runs.recorder import new_run, new_tracker, note_run, record_run
from pipeline.outcome import Outcome
from pipeline.progress import Progress, together
from pipeline.progress.events import Finished, RunBegan, RunConcluded
from pipeline.spec.document import is_ensemble
from pipeline.spec.ensembles.model import EnsembleSpec
from pipeline.spec.model import ModelSpec
from pipeline.values import Selection


@dataclass(frozen=True)
class RunOptions:
    """The options of a run, as text and numbers. targets, precisions, backends: names with commas; None means all.

    jobs: processes at once, None for one per CPU.  ray_address: None for a Ray started for this run.
    wait_for_nodes_s: how long a unit waits for a suitable Ray node to come; 0: it fails at once.
    registry: None for the spec's.  executor: where units are built.
    """

    registry: str | None = None
    targets: str | None = None
    precisions: str | None = None
    backends: str | None = None
    executor: Literal["local", "ray"] = "local"
    jobs: int | None = None
    ray_address: str | None = None
    wait_for_nodes_s: float = 0.0


@dataclass(frozen=True)
class Executors:
    """`local` runs what must run on this machine, `builder` builds engines; several runs may share them."""

    local: Executor
    builder: Executor


@dataclass(frozen=True)
class Compiled:
    """The outcome of a run, and the registry that it published to."""

    outcome: Outcome
    store: Store


def compile_locked(run: Run, options: RunOptions) -> Outcome:
    """`compile_model` while this run holds its build locks; from the records where another run holds one and there is
    nothing to do."""
    locks = lock_names(run, options)
    if any(is_held(run.context.store, name) for name in locks) and (outcome := _from_records(run)):
        return outcome
    with build_lock(run, locks):
        return compile_model(run)


def compile_from_records(address: Path | str | Found, options: RunOptions) -> Outcome | None:
    """The outcome of a run that has nothing to do, without starting a server, a cluster or a process; else None, and
    for an ensemble."""
    with spec_at(address, options.registry) as spec_file:
        if is_ensemble(spec_file.path):
            return None
        spec = spec_file.load()
        if depends_on_workers(spec, options):
            return None
        store = open_store(registry_of(spec, options.registry), create=True)
        tracker = new_tracker(new_run(spec.model, spec.address, store))
        try:
            context = RunContext(store, OnlyRecords(), OnlyRecords(), tracker)
            outcome = compile_model(Run(spec, context, select(spec, options)))
        except NotOnRecord:
            return None
    note_run(store, tracker)
    return outcome


def _from_records(run: Run) -> Outcome | None:
    """As `compile_from_records`, for a run that is open and would wait for a lock."""
    record_context = replace(run.context, local=OnlyRecords(), executor=OnlyRecords(), progress=Progress())
    try:
        outcome = compile_model(Run(run.spec, record_context, run.selection))
    except NotOnRecord:
        return None
    run.context.progress.emit(Finished("lock", reason="all results are in the registry, so there is nothing to do"))
    run.context.progress.emit(RunConcluded(outcome))
    return outcome


def lock_names(run: Run, options: RunOptions) -> tuple[str, str]:
    """The build locks of a run, by digest: of this spec and selection on every machine, and of this model on this one.

    The first saves doing the same work twice. The second is there because engines are timed: two builds of one model,
    whatever they select, would time each other.
    """
    selection_fields = {"targets": options.targets, "precisions": options.precisions, "backends": options.backends}
    host_fields = {"compiling": run.spec.model, "on": this_process().host}
    return digest_of({"compiling": resolved_spec(run.spec), **selection_fields}), digest_of(host_fields)


@contextmanager
def build_lock(run: Run, names: tuple[str, ...]) -> Iterator[None]:
    """Hold the build locks of these names, in this order; while another process holds one, show the wait."""
    with ExitStack() as lock_stack:
        for name in names:
            lock_stack.enter_context(hold_lock(run.context, name, f"compiling {run.spec.model}"))
        yield


@contextmanager
def open_run(
    spec: ModelSpec | Path | str | Found,
    options: RunOptions,
    progress: Progress,
    executors: Executors | None = None,
    runner: StepRunner = IN_PROCESS,
    *,
    keep_state: bool = True,
) -> Iterator[Run]:
    """Read the spec, unless it is read already, open the registry, and start executors unless some are given.

    keep_state: whether the registry keeps this run's state (`enginesmith status`). Raises what `spec_at` raises,
    SpecError, UnknownNameError (a selection that the spec does not have), InputError and UnavailableError.
    """
    with ExitStack() as exit_stack:
        if not isinstance(spec, ModelSpec):
            spec = exit_stack.enter_context(spec_at(spec, options.registry)).load()
        selection = select(spec, options)
        store = open_store(registry_of(spec, options.registry), create=True)
        context = exit_stack.enter_context(
            open_context(spec, store, options, progress, executors, keep_state=keep_state)
        )
        if depends_on_workers(spec, options):
            workers = find_ray_workers(spec, context.executor, options.wait_for_nodes_s > 0)
            selection = replace(selection, workers=workers)
        yield Run(spec, context, selection, runner)


@contextmanager
def open_context(
    spec: ModelSpec | EnsembleSpec,
    store: Store,
    options: RunOptions,
    progress: Progress,
    executors: Executors | None = None,
    *,
    keep_state: bool = True,
) -> Iterator[RunContext]:
    """The context that the steps of a run share, with a lease on the registry."""
    model = spec.model
    with ExitStack() as exit_stack:
        lease = exit_stack.enter_context(hold_lease(store, f"building {model}", BUILDING))
        executor_pair = executors or exit_stack.enter_context(start_executors(options))
        if keep_state:
            run = new_run(model, spec.address, store, progress.by)
            tracker = exit_stack.enter_context(record_run(store, run, lease.secure))
            progress = together(progress.of_run(model, run.id), tracker)
            progress.emit(RunBegan(model, run.id))
        yield RunContext(store, executor_pair.local, executor_pair.builder, progress)


@contextmanager
def start_executors(options: RunOptions, *, signals: bool = True) -> Iterator[Executors]:
    """Start the executors. While inside, Ctrl-C and SIGTERM first kill the jobs that run, as does any other exception.

    signals: whether to handle the two here. They belong to the main thread; a flow leaves them to Prefect, which can
    tell a cancelled run from one that crashed only as long as it receives them itself.
    """
    with ExitStack() as exit_stack:
        local_executor = LocalExecutor(options.jobs, exit_stack.enter_context(fork_server(PRELOADED)))
        builder: Executor = local_executor
        if options.executor != "local":
            from builders.execution.ray import RayExecutor

            address, wait_s = options.ray_address, options.wait_for_nodes_s
            builder = exit_stack.enter_context(RayExecutor(address, options.jobs, wait_s, PRELOADED))

        def cancel() -> None:
            local_executor.cancel()
            builder.cancel()

        with _handle_signals(cancel) if signals else nullcontext():
            try:
                yield Executors(local_executor, builder)
            except BaseException:
                cancel()
                raise


@contextmanager
def _handle_signals(cancel: Callable[[], None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    old_handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def stop(_number: int, _frame: object) -> None:
        cancel()
        raise KeyboardInterrupt

    for number in old_handlers:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)


def store_named(uri: str) -> Store:
    """The registry of a URI or path, opened to be read; made where there is none yet. Raises InputError,
    UnavailableError."""
    try:
        return open_store(uri)
    except UnavailableError:
        return open_store(uri, create=True)


def select(spec: ModelSpec, options: RunOptions) -> Selection:
    """The part of the spec that the options ask for. Raises UnknownNameError for what the spec does not have."""
    spec_targets, selected_targets = spec.target_list(), set[Target]()
    for name in _require_names("targets", options.targets):
        matches = set(match_targets(name, spec_targets))
        if not matches:
            raise UnknownNameError(
                f"targets {name}: not in the spec, which has {', '.join(spec.targets)}; add it there"
            )
        selected_targets |= matches
    return Selection(
        tuple(target for target in spec_targets if target in selected_targets),
        select_precisions(spec, options.precisions),
        _select("backends", options.backends, tuple(spec.backends), tuple(backends.names())),
        tuple(
            (target.name, HERE)
            for target in spec_targets
            if not target.is_cpu and cuda.explain_missing_gpu(target) is None
        ),
    )


def depends_on_workers(spec: ModelSpec, options: RunOptions) -> bool:
    """Whether a cluster has to be asked which units the spec has: one of its compilers tunes on GPUs."""
    compilers = (backends.configure(name, {}) for name in spec.backends)
    tunes_on_target = any(compiler.capabilities.tunes_on_target and compiler.versions() for compiler in compilers)
    return options.executor == "ray" and tunes_on_target and not all(target.is_cpu for target in spec.target_list())


def find_ray_workers(spec: ModelSpec, executor: Executor, waits: bool) -> tuple[tuple[str, str], ...]:
    """`Selection.workers` of a cluster: the targets that a node has now, or that units wait for."""
    from builders.execution.ray import RayExecutor

    if not isinstance(executor, RayExecutor):
        return ()
    workers = []
    for gpu in (target for target in spec.target_list() if not target.is_cpu):
        has_node = executor.has_node(Needs(gpu_labels(gpu), required=True, gpus=1))
        if has_node or waits:
            workers.append((gpu.name, f"on a Ray worker with {gpu.sm}" + ("" if has_node else ", once one comes")))
    return tuple(workers)


def select_precisions(spec: ModelSpec, text: str | None) -> tuple[Precision, ...]:
    """The precisions that are named, in the order of PRECISIONS; () for None. Raises as `select`."""
    names = _select("precisions", text, spec.precision_list(), PRECISIONS)
    return tuple(precision for precision in PRECISIONS if precision in names)


def _select(option: str, text: str | None, spec_names: tuple[str, ...], possible: tuple[str, ...]) -> tuple[str, ...]:
    """The names in `text`. Raises UnknownNameError for one that the spec does not have. possible: what it can have."""
    names = _require_names(option, text)
    for name in names:
        if name not in spec_names:
            remedy = f"there is no such name; choose from the spec's: {', '.join(spec_names)}"
            if name in possible:
                remedy = f"not in the spec, which has {', '.join(spec_names)}; add it there"
            raise UnknownNameError(f"{option} {name}: {remedy}")
    return tuple(names)


def _require_names(option: str, text: str | None) -> list[str]:
    """Names separated by commas or spaces; none for None. An empty text is a mistake: a variable that was not set."""
    names = split_names(text)
    if text is not None and not names:
        raise InputError(f"{option} {text!r} contains no name; give one, or leave the option out for the whole spec")
    return names


def split_names(text: str | None) -> list[str]:
    """Names separated by commas or spaces; none for None."""
    return (text or "").replace(",", " ").split()
