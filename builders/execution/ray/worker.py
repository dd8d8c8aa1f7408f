"""The worker's side of a job on Ray: runs it in a process of its own, and tells the driver what becomes of it.

A task is a generator of batches of events, a `TaskAnswer` the last one. For jobs that need no process of their own it
is a plain function that returns one batch (`work_here`).
"""

import signal
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from builders.execution.events import JobEvent, Started
from builders.execution.jobs import Job, WorkerContext
from builders.execution.process import run_job
from builders.execution.workdir import workdir
from enginery.core.codec import encode
from enginery.core.errors import EngineryError, StepError, error_to_json
from enginery.core.untyped import Untyped

# Batches are this far apart, the answer apart.
_BATCH_S = 0.25


@dataclass(frozen=True)
class TaskAnswer:
    """The last event of a task: {'value': ...}, or an error as `enginery.core.errors.error_to_json` writes it."""

    data: dict[str, object]


Event = JobEvent | TaskAnswer


def work(job: Job[object]) -> Iterator[list[Event]]:
    """Run a job in a process of its own within its limits."""
    # Ray interrupts a task as Ctrl-C would, which a Ray that was started in a shell's background has learnt to ignore.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield [Started(job.name, _node_id())]
    running = _Running(job)
    try:
        while not running.done.wait(_BATCH_S):
            if batch := running.events():
                yield batch
    except BaseException:  # interrupted: the job's processes end before this worker does
        running.cancel()
        raise
    yield running.events()


def work_through(job: Job[object]) -> list[Event]:
    """As `work`, all events at once: for Ray's client, which streams nothing."""
    return [event for batch in work(job) for event in batch]


def work_here(job: Job[object]) -> list[Event]:
    """Run a job in this worker, whose next job sees what it leaves behind; without limits."""
    return [Started(job.name, _node_id()), _answer(job, lambda: _call(job))]


def _call(job: Job[object]) -> Untyped:
    with workdir() as folder:
        return encode(job.request.run(WorkerContext(folder, job.store)))


class _Running:
    """A job in a thread: Ray interrupts the main thread alone."""

    def __init__(self, job: Job[object]) -> None:
        self._job = job
        self._events: deque[Event] = deque()
        self._cancelled = False
        self.done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def events(self) -> list[Event]:
        """What was told since the last call."""
        return [self._events.popleft() for _ in range(len(self._events))]

    def cancel(self) -> None:
        """Kill the job's processes, and wait for that."""
        self._cancelled = True
        self._thread.join()

    def _run(self) -> None:
        try:
            self._events.append(_answer(self._job, self._value))
        finally:
            self.done.set()

    def _value(self) -> Untyped:
        with workdir() as folder:
            return encode(run_job(self._job, folder, lambda: self._cancelled, self._events.append))


def _answer(job: Job[object], function: Untyped) -> TaskAnswer:
    """A value or an error as JSON, since Ray would wrap an exception."""
    try:
        return TaskAnswer({"value": function()})
    except EngineryError as error:
        return TaskAnswer(error_to_json(error))
    except Exception as error:
        return TaskAnswer(error_to_json(StepError(f"{job.name}: {type(error).__name__}: {error}")))


def _node_id() -> str:
    import ray

    node: str = ray.get_runtime_context().get_node_id()
    return node
