import os
import subprocess
import sys
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from builders.execution import process
from builders.execution.fork_client import fork_server
from builders.execution.jobs import (
    Job,
    JobEvent,
    MemoryHeld,
    PhaseEntered,
    Printed,
    ProcessEnded,
    ProcessLimits,
    encode_request,
)
from builders.execution.process import LOG_TAIL_BYTES, Start, spawn
from enginesmith.core import errors
from enginesmith.core.errors import ModelError, StepError
from tests.calls import Call, call_job
from tests.waiting import gone, text_of

JOBS = "tests.builders.jobs"


STARTS: list[Start] = []


@pytest.fixture(params=["spawned", "forked"], autouse=True, scope="module")
def how(request):
    """Every test here runs with a new interpreter for each job, and with processes forked from a warm one."""
    with fork_server(["json", "no_such_module"]) if request.param == "forked" else nullcontext(spawn) as start:
        STARTS[:] = [start]
        yield request.param


def run_job(*arguments, **named):
    return process.run_job(*arguments, **named, start=STARTS[0])


def job(function: str, arguments: dict | None = None, **limits: float) -> Job:
    return call_job("unit", f"{JOBS}:{function}", arguments, limits=ProcessLimits(**limits))


def failure(workdir: Path, *args, **kwargs) -> StepError:
    with pytest.raises(StepError) as error:
        run_job(job(*args, **kwargs), workdir)
    return error.value


@pytest.fixture
def noted(tmp_path, monkeypatch):
    """A file in which a job notes that it has begun. As soon as it has, its time is over, and not before.

    Its time begins with the first two readings of the clock, which on a busy machine are made after it noted that.
    """
    path, readings = tmp_path / "noted", count()

    def monotonic() -> float:
        return 1000.0 if next(readings) > 1 and path.exists() and path.read_text() else 0.0

    clock = SimpleNamespace(monotonic=monotonic)
    monkeypatch.setattr(process, "time", clock)
    return path


@pytest.mark.timeout(60)
def test_the_end_of_a_job_is_noticed_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "TICK_S", 3600.0)
    assert run_job(job("add", {"a": 1, "b": 2}), tmp_path) == 3


def test_without_pidfd_the_end_of_a_process_is_polled(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "pidfd_open")
    assert process.run_job(job("add", {"a": 1, "b": 2}), tmp_path, start=spawn) == 3
    with pytest.raises(StepError, match=r"its limit of 0\.2 s"):
        process.run_job(job("hang", {"path": str(tmp_path / "pid")}, timeout_s=0.2), tmp_path, start=spawn)


def test_the_value_is_returned(tmp_path):
    assert run_job(job("add", {"a": 2, "b": 3}), tmp_path) == 5


def test_a_job_has_its_own_process_and_session_in_its_workdir(tmp_path):
    place = run_job(job("where"), tmp_path)
    assert place["pid"] not in (os.getpid(), 0)
    assert place["session"] == place["pid"]
    assert place["core_bytes"] == 0
    assert place["workdir"] == place["cwd"] == place["tmp"] == str(tmp_path)
    assert (tmp_path / "dropping").exists()


