"""`enginesmith status` on runs of real builds, and on one that goes on."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from builders.execution.jobs import Job, Printed, ProcessEnded, Started, Usage, Watch, ignore_event
from enginesmith.core.errors import StepError
from enginesmith.core.text import precise_now
from enginesmith.registry.builds.build_history import History
from enginesmith.registry.store.base import open_store
from enginesmith.registry.store.layout import run_key, run_live_key
from pipeline.cli.models import report
from pipeline.compile.run_context import RunContext, Work
from pipeline.compile.steps import engines
from pipeline.orchestration.runs.recorder import new_run, record_run
from pipeline.progress.events import Planned
from pipeline.spec.model import load_spec
from tests.pipeline.orchestration.runs.runs import EXPECTED, UNIT, plan, run_state, running
from tests.pipeline.projects import Project, raising


@pytest.fixture
def going(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Project:
    """A registry in which one run goes on."""
    project = Project(tmp_path / "project", capsys)
    store = open_store(project.registry, create=True)
    run = replace(running(predicted=EXPECTED), beats_every_s=3600.0)  # however late it is looked at
    run = replace(run, heard_at=precise_now(), items=(replace(run.items[0], started_at=precise_now()),))
    store.create(run_key(run.id), run.to_bytes())
    store.create(run_live_key(run.id), json.dumps({UNIT: "layer 3 of 9\n"}).encode())
    return project


def test_status_shows_a_finished_build_with_units_and_logs(built: Project) -> None:
    listed_runs = built.run("status", "--json").json["runs"]
    assert [(run["model"], run["state"], run["version"]) for run in listed_runs] == [("tiny", "done", "1")]
    assert listed_runs[0]["units"] == "5 built, 1 refused"
    items = {item["name"]: item for item in built.run("status", "tiny", "--json").json["items"]}
    unit = items["sm_89 int8 tensorrt-rtx"]
    assert unit["state"] == "built" and unit["seconds"] > 0 and unit["peak_mib"] > 20 and unit["where"] == "here"
    assert unit["verdict"].startswith("unproven") and unit["log_bytes"] > 0
    assert items["cpu fp32 onnxruntime"]["verdict"].startswith("proven")
    assert items["export"]["state"] == "done" and not items["export"]["unit"]
    shown_output = built.run("status", "tiny").out
    assert "sm_75 has no FP32 GEMM" in shown_output and "export" not in shown_output.partition("where the time went")[0]
    assert "--log UNIT" in shown_output and "export" in shown_output.partition("where the time went")[2]
    assert "export" in built.run("status", "tiny", "--all").out.partition("where the time went")[0]
    assert unit["cpu_s"] > 0 and items["export"]["cpu_s"] > 0
    log = built.run("status", listed_runs[0]["run"], "--log", "sm_89 int8")
    assert "[INFO]" in log.out and log.code == 0


def test_status_shows_a_cached_run_and_the_next_build_is_predicted(built: Project) -> None:
    assert built.build("--quiet").code == 0
    runs = built.run("status", "--json").json["runs"]
    assert [run["units"] for run in runs] == ["5 cached, 1 refused", "5 built, 1 refused"]
    built.change_spec(targets=["sm_89"], precisions=["fp32"], backends={"tensorrt-rtx": {"workspace_mib": 64}})
    result = built.build("--log-format", "json")
    events = [json.loads(line) for line in result.err.splitlines()]
    (predicted_event,) = [event for event in events if event["event"] == "predicted"]
    assert predicted_event["unit"] == "sm_89 fp32 tensorrt-rtx" and predicted_event["basis"] == "1 build of this unit"
    assert predicted_event["seconds"] > 0 and predicted_event["peak_mib"] > 20
    assert {event["model"] for event in events} == {"tiny"} and len({event["run"] for event in events}) == 1
    finished_events = {event["unit"]: event for event in events if event["event"] == "finished"}
    assert finished_events["sm_89 fp32 tensorrt-rtx"]["state"] == "built"
    assert [event["phase"] for event in events if event["event"] == "phase"][-1] == "storing"
    assert events[0]["event"] == "began" and events[-1]["event"] == "concluded" and events[-1]["version"] == "2"


class Fails:
    """An executor whose jobs print a secret and die."""

    def run(self, job: Job, watch: Watch = ignore_event) -> Any:
        watch(Started(job.name))
        watch(Printed(job.name, "api_key=hunter2hunter2\nno room\n"))
        watch(ProcessEnded(job.name, Usage(1.0, 9000.0)))
        raise StepError("held 9000 MiB, password=hunter2hunter2", "memory", "api_key=hunter2hunter2")

    def cancel(self) -> None:
        pass


def test_a_failed_build_keeps_its_log_and_reason_without_credentials(project: Project) -> None:
    store = open_store(project.registry, create=True)
    planned_build = plan(store.put_bytes(b"graph"))
    with record_run(store, new_run("tiny", "tiny.yaml", store), lambda _: None) as tracker:
        tracker.emit(Planned(planned_build))
        context = RunContext(store, Fails(), Fails(), tracker)
        failure = engines.build(planned_build.units[0], Work(load_spec(project.spec), context)).failure
    assert failure and failure.kind == "memory" and "hunter2" not in failure.log
    (item,) = [item for item in project.run("status", "tiny", "--json").json["items"] if item["name"] == UNIT]
    assert (item["state"], item["why"], item["peak_mib"]) == ("failed", "held 9000 MiB, password=[hidden]", 9000.0)
    assert project.run("status", "tiny", "--log", UNIT).out == "api_key=[hidden]\nno room\n"
    second_prediction = History(store).predict("tiny", planned_build.units[0].request)
    assert second_prediction and second_prediction.peak_mib == 9000.0 and second_prediction.seconds is None


def test_a_live_run_shows_phase_prediction_and_the_end_of_its_log(going: Project) -> None:
    output = going.run("status", "digits").out
    assert "running" in output and "compiling" in output and "s left (predicted from 3 builds of this unit)" in output
    log = going.run("status", "digits", "--log", UNIT)
    assert log.out == "layer 3 of 9\n" and "so far" in log.err
    assert going.run("status").out.count("running") == 2, "the run, and its unit"


def test_watching_ends_with_the_run(going: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    store = going.store
    key = run_key(running().id)

    def meanwhile(_: float) -> None:
        content_before = store.read(key)
        store.replace(key, run_state().to_bytes(), content_before)

    monkeypatch.setattr(report.time, "sleep", meanwhile)
    result = going.run("status", "digits", "--watch")
    assert result.code == 0 and ": running" in result.out and ": done" in result.out


def test_watching_can_be_stopped(going: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report.time, "sleep", raising(KeyboardInterrupt()))
    result = going.run("status", "--watch")
    assert result.code == 0 and "the run goes on" in result.err


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("other",), 2, "no run or model 'other'"),
        (("digits", "--log", "sm_75"), 2, "no unit is 'sm_75' in"),
        (("--log", "sm_75"), 2, "--log needs a RUN or a MODEL"),
    ],
)
def test_the_error_names_missing_runs(going: Project, words: tuple[str, ...], code: int, message: str) -> None:
    result = going.run("status", *words)
    assert result.code == code and message in result.err


def test_an_empty_registry_names_the_next_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty_project = Project(tmp_path / "project", capsys)
    open_store(empty_project.registry, create=True)
    assert "has no builds yet; run `enginesmith build`" in empty_project.run("status").err
    assert empty_project.run("status", "--json").json == {"runs": []}


def test_a_deleted_log_is_reported(going: Project) -> None:
    store = going.store
    run = running(1, log="b" * 64, log_bytes=1, state="built")
    store.create(run_key(run.id), replace(run, heard_at=precise_now()).to_bytes())
    result = going.run("status", run.id, "--log", UNIT)
    assert result.code == 2 and "was deleted with `enginesmith registry gc`, or is lost" in result.err
