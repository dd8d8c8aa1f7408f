"""A job as a Ray task: the connection to the cluster, the node that it needs, and the task itself."""

import os
import signal
import socket
import sys
import threading
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass
from functools import cache
from queue import SimpleQueue

from builders.execution.fork_client import keep_fork_server
from builders.execution.jobs import Job, JobEvent, MemoryHeld, Needs, Started, Usage, WorkerContext
from builders.execution.local import workdir
from builders.execution.process import run_job
from enginesmith.core.codec import encode
from enginesmith.core.errors import EnginesmithError, StepError, UnavailableError, error_to_json
from enginesmith.core.parsing import find, read
from enginesmith.core.types import Untyped

# Ray gives every node this label.
_NODE_ID = "ray.io/node-id"
_REACH_S = 5.0
# Ray replaces these by this machine's address, even if a cluster listens on loopback alone.
_LOOPBACK = ("localhost", "127.0.0.1")
_ANSWER_S = 2.0
# Seconds for a head to answer; Ray ends a process that waits 60 s for its head.
_HEAD_S = 20.0
# Free while a connection of `connect_ahead` is unused.
_AHEAD = threading.Semaphore(0)
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else Ray warns about CUDA_VISIBLE_DEVICES
    "RAY_task_oom_retries": "0",  # else a task that Ray's memory monitor kills is restarted without end
    "RAY_ENABLE_AUTO_CONNECT": "0",  # else a thread that calls Ray after another one disconnected starts one here
}


@dataclass(frozen=True)
class RayNode:
    """A node of the cluster, with its total resources, used or not. address: host and port of its raylet.  id, name:
    Ray's.  cpus, gpus: numbers.  memory_mib: MiB that Ray may reserve for tasks."""

    id: str
    name: str
    address: tuple[str, int]
    labels: Mapping[str, str]
    cpus: float
    gpus: float
    memory_mib: int

    @property
    def where(self) -> str:
        """The node's name for people, with its labels in brackets."""
        return f"{self.name} ({', '.join(self.labels.values())})" if self.labels else self.name


def connect(address: str | None, jobs: int | None) -> bool:
    """Connect to Ray; returns whether the caller must end the connection: if this call or `connect_ahead` made it.

    address: None starts Ray with `jobs` CPUs (None: all) on this host. Raises UnavailableError.
    """
    # Ray reads these when it is imported.
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    if address and "ray" not in sys.modules:
        # When the raylet is lost, Ray ends this process if the process with this pid is gone. The default is the
        # parent: it may be a Prefect worker that was killed too, or a container's first process, which counts as gone.
        os.environ["RAY_RAYLET_PID"] = str(os.getpid())
    import ray

    if ray.is_initialized():
        return _AHEAD.acquire(blocking=False)
    if address:
        check_reachable(address)
    local_options = {} if address else {"num_cpus": jobs or os.cpu_count(), "include_dashboard": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own deprecations do not concern our user
        try:
            # Ray logs each task that ends with its worker, also when a cluster ends. `RayTask` raises errors for the
            # ones that matter.
            ray.init(address=address or "local", log_to_driver=False, logging_level="CRITICAL", **local_options)
        except Exception as error:  # Ray raises a plain Exception if a node's start times out
            reason = f"the Ray cluster at {address}: {error}" if address else f"a local Ray: {error}"
            # Ray sends no token to an address by default, and its error does not give that reason.
            if address and os.environ.get("RAY_AUTH_MODE") != "token":
                reason += " (if the cluster requires a token, set RAY_AUTH_MODE=token)"
            raise UnavailableError(f"cannot reach {reason}; check it, or use the local executor") from error
    _let_raylets_print(False)
    return True


def connect_ahead(jobs: int | None, work_beside: Callable[[], object]) -> None:
    """Start Ray on this host while `work_beside` runs in another thread; raises what `work_beside` raises.

    The next `connect` uses this Ray, or tries again if the start failed. Ray's changes of this process's environment
    variables and module path are undone: otherwise spawned jobs would have them, and forked jobs would not
    (`builders.execution.fork_client`).
    """
    variables, path = dict(os.environ), list(sys.path)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(copy_context().run, work_beside)
        with suppress(UnavailableError):  # in this thread: Ray's processes end with the thread that started them
            if connect(None, jobs):
                _AHEAD.release()
    sys.path[:] = path
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)
    future.result()


