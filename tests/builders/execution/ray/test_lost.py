"""A cluster that is not reached, or lost in mid-work: what waits fails, and the next job finds a new one."""

import socket
import threading

import pytest

from builders.execution.jobs import Started, Waiting
from builders.execution.ray import RayExecutor, executor, task
from builders.execution.ray import executor as listener
from builders.execution.ray.task import RayNode, TaskAnswer, check_reachable
from enginesmith.core.errors import StepError, UnavailableError
from tests.calls import call_job
from tests.waiting import PATIENCE_S, until

JOB = call_job("unit", "tests.builders.jobs:add", {"a": 1, "b": 2})
NODE = RayNode("id", "node", ("127.0.0.1", 1), {}, 2.0, 0.0, 4096)


class Task:
    """In the place of `builders.execution.ray.task.RayTask`: a job that ends when the test says so."""

    def __init__(self, job, there, avoid, modules):
        import queue

        self.job, self.node, self.ref = job, None, object()
        self.told, self.over, self.started, self.queued = queue.Queue(), False, None, False
        self.unplaced_since = self.lost_since = None

    def fail(self, error):
        self.over = True
        self.told.put(error)

    def take(self):
        self.told.put(TaskAnswer({"value": 3}))
        return True

    def cancel(self, force):
        """Nothing runs."""


class Ray:
    """A cluster that can be away. connected: number of connections. threads: those that call Ray."""

    def __init__(self):
        self.away, self.connected, self.asked = threading.Event(), 0, threading.Event()
        self.answers, self.disconnected, self.threads = threading.Event(), threading.Event(), set()

    def connect(self, address, jobs):
        self.check(address)
        self.connected += 1
        self.threads.add(threading.current_thread())
        return True

    def disconnect(self):
        self.threads.add(threading.current_thread())
        self.disconnected.set()

    def check(self, address):
        self.asked.set()
        if self.away.is_set():
            raise UnavailableError(f"cannot reach {address}")

    def nodes(self):
        if self.away.is_set():
            raise Exception("Ray Client is not connected")
        return [NODE]

    def ready(self, refs):
        self.threads.add(threading.current_thread())
        if self.away.is_set():
            raise ConnectionError("Client is shutting down.")
        return refs if self.answers.wait(0.05) else []


@pytest.fixture
def ray(monkeypatch):
    fake_ray = Ray()
    monkeypatch.setattr(task, "connect", fake_ray.connect)
    monkeypatch.setattr(task, "disconnect", fake_ray.disconnect)
    monkeypatch.setattr(task, "check_reachable", fake_ray.check)
    monkeypatch.setattr(listener, "nodes", fake_ray.nodes)
    monkeypatch.setattr(listener, "_ready", fake_ray.ready)
    monkeypatch.setattr(executor, "RayTask", Task)
    monkeypatch.setattr(executor, "_AGAIN_S", 0.01)
    return fake_ray


def in_thread(run):
    """A call in a thread, and the place where its answer or error comes."""
    items = []

    def call():
        try:
            items.append(run())
        except Exception as error:
            items.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread, items


def test_waiting_jobs_fail_and_the_next_job_waits_for_the_cluster(ray):
    with RayExecutor("ray://head:10001", wait_s=3600) as ray_executor:
        first_thread, result = in_thread(lambda: ray_executor.run(JOB))
        until(lambda: ray_executor._listener and ray_executor._listener._tasks)
        ray.away.set()
        first_thread.join(PATIENCE_S)
        assert isinstance(result[0], UnavailableError) and "lost the Ray cluster" in str(result[0])
        ray.asked.clear()
        second_thread, result = in_thread(lambda: ray_executor.run(JOB))
        assert ray.asked.wait(PATIENCE_S) and not result
        ray.answers.set()
        ray.away.clear()
        second_thread.join(PATIENCE_S)
        assert result == [3] and ray.connected == 2


def test_a_crashed_job_may_run_again_on_the_only_node(ray, monkeypatch):
    avoided_nodes = []
    monkeypatch.setattr(executor, "RayTask", lambda *values: avoided_nodes.append(values[2]) or Task(*values))
    ray.answers.set()
    with RayExecutor("ray://head:10001") as ray_executor:
        assert ray_executor._attempt(JOB, print, ray_executor._connect("unit", print), [NODE.id], True) == 3
    assert avoided_nodes == [None]


def test_the_first_connection_waits_for_a_head_that_does_not_answer(ray):
    """Right after an installation a build starts before the head does."""
    ray.away.set()
    ray.answers.set()
    waits = []
    with RayExecutor("ray://head:10001", wait_s=3600) as ray_executor:
        first_thread, result = in_thread(lambda: ray_executor.run(JOB, waits.append))
        until(lambda: len(waits) > 1)
        assert isinstance(waits[0], Waiting) and not result
        assert waits[0].why == "cannot reach ray://head:10001; tried again, 60:00 left"
        ray.away.clear()
        first_thread.join(PATIENCE_S)
        assert result == [3] and ray.connected == 1


