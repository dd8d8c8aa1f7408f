import shlex

import pytest

from builders.execution.jobs import WorkerContext
from enginesmith.core.types import Dim, TensorSpec
from enginesmith.registry.manifest import request_of
from pipeline.operations.golden import FuzzEngine
from pipeline.values import EngineBlob, ModelShapes
from tests.pipeline.projects import Project, weights, write_model


def test_a_published_engine_is_fuzzed_and_the_same_seed_gives_the_same_report(built: Project) -> None:
    words = ("debug", "fuzz", "tiny", "--target", "cpu", "--precision", "int8", "--seed", 4, "--cases", 12, "--json")
    result = built.run(*words)
    assert result.code == 0, result.err
    report = result.json
    assert (report["seed"], report["passed"], report["precision"]) == (4, True, "int8")
    assert built.run(*words).json == report
    assert [case["sizes"]["batch"] for case in report["cases"] if case["outside"]] == [9]


def test_an_engine_from_another_version_fails_and_failures_name_a_repeating_command(built, tmp_path):
    store, manifest = built.published()
    entry = next(item for item in manifest.engines if item.unit == "cpu fp32 onnxruntime")
    write_model(tmp_path / "other.onnx", weights(seed=9))
    shapes = ModelShapes((TensorSpec("x", "float32", ("batch", 8)),), (Dim("batch", 1, 4, 8),))
    (tmp_path / "work").mkdir()
    other_text = store.put_file(tmp_path / "other.onnx")
    command, engine = ("enginesmith", "debug", "fuzz", "tiny@1"), EngineBlob(request_of(entry), other_text, ".onnx")
    fuzz = FuzzEngine(engine, manifest.sources["golden"], shapes, {}, 1, 4, command)
    report = fuzz.run(WorkerContext(tmp_path / "work", store.uri))
    assert report.passed is False
    failed_case = report.smallest[0]
    assert failed_case.sizes == {"batch": 1}
    words = shlex.split(failed_case.reproduce)
    assert words[:4] == [*command] and words[4:] == ["--only", failed_case.case]


@pytest.mark.slow
def test_profile_times_one_engine_and_compares_two(built: Project) -> None:
    words = ("profile", "tiny", "--target", "cpu", "--quiet", "--json")
    arguments = ("--precision", "fp32", "--seconds", 0.05, "--bucket", "batch=3", "--streams", 2)
    report = built.run(*words, *arguments).json
    (bucket,) = report["buckets"]
    assert bucket["name"] == "batch=3" and bucket["streams"] == 2 and bucket["streams_items_per_s"] > 0
    assert report["model"] == "tiny" and report["anatomy"]["bucket"] == "batch=3"
    assert len(report["anatomy"]["profile"]["nodes"]) == report["anatomy"]["traffic"]["groups"]
    race = ("--precision", "fp32", "--against", "tiny", "--against-precision", "int8", "--seconds", 0.4)
    result = built.run(*words, *race).json
    assert result["verdict"] in ("faster", "slower", "no difference shown") and result["bucket"] == "batch=4"
    assert (result["first"]["precision"], result["second"]["precision"]) == ("fp32", "int8")
    assert result["ratios"][0]["low"] < result["ratios"][0]["ratio"] < result["ratios"][0]["high"]
    wrong_result = built.run("profile", "tiny", "--target", "cpu", "--bucket", "batch=9")
    assert wrong_result.code == 2 and "batch has the sizes 1..8" in wrong_result.err


@pytest.mark.slow
def test_a_cpu_engine_is_rebuilt_without_remains(built: Project) -> None:
    paths_before = sorted(path for path in built.registry.rglob("*") if path.is_file())
    result = built.run("debug", "reproduce", "tiny", "--target", "cpu", "--precision", "fp32", "--times", 2, "--json")
    assert result.code == 0, result.err
    report = result.json
    assert (report["times"], report["passed"], report["byte_equal"]) == (2, True, True)
    assert report["published"]["rebuilt"] is True and report["outputs"]["logits"]["bit_equal"] is True
    assert sorted(path for path in built.registry.rglob("*") if path.is_file()) == paths_before
