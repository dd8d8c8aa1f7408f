"""The engines that a canary compares, also of ensembles, each in a process of its own."""

import os
import queue
import signal
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING

from builders.backends import discovery
from builders.backends.discovery import open_engine
from enginesmith.client.resolve import Policy, rank_engines
from enginesmith.core.errors import EnginesmithError, InputError
from enginesmith.core.hardware.cpu_kinds import this_kind
from enginesmith.core.hardware.cuda import DEFAULT_MODE, gpus
from enginesmith.core.hardware.machine import Machine
from enginesmith.core.names import Reference
from enginesmith.core.state import EnsembleFunction, order_nodes
from enginesmith.core.text import WorkerThread
from enginesmith.core.types import Engine, Session, Target, Tensors, TensorSpec, Untyped
from enginesmith.registry.evidence.attestations import judge_entries
from enginesmith.registry.evidence.latencies import measured_speeds
from enginesmith.registry.manifest import EngineEntry, Manifest, functions_of, pinned_engines
from enginesmith.registry.store.base import Store
from enginesmith.registry.trust import require
from enginesmith.registry.versions.lookup import locate
from pipeline.compile.steps.blobs import fetch_engine
from pipeline.outcome import engine_of
from validation.canary.observations import EngineIdentity
from validation.canary.replay import ReplayClock, ServedRequest, Timed, TrafficSegment, serve, serve_requests

if TYPE_CHECKING:
    from enginesmith.ensembles import Ensemble


