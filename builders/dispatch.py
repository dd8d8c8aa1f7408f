"""Runs jobs on a Ray cluster: the same processes and limits as on this host, placed where their labels match.

Ray places and nothing else. Each job gets a fresh Ray worker, whose only work is `process.run_job`: so results, errors
and limits are those of `LocalExecutor`, and a compiler that crashes takes down neither worker nor raylet.

A label selector that no node matches would wait for ever, so the nodes are asked first, and a job whose labels no node
has runs anywhere. Paths in a job's arguments must mean the same on every node (a shared file system).
"""

import dataclasses
import os
import signal
import socket
import threading
import warnings
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from builders.errors import EngineryError, StepError, UnavailableError
from builders.jobs import UNWATCHED, Job, Limits, Watch
from builders.process import error_from_json, error_to_json, run_job
from builders.workdir import workdir

_POLL_S = 0.1
_REACH_S = 5.0
_GRACE_S = 5.0
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else it warns about CUDA_VISIBLE_DEVICES
    "RAY_task_oom_retries": "0",  # else what its memory monitor kills is started again without end
}


class RayExecutor:
    """An `Executor` on Ray. Connects at the first job; close it, or use it as a context manager.

    address: of a running cluster, 'host:port'. None takes the Ray that this process is connected to, or that
    RAY_ADDRESS names, else starts one on this host, without dashboard or usage statistics. A cluster that happens to
    run on this host is joined only by name ('auto').
    jobs: how many run at once; by default as many as the cluster has CPUs.
    """

    def __init__(self, address: str | None = None, jobs: int | None = None) -> None:
        self._address = address or os.environ.get("RAY_ADDRESS")
        self._jobs = jobs
        self._slots = threading.Semaphore(jobs) if jobs else None
        self._connecting = threading.Lock()
        self._connected = self._mine = False
        self._cancelled = False  # a plain flag: safe from a signal handler

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Shut down the Ray that this executor started, or its connection; nothing that others started."""
        import ray

        with self._connecting:
            if self._mine:
                ray.shutdown()
            self._connected = self._mine = False

    def run(self, job: Job, watch: Watch = UNWATCHED) -> Any:
        """Run the job on a node that has its labels, else on any. `watch` is told when Ray has got it.

        Errors are `run_job`'s; also StepError 'crash' when its worker or node is lost, and UnavailableError when the
        cluster cannot be reached.
        """
        self._connect()
        while self._slots and not self._slots.acquire(timeout=_POLL_S):
            self._refuse_when_cancelled(job)
        try:
            self._refuse_when_cancelled(job)
            watch.started("ray")
            return _value(self._wait(job, _submit(job)))
        finally:
            if self._slots:
                self._slots.release()

    def cancel(self) -> None:
        """End what runs, within a few tenths of a second, and refuse what comes."""
        self._cancelled = True

    def _connect(self) -> None:
        with self._connecting:
            if not self._connected:
                self._mine = _start(self._address, self._jobs)
                self._connected = True

    def _wait(self, job: Job, task: Any) -> dict[str, Any]:
        import ray

        try:
            while not ray.wait([task], timeout=_POLL_S)[0]:
                self._refuse_when_cancelled(job)
            answer: dict[str, Any] = ray.get(task)
            return answer
        except ray.exceptions.OutOfMemoryError as error:
            raise StepError(f"{job.name}: Ray killed it, its node ran out of memory", "memory", str(error)) from error
        except ray.exceptions.RayError as error:
            raise StepError(
                f"{job.name}: lost with its Ray worker: {type(error).__name__}", "crash", str(error)
            ) from error
        except BaseException:  # cancelled, or Ctrl-C
            _stop(task)
            raise

    def _refuse_when_cancelled(self, job: Job) -> None:
        if self._cancelled:
            raise StepError(f"{job.name}: cancelled", "cancelled")


def _start(address: str | None, jobs: int | None) -> bool:
    """Connect to Ray; whether this started the connection, and so has to end it."""
    import ray

    if ray.is_initialized():
        return False
    if address:
        _check_reachable(address)
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    local = {} if address else {"num_cpus": jobs or os.cpu_count(), "include_dashboard": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own deprecations are not our user's business
        try:
            ray.init(address=address or "local", log_to_driver=False, logging_level="ERROR", **local)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            where = f"the Ray cluster at {address}" if address else "a local Ray"
            raise UnavailableError(f"cannot reach {where}: {error}; check it, or use the local executor") from error
    return True


def _check_reachable(address: str) -> None:
    """Raise UnavailableError within seconds where Ray would try for a minute."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not (host and port.isdigit()):
        return  # 'auto', 'local': Ray's own names
    try:
        socket.create_connection((host, int(port)), _REACH_S).close()
    except (OSError, OverflowError) as error:
        raise UnavailableError(
            f"cannot reach the Ray cluster at {address}: {error}; check the address, or use the local executor"
        ) from error


def _submit(job: Job) -> Any:
    """Start the job on Ray; a reference to its answer."""
    import ray

    # In a fresh worker each, and never twice: a build that killed its node would kill the next one too.
    once = ray.remote(num_cpus=1, max_calls=1, max_retries=0)(_work)
    needs = dict(job.needs)
    placed = once.options(name=job.name, label_selector=needs) if _any_node_has(needs) else once.options(name=job.name)
    return placed.remote(dataclasses.asdict(job))


def _any_node_has(labels: Mapping[str, str]) -> bool:
    import ray

    alive = (node["Labels"] for node in ray.nodes() if node["Alive"])
    return bool(labels) and any(labels.items() <= node.items() for node in alive)


def _work(data: dict[str, Any]) -> dict[str, Any]:
    """The worker's side: run the job in a process of its own; its value or error as JSON, since Ray would wrap it."""
    job = Job(**{**data, "limits": Limits(**data["limits"])})
    # Ray interrupts a task as Ctrl-C would, which a Ray that was started in a shell's background has learnt to ignore.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with workdir() as folder:
            return {"value": run_job(job, folder)}
    except EngineryError as error:
        return error_to_json(error)


def _value(answer: dict[str, Any]) -> Any:
    if "error" in answer:
        raise error_from_json(answer)
    return answer["value"]


def _stop(task: Any) -> None:
    """Interrupt the worker, which then kills the job's processes and removes its folder; kill it when it does not obey.

    A killed worker still takes the job's process along (`process.die_with_parent`).
    """
    import ray

    ray.cancel(task, force=False)
    if not ray.wait([task], timeout=_GRACE_S)[0]:
        ray.cancel(task, force=True)
