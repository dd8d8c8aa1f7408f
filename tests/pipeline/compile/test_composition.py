"""Units of the exported model itself wait for nothing that the others need; order and results are those of the plan."""

import threading
from typing import Any

import pytest

from enginery.core.errors import DataError
from pipeline.compile import composition
from tests.pipeline.projects import Project


@pytest.fixture
def proven(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when a unit was judged."""
    judged, validate = threading.Event(), composition.validate

    def note(*arguments: Any) -> Any:
        found = validate(*arguments)
        judged.set()
        return found

    monkeypatch.setattr(composition, "validate", note)
    return judged


def test_fp32_is_proven_before_calibration_ends(
    project: Project, proven: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    observe = composition.observe

    def wait(*arguments: Any) -> Any:
        assert proven.wait(120), "no engine was proven before calibration"
        return observe(*arguments)

    monkeypatch.setattr(composition, "observe", wait)
    project.change_spec(targets=["cpu"], precisions=["int8", "fp32"])
    done = project.build()
    assert done.code == 0, done.err
    planned = project.run("plan", project.spec, "--json").json["units"]
    assert [row["precision"] for row in done.json["engines"]] == [unit["precision"] for unit in planned]
    assert {row["status"] for row in done.json["engines"]} == {"proven"}
    again = project.build()
    assert again.json["cached"] and again.json["version"] == done.json["version"]


def test_what_is_under_way_when_calibration_fails_is_kept(
    project: Project, proven: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise DataError("calibration.data is gone")

    monkeypatch.setattr(composition, "observe", fail)
    project.change_spec(targets=["cpu"], precisions=["fp32", "int8"])
    done = project.build()
    assert done.code == 2 and "calibration.data is gone" in done.err
    assert proven.is_set()
    monkeypatch.undo()
    assert "cpu fp32 onnxruntime: cached" in project.build().err


def refuse(monkeypatch: pytest.MonkeyPatch, refused: str) -> None:
    """Have a precision be refused when its units are planned."""
    monkeypatch.setattr(
        "pipeline.compile.plan._refusal", lambda _, item, *__: "no" if item.precision == refused else None
    )


@pytest.mark.parametrize(
    ("refused", "step"),
    [("fp32", "observe"), ("int8", "build")],
    ids=["a-plain-unit-before-calibration", "another-before-anything-is-built"],
)
def test_a_required_unit_that_is_refused_stops_the_run_early(
    project: Project, monkeypatch: pytest.MonkeyPatch, refused: str, step: str
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(composition, step, lambda *arguments: calls.append(arguments))
    refuse(monkeypatch, refused)
    project.change_spec(targets=["cpu"], precisions=["fp32", "int8"], build={"required": [f"cpu {refused}"]})
    done = project.build()
    assert done.code == 1 and "units that the spec requires are refused" in done.err and not calls