def through_client() -> bool:
    """Whether Ray is reached by its client ('ray://...'), from outside of the cluster."""
    from ray.util.client import ray as client

    return bool(client.is_connected())


def disconnect() -> None:
    """End the connection, and the Ray that `connect` started."""
    import ray

    ray.shutdown()
    _let_raylets_print(True)


def _let_raylets_print(is_allowed: bool) -> None:
    """Set whether raylets report lost workers on stdout, which is for results; `RayTask` turns these into errors.

    Ray 2.60 has no public switch for it: `log_to_driver` is about the workers' own output.
    """
    from ray._private import worker

    worker._worker_logs_enabled = is_allowed


def check_reachable(address: str) -> None:
    """Raise UnavailableError within seconds if nothing listens at `address`; Ray would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not (host and port.isdigit()):
        return  # 'auto', 'local': Ray's own names
    _connect(host, int(port), f"the Ray cluster at {address}", "check the address, or use the local executor")
    if host in _LOOPBACK and not address.startswith("ray://"):
        from ray.util import get_node_ip_address

        node_address = get_node_ip_address()
        remedy = f"start its head with --node-ip-address {node_address}"
        _connect(
            node_address, int(port), f"the Ray cluster at {address}, which Ray looks for at {node_address}", remedy
        )


def _connect(host: str, port: int, server_name: str, remedy: str) -> None:
    try:
        socket.create_connection((host, port), _REACH_S).close()
    except (OSError, OverflowError) as error:
        raise UnavailableError(f"cannot reach {server_name}: {error}; {remedy}") from error


def nodes() -> list[RayNode]:
    """The nodes that Ray considers alive. Raises an error of Ray if its head is lost."""
    import ray
    from ray._private import worker

    if not through_client():
        # `ray.nodes` waits for a head without limit. Ray ends this process if none answers within a minute, or another.
        worker.global_worker.gcs_client.get_all_node_info(timeout=_HEAD_S)
    return [_parse_node(node_json) for node_json in ray.nodes() if read(node_json, "Alive", bool)]


def answers(node: RayNode) -> bool:
    """Whether a node's raylet takes connections. Ray itself notices a lost node only after some 20 seconds."""
    try:
        socket.create_connection(node.address, _ANSWER_S).close()
    except OSError:
        return False
    return True


def _parse_node(node_info: Mapping[str, object]) -> RayNode:
    """A node from an item of `ray.nodes()`."""
    labels = {name: value for name, value in read(node_info, "Labels", dict).items() if not name.startswith("ray.io/")}
    cpus, gpus, memory = (find(node_info, f"Resources.{name}", float, 0.0) for name in ("CPU", "GPU", "memory"))
    host = read(node_info, "NodeManagerAddress", str)
    address = (host, read(node_info, "NodeManagerPort", int))
    name = find(node_info, "NodeName", str, "") or host
    return RayNode(read(node_info, "NodeID", str), name, address, labels, cpus, gpus, int(memory) >> 20)


def find_fitting(needs: Needs, nodes: Iterable[RayNode], avoid: str | None = None) -> list[RayNode]:
    """The nodes that the job could run on if they were idle. Memory excludes none (see `ray_options`).

    avoid: the id of a node to exclude.
    """
    labels = needs.labels.items() if needs.required else set()
    return [
        node
        for node in nodes
        if node.id != avoid and node.cpus >= 1 and node.gpus >= needs.gpus and labels <= node.labels.items()
    ]


def ray_options(needs: Needs, nodes: Sequence[RayNode], avoid: str | None = None) -> dict[str, object]:
    """The options of a Ray task with these needs: one CPU, its GPUs and memory, and label selectors.

    A job that needs more memory than any suitable node has gets all memory of the largest one. A preferred label is
    dropped as soon as only other nodes have room. avoid: id of a node that is left out.
    """
    matches = find_fitting(needs, nodes, avoid)
    selector = dict(needs.labels) if needs.required else {}
    if avoid is not None:
        selector[_NODE_ID] = f"!{avoid}"
    options: dict[str, object] = {"num_cpus": 1, "num_gpus": needs.gpus, "label_selector": selector}
    if needs.memory_mib:
        largest_mib = max((node.memory_mib for node in matches), default=needs.memory_mib)
        options["memory"] = min(needs.memory_mib, largest_mib) << 20
    if not needs.required and needs.labels and any(needs.labels.items() <= node.labels.items() for node in matches):
        options["label_selector"] = {**needs.labels, **selector}
        options["fallback_strategy"] = [{"label_selector": selector}]
    return options


