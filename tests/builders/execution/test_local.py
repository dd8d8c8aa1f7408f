import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from builders.execution.jobs import Job, Needs
from builders.execution.local import LocalExecutor
from enginesmith.core.errors import StepError
from tests.calls import call_job

JOBS = "tests.builders.jobs"


def test_each_job_gets_a_fresh_process_and_folder_and_the_folder_goes():
    executor = LocalExecutor(1)
    places = [executor.run(call_job("unit", f"{JOBS}:where")) for _ in range(2)]
    assert len({place["pid"] for place in places}) == 2
    assert len({place["workdir"] for place in places}) == 2
    assert not any(Path(place["workdir"]).exists() for place in places)


@pytest.mark.parametrize(("jobs", "most"), [(1, 1), (2, 2)])
def test_at_most_so_many_run_at_once(tmp_path, jobs, most):
    executor = LocalExecutor(jobs)
    naps = [call_job("nap", f"{JOBS}:nap", {"seconds": 0.3, "path": str(tmp_path / str(i))}) for i in range(3)]
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(executor.run, naps))
    times = [tuple(map(float, path.read_text().split())) for path in tmp_path.iterdir()]
    together = max(sum(start <= at < end for start, end in times) for at, _ in times)
    assert together <= most


def test_a_job_that_is_timed_has_the_machine_to_itself(tmp_path):
    executor = LocalExecutor(3)
    naps = [
        call_job("nap", f"{JOBS}:nap", {"seconds": 0.15, "path": str(tmp_path / f"{i}")}, needs=Needs(alone=i % 3 == 0))
        for i in range(6)
    ]
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(executor.run, naps))
    times = {int(path.name): tuple(map(float, path.read_text().split())) for path in tmp_path.iterdir()}
    for alone in (0, 3):
        start, end = times.pop(alone)
        assert all(other_end <= start or end <= other_start for other_start, other_end in times.values())


def test_labels_are_ignored():
    job = call_job("unit", f"{JOBS}:add", {"a": 1, "b": 1}, needs=Needs({"enginesmith/sm": "sm_89"}, required=True))
    assert LocalExecutor().run(job) == 2


def test_cancel_ends_the_running_the_waiting_and_the_coming(tmp_path):
    executor = LocalExecutor(1)
    marked = tmp_path / "marked"
    hang = call_job("hang", f"{JOBS}:hang", {"path": str(marked)})
    waiting = call_job("waiting", f"{JOBS}:mark", {"path": str(tmp_path / "never")})

    def failure(job: Job) -> str:
        with pytest.raises(StepError) as caught:
            executor.run(job)
        assert caught.value.kind == "cancelled"
        return str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(failure, hang)
        while not marked.exists():
            time.sleep(0.02)
        second = pool.submit(failure, waiting)
        time.sleep(0.1)
        start = time.monotonic()
        executor.cancel()
        assert first.result() == "hang: cancelled"
        assert second.result() == "waiting: cancelled before it started"
        assert time.monotonic() - start < 2
    assert failure(waiting) == "waiting: cancelled before it started"
    assert not (tmp_path / "never").exists()


def test_a_failed_job_frees_its_slot():
    executor = LocalExecutor(1)
    with pytest.raises(StepError):
        executor.run(call_job("boom", f"{JOBS}:boom"))
    assert executor.run(call_job("add", f"{JOBS}:add", {"a": 1, "b": 2})) == 3


def test_no_thread_and_no_file_is_left_open():
    threads, files = threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))
    LocalExecutor().run(call_job("add", f"{JOBS}:add", {"a": 1, "b": 2}))
    assert threading.active_count() == threads
    assert len(list(Path("/proc/self/fd").iterdir())) == files
