import shutil
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import onnx
import pytest

from enginesmith.core.errors import EnginesmithError
from enginesmith.core.reports.proof import Check
from pipeline.compile import composition
from pipeline.compile import plan as missed
from tests.one_server import OneServer
from tests.pipeline.projects import SEARCHED_INT8, Project, Result, capture, raising, write_project
from tests.pipeline.quantization.search.outlier_nets import WIDTH, noise, outlier_net
from tests.pipeline.quantization.small_nets import build
from tests.waiting import PATIENCE_S

WHY = "searched, because plain ranges missed quantization "
CHOICE = f"choose {SEARCHED_INT8}"


def write_data(project: Project, seed: int) -> None:
    np.savez(project.folder / "golden.npz", **noise(24, seed))


def make_loud(project: Project) -> Project:
    """A net with a channel a hundred times as loud as the others, which no range of a whole tensor fits."""
    onnx.save(outlier_net(), project.folder / "tiny.onnx")
    np.savez(project.folder / "calibration.npz", **noise(96, 1))
    write_data(project, 2)
    inputs = {"x": {"dtype": "float32", "shape": ["batch", WIDTH]}}
    project.change_spec(inputs=inputs, outputs=["z"], targets=["cpu"], golden={"data": "golden.npz"})
    return project


@pytest.fixture
def loud(project: Project) -> Project:
    return make_loud(project)


@pytest.fixture(scope="module")
def built_loud(tmp_path_factory: pytest.TempPathFactory, one_server: OneServer) -> tuple[Path, Result]:
    """The folder of its project and registry after one build, which did not end its search before it had an engine."""
    folder = tmp_path_factory.mktemp("loud")
    built_event, build, search = threading.Event(), composition.build, composition.search_missed

    def note(unit: Any, *others: Any) -> Any:
        engine = build(unit, *others)
        built_event.set()
        return engine

    def wait(*arguments: Any) -> Any:
        assert built_event.wait(PATIENCE_S), "no engine was built before the search ended"
        return search(*arguments)

    write_project(folder / "project")
    with capture() as printed_capture, pytest.MonkeyPatch.context() as patched_context:
        patched_context.setattr(composition, "build", note)
        patched_context.setattr(composition, "search_missed", wait)
        return folder, make_loud(Project(folder / "project", printed_capture)).build()


