"""The executor on Ray: the protocol of `builders.execution.jobs.Executor`, slots, retries and cancelling."""

import os
import threading
import time
from concurrent.futures import Future
from contextlib import nullcontext
from types import TracebackType
from typing import Self

from builders.execution.jobs import Job, ProcessEnded, Result, Started, Watch, ignore_event, result_type
from builders.execution.ray import cluster
from builders.execution.ray.listener import TaskListener
from builders.execution.ray.placement import find_fitting, none_fits
from builders.execution.ray.task import RayTask, TaskAnswer
from builders.execution.retries import run_with_retries
from enginesmith.core.codec import decode
from enginesmith.core.errors import EnginesmithError, StepError, UnavailableError, error_from_json

# Between two attempts to reach a cluster that was lost.
_AGAIN_S = 2.0


class RayExecutor:
    """An `Executor` on Ray. Connects at the first job; close it, or use it as a context manager.

    address: of a running cluster, 'host:port'. None takes the Ray that this process is connected to, or that
    RAY_ADDRESS names, else starts one on this host, without dashboard or usage statistics. A cluster that happens to
    run on this host is joined only by name ('auto').
    jobs: how many run at once; by default as many as the cluster has room for.
    wait_s: how long a job waits for a node that suits it to come, or for a cluster that was lost to come back; by
    default it fails at once.
    modules: what the processes of jobs have imported already, where they can be forked (`builders.execution.forking`).
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
        self._connecting, self._closed = threading.Lock(), threading.Event()
        self._listener: TaskListener | None = None
        self._connected_here = self._cancelled = False  # plain flags: safe from a signal handler

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Shut down the Ray that this executor started, or its connection; nothing that others started."""
        with self._connecting:
            self._disconnect()

    def run(self, job: Job[Result], watch: Watch = ignore_event) -> Result:
        """Run the job where its needs are met, and again where that helps (`builders.execution.retries`).

        Errors are `run_job`'s; also StepError 'crash' when its worker is lost, 'node-lost', 'node-memory' and
        'no-node', and UnavailableError when the cluster cannot be reached.
        """
        self._refuse_when_cancelled(job)
        listener = self._connect()
        last: list[str | None] = [None]

        def attempt(job: Job[Result], elsewhere: bool) -> Result:
            return self._attempt(job, watch, listener, last, elsewhere)

        with self._slots or nullcontext():  # a short wait after `cancel`, which kills the jobs that hold slots
            self._refuse_when_cancelled(job)
            return run_with_retries(job, watch, attempt, clustered=True)

    def cancel(self) -> None:
        """End the jobs that run, within some seconds, and refuse new ones."""
        self._cancelled = True
        if self._listener:
            self._listener.cancel()

    def _connect(self) -> TaskListener:
        with self._connecting:
            if self._listener and self._listener.lost:
                self._disconnect()
                self._wait_for_head()
            if self._listener is None:
                self._connected_here = self._connect_in_thread()
                self._listener = TaskListener(self._wait_s)
            return self._listener

    def _connect_in_thread(self) -> bool:
        """`cluster.connect`, in a thread that lives until this executor is closed: the processes of a Ray that is
        started here end with the thread that started them, and the caller's may be one of a pool."""
        connected: Future[bool] = Future()
        self._closed = closed = threading.Event()

        def hold() -> None:
            try:
                connected.set_result(cluster.connect(self._address, self._jobs))
            except BaseException as error:
                connected.set_exception(error)
                return
            closed.wait()

        threading.Thread(target=hold, name="ray", daemon=True).start()
        return connected.result()

    def _disconnect(self) -> None:
        if self._listener:
            self._listener.close()
        if self._connected_here:
            cluster.disconnect()
        self._closed.set()
        self._listener, self._connected_here = None, False

    def _wait_for_head(self) -> None:
        """Wait for a cluster that was there to come back. Raises UnavailableError after `wait_s`."""
        until = time.monotonic() + self._wait_s
        while self._address and not self._cancelled:
            try:
                return cluster.check_reachable(self._address)
            except UnavailableError:
                if time.monotonic() > until:
                    raise
                time.sleep(_AGAIN_S)
        return None

    def _attempt(
        self, job: Job[Result], watch: Watch, listener: TaskListener, last: list[str | None], elsewhere: bool
    ) -> Result:
        try:
            there = listener.nodes()
            if not find_fitting(job.needs, there):
                there = listener.nodes(fresh=True)
                if not find_fitting(job.needs, there) and not self._wait_s:
                    raise StepError(f"{job.name}: {none_fits(job.needs, there)}", "no-node")
            task = RayTask(job, there, last[0] if elsewhere else None, self._modules)
        except EnginesmithError:
            raise
        except Exception as error:  # Ray's client raises a plain one
            raise listener.lose(error) from error
        try:
            listener.add(task)
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
    """The value of the task's answer; until then each of its events goes to the watch. Raises the error of either."""
    ended = False
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
                    ended = ended or isinstance(event, ProcessEnded)
                    watch(event)
    finally:
        if task.started and not ended:
            watch(ProcessEnded(task.job.name, task.usage()))


def _where(node: str, listener: TaskListener) -> str:
    """A node's name; its id where Ray does not know it any more."""
    for fresh in (False, True):  # one that came just now is looked for again
        for known in listener.nodes(fresh):
            if known.id == node:
                return known.where
    return node