def test_a_relative_workdir_works(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("w").mkdir()
    assert run_job(job("where"), Path("w"))["workdir"] == str(tmp_path / "w")


def test_an_exception_returns_as_type_and_text_with_the_traceback_in_the_log(tmp_path):
    error = failure(tmp_path, "boom")
    assert (error.kind, str(error)) == ("error", "unit: ValueError: seven is not prime enough")
    assert "about to fail" in error.log
    assert "jobs.py" in error.log and "Traceback" in error.log


@pytest.mark.parametrize(
    ("cls", "arguments"),
    [
        ("ModelError", ["model.onnx is empty; export it again"]),
        ("SpecError", [["a: wrong", "b: wrong"]]),
        ("StepError", ["inner", "timeout", "the log"]),
        ("UnavailableError", ["disk full"]),
    ],
)
def test_an_enginesmith_error_returns_unchanged(tmp_path, cls, arguments):
    expected = getattr(errors, cls)(*arguments)
    with pytest.raises(type(expected)) as error:
        run_job(job("refuse", {"cls": cls, "arguments": arguments}), tmp_path)
    assert type(error.value) is type(expected)
    assert str(error.value) == str(expected)
    for field in ("lines", "kind", "log"):
        assert getattr(error.value, field, None) == getattr(expected, field, None)


def test_every_error_class_survives_the_transfer(tmp_path):
    from enginesmith.core.errors import error_from_json, error_to_json

    for name in vars(errors):
        cls = getattr(errors, name)
        if isinstance(cls, type) and issubclass(cls, errors.EnginesmithError):
            error = cls(["x"] if cls is errors.SpecError else "x")
            second_error = error_from_json(error_to_json(error))
            assert (type(second_error), str(second_error)) == (cls, str(error))


def test_an_unknown_subclass_returns_as_its_nearest_known_ancestor(tmp_path):
    with pytest.raises(ModelError, match="1 and 2") as error:
        run_job(job("refuse_from_outside"), tmp_path)
    assert type(error.value) is ModelError


def test_a_segmentation_fault_is_a_crash_with_its_signal_and_log(tmp_path):
    error = failure(tmp_path, "crash")
    assert (error.kind, str(error)) == ("crash", "unit: killed by SIGSEGV")
    assert "reading address zero" in error.log


@pytest.mark.parametrize(
    ("function", "arguments", "kind", "words"),
    [
        ("signal_self", {"number": 9}, "crash", "unit: killed by SIGKILL (the kernel"),
        ("signal_self", {"number": 40}, "crash", "unit: killed by signal 40"),
        ("leave", {"status": 0}, "error", "unit: ended with exit status 0 and no result"),
        ("leave", {"status": 3}, "error", "unit: ended with exit status 3 and no result"),
    ],
)
def test_errors_name_the_signal_or_exit_status(tmp_path, function, arguments, kind, words):
    error = failure(tmp_path, function, arguments)
    assert error.kind == kind and str(error).startswith(words)


def test_a_value_that_is_not_json_is_an_error(tmp_path):
    assert "object cannot be written as JSON" in str(failure(tmp_path, "unencodable"))


@pytest.mark.parametrize("function", ["nowhere", "jobs_of_no_module:x"])
def test_a_missing_function_is_an_error(tmp_path, function):
    assert failure(tmp_path, function).kind == "error"


@pytest.mark.parametrize("function", ["hang", "hold_the_gil"])
def test_a_hang_is_killed_at_its_limit_even_while_it_holds_the_gil(tmp_path, noted, function):
    error = failure(tmp_path, function, {"path": str(noted)}, timeout_s=999.5)
    assert error.kind == "timeout" and "limit of 999.5 s" in str(error)


@pytest.mark.parametrize("function", ["eat", "eat_in_a_child"])
def test_memory_of_children_counts_for_the_limit(tmp_path, function):
    error = failure(tmp_path, function, {"mib": 400}, memory_mib=300)
    assert error.kind == "memory" and "300 MiB" in str(error)


@pytest.mark.parametrize("wait", [True, False])
def test_no_process_of_the_group_stays(tmp_path, noted, wait):
    arguments = {"path": str(noted), "wait": wait}
    if wait:
        assert failure(tmp_path, "spawn", arguments, timeout_s=999.5).kind == "timeout"
    else:
        run_job(job("spawn", arguments), tmp_path)
    assert gone(int(noted.read_text()))


@pytest.mark.timeout(100)
def test_cancelling_kills_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "GRACE_S", 3600.0)
    begun_path = tmp_path / "begun"
    with pytest.raises(StepError) as error:
        run_job(job("hang", {"path": str(begun_path)}), tmp_path, begun_path.exists)
    assert error.value.kind == "cancelled"


def test_the_log_is_the_end_of_the_output(tmp_path):
    log = failure(tmp_path, "chatter", {"lines": 10_000}).log
    assert len(log) <= LOG_TAIL_BYTES
    assert "line 9999" in log and "line 0\n" not in log