def test_jobs_wait_for_the_head_in_parallel(ray, monkeypatch):
    ray.away.set()
    clock = iter(range(0, 9000, 100))
    monkeypatch.setattr(executor.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(executor.time, "sleep", lambda _: None)
    waits = []
    with RayExecutor("ray://head:10001", wait_s=1000) as ray_executor:
        for _ in range(2):
            with pytest.raises(UnavailableError, match="cannot reach"):
                ray_executor.run(JOB, waits.append)
            assert 5 < len(waits) < 11


class RpcError(Exception):
    """As gRPC's: five lines, and what they say in one."""

    def details(self):
        return "Failed to serialize response!"


def test_a_new_head_that_does_not_know_the_client_counts_as_lost(ray, monkeypatch):
    monkeypatch.setattr(ray, "ready", lambda refs: (_ for _ in ()).throw(RpcError("<\nfive\nlines\n>")))
    monkeypatch.setattr(listener, "_ready", ray.ready)
    with RayExecutor("ray://head:10001") as ray_executor:
        with pytest.raises(UnavailableError, match="lost the Ray cluster: Failed to serialize response!; start it"):
            ray_executor.run(JOB)
        assert ray_executor._listener.lost


def test_a_cluster_lost_while_idle_is_unreachable(ray):
    ray.answers.set()
    with RayExecutor("ray://head:10001") as ray_executor:
        assert ray_executor.run(JOB) == 3
        ray_executor._listener._nodes = (0.0, [])
        ray.away.set()
        for output in ("lost the Ray cluster: Ray Client is not connected", "cannot reach"):
            with pytest.raises(UnavailableError, match=output):
                ray_executor.run(JOB)
        ray.away.clear()
        assert ray_executor.run(JOB) == 3


def test_an_idle_connection_to_a_lost_cluster_ends(ray, monkeypatch):
    """After a minute without its head, Ray would end this process."""
    monkeypatch.setattr(executor, "_CHECK_S", 0.01)
    ray.answers.set()
    with RayExecutor("ray://head:10001") as ray_executor:
        assert ray_executor.run(JOB) == 3
        ray.away.set()
        assert ray.disconnected.wait(PATIENCE_S)
    assert len(ray.threads) == 1 and threading.current_thread() not in ray.threads


def test_no_other_thread_calls_ray_while_it_disconnects(ray, monkeypatch):
    """Ray would end this process."""
    locked_flags = []
    with RayExecutor("ray://head:10001") as ray_executor:

        def note():
            locked_flags.append(ray_executor._listener._calls.locked())

        monkeypatch.setattr(task, "disconnect", note)
        monkeypatch.setattr(listener, "nodes", lambda: note() or [NODE])
        monkeypatch.setattr(executor, "RayTask", lambda *arguments: note() or Task(*arguments))
        ray.answers.set()
        assert ray_executor.run(JOB) == 3
    assert len(locked_flags) == 3 and all(locked_flags)


def test_a_cancelled_job_does_not_wait_for_the_head(ray):
    with RayExecutor("ray://head:10001", wait_s=3600) as ray_executor:
        ray.answers.set()
        assert ray_executor.run(JOB) == 3
        ray_executor._listener._nodes = (0.0, [])
        ray.away.set()
        with pytest.raises(UnavailableError):
            ray_executor.run(JOB)
        second_thread, result = in_thread(lambda: ray_executor.run(JOB))
        assert ray.asked.wait(PATIENCE_S)
        ray_executor.cancel()
        second_thread.join(PATIENCE_S)
        assert isinstance(result[0], StepError | UnavailableError)


def test_an_interrupted_worker_waits_for_the_end_of_its_jobs_processes(monkeypatch):
    """Ray interrupts the worker's main thread, and takes the resources for free once the worker has left the task."""
    ended_names = []

    def run_job(job, folder, is_cancelled, tell, start):
        tell("runs")
        until(is_cancelled)
        ended_names.append(job.name)

    for name, stand_in in (
        ("run_job", run_job),
        ("_node_id", lambda: "id"),
        ("keep_fork_server", lambda modules: None),
    ):
        monkeypatch.setattr(task, name, stand_in)
    batches = task.work(JOB, ())
    assert next(batches) == [Started("unit", "id")] and next(batches) == ["runs"]
    with pytest.raises(KeyboardInterrupt):
        batches.throw(KeyboardInterrupt())
    assert ended_names == ["unit"]


class Panic(BaseException):
    """As pyo3's PanicException."""


@pytest.mark.timeout(60)
def test_a_failing_listener_blocks_no_job(ray, monkeypatch):
    monkeypatch.setattr(listener, "_ready", lambda refs: (_ for _ in ()).throw(Panic("at the third layer")))
    with RayExecutor("ray://head:10001") as ray_executor:
        with pytest.raises(UnavailableError, match="lost the Ray cluster: at the third layer") as error_info:
            ray_executor.run(JOB)
        assert isinstance(error_info.value.__cause__, Panic)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "127.0.0.1:99999", "no.such.host.invalid:1"])
def test_an_unreachable_address_is_reported_at_once(address):
    """Ray itself looks for one for six minutes."""
    with pytest.raises(UnavailableError, match=f"cannot reach the Ray cluster at {address}.*local executor"):
        check_reachable(address)


@pytest.mark.parametrize("raised", [ConnectionError, TimeoutError, Exception])
def test_a_foreign_or_failing_cluster_is_unreachable(monkeypatch, raised):
    real_ray = pytest.importorskip("ray")

    def refuse(**options):
        raise raised("timed out during startup")

    monkeypatch.setattr(real_ray, "is_initialized", lambda: False)
    monkeypatch.setattr(real_ray, "init", refuse)
    remark = " (if the cluster requires a token, set RAY_AUTH_MODE=token)"  # Ray itself sends none, and does not say so
    for mode, suffix in (("token", ""), ("disabled", remark)):
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
        with pytest.raises(UnavailableError) as error:
            RayExecutor("auto").run(JOB)
        reason = f"cannot reach the Ray cluster at auto: timed out during startup{suffix};"
        assert str(error.value).startswith(reason)


def test_a_loopback_cluster_is_not_waited_for(monkeypatch):
    """Ray looks for it under the machine's own address, for six minutes."""
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.2")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(UnavailableError, match=r"looks for at 127\.0\.0\.2: .*--node-ip-address 127\.0\.0\.2"):
            check_reachable(address)
        check_reachable(f"ray://{address}")  # a client asks where it is told to
        monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "127.0.0.1")
        check_reachable(address)
