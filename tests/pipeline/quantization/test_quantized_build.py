import json
from pathlib import Path

import numpy as np
import onnx
import pytest

from pipeline.quantization.insertion_points import count_integer_nodes
from pipeline.quantization.schemes.write import quantize_dynamic
from tests.pipeline.projects import CPU_INT8, Project, arrays, rebuilt, units


def test_a_changed_calibration_sample_rebuilds_only_int8(built: Project) -> None:
    data = arrays(built.folder / "calibration.npz")
    data["x"][3] *= 10
    np.savez(built.folder / "calibration.npz", **data)
    outcome = built.build().json
    assert outcome["version"] == "2"
    assert rebuilt(outcome) == {"cpu int8", "sm_75 int8", "sm_89 int8"}


def test_calibration_data_that_gives_the_same_ranges_writes_no_graph_again(built: Project) -> None:
    np.savez_compressed(built.folder / "calibration.npz", **arrays(built.folder / "calibration.npz"))
    result = built.build()
    assert "calibrate: done" in result.err and f"write {CPU_INT8}: cached" in result.err


@pytest.mark.slow
def test_another_method_changes_the_scales_without_running_inference_again(built: Project) -> None:
    built.change_spec(calibration={"data": "calibration.npz", "method": "mse"})
    result = built.build()
    assert "calibrate: cached" in result.err
    assert rebuilt(result.json) == {"cpu int8", "sm_75 int8", "sm_89 int8"}


GENERATOR = """
import numpy as np
import pytest

def samples():
    rng = np.random.default_rng(2)
    for index in range(64):
        yield {"x": rng.normal(size=(8,)).astype(np.float32 if index != BAD else np.float64)}
"""


@pytest.mark.slow
def test_calibration_data_may_come_from_a_generator(built: Project) -> None:
    built.change_spec(calibration={"data": "data.py:samples", "method": "entropy"}, targets=["cpu"])
    (built.folder / "data.py").write_text(GENERATOR.replace("BAD", "41"))
    result = built.build()
    assert result.code == 1 and "data.py:samples: sample 41: 'x' is float64" in result.err
    assert units(result.json, "status") == {"cpu fp32": "proven", "cpu int8": "failed"}
    (built.folder / "data.py").write_text(GENERATOR.replace("BAD", "None"))
    assert units(built.build().json, "status") == {"cpu fp32": "proven", "cpu int8": "proven"}
    assert built.build().json["cached"] is True


def test_calibration_in_parts_equals_one_pass_and_keeps_finished_parts(built: Project) -> None:
    built.change_spec(targets=["cpu"], precisions=["int8"], calibration={"data": "calibration.npz", "parts": 3})
    result = built.build()
    assert all(f"calibrate {part}/3: done" in result.err for part in (1, 2, 3))
    assert "write int8" in result.err and "write int8: done" not in result.err
    assert rebuilt(result.json) == set(), "the same observations give the same graphs"
    next((built.registry / "records" / "merge").rglob("*.json")).unlink()
    errors = built.build().err
    assert "merge calibration: done" in errors and all(f"calibrate {part}/3: cached" in errors for part in (1, 2, 3))


def test_calibration_data_may_be_a_folder(built: Project) -> None:
    (built.folder / "samples").mkdir()
    for index, sample in enumerate(arrays(built.folder / "calibration.npz")["x"]):
        np.save(built.folder / "samples" / f"{index:03}.npy", sample)
    built.change_spec(calibration={"data": "samples"}, targets=["cpu"])
    json = built.build().json
    assert units(json, "status") == {"cpu fp32": "proven", "cpu int8": "proven"} and rebuilt(json) == set()
    np.save(built.folder / "samples" / "063.npy", np.full(8, 5, np.float32))
    assert rebuilt(built.build().json) == {"cpu int8"}


def test_int8_without_calibration_data_is_an_error_with_the_remedy(built: Project) -> None:
    built.change_spec(calibration=None)
    result = built.build()
    assert result.code == 1 and units(result.json, "status")["cpu fp32"] == "proven"
    assert "add calibration.data" in next(row["reason"] for row in result.json["engines"] if row["precision"] == "int8")


