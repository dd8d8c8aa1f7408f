"""One job on Ray: starting it, what is known of it, ending it, and what its loss means."""

import time
from collections.abc import Sequence
from functools import cache
from queue import SimpleQueue

from builders.execution.events import MemoryHeld, Started, Usage
from builders.execution.jobs import Job
from builders.execution.ray.cluster import answers, nodes, through_client
from builders.execution.ray.placement import RayNode, ray_options
from builders.execution.ray.worker import Event, TaskAnswer, work, work_here, work_through
from enginery.core.errors import StepError, UnavailableError
from enginery.core.untyped import Untyped

# A worker ends its job at its limit; this much later it is taken for hung itself.
LATE_S = 60.0


class RayTask:
    """A job that was handed to Ray. The listener writes it, and the thread that waits for the job reads `told`.

    told: events of the worker, and of the listener: `Waiting`, and the error that ends it.  over: whether the last one
    is there.
    """

    def __init__(self, job: Job[object], nodes: Sequence[RayNode], avoid: str | None, isolated: bool) -> None:
        self.job = job
        self.avoid = avoid
        self.told: SimpleQueue[Event | Exception] = SimpleQueue()
        self.started: float | None = None
        self.node: str | None = None
        self.peak_mib = 0.0
        self.unplaced_since: float | None = None
        self.lost_since: float | None = None
        self.queued = self.over = False
        streams = isolated and not through_client()
        function = _remote(isolated, streams)
        self.ref = function.options(name=job.name, **ray_options(job.needs, nodes, avoid)).remote(job)
        self._stream = streams

    def take(self) -> bool:
        """Hand on what the task has ready; whether there is nothing more to come."""
        import ray

        try:
            batch: list[Event] = ray.get(next(self.ref) if self._stream else self.ref)
        except (ray.exceptions.RayError, StopIteration) as error:
            self.fail(self._failure(error))
            return True
        for event in batch:
            self._note(event)
            self.told.put(event)
        return self.over

    def fail(self, error: Exception) -> None:
        """End the waiting thread's wait with an error."""
        self.over = True
        self.told.put(error)

    def usage(self) -> Usage:
        """What it took as far as was heard: for a task whose worker cannot say it any more."""
        return Usage(time.monotonic() - (self.started or time.monotonic()), self.peak_mib)

    def late(self, now: float) -> bool:
        """Whether it runs far beyond its limit: then its worker hangs."""
        return self.started is not None and now > self.started + self.job.limits.timeout_s + LATE_S

    def cancel(self, force: bool) -> None:
        """Interrupt the worker, which then kills the job's processes and removes its folder; or kill it (force).

        A killed worker still takes the job's processes along (`builders.execution.child`).
        """
        import ray

        ray.cancel(self.ref, force=force)

    def _note(self, event: Event) -> None:
        match event:
            case Started(_, node):
                self.node, self.started = node, time.monotonic()
            case MemoryHeld(_, mib):
                self.peak_mib = mib
            case TaskAnswer():
                self.over = True

    def _failure(self, error: Exception) -> Exception:
        """What Ray says of a task that it lost, as an error of ours."""
        import ray.exceptions as said

        name, words = self.job.name, str(error)
        if isinstance(error, said.OutOfMemoryError):
            held = f"; it held {self.peak_mib:.0f} MiB" if self.peak_mib else ""
            return StepError(
                f"{name}: killed by Ray, its node ran out of memory{held}", "node-memory", words, self.peak_mib
            )
        if isinstance(error, said.LocalRayletDiedError | said.RaySystemError):
            return UnavailableError(f"{name}: lost the Ray cluster: {words}; start it again, then run again")
        if isinstance(error, said.TaskCancelledError):
            return StepError(f"{name}: cancelled", "cancelled")
        if isinstance(error, said.RayTaskError | said.RuntimeEnvSetupError | said.TaskUnschedulableError):
            return StepError(
                f"{name}: its Ray worker could not run it: {words.strip().splitlines()[-1]}", "error", words
            )
        if self.node is not None and not any(node.id == self.node and answers(node) for node in nodes()):
            return StepError(f"{name}: lost with its node", "node-lost", words, self.peak_mib)
        return StepError(f"{name}: lost with its Ray worker: {type(error).__name__}", "crash", words, self.peak_mib)


@cache
def _remote(isolated: bool, streams: bool) -> Untyped:
    import ray

    # Never twice by Ray itself, which would not say so: what is tried again is up to `builders.execution.retries`.
    if isolated:  # in a fresh worker each
        returns, function = ("streaming", work) if streams else (1, work_through)
        return ray.remote(num_returns=returns, max_calls=1, max_retries=0)(function)
    return ray.remote(max_retries=0)(work_here)
