import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from builders.execution.jobs import (
    Job,
    JobEvent,
    Needs,
    PhaseEntered,
    Printed,
    ProcessEnded,
    ProcessLimits,
    Retrying,
    Started,
)
from builders.execution.ray import RayExecutor
from enginesmith.core.errors import ModelError, SpecError, StepError
from tests.calls import call_job
from tests.waiting import PATIENCE_S, gone, text_of, until

ray = pytest.importorskip("ray")

JOBS = "tests.builders.jobs"
pytestmark = [pytest.mark.server, pytest.mark.slow]


def job(function: str, arguments: dict | None = None, needs: Needs | None = None, **limits: float) -> Job:
    return call_job("unit", f"{JOBS}:{function}", arguments, limits=ProcessLimits(**limits), needs=needs or Needs())


def test_each_job_has_its_own_process_and_folder_which_is_deleted(executor):
    places = [executor.run(job("where")) for _ in range(2)]
    assert len({place["pid"] for place in places}) == 2
    assert not any(Path(place["workdir"]).exists() for place in places)


def test_a_worker_keeps_the_fork_server_of_its_jobs(fleet):
    needs = Needs({"enginesmith/sm": "sm_75"}, required=True)
    with RayExecutor(fleet.address, modules=("wave",)) as executor:
        assert executor.run(job("imported", {"names": ["wave", "colorsys"]}, needs)) == ["wave"]
        places = [executor.run(job("where", needs=needs)) for _ in range(4)]
    assert len({place["parent"] for place in places}) < 4


def test_errors_equal_those_of_the_local_executor(executor):
    with pytest.raises(StepError, match="unit: ValueError: seven") as error:
        executor.run(job("boom"))
    assert error.value.kind == "error" and "Traceback" in error.value.log
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
def test_limits_equal_those_of_the_local_executor(executor, function, arguments, limits, kind):
    with pytest.raises(StepError) as error:
        executor.run(job(function, arguments, **limits))
    assert error.value.kind == kind


class Noted(list[JobEvent]):
    def all(self, kind: type[JobEvent]) -> list:
        """What the events of one kind say beside the job's name."""
        return [list(vars(event).values())[1] for event in self if isinstance(event, kind)]


def test_a_local_watch_sees_remote_events(executor, tmp_path):
    seen_events = Noted()

    def watch(event: JobEvent) -> None:
        seen_events.append(event)
        if isinstance(event, PhaseEntered):
            (tmp_path / event.phase).touch()  # the job goes on when that was seen

    arguments = {"names": ["fetching", "compiling"], "folder": str(tmp_path)}
    executor.run(job("phases", arguments, Needs({"enginesmith/sm": "sm_75"}, True)), watch)
    assert seen_events.all(Started) == ["sm_75 (sm_75)"]
    assert seen_events.all(PhaseEntered) == ["fetching", "compiling"]
    mu = "\N{GREEK SMALL LETTER MU}"
    assert "".join(seen_events.all(Printed)).split() == ["now", "fetching", mu, "now", "compiling", mu]
    assert isinstance(seen_events[-1], ProcessEnded) and seen_events[-1].usage.peak_mib > 1


def test_an_exception_in_a_watch_stops_the_job(executor, tmp_path):
    def be_impatient(event: JobEvent) -> None:
        if isinstance(event, Printed):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        executor.run(job("say_and_hang", {"path": str(tmp_path / "pid")}), be_impatient)
    assert gone(int((tmp_path / "pid").read_text()))


def test_a_killed_worker_is_a_crash_and_the_job_is_retried_on_another_node(executor, tmp_path):
    marked_path, seen_items = tmp_path / "marks", Noted()
    with pytest.raises(StepError, match=r"WorkerCrashedError \(after 2 tries") as error:
        executor.run(job("kill_worker", {"path": str(marked_path)}), seen_items.append)
    first_part, second_part = marked_path.read_text().split()
    assert error.value.kind == "crash" and first_part != second_part
    assert seen_items.all(Retrying) == ["it crashed; retry: on another node if one suits"]
    assert len(seen_items.all(Started)) == len(seen_items.all(ProcessEnded)) == 2


def test_a_killed_worker_leaves_no_process_of_its_job(executor, tmp_path):
    noted_path = tmp_path / "pid"
    with pytest.raises(StepError):
        executor.run(job("spawn_and_kill_parent", {"path": str(noted_path)}))
    started_numbers = [int(pid) for pid in noted_path.read_text().split()]
    assert len(started_numbers) == 2 and gone(*started_numbers)


def test_an_engine_built_in_process_has_no_limits_but_errors(fleet):
    with RayExecutor(fleet.address, modules=None) as executor:
        assert executor.run(job("add", {"a": 1, "b": 2})) == 3
        with pytest.raises(ModelError, match="no"):
            executor.run(job("refuse", {"cls": "ModelError", "arguments": ["no"]}))
        with pytest.raises(StepError, match="unit: ValueError: seven"):
            executor.run(job("boom"))


