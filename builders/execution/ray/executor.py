"""Runs jobs on a Ray cluster, and forwards their progress."""

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from types import TracebackType
from typing import Self

from builders.execution.jobs import (
    Job,
    Needs,
    ProcessEnded,
    Result,
    Started,
    Waiting,
    Watch,
    ignore_event,
    result_type,
    run_with_retries,
)
from builders.execution.ray import task as cluster
from builders.execution.ray.task import RayNode, RayTask, TaskAnswer, answers, countdown, find_fitting, nodes, none_fits
from enginesmith.core.codec import decode
from enginesmith.core.errors import EnginesmithError, StepError, UnavailableError, error_from_json
from enginesmith.core.text import WorkerThread, pluralize
from enginesmith.core.types import Untyped

# One thread of an executor is connected to Ray, and receives the events of all its Ray tasks. It ends lost tasks, and
# tasks that no node can run.
#
# A thread per task that polls Ray would use a core for a few hundred tasks.

# Seconds to wait for a first event, and between two queries of the nodes. `_ready` explains the next two.
_WAIT_S = 0.1
_CHECK_S = 2.0
_MANY = 16
_GATHER_S = 0.01
# How long a node may not answer before it counts as lost: a result may still be on its way.
_LOST_S = 3.0
_GRACE_S = 2.0
# A worker ends its job at the job's limit. If it has not done this after so many more seconds, the worker hangs.
LATE_S = 60.0


class TaskListener:
    """A connection to Ray, until it is closed or Ray is lost: receives the events of tasks until they end.

    connect: makes the connection, and returns whether the listener must end it; its exceptions are raised.
    wait_s: how long a task may wait for a suitable node.
    """

    def __init__(self, connect: Callable[[], bool], wait_s: float) -> None:
        self._wait_s = wait_s
        self._nodes: tuple[float, list[RayNode]] = (0.0, [])
        self._tasks: dict[Untyped, RayTask] = {}
        self._changed = threading.Condition()
        self._calls = (
            threading.Lock()
        )  # held during calls of other threads: Ray would end this process if they called it while it disconnects
        self._closed = self._cancelled = False  # plain flags: `cancel` is called by signal handlers
        self.lost = False  # whether Ray is lost: this listener then gets no events, and a new one is needed
        self._connection: Future[None] = Future()
        # `lose`: if Ray is lost or the thread fails, other threads must not wait for ever for events.
        self._thread = WorkerThread("ray", lambda: self._work(connect), self.lose)
        self._thread.start()
        self._connection.result()

    def nodes(self, fresh: bool = False) -> list[RayNode]:
        """The cluster's nodes, at most `_CHECK_S` seconds old. fresh: ask Ray again. Raises UnavailableError."""
        with self._calls:
            query_time, ray_nodes = self._nodes
            if fresh or time.monotonic() > query_time + _CHECK_S:
                self._refuse_when_lost()
                try:
                    ray_nodes = nodes()
                except Exception as error:  # Ray's client raises a plain Exception
                    raise self.lose(error) from error
                self._nodes = (time.monotonic(), ray_nodes)
            return ray_nodes

    def submit(self, make_task: Callable[[], RayTask]) -> RayTask:
        """Make a task and listen to it. Raises UnavailableError if Ray is lost, and what `make_task` raises."""
        with self._calls:
            self._refuse_when_lost()
            task = make_task()
            with self._changed:
                self._tasks[task.ref] = task
                self._changed.notify()
        return task

    def _refuse_when_lost(self) -> None:
        if self.lost:
            raise UnavailableError("lost the Ray cluster; start it again, then run again")

    def cancel(self) -> None:
        """End all tasks, within `_GRACE_S`; safe from a signal handler."""
        self._cancelled = True

    def drop(self, task: RayTask) -> None:
        """End one task that no thread waits for any more; returns when its processes are dead."""
        with self._changed:
            task_entry = self._tasks.pop(task.ref, None)
        if task_entry and not task.over and not self.lost:
            _end([task])

    def lose(self, error: BaseException) -> UnavailableError:
        """Fail all tasks with the returned error, because Ray is lost. error: the exception that Ray raised."""
        message = _details(error) or str(error) or type(error).__name__
        loss_error = UnavailableError(f"lost the Ray cluster: {message}; start it again, then run again")
        loss_error.__cause__ = error
        self.lost = True
        with self._changed:
            for task in self._tasks.values():
                task.fail(loss_error)
            self._tasks.clear()
            self._closed = True
            self._changed.notify()
        return loss_error

    def close(self) -> None:
        """End the thread and its connection; the events of its tasks are no longer received."""
        self._closed = True
        with self._changed:
            self._changed.notify()
        self._thread.join()

    def _work(self, connect: Callable[[], bool]) -> None:
        """Connect, listen and disconnect in one thread: the processes of a Ray that starts here end with that thread.

        A connection to a lost Ray is ended at once: otherwise Ray ends this process after a minute.
        """
        try:
            connected_here = connect()
        except BaseException as error:
            self._connection.set_exception(error)
            return
        self._connection.set_result(None)
        try:
            self._hear()
        finally:
            with self._calls:
                self.lost = True
                if connected_here:
                    cluster.disconnect()

    def _hear(self) -> None:
        checked_s = time.monotonic()
        while not self._closed:
            with self._changed:
                if not (self._tasks or self._closed):
                    self._changed.wait(_CHECK_S)
                refs = list(self._tasks)
            if self._cancelled:
                self._cancel_all()
            elif refs:
                for ref in _ready(refs):
                    task = self._tasks.get(ref)  # None: dropped meanwhile
                    if task and task.take():
                        self._forget(task)
            if time.monotonic() > checked_s + _CHECK_S:
                self._end_lost(self.nodes(fresh=True))
                checked_s = time.monotonic()

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
        node_ids = {task.node for task in tasks}
        ids, now = {node.id for node in there if node.id in node_ids and answers(node)}, time.monotonic()
        for task in tasks:
            if error := self._find_loss(task, ids, now) if task.started else self._find_placement(task, there, now):
                task.cancel(force=True)
                task.fail(error)
                self._forget(task)

    def _find_loss(self, task: RayTask, alive: set[str], now: float) -> StepError | None:
        name, peak = task.job.name, task.peak_mib
        limits = task.job.limits
        if task.started is not None and now > task.started + limits.timeout_s + LATE_S:  # its worker hangs
            loss_text = f"no result long after its limit of {limits.timeout_s:g} s; {limits.raise_timeout}"
            return StepError(f"{name}: {loss_text}", "timeout", peak_mib=peak)
        if task.node in alive:
            task.lost_since = None
            return None
        task.lost_since = task.lost_since or now
        is_lost = now >= task.lost_since + _LOST_S
        return StepError(f"{name}: lost with its node", "node-lost", "", peak) if is_lost else None

    def _find_placement(self, task: RayTask, there: Sequence[RayNode], now: float) -> StepError | None:
        needs = task.job.needs
        if fitting_nodes := find_fitting(needs, there, task.avoid):
            task.unplaced_since = None
            if not task.queued:
                task.queued = True
                fit_text = f"{len(fitting_nodes)} of {pluralize(len(there), 'node')} can take it"
                task.told.put(Waiting(task.job.name, f"room on the cluster: {fit_text}"))
            return None
        if find_fitting(needs, there):  # only the node to avoid
            return StepError(f"{task.job.name}: the other nodes were lost", "node-lost", "", task.peak_mib)
        task.unplaced_since = task.unplaced_since or now
        remaining_s = task.unplaced_since + self._wait_s - now
        if remaining_s <= 0:
            return StepError(f"{task.job.name}: {none_fits(needs, there, self._wait_s)}", "no-node")
        task.told.put(Waiting(task.job.name, countdown(needs, remaining_s)))
        return None


