"""The thread that hears all Ray tasks of an executor, and ends those that no node can run and those that were lost.

A thread per task that polls Ray would cost a core for a few hundred tasks.
"""

import threading
import time
from collections.abc import Sequence

from builders.execution.jobs import Waiting
from builders.execution.ray.cluster import RayNode, answers, nodes
from builders.execution.ray.placement import countdown, find_fitting, none_fits
from builders.execution.ray.task import RayTask
from enginesmith.core.errors import StepError, UnavailableError
from enginesmith.core.text import pluralize
from enginesmith.core.types import Untyped
from enginesmith.core.worker_thread import WorkerThread

_WAIT_S = 0.1
_CHECK_S = 2.0
_MANY = 16
_GATHER_S = 0.01
# How long a node may not answer before it counts as lost: a result may still be on its way.
_LOST_S = 3.0
_GRACE_S = 2.0
# A worker ends its job at its limit; this much later the worker itself is taken for hung.
LATE_S = 60.0


class TaskListener:
    """Takes in what tasks tell until they end. wait_s: how long a task may wait for a node that suits it to come."""

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._nodes: tuple[float, list[RayNode]] = (0.0, [])
        self._tasks: dict[Untyped, RayTask] = {}
        self._changed = threading.Condition()
        self._closed = self._cancelled = False  # plain flags: `cancel` is called by signal handlers
        self.lost = False  # whether Ray is gone: no task is heard any more, and another listener is needed
        # Ray that is gone, or a bug: threads would wait for ever for events that no one takes in.
        self._thread = WorkerThread("ray listener", self._hear, self.lose)
        self._thread.start()

    def nodes(self, fresh: bool = False) -> list[RayNode]:
        """The nodes of the cluster, as they were at most `_CHECK_S` ago, or now. Raises UnavailableError."""
        asked, found = self._nodes
        if fresh or time.monotonic() > asked + _CHECK_S:
            try:
                found = nodes()
            except Exception as error:  # Ray's client raises a plain one
                raise self.lose(error) from error
            self._nodes = (time.monotonic(), found)
        return found

    def add(self, task: RayTask) -> None:
        """Listen to this task from now on. Raises UnavailableError where Ray was lost meanwhile."""
        with self._changed:
            if self.lost:
                raise UnavailableError(f"{task.job.name}: lost the Ray cluster; start it again, then run again")
            self._tasks[task.ref] = task
            self._changed.notify()

    def cancel(self) -> None:
        """End all tasks, within `_GRACE_S`; safe from a signal handler."""
        self._cancelled = True

    def drop(self, task: RayTask) -> None:
        """End one task that no thread waits for any more; returns when its processes are dead."""
        with self._changed:
            known = self._tasks.pop(task.ref, None)
        if known and not task.over:
            _end([task])

    def lose(self, error: BaseException) -> UnavailableError:
        """End all tasks with the error that is returned, since Ray is gone: it raised `error`."""
        words = _details(error) or str(error) or type(error).__name__
        lost = UnavailableError(f"lost the Ray cluster: {words}; start it again, then run again")
        lost.__cause__ = error
        self.lost = True
        with self._changed:
            for task in self._tasks.values():
                task.fail(lost)
            self._tasks.clear()
            self._closed = True
            self._changed.notify()
        return lost

    def close(self) -> None:
        """End the thread; its tasks are no longer heard."""
        self._closed = True
        with self._changed:
            self._changed.notify()
        self._thread.join()

    def _hear(self) -> None:
        checked = time.monotonic()
        while not self._closed:
            with self._changed:
                while not (self._tasks or self._closed):
                    self._changed.wait()
                refs = list(self._tasks)
            if self._cancelled:
                self._cancel_all()
            elif refs:
                for ref in _ready(refs):
                    task = self._tasks.get(ref)  # None: dropped meanwhile
                    if task and task.take():
                        self._forget(task)
            if refs and time.monotonic() > checked + _CHECK_S:
                self._end_lost(self.nodes(fresh=True))
                checked = time.monotonic()

    def _cancel_all(self) -> None:
        with self._changed:
            tasks = list(self._tasks.values())
        _end(tasks)
        for task in tasks:
            task.fail(StepError(f"{task.job.name}: cancelled", "cancelled"))
            self._forget(task)

    def _forget(self, task: RayTask) -> None:
        with self._changed:
            self._tasks.pop(task.ref, None)

    def _end_lost(self, there: Sequence[RayNode]) -> None:
        """End tasks that no node can run, those on a node that is gone, and those that hang. there: the nodes."""
        with self._changed:
            tasks = list(self._tasks.values())
        used = {task.node for task in tasks}
        alive, now = {node.id for node in there if node.id in used and answers(node)}, time.monotonic()
        for task in tasks:
            if error := self._find_loss(task, alive, now) if task.started else self._find_placement(task, there, now):
                task.cancel(force=True)
                task.fail(error)
                self._forget(task)

    def _find_loss(self, task: RayTask, alive: set[str], now: float) -> StepError | None:
        name, peak = task.job.name, task.peak_mib
        limits = task.job.limits
        if task.started is not None and now > task.started + limits.timeout_s + LATE_S:  # its worker hangs
            told = f"no sign of it long after its limit of {limits.timeout_s:g} s; {limits.raise_timeout}"
            return StepError(f"{name}: {told}", "timeout", peak_mib=peak)
        if task.node in alive:
            task.lost_since = None
            return None
        task.lost_since = task.lost_since or now
        lost = now >= task.lost_since + _LOST_S
        return StepError(f"{name}: lost with its node", "node-lost", "", peak) if lost else None

    def _find_placement(self, task: RayTask, there: Sequence[RayNode], now: float) -> StepError | None:
        needs = task.job.needs
        if fits := find_fitting(needs, there, task.avoid):
            task.unplaced_since = None
            if not task.queued:
                task.queued = True
                room = f"{len(fits)} of {pluralize(len(there), 'node')} can take it"
                task.told.put(Waiting(task.job.name, f"room on the cluster: {room}"))
            return None
        if find_fitting(needs, there):  # only the one to be avoided
            return StepError(f"{task.job.name}: the other nodes were lost", "node-lost", "", task.peak_mib)
        task.unplaced_since = task.unplaced_since or now
        left = task.unplaced_since + self._wait_s - now
        if left <= 0:
            return StepError(f"{task.job.name}: {none_fits(needs, there, self._wait_s)}", "no-node")
        task.told.put(Waiting(task.job.name, countdown(needs, left)))
        return None


def _details(error: BaseException) -> str:
    """The details of an error of gRPC, which Ray's client raises where a new head does not know it; '' for others."""
    found = getattr(error, "details", None)
    return str(found()) if callable(found) else ""


def _ready(refs: list[Untyped]) -> list[Untyped]:
    """The tasks that have something to tell, after a wait of up to `_WAIT_S` for the first.

    `ray.wait` takes time for each task there is, so over `_MANY` are left to gather for `_GATHER_S`.
    """
    import ray

    first, _ = ray.wait(refs, num_returns=1, timeout=_WAIT_S, fetch_local=False)
    if not first or len(refs) == 1:
        return list(first)
    if len(refs) > _MANY:
        time.sleep(_GATHER_S)
    ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)
    return list(ready)


def _end(tasks: Sequence[RayTask]) -> None:
    """Interrupt tasks that run and take back the others; kill those that have not ended after `_GRACE_S`."""
    for task in tasks:
        task.cancel(force=task.started is None)
    until = time.monotonic() + _GRACE_S
    left = [task for task in tasks if task.started]
    while left and time.monotonic() < until:
        ready = set(_ready([task.ref for task in left]))
        left = [task for task in left if task.ref not in ready or not task.take()]
    for task in left:
        task.cancel(force=True)