def test_cancel_ends_running_jobs_and_leaves_nothing(fleet, tmp_path):
    noted_path, empty_path = tmp_path / "pid", tmp_path / "never"
    failures = []

    def run(path: Path) -> None:
        with pytest.raises(StepError) as error:
            executor.run(job("spawn", {"path": str(path), "wait": True}))
        failures.append(error.value.kind)

    with RayExecutor(fleet.address) as executor:
        thread = threading.Thread(target=run, args=(noted_path,))
        thread.start()
        grandchild = int(text_of(noted_path))
        executor.cancel()
        thread.join(PATIENCE_S)
        assert gone(grandchild)
        run(empty_path)
    assert failures == ["cancelled", "cancelled"]
    assert not empty_path.exists()


def test_at_most_the_limit_runs_at_once(fleet, tmp_path):
    go, begun_paths = tmp_path / "go", [tmp_path / "0", tmp_path / "1"]
    kept_jobs = [job("stay", {"path": str(path), "go": str(go)}) for path in begun_paths]
    with RayExecutor(fleet.address, jobs=1) as executor, ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(executor.run, item) for item in kept_jobs]
        until(lambda: any(path.exists() for path in begun_paths))
        with RayExecutor(fleet.address) as other:  # the cluster has room: what would be sent to it has come by now
            assert other.run(job("add", {"a": 1, "b": 2})) == 3
        assert not all(path.exists() for path in begun_paths)
        go.touch()
        assert [run.result(PATIENCE_S) for run in runs] == [None, None]


def test_an_executor_shuts_down_only_what_it_started(executor):
    with RayExecutor() as other_executor:
        assert other_executor.run(job("add", {"a": 1, "b": 2})) == 3
    assert ray.is_initialized()


LOCAL = f"""
import warnings; warnings.simplefilter("error")
from builders.execution.ray import RayExecutor; from tests.calls import call_job
with RayExecutor(jobs=1) as executor:
    assert executor.run(call_job("unit", "{JOBS}:add", {{"a": 1, "b": 2}})) == 3
import ray
assert not ray.is_initialized()
"""


AHEAD = f"""
import os, sys, threading
from builders.execution.ray import RayExecutor; from builders.execution.ray.task import connect_ahead
from tests.calls import call_job
before, threads = (dict(os.environ), list(sys.path)), []
connect_ahead(1, lambda: threads.append(threading.current_thread()))
import ray
assert ray.is_initialized() and threads != [threading.main_thread()]
assert (dict(os.environ), sys.path) == before
with RayExecutor(jobs=1) as executor:
    assert executor.run(call_job("unit", "{JOBS}:add", {{"a": 1, "b": 2}})) == 3
    lost = ray.remote(num_returns="streaming", max_retries=0)(lambda: (yield os._exit(1))).remote()
    ray.wait([lost], fetch_local=False)  # nobody asks for its error: so it is where a worker ends after the last event
    del lost
assert not ray.is_initialized(), "the first executor has it, and ends it"
ray.init = lambda **_: 1 / 0
try:
    connect_ahead(1, lambda: [][0])
except IndexError:
    print("raised what ran beside")
"""


IN_THREADS = f"""
import os, threading
from builders.execution.ray import RayExecutor
from tests.calls import call_job
from tests.waiting import until
answers = []
with RayExecutor(jobs=1) as executor:
    for number in range(2):
        add = call_job("unit", "{JOBS}:add", {{"a": 1, "b": number}})
        thread = threading.Thread(target=lambda: answers.append(executor.run(add)))
        thread.start()
        native = thread.native_id
        thread.join()
        until(lambda: not os.path.exists(f"/proc/self/task/{{native}}"))  # the kernel ends what was started by it
print(answers)
"""


@pytest.mark.parametrize(
    ("program", "printed"),
    [
        pytest.param(LOCAL, "", id="without a cluster it starts one and says nothing"),
        pytest.param(AHEAD, "raised what ran beside\n", id="one started ahead is the first executor's"),
        pytest.param(IN_THREADS, "[1, 2]\n", id="it outlives the thread whose job was the first"),
    ],
)
def test_starting_ray_leaves_the_process_unchanged(program, printed):
    environment = {"PYTHONPATH": str(Path(__file__).parents[4]), "PATH": "/usr/bin:/bin", "HOME": str(Path.home())}
    result = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, printed, "")


def test_a_job_through_rays_client_gives_the_same_result_without_progress(executor, monkeypatch):
    """The client (ray://...) streams nothing, and needs grpc, which is not here: tried is what it would be handed."""
    from builders.execution.ray import task

    remote, flags = task._remote, []
    monkeypatch.setattr(task, "through_client", lambda: True)
    monkeypatch.setattr(task, "_remote", lambda isolated, streams: flags.append(streams) or remote(isolated, streams))
    seen_items = Noted()
    assert executor.run(job("add", {"a": 2, "b": 3}), seen_items.append) == 5
    assert [type(event) for event in seen_items if isinstance(event, Started | ProcessEnded)] == [Started, ProcessEnded]
    assert flags == [False]
    with pytest.raises(StepError) as error:
        executor.run(job("hang", timeout_s=0.5))
    assert error.value.kind == "timeout"
