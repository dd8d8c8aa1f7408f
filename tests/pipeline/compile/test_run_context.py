"""Records of steps, and the progress display."""

from pathlib import Path

import pytest

from builders.execution.jobs import Executor, Job
from builders.execution.local import LocalExecutor
from enginery.registry.store.base import open_store
from enginery.registry.writers.leases import BUILDING, leases
from pipeline.compile.run_context import Workshop, versions
from pipeline.orchestration.run import RunOptions, opened
from pipeline.progress import Lines, LiveTable, Silent
from pipeline.progress.events import Finished, Started
from tests.calls import call_job
from tests.pipeline.projects import Project


def echo(blob: str) -> dict[str, str]:
    """A step's work, in its own process."""
    return {"blob": blob}


@pytest.fixture
def shop(tmp_path: Path) -> Workshop:
    executor = LocalExecutor(1)
    return Workshop(open_store(tmp_path / "registry", create=True), executor, executor)


def count(shop: Workshop, key: dict[str, object], blob: str) -> list[str]:
    """Ask for a step's value; the jobs that had to run for it."""
    ran: list[str] = []

    def shown(executor: Executor, name: str, job: Job[dict[str, str]]) -> dict[str, str]:
        ran.append("ran")
        return shop.shown(executor, name, job)

    job = call_job("echo", "tests.pipeline.compile.test_run_context:echo", {"blob": blob})
    assert shop.once("echo", "echo", key, job, lambda value: [value["blob"]], shown) == {"blob": blob}
    return ran


def test_a_step_runs_once_for_a_key_and_again_when_its_blob_is_gone(shop: Workshop) -> None:
    blob = shop.store.put_bytes(b"bytes")
    assert count(shop, {"a": 1}, blob) == ["ran"]
    assert count(shop, {"a": 1}, blob) == []
    assert count(shop, {"a": 2}, blob) == ["ran"]
    shop.store.path(blob).unlink()
    assert count(shop, {"a": 1}, blob) == ["ran"]


def test_versions_are_read_and_absence_is_a_version() -> None:
    found = versions("onnx", "no-such-distribution")
    assert found["no-such-distribution"] == "absent"
    assert found["onnx"][0].isdigit()


def test_lines_tell_events_and_that_long_work_is_alive(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import time

    monkeypatch.setattr("pipeline.progress.lines.HEARTBEAT_S", 0.02)
    lines = Lines()
    lines.emit(Started("unit"))
    with lines.watching("unit"):
        time.sleep(0.2)
    lines.emit(Finished("unit"))
    err = capsys.readouterr().err
    assert "unit ..." in err
    assert "unit: still running" in err
    assert "unit: done" in err


def test_the_live_table_shows_markup_in_names_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    with LiveTable() as table:
        table.emit(Started("[red]unit[/red]"))
        with table.watching("[red]unit[/red]"):
            pass
        table.emit(Finished("[red]unit[/red]", "failed", "[bold]x"))
    assert "[red]unit[/red]: failed: [bold]x" in capsys.readouterr().err


def test_a_run_holds_a_lease_so_that_what_it_finds_stays(project: Project) -> None:
    with opened(project.spec, RunOptions(registry=str(project.registry)), Silent()) as run:
        (lease,) = leases(run.shop.store)
        assert lease.what == "building tiny" and lease.expires - lease.at == BUILDING
    assert leases(run.shop.store) == []