@dataclass(frozen=True)
class FetchedEnsemble:
    """An ensemble's engine as files, which may be sent to another process. engines: of its graphs, by name.

    sources: what gives each input of a graph.  functions: each with the folder of its files.  inputs, outputs: of the
    whole.  thread_safe: whether several threads may run it at once, which is unknown for functions.
    """

    engines: Mapping[str, Engine]
    sources: Mapping[str, Mapping[str, str]]
    functions: tuple[tuple[EnsembleFunction, Path], ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    thread_safe: bool

    @contextmanager
    def open(self) -> "Iterator[Ensemble]":
        """The ensemble as one session; its functions run in this process. Raises what the backends raise, and
        ModelError for a function that cannot be imported."""
        from enginesmith.ensembles import Ensemble, EnsembleGraph, call_rows, function_node
        from enginesmith.user_code.channel import load_function

        graphs = dict[str, EnsembleGraph]()
        with ExitStack() as exit_stack:
            for name, engine in self.engines.items():
                session, request = exit_stack.enter_context(open_engine(engine)), engine.request
                rows = call_rows(session.inputs, session.outputs, request.profiles)
                graphs[name] = EnsembleGraph(session.run, session.inputs, self.sources[name], session.outputs, rows)
            for function, folder in self.functions:
                run = load_function(folder, function.file, function.function, function.files)
                graphs[function.name] = function_node(
                    function.name, run, function.inputs, function.outputs, function.sources
                )
            order = order_nodes(self.sources, {function.name: function.sources for function, _ in self.functions})
            yield Ensemble({name: graphs[name] for name in order}, self.inputs, self.outputs)


def fetch_ensemble(store: Store, manifest: Manifest, entry: EngineEntry, folder: Path) -> FetchedEnsemble:
    """The engines of the graphs in an ensemble's engine, and its functions, fetched into `folder` and verified.

    Raises as `fetch`, and IntegrityError for a graph's version that is gone.
    """
    engines, sources, safe_flags = dict[str, Engine](), dict[str, Mapping[str, str]](), list[bool]()
    for graph, _, engine in pinned_engines(store, manifest, entry):
        engine_folder = folder / graph.name
        engine_folder.mkdir()
        engines[graph.name] = fetch_engine(store, engine_of(engine), engine_folder)
        sources[graph.name] = graph.sources
        safe_flags.append(discovery.capabilities_of(engine.backend).thread_safe)
    functions = list[tuple[EnsembleFunction, Path]]()
    for function in functions_of(manifest):
        for name, digest in function.files.items():
            path = folder / function.name / name
            path.parent.mkdir(parents=True, exist_ok=True)
            store.fetch(digest, path)
        functions.append((function, folder / function.name))
    return FetchedEnsemble(
        engines, sources, tuple(functions), tuple(entry.inputs), tuple(entry.outputs), all(safe_flags) and not functions
    )


# An engine in a process of its own: a crash of that process is evidence against the engine, and the canary goes on.
#
# Inside that process one thread answers one request at a time, and several threads have several requests in flight. The
# service time of a request is measured there, so that the way between the processes is not part of it.

Opener = Callable[[], AbstractContextManager[Session]]
Job = tuple[TrafficSegment, list[Timed | None], float]
# Seconds that a process has to end by itself.
JOIN_S = 10.0
# Seconds without an answer after which an engine hangs (or ten times its slowest answer); the first may compile.
HANG_S, FIRST_S = 30.0, 600.0
# Seconds from the request of a segment to its start, so that every thread is awake.
LEAD_S = 0.002


@dataclass(frozen=True)
class Prepare:
    """Asks an engine's process for threads. in_flight: how many.  warmup: inputs that each runs first, not observed."""

    in_flight: int
    warmup: tuple[Tensors, ...]


class IsolatedSession:
    """The engine that `process` serves. inputs: its specs.  died: how its process ended and when, '' while it runs.

    A request to an engine whose process ended fails at once; nothing restarts it.
    """

    def __init__(self, process: BaseProcess, connection: Connection, inputs: Sequence[TensorSpec]) -> None:
        self._process, self._connection, self._requests, self._slowest = process, connection, 0, 0.0
        self.inputs, self.died = inputs, ""

    def serve(self, inputs: Tensors) -> ServedRequest:
        """The answer to one request, or why it failed, and the seconds of service."""
        self._requests += 1
        position = f"at request {self._requests} with the warm-up's"
        answer: ServedRequest = self._ask(inputs, position, self._patience()) or self._failed()
        self._slowest = max(self._slowest, answer.service)
        return answer

    def prepare(self, in_flight: int, warmup: Sequence[Tensors]) -> None:
        """Serve this many requests concurrently from now on, with warmed-up threads. Raises EnginesmithError if the
        engine cannot be opened this many times."""
        failure: EnginesmithError | str | None = self._ask(
            Prepare(in_flight, tuple(warmup)), "before the first request"
        )
        if isinstance(failure, EnginesmithError):
            raise EnginesmithError(
                f"it cannot have {in_flight} requests in flight here ({failure}); give fewer with --in-flight"
            ) from failure

    def serve_segment(self, segment: TrafficSegment) -> Iterator[Timed]:
        """The answers to the requests after `segment.lead`, in order; all failed where the engine's process ended.

        The process sends one at a time, so that one answer is in memory here.
        """
        first_request = self._requests + 1
        position = f"among requests {first_request} to {self._requests + len(segment)} that it was sent"
        count: int | None = self._ask(
            segment, position, segment.arrivals[-1] + len(segment) * self._slowest + self._patience()
        )
        count = len(segment) - segment.lead if count is None else count
        self._requests += segment.lead + count
        for _ in range(count):
            answer: Timed = self._receive(position, FIRST_S) or Timed(0.0, self._failed())
            self._slowest = max(self._slowest, answer.served.service)
            yield answer

    def _patience(self) -> float:
        return max(HANG_S, 10.0 * self._slowest) if self._slowest else FIRST_S

    def _ask(self, message: object, when: str, patience_s: float = FIRST_S) -> Untyped:
        """The process's answer; None if it has ended, or is killed because it does not answer within `patience_s`.
        when: what it was doing, for `died`."""
        if not self.died:
            try:
                self._connection.send(message)
            except OSError:
                self.died = f"{_describe_end(self._process)}, {when}"
        return self._receive(when, patience_s)

    def _receive(self, when: str, patience_s: float) -> Untyped:
        if not self.died:
            try:
                if self._connection.poll(patience_s):
                    return self._connection.recv()
                self._process.kill()
                self.died = f"it was killed after {patience_s:.3g} s without an answer, {when}"
            except (EOFError, OSError):
                self.died = f"{_describe_end(self._process)}, {when}"
        return None

    def _failed(self) -> ServedRequest:
        return ServedRequest(0.0, None, f"the engine ended its process: {self.died}"[:1000])


@contextmanager
def isolate(role: str, opener: Opener, thread_safe: bool = False) -> Iterator[IsolatedSession]:
    """The engine that `opener`, which is pickled, opens in a process of its own.

    role: 'candidate' or 'baseline', for messages.  thread_safe: whether several threads may run one session at once.
    Raises the EnginesmithError that `opener` raises, and one for whatever else ends the opening.
    """
    parent_end, child_end = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=_serve, args=(child_end, opener, thread_safe), daemon=True)
    # Ctrl-C goes to every process of the terminal; only the canary itself answers it. Starting the tracker unblocks it.
    resource_tracker.ensure_running()
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
    child_end.close()
    try:
        try:
            startup_message: Sequence[TensorSpec] | EnginesmithError = parent_end.recv()
        except EOFError:
            raise EnginesmithError(
                f"the {role}'s engine ended its process while it was opened: {_describe_end(process)}; it cannot "
                "be used here"
            ) from None
        if isinstance(startup_message, EnginesmithError):
            raise startup_message
        yield IsolatedSession(process, parent_end, startup_message)
    finally:
        parent_end.close()
        process.join(JOIN_S)
        process.kill()
        process.join()


