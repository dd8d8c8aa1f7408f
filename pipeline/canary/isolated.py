"""An engine in a process of its own: one that ends its process is evidence against it, and does not end the canary.

The engine's time is measured in its own process, so the way there and back counts for nothing.

Threads of an engine's process: as many requests in flight as there are threads.

They share a session that several threads may run at once (`Capabilities.thread_safe`). Of any other each thread opens
one of its own, which holds the engine's memory once more, as a server with so many instances does.
"""

import os
import queue
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from enginery.core.errors import EngineryError
from enginery.core.types import Session, Tensors, TensorSpec, Untyped
from validation.canary.concurrent import TrafficSegment, serve_requests
from validation.canary.replay import ReplayClock, ServedRequest, Timed, serve

Opener = Callable[[], AbstractContextManager[Session]]
JOIN_S = 10.0


@dataclass(frozen=True)
class Prepare:
    """Asks an engine's process for threads. in_flight: how many.  warmup: what each runs first, unobserved."""

    in_flight: int
    warmup: tuple[Tensors, ...]


class IsolatedSession:
    """The engine that `process` serves. inputs: its specs.  died: what ended its process; '' while it lives.

    A request to an engine that died fails at once: nothing restarts it.
    """

    def __init__(self, process: BaseProcess, connection: Connection, inputs: Sequence[TensorSpec]) -> None:
        self._process, self._connection, self._requests = process, connection, 0
        self.inputs, self.died = inputs, ""

    def serve(self, inputs: Tensors) -> ServedRequest:
        """Seconds of service, the answer or None, and what went wrong or ''."""
        self._requests += 1
        served: ServedRequest | None = self._ask(inputs, f"at request {self._requests} with the warm-up's")
        return served or self._failed()

    def prepare(self, in_flight: int, warmup: Sequence[Tensors]) -> None:
        """Have so many requests in flight from now on, each engine's thread warmed up. Raises EngineryError where the
        engine cannot be opened so many times."""
        failure: EngineryError | str | None = self._ask(Prepare(in_flight, tuple(warmup)), "before the first request")
        if isinstance(failure, EngineryError):
            raise EngineryError(
                f"it cannot have {in_flight} requests in flight here ({failure}); give fewer with --in-flight"
            ) from failure

    def serve_segment(self, segment: TrafficSegment) -> Iterator[Timed]:
        """What came of each request behind the lead; all failed where the engine died meanwhile. One at a time is on
        its way here."""
        first = self._requests + 1
        when = f"among requests {first} to {self._requests + len(segment)} that it was sent"
        count: int | None = self._ask(segment, when)
        count = len(segment) - segment.lead if count is None else count
        self._requests += segment.lead + count
        for _ in range(count):
            timed: Timed | None = self._receive(when)
            yield timed or Timed(0.0, self._failed())

    def _ask(self, what: object, when: str) -> Untyped:
        """The engine's process' answer; None where it ended. when: for what it died of."""
        if not self.died:
            try:
                self._connection.send(what)
            except OSError:
                self._end(when)
        return self._receive(when)

    def _receive(self, when: str) -> Untyped:
        if not self.died:
            try:
                return self._connection.recv()
            except (EOFError, OSError):
                self._end(when)
        return None

    def _end(self, when: str) -> None:
        self.died = f"{_describe_end(self._process)}, {when}"

    def _failed(self) -> ServedRequest:
        return ServedRequest(0.0, None, f"the engine ended its process: {self.died}"[:1000])


@contextmanager
def isolate(role: str, opener: Opener, thread_safe: bool = False) -> Iterator[IsolatedSession]:
    """The engine that `opener` opens in a process of its own; opener is pickled.

    Raises the EngineryError that `opener` raises, and one for whatever else ends the opening. role: whose engine it is.
    thread_safe: whether several threads may run one session of it at once.
    """
    ours, theirs = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=_serve, args=(theirs, opener, thread_safe), daemon=True)
    # Ctrl-C goes to every process of the terminal; only the canary itself answers it. Starting the tracker unblocks it.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    theirs.close()
    try:
        yield IsolatedSession(process, ours, _await_opening(role, process, ours))
    finally:
        ours.close()
        process.join(JOIN_S)
        process.kill()
        process.join()


