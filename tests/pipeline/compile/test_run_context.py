from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from builders.execution.jobs import Executor, Job, WorkerContext
from builders.execution.local import LocalExecutor
from builders.execution.process import Start
from enginesmith.core.errors import EnginesmithError, IntegrityError, ModelError, StepError, UnavailableError
from enginesmith.registry.leases import BUILDING, list_leases
from enginesmith.registry.store.base import open_store
from pipeline.compile.run_context import RunContext, fail_step, versions
from pipeline.orchestration.run import RunOptions, open_run
from pipeline.progress import Lines, LiveTable, Progress
from pipeline.progress.events import Event, Finished, ProcessEnded, Started
from tests.pipeline.progress.test_progress import Hears
from tests.pipeline.projects import Project
from tests.waiting import until


@dataclass(frozen=True)
class Echoed:
    blob: str


@dataclass(frozen=True)
class Echo:
    """A step's work, in its own process."""

    blob: str

    def run(self, context: WorkerContext) -> Echoed:
        return Echoed(self.blob)


@pytest.fixture
def context(tmp_path: Path, start: Start) -> RunContext:
    executor = LocalExecutor(1, start)
    return RunContext(open_store(tmp_path / "registry", create=True), executor, executor)


def count(context: RunContext, key: dict[str, object], blob: str) -> list[str]:
    """Ask for a step's value; the jobs that had to run for it."""
    actual_texts: list[str] = []

    def shown(executor: Executor, name: str, job: Job[Echoed]) -> Echoed:
        actual_texts.append("ran")
        return context.run_job(executor, name, job)

    job = Job("echo", Echo(blob))
    assert context.once("echo", "echo", key, job, lambda value: [value.blob], shown) == Echoed(blob)
    return actual_texts


def test_a_step_runs_once_per_key_and_again_if_its_blob_is_missing(context: RunContext) -> None:
    blob = context.store.put_bytes(b"bytes")
    assert count(context, {"a": 1}, blob) == ["ran"] and count(context, {"a": 1}, blob) == []
    assert count(context, {"a": 2}, blob) == ["ran"]
    context.store.path(blob).unlink()
    assert count(context, {"a": 1}, blob) == ["ran"]


def test_job_events_name_their_step(context: RunContext) -> None:
    progress = Hears()
    hearing = replace(context, progress=progress)
    assert hearing.run_job(context.local, "echo of int8", Job("echo", Echo("b"))) == Echoed("b")
    heard_events = progress.heard
    assert heard_events[0] == Started("echo of int8", "here") and isinstance(heard_events[-1], ProcessEnded)
    assert {event.name for event in heard_events} == {"echo of int8"}


def test_missing_versions_count_as_versions() -> None:
    actual = versions("onnx", "no-such-distribution")
    assert actual["no-such-distribution"] == "absent" and actual["onnx"][0].isdigit()


def test_log_lines_show_events_and_heartbeats(capsys, monkeypatch):
    monkeypatch.setattr("pipeline.progress.display.HEARTBEAT_S", 0.02)
    lines = Lines()
    lines.emit(Started("unit"))
    messages: list[str] = []
    with lines.watch("unit"):
        until(lambda: messages.append(capsys.readouterr().err) or "unit: still running" in "".join(messages))
    lines.emit(Finished("unit"))
    assert "unit ..." in messages[0]
    assert "unit: done" in capsys.readouterr().err


def test_the_live_table_shows_markup_in_names_unchanged(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with LiveTable() as table:
        table.emit(Started("[red]unit[/red]"))
        table.emit(Started("other"))
        table.emit(Finished("[red]unit[/red]", "failed", "[bold]x"))
    printed_errors = capsys.readouterr().err
    assert "[red]unit[/red]: failed: [bold]x" in printed_errors and " other \x1b[2m0 s" in printed_errors


def test_a_lease_of_a_run_protects_existing_blobs(project: Project) -> None:
    with open_run(project.spec, RunOptions(registry=str(project.registry)), Progress()) as run:
        (lease,) = list_leases(run.context.store)
        assert lease.what == "building tiny" and lease.expires - lease.at == BUILDING
    assert list_leases(run.context.store) == []


@pytest.mark.parametrize(
    "error", [IntegrityError("damaged"), UnavailableError("away"), StepError("stopped", kind="cancelled")]
)
def test_only_errors_about_the_step_are_reported(error: EnginesmithError) -> None:
    events = list[Event]()
    context = SimpleNamespace(progress=SimpleNamespace(emit=events.append))
    with pytest.raises(type(error)):
        fail_step("latency x", error, context)
    assert not events
    assert fail_step("latency x", ModelError("it has no y\nmore"), context).reason.startswith("latency x: it has no y")
    assert events == [Finished("latency x", "failed", "it has no y")]
