import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from builders.execution import local
from builders.execution.jobs import Job, JobEvent, Needs, Started, Waiting
from builders.execution.local import ALONE, QUEUED, LocalExecutor
from enginesmith.core.errors import StepError
from tests.calls import call_job
from tests.waiting import PATIENCE_S, until

JOBS = "tests.builders.jobs"


def test_each_job_gets_a_fresh_process_and_folder_and_the_folder_goes():
    executor = LocalExecutor(1)
    places = [executor.run(call_job("unit", f"{JOBS}:where")) for _ in range(2)]
    assert len({place["pid"] for place in places}) == 2
    assert len({place["workdir"] for place in places}) == 2
    assert not any(Path(place["workdir"]).exists() for place in places)


class Running:
    """Jobs that run, in the place of processes, until each is let go. At each start, the names of those that run."""

    def __init__(self) -> None:
        self.names, self.seen, self.events = set[str](), list[set[str]](), list[JobEvent]()
        self._lock, self._go = threading.Lock(), dict[str, threading.Event]()

    def __call__(self, job: Job, *_: object) -> str:
        with self._lock:
            self.names.add(job.name)
            self.seen.append({*self.names})
        assert self.of(job.name).wait(PATIENCE_S)
        with self._lock:
            self.names.remove(job.name)
        return job.name

    def of(self, name: str) -> threading.Event:
        return self._go.setdefault(name, threading.Event())

    def let_go(self, *names: str) -> None:
        for name in names:
            self.of(name).set()

    def until_told(self, *events: JobEvent) -> None:
        until(lambda: all(event in self.events for event in events), f"{events}")


@pytest.fixture
def running(monkeypatch):
    monkeypatch.setattr(local, "run_job", jobs := Running())
    return jobs


def submit(pool: ThreadPoolExecutor, executor: LocalExecutor, running: Running, name: str, alone: bool = False):
    return pool.submit(executor.run, call_job(name, f"{JOBS}:add", needs=Needs(alone=alone)), running.events.append)


@pytest.mark.parametrize("most", [1, 2])
def test_at_most_the_limit_runs_at_once(running, most):
    executor, names = LocalExecutor(most), "abc"
    with ThreadPoolExecutor(3) as pool:
        runs = [submit(pool, executor, running, name) for name in names]
        until(lambda: len(running.events) == len(names) and len(running.seen) >= most, "each runs or waits")
        running.let_go(*names)
        assert [run.result() for run in runs] == [*names]
    assert sum(isinstance(event, Waiting) and event.why == QUEUED for event in running.events) == 3 - most
    assert max(map(len, running.seen)) == most


def test_a_timed_job_runs_alone(running):
    executor = LocalExecutor(3)
    with ThreadPoolExecutor(5) as pool:
        runs = [submit(pool, executor, running, name) for name in "ab"]
        running.until_told(Started("a"), Started("b"))
        runs.append(submit(pool, executor, running, "first", alone=True))
        running.until_told(Waiting("first", ALONE))
        runs.append(submit(pool, executor, running, "second", alone=True))
        running.until_told(Waiting("second", ALONE))
        running.let_go("a", "b")
        running.until_told(Started("first"))
        runs.append(submit(pool, executor, running, "c"))
        running.until_told(Waiting("c", QUEUED))
        running.let_go("first", "second", "c")
        assert [run.result() for run in runs] == ["a", "b", "first", "second", "c"]
    assert all(len(names) == 1 for names in running.seen if names & {"first", "second"})


def test_labels_are_ignored():
    job = call_job("unit", f"{JOBS}:add", {"a": 1, "b": 1}, needs=Needs({"enginesmith/sm": "sm_89"}, required=True))
    assert LocalExecutor().run(job) == 2


def test_cancel_ends_running_waiting_and_future_jobs(tmp_path):
    executor = LocalExecutor(1)
    marked_path, seen_items = tmp_path / "marked", list[JobEvent]()
    hang = call_job("hang", f"{JOBS}:hang", {"path": str(marked_path)})
    waiting_job = call_job("waiting", f"{JOBS}:mark", {"path": str(tmp_path / "never")})

    def failure(job: Job) -> str:
        with pytest.raises(StepError) as error:
            executor.run(job, seen_items.append)
        assert error.value.kind == "cancelled"
        return str(error.value)

    with ThreadPoolExecutor(2) as pool:
        first_future = pool.submit(failure, hang)
        until(marked_path.exists)
        second_future = pool.submit(failure, waiting_job)
        until(lambda: Waiting("waiting", QUEUED) in seen_items)
        executor.cancel()
        assert first_future.result() == "hang: cancelled"
        assert second_future.result() == "waiting: cancelled before it started"
    assert failure(waiting_job) == "waiting: cancelled before it started"
    assert not (tmp_path / "never").exists()


def test_a_failed_job_frees_its_slot():
    executor = LocalExecutor(1)
    with pytest.raises(StepError):
        executor.run(call_job("boom", f"{JOBS}:boom"))
    assert executor.run(call_job("add", f"{JOBS}:add", {"a": 1, "b": 2})) == 3


def test_no_thread_and_no_file_stays_open():
    threads, files = threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))
    LocalExecutor().run(call_job("add", f"{JOBS}:add", {"a": 1, "b": 2}))
    assert threading.active_count() == threads
    assert len(list(Path("/proc/self/fd").iterdir())) == files