def none_fits(needs: Needs, nodes: Iterable[RayNode], waited_s: float = 0.0) -> str:
    """The message that no node is suitable: the needs, the nodes, and the remedy. waited_s: seconds waited for one."""
    node_counts = Counter(_describe(node.labels, node.gpus) for node in nodes)
    nodes_text = ", ".join(f"{count} with {text}" for text, count in sorted(node_counts.items())) or "none"
    label_text = "".join(f" --labels {name}={value}" for name, value in needs.labels.items() if needs.required)
    gpu_option = f" --num-gpus {needs.gpus}" if needs.gpus else ""
    arrival_text = f" came in {_minutes(waited_s)}" if waited_s else ""
    wait_text = "wait longer for it" if waited_s else "wait for it"
    return (
        f"no node with {_describe_needs(needs)}{arrival_text}; the cluster's nodes: {nodes_text}; start one with "
        f"`ray start --address HEAD{label_text}{gpu_option}`, or {wait_text} if an autoscaler adds nodes "
        "(`--wait-for-nodes 15m` of `build` and `validate`; the chart needs a group of that generation and product "
        "in `gpuGroups`)"
    )


def countdown(needs: Needs, left_s: float) -> str:
    """The message while no node is suitable yet: the needs, and the remaining time."""
    return f"a node with {_describe_needs(needs)}: none yet, {_minutes(left_s)} left"


def describe_unreachable(error: UnavailableError, left_s: float) -> str:
    """The message while the cluster does not answer: the reason, and the remaining time."""
    return f"{str(error).partition(';')[0]}; tried again, {_minutes(left_s)} left"


def _describe_needs(needs: Needs) -> str:
    return _describe(needs.labels if needs.required else {}, needs.gpus)


def _minutes(seconds: float) -> str:
    return "{}:{:02d}".format(*divmod(max(0, round(seconds)), 60))


def _describe(labels: Mapping[str, str], gpus: float) -> str:
    label_texts = [f"{name}={value}" for name, value in sorted(labels.items())]
    resources = [*label_texts, *([f"{gpus:g} GPU{'s' if gpus > 1 else ''}"] if gpus else [])]
    return " and ".join(resources) if resources else "a CPU"


# One job on Ray: the function that its worker runs, and the driver's view: its start, events, cancellation and loss.
#
# The task (`work`) is a generator of batches of events; the last event is a `TaskAnswer`. For a job that needs no
# process of its own, it is a plain function that returns one batch (`work_here`). A worker runs one job of a run after
# another. It keeps nothing of them but the server that forks their processes (`fork_client`). For a job with a GPU, Ray
# uses a worker once.

# Seconds between two batches of events; the answer comes at once.
_BATCH_S = 0.25


@dataclass(frozen=True)
class TaskAnswer:
    """The last event of a task: {'value': ...}, or an error as `enginesmith.core.errors.error_to_json` writes it."""

    data: dict[str, object]


Event = JobEvent | TaskAnswer


def work(job: Job[object], modules: tuple[str, ...]) -> Iterator[list[Event]]:
    """Run a job in a process of its own within its limits; yields batches of its events.

    modules: those that its process has imported already, if it can be forked.
    """
    # Ray interrupts a task with SIGINT, which a Ray that a shell started in the background ignores.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield [Started(job.name, _node_id())]
    events: deque[Event] = deque()
    done_event, cancel_event = threading.Event(), threading.Event()

    def call() -> Untyped:
        with workdir() as folder:
            return encode(run_job(job, folder, cancel_event.is_set, events.append, keep_fork_server(modules)))

    def run() -> None:
        try:
            events.append(_answer(job, call))
        finally:
            done_event.set()

    thread = threading.Thread(target=run, daemon=True)  # Ray interrupts the main thread alone
    thread.start()
    try:
        while not done_event.wait(_BATCH_S):
            if events:
                yield [events.popleft() for _ in range(len(events))]
    except BaseException:  # interrupted: the job's processes end before this worker does
        cancel_event.set()
        thread.join()
        raise
    yield list(events)


