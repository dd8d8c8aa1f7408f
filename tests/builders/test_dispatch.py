import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from builders import dispatch
from builders.dispatch import RayExecutor
from builders.errors import ModelError, SpecError, StepError, UnavailableError
from builders.jobs import Job, Limits
from tests.builders.test_process import gone, read_when_there

ray = pytest.importorskip("ray")
cluster_utils = pytest.importorskip("ray.cluster_utils")

JOBS = "tests.builders.jobs"
pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def cluster():
    """Real raylets: a head, and one node that says it has an sm_89 GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
        started = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
        started.add_node(num_cpus=1, labels={"enginery/sm": "sm_89"})
        yield started
        ray.shutdown()  # a test alone may still be connected
        started.shutdown()


@pytest.fixture(scope="module")
def executor(cluster):
    with RayExecutor(cluster.address) as made:
        yield made


def job(function: str, arguments: dict | None = None, needs: dict | None = None, **limits: float) -> Job:
    return Job("unit", f"{JOBS}:{function}", arguments or {}, Limits(**limits), needs or {})


def test_the_value_comes_back(executor):
    assert executor.run(job("add", {"a": 2, "b": 3})) == 5


def test_each_job_gets_a_fresh_worker_and_folder_and_the_folder_goes(executor):
    places = [executor.run(job("where")) for _ in range(2)]
    assert len({place["pid"] for place in places}) == len({place["parent"] for place in places}) == 2
    assert not any(Path(place["workdir"]).exists() for place in places)


def test_errors_are_those_of_the_local_executor(executor):
    with pytest.raises(StepError, match="unit: ValueError: seven") as caught:
        executor.run(job("boom"))
    assert caught.value.kind == "error" and "Traceback" in caught.value.log
    with pytest.raises(ModelError, match="export it again"):
        executor.run(job("refuse", {"cls": "ModelError", "arguments": ["empty; export it again"]}))
    with pytest.raises(SpecError) as spec:
        executor.run(job("refuse", {"cls": "SpecError", "arguments": [["a: x", "b: y"]]}))
    assert spec.value.lines == ("a: x", "b: y")


@pytest.mark.parametrize(
    ("function", "arguments", "limits", "kind"),
    [
        ("crash", {}, {}, "crash"),
        ("hang", {}, {"timeout_s": 0.5}, "timeout"),
        ("eat", {"mib": 400}, {"memory_mib": 300}, "memory"),
    ],
)
def test_limits_are_those_of_the_local_executor(executor, function, arguments, limits, kind):
    with pytest.raises(StepError) as caught:
        executor.run(job(function, arguments, **limits))
    assert caught.value.kind == kind


def test_a_job_goes_to_the_node_with_its_label(cluster, executor):
    labelled = next(iter(cluster.worker_nodes)).all_processes["raylet"][0].process.pid
    with ThreadPoolExecutor(3) as pool:
        raylets = list(pool.map(executor.run, [job("raylet", needs={"enginery/sm": "sm_89"})] * 3))
    assert set(raylets) == {labelled}


def test_a_label_that_no_node_has_does_not_hang(executor):
    start = time.monotonic()
    assert executor.run(job("add", {"a": 1, "b": 1}, needs={"enginery/sm": "sm_75"})) == 2
    assert time.monotonic() - start < 20


def test_a_killed_worker_is_a_crash_and_is_not_started_again(executor, tmp_path):
    marked = tmp_path / "marks"
    with pytest.raises(StepError) as caught:
        executor.run(job("kill_parent", {"path": str(marked)}))
    assert caught.value.kind == "crash" and "WorkerCrashedError" in str(caught.value)
    assert marked.read_text() == "once\n"


def test_cancel_ends_what_runs_and_nothing_is_left(cluster, tmp_path):
    executor = RayExecutor(cluster.address)
    noted, never = tmp_path / "pid", tmp_path / "never"
    failures = []

    def run(path: Path) -> None:
        with pytest.raises(StepError) as caught:
            executor.run(job("spawn", {"path": str(path), "wait": True}))
        failures.append(caught.value.kind)

    thread = threading.Thread(target=run, args=(noted,))
    thread.start()
    grandchild = int(read_when_there(noted))
    executor.cancel()
    thread.join(20)
    assert gone(grandchild)
    run(never)
    assert failures == ["cancelled", "cancelled"]
    assert not never.exists()


def test_at_most_so_many_run_at_once(cluster, tmp_path):
    executor = RayExecutor(cluster.address, jobs=1)
    naps = [job("nap", {"seconds": 0.2, "path": str(tmp_path / str(i))}) for i in range(2)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(executor.run, naps))
    (_, first), (second, _) = sorted(tuple(map(float, path.read_text().split())) for path in tmp_path.iterdir())
    assert first <= second


def test_it_shuts_down_only_what_it_started(executor):
    with RayExecutor() as other:
        assert other.run(job("add", {"a": 1, "b": 2})) == 3
    assert ray.is_initialized()


LOCAL = f"""
import warnings; warnings.simplefilter("error")
from builders.dispatch import RayExecutor; from builders.jobs import Job
with RayExecutor(jobs=1) as executor:
    assert executor.run(Job("unit", "{JOBS}:add", {{"a": 1, "b": 2}})) == 3
import ray
assert not ray.is_initialized()
"""


def test_without_a_cluster_it_starts_one_and_says_nothing():
    environment = {"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": "/usr/bin:/bin", "HOME": str(Path.home())}
    ended = subprocess.run([sys.executable, "-c", LOCAL], env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "127.0.0.1:99999", "no.such.host.invalid:1"])
def test_an_address_out_of_reach_is_said_at_once(address):
    start = time.monotonic()
    with pytest.raises(UnavailableError, match=f"cannot reach the Ray cluster at {address}.*local executor"):
        dispatch._check_reachable(address)
    assert time.monotonic() - start < 10


def test_a_cluster_that_is_no_ray_is_out_of_reach_too(monkeypatch):
    def refuse(**options):
        raise ConnectionError("version mismatch")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(UnavailableError, match="cannot reach the Ray cluster at auto: version mismatch"):
        RayExecutor("auto").run(job("add", {"a": 1, "b": 2}))