@pytest.fixture
def searched(built_loud: tuple[Path, Result], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Project:
    shutil.copytree(built_loud[0], tmp_path / "copy")
    return Project(tmp_path / "copy" / "project", capsys)


def rows(project: Project) -> dict[str, Any]:
    return {row["precision"]: row for row in project.build().json["engines"]}


def searches(project: Project) -> list[Path]:
    return [*(project.registry / "records" / "choose").glob("*.json")]


@pytest.mark.parametrize(("check", "is_searched"), [("sqnr_db", True), ("shape", True), ("outputs", False)])
def test_a_graph_that_selects_other_rows_is_searched_too(
    check: str, is_searched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(missed, "search_follows", lambda _: True)
    graph = Mock(proof=Mock(failed=[Check("quantization", check, "boxes", "golden", 3.0, 4.0, False)]))
    graph.variant.precision = "int8"
    export = Mock(proof=Mock(failed=[]), model=Mock(shards=()))
    actual = missed.find_missed(Mock(units=[Mock(action="failed", graph=graph)]), Mock(), export)
    assert bool(actual) is is_searched


def test_a_repair_is_searched_proven_and_reported_everywhere(
    built_loud: tuple[Path, Result], searched: Project
) -> None:
    result = built_loud[1]
    assert result.code == 0, result.err
    assert f"plain {SEARCHED_INT8}: plain ranges missed quantization " in result.err
    assert f"{CHOICE}: done" in result.err
    plain_row, row = (row for name in ("fp32", "int8") for row in result.json["engines"] if row["precision"] == name)
    assert plain_row["status"] == row["status"] == "proven" and WHY in row["reason"] and ", limit " in row["reason"]
    assert "of the multiplications with weights in int8, no node left in float by it" in row["reason"]
    assert row["notes"][0].startswith(WHY)
    assert WHY not in plain_row["reason"]
    assert WHY in searched.run("show", "tiny", "--json").out
    page = searched.page()
    assert "plain ranges missed quantization" in page
    assert WHY in searched.run("plan", searched.spec, "--json").out


@pytest.mark.slow
def test_another_run_and_another_golden_set_repeat_no_search(searched: Project) -> None:
    search_records = searches(searched)
    assert len(search_records) == 1
    second_build = searched.build()
    assert second_build.json["cached"] and f"{CHOICE}: done" not in second_build.err
    write_data(searched, 3)
    assert f"{CHOICE}: cached" in searched.build().err and searches(searched) == search_records


@pytest.mark.slow
def test_never_leaves_a_failure_and_the_plan_describes_a_search(loud: Project) -> None:
    loud.change_spec(quantization={"search": "never"})
    row = rows(loud)["int8"]
    assert row["status"] == "failed" and "searched" not in row["reason"] and not searches(loud)
    loud.change_spec(quantization=None)
    planned_document = loud.run("plan", loud.spec, "--no-export", "--json").json
    (unit,) = [unit for unit in planned_document["units"] if unit["precision"] == "int8"]
    assert unit["action"] == "unknown" and unit["reason"].startswith("plain ranges missed quantization ")
    assert unit["reason"].endswith("build searches for a better quantization; the action is known after the search")
    assert planned_document["missing"] == [f"search of {SEARCHED_INT8}"]
    assert "1 build" not in loud.run("plan", loud.spec, "--no-export").out and not searches(loud)


def test_a_first_plan_predicts_the_search(loud: Project) -> None:
    units = loud.run("plan", loud.spec, "--no-export", "--json").json["units"]
    message = {unit["precision"]: "if plain calibration misses the limits" in unit["reason"] for unit in units}
    assert message == {"fp32": False, "int8": True}
    loud.change_spec(quantization={"search": "never"})
    assert "searched if" not in loud.run("plan", loud.spec, "--no-export", "--json").out


def test_limits_that_only_float_keeps_refuse_the_unit(loud: Project) -> None:
    loud.change_spec(validation={"limits": {"int8": {"quantization": {"sqnr_db": 110}}}})
    unit = rows(loud)
    assert unit["fp32"]["status"] == "proven" and unit["int8"]["status"] == "refused"
    assert "0 nodes compute in int8" in unit["int8"]["reason"]
    assert "the graph's limits: quantized alone it leaves" in unit["int8"]["reason"] and WHY in unit["int8"]["reason"]


def test_a_cast_whose_bias_hides_the_variation_ends_in_fp32(project: Project) -> None:
    weights = np.random.default_rng(0).standard_normal((8, 4)) * [0.01, 1, 1, 1]
    text, values = "m = MatMul(x, w) logits = Add(m, b)", {"w": weights, "b": [-1000.0, 0, 0, 0]}
    onnx.save(build("float[batch,8] x", "float[batch,4] logits", text, values), project.folder / "tiny.onnx")
    project.change_spec(precisions=["fp32", "fp16"], targets=["cpu"], golden={"data": "golden.npz", "labels": "label"})
    row = rows(project)["fp16"]
    assert row["status"] == "proven" and "in 16 bits an output missed its limits" in " ".join(row["notes"])


def test_a_failed_search_costs_no_other_unit(loud: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        missed, "search_for_limits", raising(EnginesmithError("out of memory; run it on a machine with more memory"))
    )
    result = loud.build()
    actual = {row["precision"]: row for row in result.json["engines"]}
    assert result.code == 1 and result.json["version"] == "1" and actual["fp32"]["status"] == "proven"
    assert actual["int8"]["status"] == "failed"
    assert "the search that followed failed: out of memory" in actual["int8"]["reason"]


@pytest.mark.slow
def test_failures_without_a_possible_repair_are_not_searched(loud: Project) -> None:
    """Golden samples that were calibrated with fail the graph whatever int8 takes."""
    np.savez(loud.folder / "golden.npz", **noise(24, 1))
    np.savez(loud.folder / "calibration.npz", **noise(24, 1))
    row = rows(loud)["int8"]
    assert row["status"] == "failed" and "searched" not in row["reason"] and not searches(loud)