def _serve(connection: Connection, opener: Opener, thread_safe: bool) -> None:
    """Main loop of the engine's process: answer requests until the other end is closed."""
    os.dup2(2, 1)  # what an engine prints is no result
    with ExitStack() as exit_stack, suppress(EOFError, ConnectionError):
        try:
            session = exit_stack.enter_context(opener())
        except Exception as error:
            connection.send(_as_engine_error(error))
            return
        connection.send(list(session.inputs))
        workers: Workers | None = None
        while True:
            message = connection.recv()
            if isinstance(message, Prepare):
                if not thread_safe:
                    exit_stack.close()  # each thread opens its own session, which needs the memory
                workers = Workers(opener, session, thread_safe, message.in_flight, message.warmup)
                connection.send(workers.failure)
            elif isinstance(message, TrafficSegment) and workers:
                answers = workers.serve_segment(message)
                connection.send(len(answers))
                while answers:
                    connection.send(answers.popleft())
            else:
                connection.send(serve(session, message, ReplayClock()))


class Workers:
    """The threads of an engine's process: as many requests in flight as there are threads. They end with the process.

    A session that several threads may run at once (`Capabilities.thread_safe`) is shared. Of any other, each thread
    opens one of its own, which takes the engine's memory once more, as in a server with so many instances.
    failure: why a thread could not open the engine; None where all are ready.
    """

    def __init__(
        self, opener: Opener, session: Session, thread_safe: bool, in_flight: int, warmup: Sequence[Tensors]
    ) -> None:
        """opener: opens the engine again. session: the open one. warmup: inputs that each thread runs."""
        self._opener = (lambda: nullcontext(session)) if thread_safe else opener
        self._warmup, self._count = warmup, in_flight
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[EnginesmithError | None] = queue.SimpleQueue()
        for number in range(in_flight):
            # In a thread it would end that thread, and the request would be waited for.
            WorkerThread(f"in flight {number}", self._run, _end_process).start()
        self.failure = next(filter(None, [self._done.get() for _ in range(in_flight)]), None)

    def serve_segment(self, segment: TrafficSegment) -> deque[Timed]:
        """The answers to the requests after `segment.lead`, in order; nothing else refers to them."""
        answer_slots: list[Timed | None] = [None] * len(segment)
        start_s = ReplayClock().now() + LEAD_S
        for _ in range(self._count):
            self._jobs.put((segment, answer_slots, start_s))
        for _ in range(self._count):
            self._done.get()
        answers = deque(answer for answer in answer_slots[segment.lead :] if answer is not None)
        answer_slots.clear()
        return answers

    def _run(self) -> None:
        clock = ReplayClock()
        try:
            session_context = self._opener()
            session = session_context.__enter__()
        except Exception as error:
            self._done.put(_as_engine_error(error))
            return
        for inputs in self._warmup:
            serve(session, inputs, clock)
        self._done.put(None)
        while True:
            segment, answer_slots, start_s = self._jobs.get()
            serve_requests(session, segment, answer_slots, clock, start_s)
            self._done.put(None)


