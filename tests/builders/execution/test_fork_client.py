import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from builders.execution import fork_client
from builders.execution.fork_client import fork_server, keep_fork_server
from builders.execution.local import LocalExecutor
from builders.execution.process import Ended, Start, module_path, run_job
from enginesmith.core.errors import StepError
from tests.calls import call_job
from tests.waiting import PATIENCE_S, gone, text_of

JOBS = "tests.builders.jobs"
WARM = ["tests.builders.jobs", "wave"]


def where(executor: LocalExecutor, **arguments: object) -> dict:
    return executor.run(call_job("where", f"{JOBS}:where", arguments))


def test_jobs_are_children_of_one_server_that_has_imported_the_modules():
    with fork_server(WARM) as start:
        executor = LocalExecutor(2, start)
        places = [where(executor) for _ in range(3)]
        (server,) = {place["parent"] for place in places}
        assert len({place["pid"] for place in places}) == 3 and server != os.getpid()
        assert executor.run(call_job("unit", f"{JOBS}:imported", {"names": [*WARM, "colorsys"]})) == WARM
    assert not psutil.pid_exists(server)


def test_another_interpreter_has_a_server_of_its_own(tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={module_path()} OF=another exec {sys.executable} "$@"\n')
    python.chmod(0o700)
    executor = LocalExecutor(2, keep_fork_server(tuple(WARM), python))
    (server,) = {where(executor)["parent"] for _ in range(2)}
    assert psutil.Process(server).environ()["OF"] == "another"
    psutil.Process(server).kill()
    assert where(executor)["parent"] == os.getpid(), "it is started for the job alone"


def test_jobs_run_side_by_side(tmp_path):
    pairs = [{"mine": own_name, "other": other, "folder": str(tmp_path)} for own_name, other in ("ab", "bc", "ca")]
    with fork_server(WARM) as start, ThreadPoolExecutor(3) as pool:
        meetings = [call_job("unit", f"{JOBS}:meet", pair) for pair in pairs]
        assert list(pool.map(LocalExecutor(3, start).run, meetings)) == ["met"] * 3


def test_other_environment_variables_or_modules_need_their_own_process(monkeypatch, tmp_path):
    with fork_server(WARM) as start:
        executor = LocalExecutor(1, start)
        assert where(executor)["parent"] != os.getpid()
        with monkeypatch.context() as patched_context:
            patched_context.setenv("ENGINESMITH_CACHE", str(tmp_path))
            assert where(executor)["parent"] == os.getpid()
        with monkeypatch.context() as patched_context:
            patched_context.setattr(sys, "path", [*sys.path, str(tmp_path)])
            assert where(executor)["parent"] == os.getpid()
        assert where(executor)["parent"] != os.getpid()


def test_a_killed_server_ends_its_job_and_later_jobs_are_spawned(tmp_path):
    noted_path = tmp_path / "pid"
    with fork_server(WARM) as start, ThreadPoolExecutor(1) as pool:
        server = where(LocalExecutor(1, start))["parent"]
        hangs = pool.submit(run_job, call_job("hang", f"{JOBS}:hang", {"path": str(noted_path)}), tmp_path, start=start)
        text_of(noted_path)
        os.kill(server, signal.SIGKILL)
        with pytest.raises(StepError, match="killed by SIGKILL") as error:
            hangs.result(PATIENCE_S)
        assert error.value.kind == "crash"
        assert where(LocalExecutor(1, start))["parent"] == os.getpid()


def test_a_failing_server_costs_only_time(tmp_path, monkeypatch):
    monkeypatch.setattr("builders.execution.fork_client.module_command", lambda _: ["/bin/false"])
    with fork_server(WARM) as start:
        assert where(LocalExecutor(1, start))["parent"] == os.getpid()


def test_the_server_is_asked_for_a_result_once_the_process_has_ended(monkeypatch):
    """While it waits for a process that the kernel cannot end, it answers nobody."""
    asked_waits: list[object] = []
    server = SimpleNamespace(ask=lambda message: asked_waits.append(message) or [0.0, 1.0])
    monkeypatch.setattr(fork_client, "is_readable", lambda *waits: asked_waits.append(waits))
    descriptor = os.open(os.devnull, os.O_RDONLY)
    assert fork_client._Forked(7, descriptor, server).end() == Ended(0, 1.0)
    assert asked_waits == [{"kill": 7}, (descriptor, None), {"take": 7}]


def test_no_job_starts_no_process_and_no_file_stays_open():
    count_before, children = len(list(Path("/proc/self/fd").iterdir())), psutil.Process().children()
    with fork_server(WARM) as start:
        assert psutil.Process().children() == children
        LocalExecutor(1, start).run(call_job("add", f"{JOBS}:add", {"a": 1, "b": 2}))
    assert len(list(Path("/proc/self/fd").iterdir())) == count_before


def run_within(start: Start, function: str, **more: object) -> dict:
    """What a job gives that runs a function in a process within its own."""
    return LocalExecutor(1, start).run(call_job("outer", f"{JOBS}:within", {"function": function, **more}))


def test_a_job_with_one_thread_forks_the_process_within_its_own_from_a_copy_of_itself():
    with fork_server(WARM) as start:
        outer_result = run_within(start, "where")
        inner = outer_result["found"]
        assert inner["parent"] not in (outer_result["pid"], *outer_result["children"]), "of the copy, which has ended"
        assert inner["session"] == inner["pid"] and inner["cwd"].endswith("/within") and inner["tmp"] == inner["cwd"]
        assert run_within(start, "imported", arguments={"names": ["colorsys", *WARM]})["found"] == ["colorsys", *WARM]
        outer_result = run_within(start, "where", threads=1)
        assert outer_result["found"]["parent"] == outer_result["pid"], "spawned"


def test_child_processes_end_with_their_job(tmp_path):
    hang = {"function": "hang", "arguments": {"path": str(tmp_path / "pid")}}  # notes its pid
    with fork_server(WARM) as start, ThreadPoolExecutor(1) as pool:
        executor = LocalExecutor(1, start)
        outer_future = pool.submit(executor.run, call_job("outer", f"{JOBS}:within", hang))
        inner_number = int(text_of(tmp_path / "pid"))
        executor.cancel()
        with pytest.raises(StepError, match="outer: cancelled"):
            outer_future.result(PATIENCE_S)
    assert gone(inner_number)