def work_through(job: Job[object], modules: tuple[str, ...]) -> list[Event]:
    """As `work`, with all events in one batch: Ray's client does not stream."""
    return [event for batch in work(job, modules) for event in batch]


def work_here(job: Job[object]) -> list[Event]:
    """All events of a job that is run in this worker itself: without limits, and with the state that earlier jobs
    left."""

    def call() -> Untyped:
        with workdir() as folder:
            return encode(job.request.run(WorkerContext(folder, job.store)))

    return [Started(job.name, _node_id()), _answer(job, call)]


def _answer(job: Job[object], function: Untyped) -> TaskAnswer:
    """The result or exception of a function, as JSON: Ray would wrap an exception."""
    try:
        return TaskAnswer({"value": function()})
    except EnginesmithError as error:
        return TaskAnswer(error_to_json(error))
    except Exception as error:
        return TaskAnswer(error_to_json(StepError(f"{job.name}: {type(error).__name__}: {error}")))


def _node_id() -> str:
    import ray

    node_id: str = ray.get_runtime_context().get_node_id()
    return node_id


class RayTask:
    """A job that was submitted to Ray. The listener's thread changes it; the thread that waits for it reads `told`.

    told: events of the worker, and of the listener: `Waiting`, and the error that ends the task.
    modules: as of `RayExecutor`; None for a job that needs no process of its own.
    started, unplaced_since, lost_since: as `time.monotonic` tells.  queued: whether `Waiting` for room was sent.
    over: whether `told` has the last event.
    nodes: of the cluster.  avoid: id of a node that is left out as long as another one suits.
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
        is_isolated = modules is not None
        self._streams = is_isolated and not through_client()
        function = _remote(is_isolated, self._streams).options(name=job.name, **ray_options(job.needs, nodes, avoid))
        self.ref = function.remote(job, modules) if is_isolated else function.remote(job)

    def take(self) -> bool:
        """Put the events that are ready into `told`; returns whether these were the last ones."""
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
        """Seconds since the task's start and its last reported peak memory: for a task whose worker is lost."""
        return Usage(time.monotonic() - (self.started or time.monotonic()), self.peak_mib)

    def cancel(self, force: bool) -> None:
        """Interrupt the worker, which then kills the job's processes and removes its folder; or kill it (force).

        The job's processes also end if the worker is killed (`builders.execution.child`).
        """
        import ray

        ray.cancel(self.ref, force=force)

    def _failure(self, error: Exception) -> Exception:
        """The StepError or UnavailableError for an error that Ray raised for a task."""
        import ray.exceptions as said

        name, message = self.job.name, str(error)
        if isinstance(error, said.OutOfMemoryError):
            reason = "killed by Ray, because its node ran out of memory"
            memory_note = f"; it held {self.peak_mib:.0f} MiB" if self.peak_mib else ""
            return StepError(f"{name}: {reason}{memory_note}", "node-memory", message, self.peak_mib)
        if isinstance(error, said.LocalRayletDiedError | said.RaySystemError):
            return UnavailableError(f"{name}: lost the Ray cluster: {message}; start it again, then run again")
        if isinstance(error, said.TaskCancelledError):
            return StepError(f"{name}: cancelled", "cancelled")
        if isinstance(error, said.RayTaskError | said.RuntimeEnvSetupError | said.TaskUnschedulableError):
            last_line = message.strip().splitlines()[-1]
            return StepError(f"{name}: its Ray worker could not run it: {last_line}", "error", message)
        if self.node is not None and not any(node.id == self.node and answers(node) for node in nodes()):
            return StepError(f"{name}: lost with its node", "node-lost", message, self.peak_mib)
        return StepError(f"{name}: lost with its Ray worker: {type(error).__name__}", "crash", message, self.peak_mib)


@cache
def _remote(is_isolated: bool, streams: bool) -> Untyped:
    import ray

    # Ray's own retries are off, because it does not report them: `run_with_retries` decides about retries.
    if is_isolated:
        return_count, function = ("streaming", work) if streams else (1, work_through)
        return ray.remote(num_returns=return_count, max_retries=0)(function)
    return ray.remote(max_retries=0)(work_here)