def _end_process(error: BaseException) -> None:
    """End this process as the error would have ended it in the main thread."""
    if not isinstance(error, SystemExit):
        traceback.print_exception(error)
    os._exit(error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1)


def _as_engine_error(error: Exception) -> EnginesmithError:
    return error if isinstance(error, EnginesmithError) else EnginesmithError(f"{type(error).__name__}: {error}")


def _describe_end(process: BaseProcess) -> str:
    """'signal 11 (SIGSEGV)' or 'exit status 3' of a process whose pipe was closed."""
    process.join(JOIN_S)
    exit_code = process.exitcode
    if exit_code is None:
        return "it closed its pipe"
    if exit_code >= 0:
        return f"exit status {exit_code}"
    signal_name = (
        signal.Signals(-exit_code).name if -exit_code in {member.value for member in signal.Signals} else "unknown"
    )
    return f"signal {-exit_code} ({signal_name})"


@dataclass(frozen=True)
class ChosenEngine:
    """A version, and the engine of it that fits a target best."""

    manifest: Manifest
    entry: EngineEntry

    @property
    def identity(self) -> EngineIdentity:
        """The engine as files of observations name it."""
        entry, manifest = self.entry, self.manifest
        unit = (entry.target, entry.precision, entry.backend)
        return EngineIdentity(manifest.model, manifest.version, manifest.digest, entry.digest, *unit)


def choose(store: Store, reference: Reference, target: Target, precision: str | None) -> ChosenEngine:
    """As `choose_unrun`, for running it here. Raises InputError when its hardware or runtime is not here."""
    chosen_engine = choose_unrun(store, reference, target, precision)
    manifest, entry = chosen_engine.manifest, chosen_engine.entry
    engines = [("", entry)]
    if manifest.graphs:
        engines = [(f"graph {graph.name!r}: ", engine) for graph, _, engine in pinned_engines(store, manifest, entry)]
    for label, engine in engines:
        # `target` and not the engine's own: one that is compatible with this kind of machine may be built for another.
        if reason := discovery.configure(engine.backend, dict(engine.options)).runs(target):
            name = f"{manifest.reference}: {entry.unit}"
            raise InputError(f"{name} does not run here: {label}{reason}; run this on a node that has it")
    return chosen_engine


def choose_unrun(store: Store, reference: Reference, target: Target, precision: str | None) -> ChosenEngine:
    """The engine of a version that `enginesmith pull` would give on a machine of this target; it need not be this one.

    precision: None for the one that fits best.
    Raises UnknownNameError when nothing fits, UntrustedError without the signatures that the trust policy asks for.
    """
    version = locate(store, reference)
    name = version.manifest.reference
    entries = judge_entries(store, version.manifest, require(store, version.manifest).counts)
    machine = replace(Machine.of(target), cpu=this_kind().name if target.is_cpu else None)
    policy = Policy(precision, proven_only=version.proven_only)
    speeds = partial(measured_speeds, store, version.manifest, machine)
    return ChosenEngine(version.manifest, rank_engines(entries, machine, policy, name, speeds).resolution().chosen)


def open_isolated(
    store: Store, role: str, chosen: ChosenEngine, folder: Path
) -> AbstractContextManager[IsolatedSession]:
    """Fetch an engine into `folder`, verify it, and open it in a process of its own. role: as for `isolate`."""
    entry = chosen.entry
    if chosen.manifest.graphs:
        ensemble = fetch_ensemble(store, chosen.manifest, entry, folder)
        return isolate(role, ensemble.open, ensemble.thread_safe)
    engine = fetch_engine(store, engine_of(entry), folder)
    return isolate(role, partial(open_engine, engine), discovery.capabilities_of(entry.backend).thread_safe)


def check_shared_gpu(target: Target) -> None:
    """Raise InputError where a GPU of this target is in exclusive-process mode: a canary runs a process per engine."""
    for gpu in gpus():
        if gpu.compute_capability == target.compute_capability and gpu.compute_mode != DEFAULT_MODE:
            raise InputError(
                f"{gpu.name} is in exclusive-process mode, and a canary opens both engines on it, each in a process of "
                "its own; set `nvidia-smi --compute-mode=DEFAULT`, or run this on a node without that mode"
            )
