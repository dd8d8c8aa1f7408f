"""`--log-format json`: whatever a command says on stderr is one JSON object a line."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline.projects import Project


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_errors_are_events(project: Project) -> None:
    done = project.build("--log-format", "json", "--precision", "bf16")
    (event,) = events(done.err)
    assert done.code == 2 and event["event"] == event["level"] == "error" and "bf16" in event["message"]


def test_remarks_are_events_and_the_result_stays_on_stdout(built: Project, tmp_path: Path) -> None:
    words = ("--dest", tmp_path / "engines", "--target", "cpu", "--log-format", "json")
    done = built.run("pull", "tiny:candidate", "--follow", "--once", *words, "--json")
    (event,) = events(done.err)
    assert done.code == 0 and event["event"] == "remark" and "tiny:candidate now serves version 1" in event["message"]
    assert done.json["swapped"] is True


def test_the_environment_may_choose(built: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINESMITH_LOG_FORMAT", "json")
    assert {event["event"] for event in events(built.build().err)} >= {"began", "finished", "verdict", "concluded"}
    proven = built.run("validate", "tiny", "--target", "cpu", "--json")
    assert {event["unit"] for event in events(proven.err)} >= {"prove cpu fp32 onnxruntime"}


def test_a_flow_has_its_own_log(built: Project) -> None:
    done = built.build("--runner", "prefect", "--log-format", "json")
    assert done.code == 2 and "--runner inprocess" in done.err
