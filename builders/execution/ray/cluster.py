"""The nodes of a Ray cluster, and connecting to it."""

import os
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass

from enginesmith.core.errors import UnavailableError
from enginesmith.core.parsing import find, read

# Ray gives every node this label.
_NODE_ID = "ray.io/node-id"
_REACH_S = 5.0
# Ray has this machine's address in the place of these, also where a cluster listens on loopback alone.
_LOOPBACK = ("localhost", "127.0.0.1")
_ANSWER_S = 2.0
# Free while there is a connection of `connect_ahead` that nobody has taken.
_AHEAD = threading.Semaphore(0)
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else it warns about CUDA_VISIBLE_DEVICES
    "RAY_task_oom_retries": "0",  # else what its memory monitor kills is started again without end
}


@dataclass(frozen=True)
class RayNode:
    """A node of the cluster, with its resources in all, used or not.  address: host and port of its raylet."""

    id: str
    name: str
    address: tuple[str, int]
    labels: Mapping[str, str]
    cpus: float
    gpus: float
    memory_mib: int

    @property
    def where(self) -> str:
        """Its name for people: with its labels in brackets."""
        return f"{self.name} ({', '.join(self.labels.values())})" if self.labels else self.name


def connect(address: str | None, jobs: int | None) -> bool:
    """Connect to Ray; whether the caller has to end the connection: it began here, or with `connect_ahead`.

    address: None starts a Ray of `jobs` CPUs (None: as there are) on this host. Raises UnavailableError.
    """
    import ray

    if ray.is_initialized():
        return _AHEAD.acquire(blocking=False)
    if address:
        check_reachable(address)
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    local = {} if address else {"num_cpus": jobs or os.cpu_count(), "include_dashboard": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own deprecations are not our user's business
        try:
            # What it logs of tasks that end with a worker, at a cluster's end too, `RayTask` makes errors of where they
            # matter.
            ray.init(address=address or "local", log_to_driver=False, logging_level="CRITICAL", **local)
        except Exception as error:  # of a node that times out at its start, Ray raises a plain one
            where = f"the Ray cluster at {address}" if address else "a local Ray"
            raise UnavailableError(f"cannot reach {where}: {error}; check it, or use the local executor") from error
    _let_raylets_print(False)
    return True


def connect_ahead(jobs: int | None, beside: Callable[[], object]) -> None:
    """Start a Ray on this host while `beside` runs in another thread; raises what that does.

    The next `connect` takes the Ray, or tries again where it failed. This process's variables and path of modules are
    afterwards what they were: jobs on this host would have what Ray puts there, and those that another process forks
    would not (`builders.execution.forking`).
    """
    variables, path = dict(os.environ), list(sys.path)
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(copy_context().run, beside)
        with suppress(UnavailableError):  # in this thread: Ray's processes end with the thread that started them
            if connect(None, jobs):
                _AHEAD.release()
    sys.path[:] = path
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)
    done.result()


def through_client() -> bool:
    """Whether Ray is reached by its client ('ray://...'), from outside of the cluster."""
    from ray.util.client import ray as client

    return bool(client.is_connected())


def disconnect() -> None:
    """End the connection, and the Ray that `connect` started."""
    import ray

    ray.shutdown()
    _let_raylets_print(True)


def _let_raylets_print(allowed: bool) -> None:
    """Whether raylets print of lost workers on stdout, which is for results; `RayTask` makes errors of these.

    Ray 2.60 has no public switch for it: `log_to_driver` is about the workers' own output.
    """
    from ray._private import worker

    worker._worker_logs_enabled = allowed


def check_reachable(address: str) -> None:
    """Raise UnavailableError within seconds where Ray would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not (host and port.isdigit()):
        return  # 'auto', 'local': Ray's own names
    _connect(host, int(port), f"the Ray cluster at {address}", "check the address, or use the local executor")
    if host in _LOOPBACK and not address.startswith("ray://"):
        from ray.util import get_node_ip_address

        seen = get_node_ip_address()
        remedy = f"start its head with --node-ip-address {seen}"
        _connect(seen, int(port), f"the Ray cluster at {address}, which Ray looks for at {seen}", remedy)


def _connect(host: str, port: int, what: str, remedy: str) -> None:
    try:
        socket.create_connection((host, port), _REACH_S).close()
    except (OSError, OverflowError) as error:
        raise UnavailableError(f"cannot reach {what}: {error}; {remedy}") from error


def nodes() -> list[RayNode]:
    """The nodes that are alive, as far as Ray has noticed."""
    import ray

    return [_parse_node(found) for found in ray.nodes() if read(found, "Alive", bool)]


def answers(node: RayNode) -> bool:
    """Whether a node's raylet takes connections. Ray itself notices a lost node only after some 20 seconds."""
    try:
        socket.create_connection(node.address, _ANSWER_S).close()
    except OSError:
        return False
    return True


def _parse_node(found: Mapping[str, object]) -> RayNode:
    """A node from an item of `ray.nodes()`."""
    labels = {name: value for name, value in read(found, "Labels", dict).items() if not name.startswith("ray.io/")}
    cpus, gpus, memory = (find(found, f"Resources.{name}", float, 0.0) for name in ("CPU", "GPU", "memory"))
    host = read(found, "NodeManagerAddress", str)
    address = (host, read(found, "NodeManagerPort", int))
    name = find(found, "NodeName", str, "") or host
    return RayNode(read(found, "NodeID", str), name, address, labels, cpus, gpus, int(memory) >> 20)
