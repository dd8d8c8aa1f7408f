import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from builders.execution.process import FOLDER_VARIABLE, environment
from pipeline.orchestration.run import RunOptions, start_executors
from tests import one_server
from tests.calls import call_job

pytestmark = pytest.mark.usefixtures("one_server")

WHERE = call_job("where", "tests.builders.jobs:where")


def run(function: str) -> Any:
    """What a job of a build of its own gives."""
    with start_executors(RunOptions()) as executors:
        return executors.local.run(call_job(function, f"tests.builders.jobs:{function}"))


def apart(variables: dict[str, str]) -> dict[str, str]:
    """All but those that name a job's own folder."""
    return {name: value for name, value in variables.items() if name not in ("TMPDIR", FOLDER_VARIABLE)}


@pytest.fixture
def parent() -> int:
    return run("where")["parent"]


def test_builds_in_fixtures_and_tests_share_a_server(parent: int) -> None:
    assert parent == run("where")["parent"] != os.getpid()


def test_jobs_see_exactly_the_environment_of_their_test(parent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("where")["parent"] == parent and apart(run("variables")) == apart(environment())
    monkeypatch.setenv("ANOTHER", "1")
    assert run("where")["parent"] not in (parent, os.getpid())
    assert apart(run("variables")) == apart(environment())


def test_a_build_beside_another_leaves_its_server_running(monkeypatch: pytest.MonkeyPatch) -> None:
    with start_executors(RunOptions()) as executors:
        parent = executors.local.run(WHERE)["parent"]
        monkeypatch.setenv("ANOTHER", "1")
        assert run("where")["parent"] == os.getpid()
        monkeypatch.delenv("ANOTHER")
        assert executors.local.run(WHERE)["parent"] == parent


def test_a_fork_gets_its_own_server_and_keeps_its_parents(monkeypatch: pytest.MonkeyPatch) -> None:
    start_modules, ended_modules = list[Sequence[str]](), list[Sequence[str]]()

    @contextmanager
    def fork_server(modules: Sequence[str]) -> Iterator[None]:
        start_modules.append(modules)
        yield
        ended_modules.append(modules)

    monkeypatch.setattr(one_server, "fork_server", fork_server)
    server = one_server.OneServer()
    for process, count in ((os.getpid(), 1), (-1, 2)):
        monkeypatch.setattr(os, "getpid", lambda process=process: process)
        for _ in range(2):
            with server([]):
                assert (len(start_modules), ended_modules) == (count, [])
    server.stop()
    assert len(ended_modules) == 1