def parent_of(how: str, workdir: Path, function: str, arguments: dict) -> subprocess.Popen[bytes]:
    """A process that runs a job, started either way."""
    start = "fork_server([])" if how == "forked" else "nullcontext(spawn)"
    code = f"""
from contextlib import nullcontext
from pathlib import Path
from builders.execution.fork_client import fork_server
from builders.execution.process import run_job
from builders.execution.process import spawn
from tests.calls import call_job
with {start} as start:
    run_job(call_job("unit", "{JOBS}:{function}", {arguments}), Path({str(workdir)!r}), start=start)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(place or "." for place in sys.path)}
    return subprocess.Popen([sys.executable, "-c", code], env=environment)


@pytest.mark.parametrize(("function", "more"), [("hang", {}), ("spawn", {"wait": True})], ids=["child", "grandchild"])
def test_a_killed_parent_ends_its_child_and_grandchildren(how, tmp_path, function, more):
    noted_path = tmp_path / "pid"
    parent = parent_of(how, tmp_path, function, {"path": str(noted_path), **more})
    running_number = int(text_of(noted_path))
    parent.kill()
    parent.wait()
    assert gone(running_number)


def test_no_guard_process_stays(tmp_path):
    """As long as the child is there so is its guard; then neither is, not even as a zombie."""
    (guard,) = run_job(job("children"), tmp_path)
    assert not psutil.pid_exists(guard)


def test_a_child_ends_if_its_parent_died_before_it_registered(tmp_path):
    """The parent's pid that it is told is not the real parent's: the child must leave without running the request."""
    import json

    marked_path = tmp_path / "marked"
    request = encode_request(Call(f"{JOBS}:mark", {"path": str(marked_path)}))
    task = {"request": request, "store": ""}
    (tmp_path / "job.json").write_text(json.dumps(task))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(place or "." for place in sys.path)}
    words = [sys.executable, "-m", "builders.execution.child", str(tmp_path), "0", "1"]
    result = subprocess.run(words, env=environment)
    assert result.returncode == 1
    assert not marked_path.exists()


def test_a_watch_sees_phases_output_and_usage(tmp_path):
    seen_events: list[JobEvent] = []

    def watch(event: JobEvent) -> None:
        seen_events.append(event)
        if isinstance(event, PhaseEntered):
            (tmp_path / event.phase).touch()  # the job goes on when that was seen

    run_job(job("phases", {"names": ["fetching", "compiling"], "folder": str(tmp_path)}), tmp_path, watch=watch)
    phases = [event.phase for event in seen_events if isinstance(event, PhaseEntered)]
    assert phases == ["fetching", "compiling"]
    assert printed(seen_events).splitlines() == [f"now {name} \N{GREEK SMALL LETTER MU}" for name in phases]
    (usage,) = (event.usage for event in seen_events if isinstance(event, ProcessEnded))
    assert usage.seconds > 0 and 1 < usage.peak_mib < 1000
    assert usage.cpu_s and usage.cpu_s > 0


def test_a_peak_is_reported_if_a_tenth_and_16_mib_above_the_last(tmp_path):
    seen_items: list[JobEvent] = []
    observer = process._Observer("job", tmp_path, seen_items.append)
    for used_value in (16.0, 17.0, 33.0, 30.0, 34.0, 400.0, 440.0, 441.0):
        observer.weigh(used_value)
    assert seen_items == [MemoryHeld("job", mib) for mib in (17.0, 34.0, 400.0, 441.0)]
    assert observer.peak_mib == 441.0


def test_a_watch_gets_all_output_and_the_usage_of_a_job_that_died(tmp_path):
    items: list[JobEvent] = []
    with pytest.raises(StepError):
        run_job(job("eat", {"mib": 600}, memory_mib=200), tmp_path, watch=items.append)
    assert isinstance(items[-1], ProcessEnded) and items[-1].usage.peak_mib > 200 and items[-1].usage.cpu_s
    peaks_mib = [event.mib for event in items if isinstance(event, MemoryHeld)]
    assert peaks_mib and peaks_mib == sorted(peaks_mib)
    with pytest.raises(StepError):
        run_job(job("chatter_and_crash", {"lines": 5000}), tmp_path, watch=items.append)
    assert printed(items).count("line 4999") == 1


def printed(seen: list[JobEvent]) -> str:
    return "".join(event.text for event in seen if isinstance(event, Printed))


@pytest.fixture
def times_out_when_it_heeds(tmp_path, monkeypatch):
    """Its time is over as soon as it has promised: a busy machine may take long until then."""

    def watch(*_):
        text_of(tmp_path / "begun")
        return "timeout", "still running"

    monkeypatch.setattr("builders.execution.process._watch", watch)


def test_a_cooperative_job_is_asked_to_end_and_gets_time(tmp_path, times_out_when_it_heeds):
    error = failure(tmp_path, "end_when_asked", {"after_s": 0.0})
    assert error.kind == "timeout"
    assert (tmp_path / "kept").read_text() == "what it learnt"


def test_a_job_that_ignores_the_request_is_killed(tmp_path, times_out_when_it_heeds, monkeypatch):
    monkeypatch.setattr("builders.execution.process.GRACE_S", 0.2)
    assert failure(tmp_path, "end_when_asked", {"after_s": 60.0}).kind == "timeout"
    assert (tmp_path / "job.stop").exists() and not (tmp_path / "kept").exists()


def test_a_cancelled_job_is_asked_to_end_too(tmp_path):
    with pytest.raises(StepError) as error:
        run_job(job("end_when_asked", {"after_s": 0.0}), tmp_path, lambda: (tmp_path / "job.heeds").exists())
    assert error.value.kind == "cancelled" and (tmp_path / "kept").exists()
