import json

import numpy as np
import pytest
import yaml

from enginesmith.core.errors import ModelError, StepError
from enginesmith.core.names import parse_reference
from enginesmith.registry.versions.lookup import locate
from pipeline.compile.steps.attributions import Suspect
from pipeline.values import NOT_BUILT
from tests.pipeline.projects import CPU_INT8, Project, raising, weights, write_data, write_model
from validation.attribution.result import attributions

GRAPH = f"graph {CPU_INT8}"


@pytest.fixture
def loud(project: Project) -> Project:
    """A channel of x that is loud in calibration and means nothing: int8 has no step left for the other channels."""
    values = weights()
    values["w1"][7] = 1e-5
    write_model(project.folder / "tiny.onnx", values)
    write_data(project.folder)
    samples = np.random.default_rng(1).normal(size=(64, 8)).astype(np.float32)
    samples[0, 7] = 1000
    np.savez(project.folder / "calibration.npz", x=samples)
    project.change_spec(targets=["cpu"], precisions=["fp32", "int8"], golden={"data": "golden.npz", "labels": "label"})
    project.change_spec(quantization={"search": "never"})  # which would repair it
    return project


def test_a_failed_build_names_the_node_and_proposes_a_repair(loud: Project) -> None:
    result = loud.build("--quiet")
    assert result.code == 1
    good_engine, failed_engine = result.json["engines"]
    assert "attribution" not in good_engine and failed_engine["status"] == "failed"
    (item,) = failed_engine["attribution"]
    assert item["stage"] == "quantization" and item["name"] == GRAPH and item["headline"].startswith("node (MatMul)")
    store, manifest = loud.published()
    actual = attributions(store, manifest)[GRAPH]
    assert [row.node for row in actual.blamed] == ["node"] and actual.proposal is not None
    expected = {"quantization": {"overrides": [{"match": "node", "precision": "fp32"}]}}
    assert yaml.safe_load(actual.proposal.snippet or "") == expected
    assert item["snippet"] == actual.proposal.snippet and not any("attribution" in name for name in manifest.sources)
    page = loud.page()
    assert "Which node drifted" in page and "with 1 of 2 groups in float" in page and "cpu int8 onnxruntime" in page

    words = ("debug", "attribute", "tiny", "--target", "cpu", "--precision", "int8")
    again = loud.run(*words)
    assert again.code == 1 and "MatMul" in again.out and '- {match: "node", precision: fp32}' in again.out
    assert f"attribute {GRAPH}: cached" in again.err and "it was not built" in again.out
    graph, engine = loud.run(*words, "--json").json["attributions"]
    assert graph["attribution"]["format"] == 1 and graph["attribution"]["finding"] == "blamed"
    assert engine["attribution"] is None and not engine["failed"]


def test_proven_units_are_published_before_failures_are_analysed(loud, monkeypatch):
    def run_out(suspect: Suspect, *_: object) -> None:
        manifest = locate(loud.store, parse_reference("tiny:candidate")).manifest
        assert [entry.status for entry in manifest.engines] == ["proven", "failed"]
        raise StepError("attribute graph int8: still running after its limit of 300 s", "timeout")

    monkeypatch.setattr("pipeline.compile.steps.attributions._run_attribution", run_out)
    result = loud.build()
    assert result.code == 1 and result.json["version"] == "1" and result.json["channel"] == "candidate"
    assert "limit of 300 s" in result.json["engines"][1]["attribution"][0]["headline"]
    monkeypatch.undo()
    # Found by the next run, it is added to the version and to its page, and is printed to be pasted into the spec.
    second_result = loud.run("build", loud.spec, "--quiet")
    snippet = 'quantization:\n  overrides:\n    - {match: "node", precision: fp32}\n'
    assert second_result.code == 1 and "tiny@1 unchanged" in second_result.out and snippet in second_result.out
    place = loud.registry / "models" / "tiny" / "versions" / "1"
    (actual,) = json.loads((place / "report.json").read_text())["attributions"]
    assert actual["name"] == GRAPH and actual["units"] == ["cpu int8 onnxruntime"]
    assert "Which node drifted" in (place / "report.html").read_text()
    times_before = {path: path.stat().st_mtime_ns for path in place.rglob("*") if path.is_file()}
    assert loud.run("build", loud.spec, "--quiet").code == 1
    assert {path: path.stat().st_mtime_ns for path in place.rglob("*") if path.is_file()} == times_before


def test_a_failing_graph_is_built_for_no_target(loud: Project) -> None:
    loud.change_spec(targets=["cpu", "sm_89"])
    loud.change_spec(validation={"attribution": "off"})
    result = loud.build()
    assert result.code == 1 and result.json["version"] == "1"
    failed_engines = [engine for engine in result.json["engines"] if engine["precision"] == "int8"]
    assert len(failed_engines) == 2
    for engine in failed_engines:
        assert engine["status"] == "failed" and engine["digest"] is None and engine["seconds"] == 0
        assert engine["reason"].startswith("quantization ") and NOT_BUILT in engine["notes"]
        assert engine["checks"]["failed"] >= 1
    assert "not built: its graph failed: quantization" in result.err
    planned_result = loud.run("plan", loud.spec, "--no-export", "--json")
    assert planned_result.code == 1, "a unit that failed fails again"
    assert {unit["action"] for unit in planned_result.json["units"] if unit["precision"] == "int8"} == {"failed"}
    second_build = loud.build()
    assert second_build.json["cached"] and second_build.json["version"] == "1"


def test_a_version_without_such_an_engine_lists_its_engines(built: Project) -> None:
    result = built.run("debug", "attribute", "tiny", "--target", "sm_90")
    assert result.code == 2 and "has no engine for sm_90; it has: cpu fp32 onnxruntime" in result.err
    result = built.run("debug", "attribute", "tiny", "--target", "sm_89", "--precision", "fp32", "--json", "--quiet")
    (attribution,) = result.json["attributions"]
    assert result.code == 0 and attribution["attribution"] is None and "cannot be tapped yet" in attribution["headline"]


def test_a_failed_attribution_gives_its_reason_and_is_no_success(built, monkeypatch):
    monkeypatch.setattr(
        "pipeline.compile.steps.attributions._run_attribution",
        raising(ModelError("part-1.onnx: onnxruntime cannot read it: [ShapeInferenceError]")),
    )
    arguments = ("debug", "attribute", "tiny", "--target", "cpu", "--precision", "fp32", "--quiet")
    result = built.run(*arguments)
    assert result.code == 1 and "the attribution failed: part-1.onnx: onnxruntime cannot read it" in result.out
    (only,) = built.run(*arguments, "--json").json["attributions"]
    assert only["failed"] and only["attribution"] is None and "ShapeInferenceError" in only["headline"]
