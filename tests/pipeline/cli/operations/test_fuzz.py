"""`enginery fuzz` over a published engine: what it prints, its exit code, and an engine that is not the graph's."""

import json
import shlex
from pathlib import Path

from builders.execution.jobs import WorkerContext
from enginery.core.types import Dim, TensorSpec
from enginery.registry.manifest import request_of
from enginery.registry.store.base import open_store
from enginery.registry.versions.lookup import load
from pipeline.operations.fuzz import FuzzEngine, FuzzTerms
from pipeline.values import EngineBlob, ModelShapes
from tests.pipeline.projects import Project, weights, write_model


def test_a_published_engine_is_fuzzed_and_the_same_seed_gives_the_same_report(built: Project) -> None:
    built.folder.joinpath("traffic.json").write_text(json.dumps({"batch": {"3": 5, "7": 1}}))
    words = ("fuzz", "tiny", "--target", "cpu", "--precision", "int8", "--seed", 4, "--cases", 12, "--json")
    done = built.run(*words, "--histogram", built.folder / "traffic.json")
    assert done.code == 0, done.err
    report = done.json
    assert (report["seed"], report["passed"], report["precision"]) == (4, True, "int8")
    assert {case["sizes"]["batch"] for case in report["cases"] if case["draw"]} <= {3, 7}
    assert [case["sizes"]["batch"] for case in report["cases"] if case["outside"]] == [9]
    built.folder.joinpath("traffic.json").write_text(json.dumps({"length": {"3": 5}}))
    refused = built.run(*words, "--histogram", built.folder / "traffic.json")
    assert refused.code == 2
    assert "dim 'length' is not one of the model's" in refused.err


def test_an_engine_from_another_version_fails_and_each_failure_names_the_command_that_repeats_it(
    built: Project, tmp_path: Path
) -> None:
    store = open_store(built.registry)
    manifest = load(store, "tiny", "1")
    entry = next(item for item in manifest.engines if item.unit == "cpu fp32 onnxruntime")
    write_model(tmp_path / "other.onnx", weights(seed=9))
    shapes = ModelShapes((TensorSpec("x", "float32", ("batch", 8)),), (Dim("batch", 1, 4, 8),))
    terms = FuzzTerms(1, 4, ("enginery", "fuzz", "tiny@1"))
    (tmp_path / "work").mkdir()
    other = store.put_file(tmp_path / "other.onnx")
    fuzz = FuzzEngine(EngineBlob(request_of(entry), other, ".onnx"), manifest.sources["golden"], shapes, {}, terms)
    report = fuzz.run(WorkerContext(tmp_path / "work", store.uri))
    assert report.passed is False
    failed = report.smallest[0]
    assert failed.sizes == {"batch": 1}
    words = shlex.split(failed.reproduce)
    assert words[:3] == [*terms.command]
    assert words[3:] == ["--only", failed.case]
