import json
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from builders.execution.jobs import Usage
from pipeline.progress import JsonLines, Lines, LiveTable, Progress, by_model, together
from pipeline.progress.display import Clocks
from pipeline.progress.events import (
    Event,
    Finished,
    PhaseEntered,
    Planned,
    Predicted,
    Printed,
    ProcessEnded,
    Retrying,
    RunBegan,
    Started,
    VerdictReached,
    VersionSettled,
    Waiting,
)
from tests.pipeline.orchestration.runs.runs import EXPECTED, UNIT, plan
from tests.pipeline.projects import Project


class Hears(Progress):
    def __init__(self) -> None:
        self.heard: list[Event] = []

    def emit(self, event: Event) -> None:
        self.heard.append(event)


class Breaks(Progress):
    def emit(self, event: Event) -> None:
        raise ValueError("it broke")


def test_a_broken_listener_gets_no_more_events_and_the_others_do(capsys: pytest.CaptureFixture[str]) -> None:
    first_listener, last_listener = Hears(), Hears()
    all_of_them_progress = together(first_listener, Breaks(), last_listener)
    all_of_them_progress.emit(PhaseEntered("unit", "one"))
    all_of_them_progress.emit(PhaseEntered("unit", "two"))
    assert first_listener.heard == last_listener.heard == [PhaseEntered("unit", "one"), PhaseEntered("unit", "two")]
    assert capsys.readouterr().err.count("it broke") == 1


def test_a_broken_display_stops_the_run() -> None:
    with pytest.raises(ValueError, match="it broke"):
        together(Breaks(), Hears()).emit(PhaseEntered("unit", "one"))


def test_an_outcomes_text_is_the_state_with_its_reason() -> None:
    assert Finished("unit", "failed", "it has: two").outcome == "failed: it has: two"
    assert Finished("unit", "built", words="built in 2.0 s").outcome == "built in 2.0 s"
    assert Finished("unit", "cached").outcome == "cached" and Finished("unit").outcome == "done"


def test_a_clock_shows_phase_and_prediction() -> None:
    clocks = Clocks()
    clocks.follow(Predicted("unit", EXPECTED))
    clocks.start("unit")
    clocks.follow(PhaseEntered("unit", "compiling"))
    (clock,) = clocks.list_running()
    assert clock.text == "0 s, compiling, ~70 s left (predicted from 3 builds of this unit)"
    assert clocks.stop("unit") is not None and clocks.stop("unit") is None and clocks.list_running() == []
    assert clocks.note_wait("unit", "a slot") and not clocks.note_wait("unit", "a slot")


def test_a_countdown_is_reported_rarely_and_a_new_reason_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks, current_values = Clocks(), [100.0]
    monkeypatch.setattr("pipeline.progress.display.time.monotonic", lambda: current_values[0])
    messages = []
    for time_s in range(0, 60, 2):
        current_values[0] = 100.0 + time_s
        messages.append(
            clocks.note_wait(
                "unit", f"a node with sm_90: none yet, {(60 - time_s) // 60}:{(60 - time_s) % 60:02d} left"
            )
        )
    assert sum(messages) == 4, "first, and each 15 seconds"
    assert clocks.note_wait("unit", "room on the cluster: 2 of 4 nodes can take it")
    assert clocks.waits() == [(["unit"], "room on the cluster: 2 of 4 nodes can take it")]


def test_units_with_the_same_wait_are_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    shown_lines, reason = Lines(), "room on the cluster: 1 of 1 node can take it"
    for number in range(14):
        shown_lines.emit(Waiting(f"unit {number}", reason))
    shown_lines.emit(Waiting("other", "a slot"))
    for number in range(14):
        shown_lines.emit(Started(f"unit {number}"))
    shown_lines.emit(Waiting("late", reason))
    waits = [line.split("] ")[1] for line in capsys.readouterr().err.splitlines() if "waiting" in line]
    assert waits == [f"unit 0: waiting: {reason}", "other: waiting: a slot", f"late: waiting: {reason}"]
    log: list[str] = []
    lines = JsonLines(log.append)
    for number in range(14):
        lines.emit(Waiting(f"unit {number}", reason))
    assert len(log) == 14, "a program wants to know of each"


def test_lines_report_waiting_and_retries(capsys: pytest.CaptureFixture[str]) -> None:
    shown_lines = Lines()
    shown_lines.emit(Waiting("unit", "for a [slot]"))
    shown_lines.emit(Waiting("unit", "for a [slot]"))
    shown_lines.emit(Started("unit", "node-7"))
    shown_lines.emit(Retrying("unit", "killed by SIGSEGV"))
    err = capsys.readouterr().err
    assert err.count("unit: waiting: for a [slot]") == 1 and "unit: once more: killed by SIGSEGV" in err