def _details(error: BaseException) -> str:
    """The details of a gRPC error, which Ray's client raises if a new head does not know it; '' for other errors."""
    details = getattr(error, "details", None)
    return str(details()) if callable(details) else ""


def _ready(refs: list[Untyped]) -> list[Untyped]:
    """The tasks with new events, after a wait of up to `_WAIT_S` for the first.

    `ray.wait` takes time for each task: with more than `_MANY`, events gather for `_GATHER_S` first.
    """
    import ray

    first_ready, _ = ray.wait(refs, num_returns=1, timeout=_WAIT_S, fetch_local=False)
    if not first_ready or len(refs) == 1:
        return list(first_ready)
    if len(refs) > _MANY:
        time.sleep(_GATHER_S)
    ready_refs, _ = ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)
    return list(ready_refs)


def _end(tasks: Sequence[RayTask]) -> None:
    """Interrupt tasks that run and cancel the others; kill those that have not ended after `_GRACE_S`."""
    for task in tasks:
        task.cancel(force=task.started is None)
    deadline = time.monotonic() + _GRACE_S
    pending_tasks = [task for task in tasks if task.started]
    while pending_tasks and time.monotonic() < deadline:
        ready_refs = set(_ready([task.ref for task in pending_tasks]))
        pending_tasks = [task for task in pending_tasks if task.ref not in ready_refs or not task.take()]
    for task in pending_tasks:
        task.cancel(force=True)


# Seconds between two attempts to reach a cluster.
_AGAIN_S = 2.0