def test_fp8_int4_dynamic_int8_and_block_floats_pass_the_whole_build(built: Project) -> None:
    built.change_spec(precisions=["fp8", "int8-dynamic", "int4", "nvfp4"], targets=["cpu", "sm_80", "sm_89"])
    result = built.build()
    assert result.code == 0, result.err
    assert units(result.json, "status") == {
        "cpu fp8": "refused",
        "cpu int8-dynamic": "proven",
        "cpu int4": "refused",
        "sm_80 fp8": "refused",
        "sm_80 int8-dynamic": "refused",
        "sm_80 int4": "refused",
        "sm_89 fp8": "unproven",
        "sm_89 int8-dynamic": "refused",
        "sm_89 int4": "refused",
        **{f"{target} nvfp4": "refused" for target in ("cpu", "sm_80", "sm_89")},
    }
    reason = next(row["reason"] for row in result.json["engines"] if row["precision"] == "int4")
    assert reason.startswith("0 nodes compute in int4") and "not a multiple of the block" in reason


def test_an_override_changes_the_graph_and_a_wrong_one_names_the_nearest_node(built: Project) -> None:
    built.change_spec(targets=["sm_89"])
    first_document = built.build("--precision", "int8").json
    built.change_spec(quantization={"overrides": [{"match": "MatMul", "precision": "fp16"}]})
    assert built.build("--precision", "int8").json["version"] != first_document["version"]
    built.change_spec(quantization={"overrides": [{"match": "MatMull", "precision": "fp16"}]})
    failed_build = built.build("--precision", "int8")
    assert failed_build.code == 1 and failed_build.json["version"] is None
    assert "no node matches 'MatMull'; did you mean 'MatMul" in failed_build.err


def test_inputs_and_outputs_of_fp16_engines_are_fp16_when_the_spec_says_so(built: Project) -> None:
    built.change_spec(precisions=["fp16"], targets=["cpu", "sm_89"], quantization={"io": "native"})
    assert units(built.build().json, "status") == {"cpu fp16": "proven", "sm_89 fp16": "unproven"}
    pulled_document = built.run("pull", "tiny", "--target", "cpu", "--dest", built.folder / "out", "--json").json
    document = json.loads(Path(pulled_document["path"]).with_suffix(".json").read_text())
    assert [tensor["dtype"] for tensor in (*document["inputs"], *document["outputs"])] == ["float16", "float16"]


def quantize_source(project: Project) -> onnx.ModelProto:
    """The project's own model, with its MatMuls in integers that are scaled at run time."""
    (path,) = project.folder.glob("*.onnx")
    onnx.save(quantize_dynamic(onnx.load(path))[0], path)
    return onnx.load(path)


def test_a_model_with_int8_of_its_own_is_marked_everywhere(project: Project) -> None:
    model = quantize_source(project)
    assert count_integer_nodes(model) and {name for name, _ in count_integer_nodes(model)} == {"MatMulInteger"}
    project.change_spec(targets=["cpu"], precisions=["fp32", "int8-dynamic"], backends={"onnxruntime": {}})
    planned_result = project.run("plan", project.spec)
    result = project.run("build", project.spec, "--json")
    assert result.code == 0, result.err
    rows = {row["precision"]: row for row in result.json["engines"]}
    assert rows["fp32"]["status"] == rows["int8-dynamic"]["status"] == "proven"
    assert "in int8, as in the source model (" in rows["fp32"]["reason"] and "MatMulInteger" in rows["fp32"]["reason"]
    assert "as in the source model" not in rows["int8-dynamic"]["reason"]
    second_result = project.run("plan", project.spec)
    assert planned_result.code == 0 and "as in the source model" in second_result.out
    page = next((project.registry / "models").glob("*/versions/1/report.html"))
    assert "as in the source model" in page.read_text()
