import threading
from dataclasses import replace
from typing import Any

import pytest

from builders.execution.local import LocalExecutor
from enginesmith.core.errors import DataError, StepError, UnavailableError
from enginesmith.core.types import QuantizationScheme
from enginesmith.registry.store.base import open_store
from pipeline.compile import composition
from pipeline.compile.run_context import RunContext, Work
from pipeline.compile.steps import graphs
from pipeline.spec.model import load_spec
from pipeline.values import Graph, GraphVariant, Observed, Recipe, StepFailure
from tests.pipeline.compile.test_steps import EXPORTED
from tests.pipeline.projects import Project, raising
from tests.waiting import PATIENCE_S

INT8 = GraphVariant("int8", QuantizationScheme("uint8", quantize_bias=True, float_precision="fp32"))


def context_of(project: Project) -> RunContext:
    executor = LocalExecutor(1)
    return RunContext(open_store(project.registry, create=True), executor, executor)


@pytest.fixture
def proven(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when a unit was judged."""
    judged_event, validate = threading.Event(), composition.validate

    def note(*arguments: Any) -> Any:
        result = validate(*arguments)
        judged_event.set()
        return result

    monkeypatch.setattr(composition, "validate", note)
    return judged_event


def test_fp32_is_proven_before_calibration_ends(project, proven, monkeypatch):
    observe = composition.observe

    def wait(*arguments: Any) -> Any:
        assert proven.wait(PATIENCE_S), "no engine was proven before calibration"
        return observe(*arguments)

    monkeypatch.setattr(composition, "observe", wait)
    project.change_spec(targets=["cpu"], precisions=["int8", "fp32"])
    result = project.build()
    assert result.code == 0, result.err
    planned_units = project.run("plan", project.spec, "--json").json["units"]
    assert [row["precision"] for row in result.json["engines"]] == [unit["precision"] for unit in planned_units]
    assert {row["status"] for row in result.json["engines"]} == {"proven"}
    second_build = project.build()
    assert second_build.json["cached"] and second_build.json["version"] == result.json["version"]


crash = raising(StepError("KeyError: 't'", "crash", "the log"))


@pytest.mark.slow
def test_failed_calibration_costs_no_other_precision(project, monkeypatch):
    """The failure stands in the build, the version, the page, the JSON and the exit code; the next build mends it."""
    monkeypatch.setattr(composition, "observe", crash)
    project.change_spec(targets=["cpu"], precisions=["fp32", "fp16", "int8"])
    result = project.build()
    rows = {row["precision"]: row for row in result.json["engines"]}
    assert result.code == 1 and result.json["version"] == "1"
    assert [rows[name]["status"] for name in ("fp32", "fp16", "int8")] == ["proven", "proven", "failed"]
    assert rows["int8"]["reason"] == "calibrate: KeyError: 't'"
    failure = rows["int8"]["failure"]
    assert (failure["kind"], failure["log"]) == ("crash", "the log") and "--precision int8" in failure["reproduce"]
    assert rows["fp16"]["notes"][0] == "written without measured ranges: calibrate: KeyError: 't'"
    shown_rows = {row["precision"]: row for row in project.run("show", "tiny", "--json").json["engines"]}
    assert shown_rows["int8"]["status"] == "failed" and "KeyError" in shown_rows["int8"]["reason"]
    page = project.page()
    assert "calibrate: KeyError" in page
    monkeypatch.undo()
    assert project.build().code == 0


@pytest.mark.parametrize("where", ["write_graph", "_check_graph"])
def test_an_unwritable_or_incomparable_graph_gives_the_reason(project, monkeypatch, where):
    graph = Graph(INT8, "c" * 64, (), (), recipe=Recipe("d" * 64))
    monkeypatch.setattr(graphs, "write_graph", lambda *_: graph)
    monkeypatch.setattr(graphs, where, crash)
    result = graphs.quantize(INT8, EXPORTED, None, {}, Work(load_spec(project.spec), context_of(project)))
    assert result.failure == StepFailure(f"graph {INT8.name}: KeyError: 't'", "crash", "the log")
    assert (result.variant, result.model) == (INT8, EXPORTED.model.digest)


def test_a_failed_search_fails_its_waiting_kinds(project, monkeypatch):
    spec, context, kind = load_spec(project.spec), context_of(project), INT8.searched
    assert kind is not None
    monkeypatch.setattr(composition, "choose", crash)
    ranges = Observed("d" * 64, "f" * 64, "e" * 64, 3)
    run = composition.Run(spec, context)
    failed_search = run._search([kind], EXPORTED, ranges)
    assert failed_search == {kind: StepFailure("search int8: KeyError: 't'", "crash", "the log")}
    assert graphs.quantize(INT8, EXPORTED, ranges, failed_search, run).failure == failed_search[kind]
    observed_failure = StepFailure("calibrate: no")  # without ranges nothing is searched
    assert run._search([kind], EXPORTED, observed_failure) == {kind: observed_failure}


def test_an_unreachable_service_ends_the_run(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says nothing about a precision."""
    monkeypatch.setattr(composition, "observe", raising(UnavailableError("the registry does not answer")))
    project.change_spec(targets=["cpu"], precisions=["fp32", "int8"])
    result = project.build()
    assert result.code == 3 and not result.out


@pytest.mark.parametrize("required", ["cpu int8", "cpu fp32"])
def test_a_required_unit_without_a_graph_stops_the_run(project, monkeypatch, required):
    monkeypatch.setattr(composition, "observe", raising(DataError("sample 3 is NaN")))
    project.change_spec(targets=["cpu"], precisions=["fp32", "int8"], build={"required": [required]})
    result = project.build()
    assert (result.code, "nothing is published" in result.err) == (1, required == "cpu int8")
    assert "calibrate: sample 3 is NaN" in result.err


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
def test_a_required_unit_that_is_refused_stops_the_run_early(project, monkeypatch, refused, step):
    calls: list[Any] = []
    monkeypatch.setattr(composition, step, lambda *arguments: calls.append(arguments))
    refuse(monkeypatch, refused)
    project.change_spec(targets=["cpu"], precisions=["fp32", "int8"], build={"required": [f"cpu {refused}"]})
    result = project.build()
    assert result.code == 1 and "error: units that the spec requires are refused, so nothing is published" in result.err
    assert f"\n  cpu {refused} onnxruntime: no" in result.err and not calls
    assert not (project.registry / "models").exists()


def test_the_exported_model_is_planned_before_any_sample_is_observed(project, monkeypatch):
    """Batches are made when they are asked for: nobody who asks for the first alone waits for the second."""
    project.change_spec(targets=["cpu"], precisions=["fp32", "int8"])
    monkeypatch.setattr(composition, "observe", crash)
    run = composition.Run(load_spec(project.spec), context_of(project))
    first_unit = next(run.plan(run.quantize(EXPORTED)))
    assert [unit.name for unit in first_unit.plan.units] == ["cpu fp32 onnxruntime"]
    update = {"required": ("cpu int8",)}
    required_run = replace(run, spec=run.spec.model_copy(update={"build": run.spec.build.model_copy(update=update)}))
    (both_plan,) = required_run.plan(required_run.quantize(EXPORTED))
    assert {unit.name: unit.action for unit in both_plan.plan.units}["cpu int8 onnxruntime"] == "failed"
