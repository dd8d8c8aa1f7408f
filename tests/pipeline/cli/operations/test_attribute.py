"""`enginery attribute`: it says again what a build said, and what a version lacks."""

import json

import numpy as np
import pytest
import yaml

from enginery.core.errors import ModelError
from enginery.core.names import parse_reference
from enginery.registry.store.base import open_store
from enginery.registry.versions.lookup import locate
from tests.pipeline.projects import Project, weights, write_data, write_model
from validation.attribution.result import attributions

GRAPH = "graph int8 (uint8 activations, fp32 elsewhere)"


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
    return project


def test_a_build_that_fails_names_the_node_and_proposes_what_repairs_it(loud: Project) -> None:
    done = loud.build("--quiet")
    assert done.code == 1
    fine, failed = done.json["engines"]
    assert "attribution" not in fine and failed["status"] == "failed"
    (told,) = failed["attribution"]
    assert told["joint"] == "quantization" and told["name"] == GRAPH and told["headline"].startswith("node (MatMul)")
    store = open_store(loud.registry)
    manifest = locate(store, parse_reference("tiny")).manifest
    found = attributions(store, manifest)[GRAPH]
    assert [row.node for row in found.blamed] == ["node"] and found.proposal is not None
    assert yaml.safe_load(found.proposal.snippet or "") == {
        "quantization": {"overrides": [{"match": "node", "precision": "fp32"}]}
    }
    assert told["digest"] in manifest.blobs()
    page = (loud.registry / "models" / "tiny" / "versions" / "1" / "report.html").read_text()
    assert "Which node drifted" in page and "leave 1 of 2 groups in float" in page and "cpu int8 onnxruntime" in page

    out = loud.folder / "out" / "found.json"
    again = loud.run("attribute", "tiny", "--target", "cpu", "--precision", "int8", "--out", out)
    assert again.code == 1 and "MatMul" in again.out and '- {match: "node", precision: fp32}' in again.out
    assert f"attribute {GRAPH}: cached" in again.err and "nothing failed at the engine stage" in again.out
    graph, engine = json.loads(out.read_text())["attributions"]
    assert graph["attribution"]["format"] == 1 and graph["attribution"]["finding"] == "blamed"
    assert engine["attribution"]["finding"] == "nothing-failed" and engine["attribution"]["rows"]


def test_a_version_without_such_an_engine_says_what_it_has(built: Project) -> None:
    done = built.run("attribute", "tiny", "--target", "sm_90")
    assert done.code == 2 and "has no engine for sm_90; it has: cpu fp32 onnxruntime" in done.err
    done = built.run("attribute", "tiny", "--target", "sm_89", "--precision", "fp32", "--json", "--quiet")
    (only,) = done.json["attributions"]
    assert done.code == 0 and only["attribution"] is None and "cannot be tapped yet" in only["headline"]


def test_an_attribution_that_ends_with_an_error_says_why_and_is_no_success(
    built: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ModelError("part-1.onnx: onnxruntime cannot read it: [ShapeInferenceError]")

    monkeypatch.setattr("pipeline.compile.steps.attributions._run_attribution", fail)
    asked = ("attribute", "tiny", "--target", "cpu", "--precision", "fp32", "--quiet")
    done = built.run(*asked)
    assert done.code == 1 and "the attribution failed: part-1.onnx: onnxruntime cannot read it" in done.out
    (only,) = built.run(*asked, "--json").json["attributions"]
    assert only["failed"] and only["attribution"] is None and "ShapeInferenceError" in only["headline"]