def test_the_table_shows_waiting_units(capsys: pytest.CaptureFixture[str]) -> None:
    table = LiveTable()
    for number in range(5):
        table.emit(Waiting(f"unit {number}", f"a node: none yet, 1:0{number} left"))
    for number in (80, 89):
        table.emit(Waiting(f"sm_{number} fp16", f"a slot of enginesmith-gpu-sm_{number}"))
    table.emit(Waiting("lock", "compiling [tiny] is running on vm"))
    table.emit(Retrying("unit 1", "killed by SIGSEGV"))
    assert "unit 1: once more: killed by SIGSEGV" in capsys.readouterr().err
    Console(file=sys.stdout, width=120).print(table._draw())
    assert [line.strip() for line in capsys.readouterr().out.splitlines()] == [
        "… unit 0, unit 1, unit 2 and 2 more: waiting: a node: none yet, 1:00 left",
        "… sm_80 fp16: waiting: a slot of enginesmith-gpu-sm_80",
        "… sm_89 fp16: waiting: a slot of enginesmith-gpu-sm_89",
        "… lock: waiting: compiling [tiny] is running on vm",
    ]
    table.emit(Started("unit 0"))
    table.emit(Finished("lock", "done", "waited 12 s"))
    for number in (80, 89):
        table.emit(Started(f"sm_{number} fp16"))
    assert table._clocks.waits() == [([f"unit {number}" for number in range(1, 5)], "a node: none yet, 1:01 left")]


def test_steps_of_several_models_name_their_model(capsys: pytest.CaptureFixture[str]) -> None:
    shown_lines = by_model(Lines()).of_run("digits", "run-1")
    shown_lines.emit(Waiting("lock", "compiling digits is running on vm"))
    shown_lines.emit(Started("export"))
    with shown_lines.watch("export"):
        pass
    shown_lines.emit(Finished("export"))
    shown_lines.emit(VerdictReached("cpu fp32", "proven", "3 checks"))
    shown_lines.emit(VersionSettled("digits@1", "published"))
    assert [line.partition("] ")[2] for line in capsys.readouterr().err.splitlines()] == [
        "digits lock: waiting: compiling digits is running on vm",
        "digits export ...",
        "digits export: done",
        "verdict on digits cpu fp32: proven: 3 checks",
        "digits@1: published",
    ]
    lines: list[str] = []
    by_model(JsonLines(lines.append)).of_run("digits", "run-1").emit(Finished("export"))
    event = json.loads(lines[0])
    assert (event["model"], event["unit"]) == ("digits", "export"), "a field of its own"


def test_json_lines_are_one_object_each_with_run_model_and_unit() -> None:
    lines: list[str] = []
    both_lines = JsonLines(lines.append)
    log, other = both_lines.of_run("digits", "run-1"), together(both_lines, Progress()).of_run("other", "run-2")
    log.emit(RunBegan("digits", "run-1"))
    log.emit(Planned(plan()))
    log.emit(Predicted(UNIT, EXPECTED))
    log.emit(Waiting(UNIT, "for a slot"))
    log.emit(Started(UNIT, "node-7"))
    log.emit(PhaseEntered(UNIT, "compiling"))
    log.emit(Printed(UNIT, "never in the log of events"))
    log.emit(Retrying(UNIT, "line one\nline two"))
    log.emit(ProcessEnded(UNIT, Usage(1.23456, 10.0)))
    log.emit(Finished(UNIT, "failed", "out of memory"))
    log.emit(VerdictReached(UNIT, "unproven", "no GPU"))
    assert len(lines) == 10
    other.emit(PhaseEntered(UNIT, "of a catalog's other run"))
    assert json.loads(lines.pop())["run"] == "run-2"
    events = [json.loads(line) for line in lines]
    assert all("\n" not in line for line in lines)
    assert all(event["run"] == "run-1" and event["model"] == "digits" and event["time"] for event in events)
    assert [event["event"] for event in events] == [
        "began", "planned", "predicted", "waiting", "started", "phase", "retrying", "ended", "finished", "verdict",
    ]  # fmt: skip
    assert (events[1]["build"], events[1]["cached"], events[1]["refused"]) == (1, 1, 1)
    assert {event["unit"] for event in events[2:]} == {UNIT}
    assert events[-2] | {"level": "error", "state": "failed", "reason": "out of memory"} == events[-2]
    assert events[-1]["level"] == "warning" and events[7]["seconds"] == 1.235


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_errors_are_events(project: Project) -> None:
    result = project.build("--log-format", "json", "--precision", "bf16")
    (event,) = events(result.err)
    assert result.code == 2 and event["event"] == event["level"] == "error" and "bf16" in event["message"]


def test_remarks_are_events_and_the_result_stays_on_stdout(built: Project, tmp_path: Path) -> None:
    words = ("--dest", tmp_path / "engines", "--target", "cpu", "--log-format", "json")
    result = built.run("pull", "tiny:candidate", "--follow", "--once", *words, "--json")
    (event,) = events(result.err)
    assert result.code == 0 and event["event"] == "remark" and "tiny:candidate now serves version 1" in event["message"]
    assert result.json["swapped"] is True


def test_an_environment_variable_sets_the_log_format(built: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINESMITH_LOG_FORMAT", "json")
    assert {event["event"] for event in events(built.build().err)} >= {"began", "finished", "verdict", "concluded"}
    proven_result = built.run("validate", "tiny", "--target", "cpu", "--json")
    assert {event["unit"] for event in events(proven_result.err)} >= {"prove cpu fp32 onnxruntime"}


def test_a_flow_uses_its_own_log(built: Project) -> None:
    result = built.build("--runner", "prefect", "--log-format", "json")
    assert result.code == 2 and "--runner inprocess" in result.err