def _await_opening(role: str, process: BaseProcess, connection: Connection) -> Sequence[TensorSpec]:
    try:
        found: Sequence[TensorSpec] | EngineryError = connection.recv()
    except EOFError:
        raise EngineryError(
            f"the {role}'s engine ended its process while it was opened: {_describe_end(process)}; it serves nothing "
            "here"
        ) from None
    if isinstance(found, EngineryError):
        raise found
    return found


def _serve(connection: Connection, opener: Opener, thread_safe: bool) -> None:
    """Answer requests until the other end is closed."""
    os.dup2(2, 1)  # what an engine prints is no result
    with ExitStack() as stack, suppress(EOFError, BrokenPipeError):
        try:
            session = stack.enter_context(opener())
        except Exception as error:
            told = error if isinstance(error, EngineryError) else EngineryError(f"{type(error).__name__}: {error}")
            connection.send(told)
            return
        connection.send(list(session.inputs))
        workers: Workers | None = None
        while True:
            asked = connection.recv()
            if isinstance(asked, Prepare):
                if not thread_safe:
                    stack.close()  # each thread opens its own, and the memory is wanted for those
                workers = Workers(opener, session, thread_safe, asked.in_flight, asked.warmup)
                connection.send(workers.failure)
            elif isinstance(asked, TrafficSegment) and workers:
                answers = workers.serve_segment(asked)
                connection.send(len(answers))
                while answers:
                    connection.send(answers.popleft())
            else:
                connection.send(serve(session, asked, ReplayClock()))


def _describe_end(process: BaseProcess) -> str:
    """'signal 11 (SIGSEGV)' or 'exit status 3' of a process whose pipe was closed."""
    process.join(JOIN_S)
    code = process.exitcode
    if code is None:
        return "it closed its pipe"
    if code >= 0:
        return f"exit status {code}"
    name = signal.Signals(-code).name if -code in {item.value for item in signal.Signals} else "unknown"
    return f"signal {-code} ({name})"


Job = tuple[TrafficSegment, list[Timed | None], float]
# So many seconds after it was asked for a segment begins: every thread is awake by then.
LEAD_S = 0.002


class Workers:
    """Threads that answer segments. failure: why an engine could not be opened in one of them; None: all are ready.

    opener, session: the engine, and the session of it that is open already.  thread_safe: whether several threads may
    run that at once.  warmup: inputs that each thread runs.
    They end with the process, whatever they do.
    """

    def __init__(
        self,
        opener: Callable[[], AbstractContextManager[Session]],
        session: Session,
        thread_safe: bool,
        in_flight: int,
        warmup: Sequence[Tensors],
    ) -> None:
        self._opener = (lambda: nullcontext(session)) if thread_safe else opener
        self._warmup, self._count = warmup, in_flight
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[EngineryError | None] = queue.SimpleQueue()
        for number in range(in_flight):
            threading.Thread(target=self._work, name=f"in flight {number}", daemon=True).start()
        self.failure = next(filter(None, [self._done.get() for _ in range(in_flight)]), None)

    def serve_segment(self, segment: TrafficSegment) -> deque[Timed]:
        """What came of each request behind the lead, in order; nothing else refers to it."""
        found: list[Timed | None] = [None] * len(segment)
        begun = ReplayClock().now() + LEAD_S
        for _ in range(self._count):
            self._jobs.put((segment, found, begun))
        for _ in range(self._count):
            self._done.get()
        answers = deque(timed for timed in found[segment.lead :] if timed is not None)
        found.clear()
        return answers

    def _work(self) -> None:
        try:
            self._run()
        except SystemExit as ended:  # in a thread it would end that thread, and the request would be waited for
            os._exit(ended.code if isinstance(ended.code, int) else 1)

    def _run(self) -> None:
        clock = ReplayClock()
        try:
            opened = self._opener()
            session = opened.__enter__()
        except Exception as error:
            told = error if isinstance(error, EngineryError) else EngineryError(f"{type(error).__name__}: {error}")
            self._done.put(told)
            return
        for inputs in self._warmup:
            serve(session, inputs, clock)
        self._done.put(None)
        while True:
            segment, found, begun = self._jobs.get()
            serve_requests(session, segment, found, clock, begun)
            self._done.put(None)
