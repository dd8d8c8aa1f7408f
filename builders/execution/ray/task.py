"""One job on Ray: what its worker runs, and what the driver knows of it: starting, events, cancelling, and its loss.

The task is a generator of batches of events, a `TaskAnswer` the last one (`work`). For jobs that need no process of
their own it is a plain function that returns one batch (`work_here`). A worker runs one job after another of a run, and
holds nothing of them: it keeps the server that their processes are forked from (`forking`), unless a job has a GPU,
whose worker Ray itself uses once.
"""

import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from queue import SimpleQueue

from builders.execution.forking import keep_fork_server
from builders.execution.jobs import Job, JobEvent, MemoryHeld, Started, Usage, WorkerContext
from builders.execution.process import run_job
from builders.execution.ray.cluster import RayNode, answers, nodes, through_client
from builders.execution.ray.placement import ray_options
from builders.execution.workdir import workdir
from enginesmith.core.codec import encode
from enginesmith.core.errors import EnginesmithError, StepError, UnavailableError, error_to_json
from enginesmith.core.types import Untyped

# Seconds between two batches of events; the answer comes at once.
_BATCH_S = 0.25


@dataclass(frozen=True)
class TaskAnswer:
    """The last event of a task: {'value': ...}, or an error as `enginesmith.core.errors.error_to_json` writes it."""

    data: dict[str, object]


Event = JobEvent | TaskAnswer


def work(job: Job[object], modules: tuple[str, ...]) -> Iterator[list[Event]]:
    """Run a job in a process of its own within its limits; gives batches of its events.

    modules: what its processes have imported already, where they can be forked.
    """
    # Ray interrupts a task as Ctrl-C would, which a Ray that was started in a shell's background has learnt to ignore.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield [Started(job.name, _node_id())]
    told: deque[Event] = deque()
    done, cancelled = threading.Event(), threading.Event()

    def call() -> Untyped:
        with workdir() as folder:
            return encode(run_job(job, folder, cancelled.is_set, told.append, keep_fork_server(modules)))

    def run() -> None:
        try:
            told.append(_answer(job, call))
        finally:
            done.set()

    thread = threading.Thread(target=run, daemon=True)  # Ray interrupts the main thread alone
    thread.start()
    try:
        while not done.wait(_BATCH_S):
            if told:
                yield [told.popleft() for _ in range(len(told))]
    except BaseException:  # interrupted: the job's processes end before this worker does
        cancelled.set()
        thread.join()
        raise
    yield list(told)


def work_through(job: Job[object], modules: tuple[str, ...]) -> list[Event]:
    """As `work`, all events in one batch: for Ray's client, which streams nothing."""
    return [event for batch in work(job, modules) for event in batch]


def work_here(job: Job[object]) -> list[Event]:
    """All events of a job that is run in this worker itself: without limits, and seeing what earlier ones left."""

    def call() -> Untyped:
        with workdir() as folder:
            return encode(job.request.run(WorkerContext(folder, job.store)))

    return [Started(job.name, _node_id()), _answer(job, call)]


def _answer(job: Job[object], function: Untyped) -> TaskAnswer:
    """What a function returns or raises, as JSON: Ray would wrap an exception."""
    try:
        return TaskAnswer({"value": function()})
    except EnginesmithError as error:
        return TaskAnswer(error_to_json(error))
    except Exception as error:
        return TaskAnswer(error_to_json(StepError(f"{job.name}: {type(error).__name__}: {error}")))


def _node_id() -> str:
    import ray

    node: str = ray.get_runtime_context().get_node_id()
    return node


class RayTask:
    """A job that was handed to Ray. The listener's thread writes it; the thread that waits for the job reads `told`.

    told: events of the worker, and of the listener: `Waiting`, and the error that ends the task.
    modules: as of `RayExecutor`; None for a job that needs no process of its own.
    started, unplaced_since, lost_since: as `time.monotonic` tells.  queued: whether `Waiting` for room was told.
    over: whether `told` has the last event.
    """

    def __init__(
        self, job: Job[object], nodes: Sequence[RayNode], avoid: str | None, modules: tuple[str, ...] | None
    ) -> None:
        self.job, self.avoid = job, avoid
        self.told: SimpleQueue[Event | Exception] = SimpleQueue()
        self.node: str | None = None
        self.peak_mib = 0.0
        self.started: float | None = None
        self.unplaced_since: float | None = None
        self.lost_since: float | None = None
        self.queued = self.over = False
        isolated = modules is not None
        self._streams = isolated and not through_client()
        function = _remote(isolated, self._streams).options(name=job.name, **ray_options(job.needs, nodes, avoid))
        self.ref = function.remote(job, modules) if isolated else function.remote(job)

    def take(self) -> bool:
        """Put the events that the task has ready into `told`; whether there are no more to come."""
        import ray

        try:
            batch: list[Event] = ray.get(next(self.ref) if self._streams else self.ref)
        except (ray.exceptions.RayError, StopIteration) as error:
            self.fail(self._failure(error))
            return True
        for event in batch:
            match event:
                case Started(_, node):
                    self.node, self.started = node, time.monotonic()
                case MemoryHeld(_, mib):
                    self.peak_mib = mib
                case TaskAnswer():
                    self.over = True
            self.told.put(event)
        return self.over

    def fail(self, error: Exception) -> None:
        """End the waiting thread's wait with an error."""
        self.over = True
        self.told.put(error)

    def usage(self) -> Usage:
        """Seconds since its start and its peak memory as far as was told: for a task whose worker is gone."""
        return Usage(time.monotonic() - (self.started or time.monotonic()), self.peak_mib)

    def cancel(self, force: bool) -> None:
        """Interrupt the worker, which then kills the job's processes and removes its folder; or kill it (force).

        A killed worker still takes the job's processes along (`builders.execution.child`).
        """
        import ray

        ray.cancel(self.ref, force=force)

    def _failure(self, error: Exception) -> Exception:
        """The StepError or UnavailableError for what Ray raised of a task."""
        import ray.exceptions as said

        name, words = self.job.name, str(error)
        if isinstance(error, said.OutOfMemoryError):
            reason = "killed by Ray, its node ran out of memory"
            held = f"; it held {self.peak_mib:.0f} MiB" if self.peak_mib else ""
            return StepError(f"{name}: {reason}{held}", "node-memory", words, self.peak_mib)
        if isinstance(error, said.LocalRayletDiedError | said.RaySystemError):
            return UnavailableError(f"{name}: lost the Ray cluster: {words}; start it again, then run again")
        if isinstance(error, said.TaskCancelledError):
            return StepError(f"{name}: cancelled", "cancelled")
        if isinstance(error, said.RayTaskError | said.RuntimeEnvSetupError | said.TaskUnschedulableError):
            last = words.strip().splitlines()[-1]
            return StepError(f"{name}: its Ray worker could not run it: {last}", "error", words)
        if self.node is not None and not any(node.id == self.node and answers(node) for node in nodes()):
            return StepError(f"{name}: lost with its node", "node-lost", words, self.peak_mib)
        return StepError(f"{name}: lost with its Ray worker: {type(error).__name__}", "crash", words, self.peak_mib)


@cache
def _remote(isolated: bool, streams: bool) -> Untyped:
    import ray

    # Ray itself tries nothing again, which it would not tell: `builders.execution.retries` decides that.
    if isolated:
        returns, function = ("streaming", work) if streams else (1, work_through)
        return ray.remote(num_returns=returns, max_retries=0)(function)
    return ray.remote(max_retries=0)(work_here)