class RayExecutor:
    """An `Executor` on Ray. Connects at the first job; close it, or use it as a context manager.

    address: of a running cluster, 'host:port'. None takes the Ray that this process is connected to, or that
    RAY_ADDRESS names, else starts one on this host, without dashboard or usage statistics. A cluster that happens to
    run on this host is joined only by name ('auto').
    jobs: how many run at once; by default as many as the cluster has room for.
    wait_s: how long a job waits for a suitable node, and how long all jobs together wait for a cluster that does not
    answer, at the first connection or after a loss; by default they fail at once.
    modules: those that processes of jobs have imported already, if they can be forked (`execution.fork_client`).
    None runs jobs in the workers themselves, without limits: for work that is known to be harmless.
    """

    def __init__(
        self,
        address: str | None = None,
        jobs: int | None = None,
        wait_s: float = 0.0,
        modules: tuple[str, ...] | None = (),
    ) -> None:
        self._address = address or os.environ.get("RAY_ADDRESS")
        self._jobs, self._wait_s, self._modules = jobs, wait_s, modules
        self._slots = threading.Semaphore(jobs) if jobs else None
        self._connecting = threading.Lock()
        self._listener: TaskListener | None = None
        self._unreachable_since: float | None = None
        self._cancelled = False  # a plain flag: safe from a signal handler

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Shut down the Ray that this executor started, or its connection; nothing that others started."""
        with self._connecting:
            self._disconnect()

    def run(self, job: Job[Result], watch: Watch = ignore_event) -> Result:
        """Run the job on a node that meets its needs, and retry it if that may help (`jobs.run_with_retries`).

        Errors are `run_job`'s; also StepError 'crash' when its worker is lost, 'node-lost', 'node-memory' and
        'no-node', and UnavailableError when the cluster cannot be reached.
        """
        self._refuse_when_cancelled(job)
        listener = self._connect(job.name, watch)
        last_address: list[str | None] = [None]

        def attempt(job: Job[Result], other_node: bool) -> Result:
            return self._attempt(job, watch, listener, last_address, other_node)

        with self._slots or nullcontext():  # a short wait after `cancel`, which kills the jobs that hold slots
            self._refuse_when_cancelled(job)
            return run_with_retries(job, watch, attempt, clustered=True)

    def has_node(self, needs: Needs) -> bool:
        """Whether the cluster has a node now that a job with these needs could run on. Raises as `run`."""
        return bool(find_fitting(needs, self._connect("which GPUs the cluster has", ignore_event).nodes(fresh=True)))

    def cancel(self) -> None:
        """End the jobs that run, within some seconds, and refuse new ones."""
        self._cancelled = True
        if self._listener:
            self._listener.cancel()

    def _connect(self, name: str, watch: Watch) -> TaskListener:
        """The listener of a working connection, made if necessary. name: the job that waits for it, for the watch."""
        with self._connecting:
            if self._listener and self._listener.lost:
                self._disconnect()
            while self._listener is None:
                try:
                    self._listener = TaskListener(lambda: cluster.connect(self._address, self._jobs), self._wait_s)
                except UnavailableError as error:
                    # Jobs that waited for this lock share one time limit, instead of waiting one after the other.
                    self._unreachable_since = self._unreachable_since or time.monotonic()
                    remaining_s = self._unreachable_since + self._wait_s - time.monotonic()
                    if not self._address or self._cancelled or remaining_s <= 0:
                        raise
                    watch(Waiting(name, cluster.describe_unreachable(error, remaining_s)))
                    time.sleep(_AGAIN_S)
            self._unreachable_since = None
            return self._listener

    def _disconnect(self) -> None:
        if self._listener:
            self._listener.close()
        self._listener = None

    def _attempt(
        self, job: Job[Result], watch: Watch, listener: TaskListener, last: list[str | None], other_node: bool
    ) -> Result:
        try:
            cluster_nodes = listener.nodes()
            if not find_fitting(job.needs, cluster_nodes):
                cluster_nodes = listener.nodes(fresh=True)
                if not find_fitting(job.needs, cluster_nodes) and not self._wait_s:
                    raise StepError(f"{job.name}: {none_fits(job.needs, cluster_nodes)}", "no-node")
            is_avoidable = other_node and find_fitting(job.needs, cluster_nodes, last[0])
            avoided_node = last[0] if is_avoidable else None
            task = listener.submit(lambda: RayTask(job, cluster_nodes, avoided_node, self._modules))
        except EnginesmithError:
            raise
        except Exception as error:  # Ray's client raises a plain Exception
            raise listener.lose(error) from error
        try:
            return decode(_follow(task, watch, listener), result_type(job.request))
        except BaseException:  # also Ctrl-C, and what the watch raises
            listener.drop(task)
            raise
        finally:
            last[0] = task.node

    def _refuse_when_cancelled(self, job: Job[object]) -> None:
        if self._cancelled:
            raise StepError(f"{job.name}: cancelled before it started", "cancelled")


def _follow(task: RayTask, watch: Watch, listener: TaskListener) -> object:
    """Pass the task's events to the watch until its answer, and return the answer's value. Raises either's error."""
    has_ended = False
    try:
        while True:
            match task.told.get():
                case Exception() as error:
                    raise error
                case TaskAnswer(data):
                    if "error" in data:
                        raise error_from_json(data)
                    return data.get("value")
                case Started(name, node):
                    watch(Started(name, _where(node, listener)))
                case event:
                    has_ended = has_ended or isinstance(event, ProcessEnded)
                    watch(event)
    finally:
        if task.started and not has_ended:
            watch(ProcessEnded(task.job.name, task.usage()))


def _where(node: str, listener: TaskListener) -> str:
    """A node's name; its id where Ray does not know it any more."""
    for refresh in (False, True):  # the second time with a new list, for a node that has just joined
        for candidate in listener.nodes(refresh):
            if candidate.id == node:
                return candidate.where
    return node
