import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from enginesmith.core.types import QuantizationScheme
from pipeline.compile.steps.search import find_searched_kinds
from pipeline.values import GraphVariant, Searched
from tests.pipeline.projects import Project

SEARCH = {"smoothing": "auto", "floor": {"sqnr_db": 20}}


@pytest.fixture
def small(project: Project) -> Project:
    whole_fields = {"onnxruntime": {"reduced_range": "never"}}
    project.change_spec(targets=["cpu"], precisions=["int8"], quantization=SEARCH, backends=whole_fields)
    return project


def test_the_command_ranks_and_draws_and_the_build_uses_its_record(small: Project, tmp_path: Path) -> None:
    out_path = tmp_path / "out"
    shown_result = small.run("debug", "sensitivity", small.spec, "--activation", "uint8", "--json", "--out", out_path)
    assert shown_result.code == 0, shown_result.err
    assert shown_result.json["groups"]
    assert shown_result.json["chosen"]["sqnr_db"] is None or shown_result.json["chosen"]["sqnr_db"] >= 20
    assert json.loads((out_path / "frontier.json").read_text()) == shown_result.json
    assert (out_path / "frontier.svg").read_text().startswith("<svg")
    table = small.run("debug", "sensitivity", small.spec, "--activation", "uint8").out
    assert "chosen: " in table and "in int8: predicted" in table
    result = small.run("build", small.spec, "--json")
    assert result.code == 0, result.err
    assert "choose int8 (uint8 activations): cached" in result.err
    record = _record(small)
    assert "of the multiplications with weights in int8" in record["notes"][0]
    graph = onnx.load(small.store.path(record["model"]))
    # The chosen model's weights carry the node's name: nothing else makes such names.
    assert [item.name for item in graph.graph.initializer if shown_result.json["groups"][0]["nodes"][0] in item.name]


@pytest.mark.slow
def test_another_floor_gives_another_choice(small: Project) -> None:
    assert small.run("debug", "sensitivity", small.spec, "--json").json["left"] == {}
    small.change_spec(quantization={"floor": {"sqnr_db": 130}}, precisions=["fp32", "int8"])
    assert small.run("debug", "sensitivity", small.spec, "--json").json["left"] != {}
    result = small.run("build", small.spec)
    assert result.code == 0 and "0 nodes compute in int8" in result.out
    assert "0 nodes compute in int8" in small.run("plan", small.spec).out
    engine = next(row for row in small.run("build", small.spec, "--json").json["engines"] if row["precision"] == "int8")
    assert engine["status"] == "refused" and engine["digest"] is None and "use fp32" in engine["reason"]
    notes = _record(small)["notes"]
    assert [note for note in notes if "the floor: quantized alone it leaves" in note]
    assert "0 nodes compute in int8" in notes[1]
    page = small.page()
    assert 'class="picture frontier"' in page and "where at least 130 dB were asked for" in page
    assert "the floor: quantized alone it leaves" in page
    assert "left in float: " in small.run("show", "tiny", "--quantization").out


def test_each_group_is_written_in_its_chosen_format(small: Project) -> None:
    parts = {"targets": ["sm_120"], "precisions": ["fp32", "nvfp4"], "backends": {"tensorrt-rtx": {}}}
    small.change_spec(**parts, quantization={"floor": {"sqnr_db": 32}})
    output = small.run("debug", "sensitivity", small.spec, "--activation", "int8").out
    assert "0.0 %, 55.6 % in int8, 44.4 % in fp16" in output and re.search("dB in nvfp4, .* in fp8, .* in int8", output)
    assert small.run("build", small.spec).code == 0
    notes = [note.partition(": quantized alone it leaves ")[0] for note in _record(small)["notes"][2:4]]
    assert notes == ["in int8: node_3 (MatMul): the floor", "left in float: node (MatMul): the floor"]


def test_measured_times_are_part_of_the_choice_and_its_record(small: Project) -> None:
    small.change_spec(quantization={"latency": "measure"})
    result = small.run("debug", "sensitivity", small.spec, "--activation", "uint8", "--json")
    assert result.code == 0, result.err
    assert all(row["int8_ms"] > 0 and row["float_ms"] > 0 for row in result.json["groups"])
    table = small.run("debug", "sensitivity", small.spec, "--activation", "uint8")
    assert "choose int8 (uint8 activations): cached" in table.err and "without -> with" in table.out
    # No target of this spec takes the other kind of int8, so there is nothing to measure, and it says so.
    other_document = small.run("debug", "sensitivity", small.spec, "--activation", "int8", "--json").json
    assert all(row["int8_ms"] is None for row in other_document["groups"])
    assert "latency was not measured: no target of this spec takes int8 (int8 activations)" in other_document["summary"]


@pytest.mark.slow
def test_weights_of_a_reduced_range_are_searched_separately(small: Project, tmp_path: Path) -> None:
    """With the other search's weights, the engine would lose what compensation gained, and the record would not say."""
    whole_result = small.run("build", small.spec, "--json")
    assert "choose int8 (uint8 activations): done" in whole_result.err, whole_result.err
    small.change_spec(backends={"onnxruntime": {"reduced_range": "always"}})
    shown_result = small.run("debug", "sensitivity", small.spec, "--activation", "uint8")
    assert "choose int8 (uint8 activations, 7-bit weights): done" in shown_result.err
    result = small.run("build", small.spec, "--json")
    assert "choose int8 (uint8 activations, 7-bit weights): cached" in result.err
    assert "write int8 (uint8 activations, 7-bit weights, fp32 elsewhere): done" in result.err
    for version, last_number in (("1", 127), ("2", 64)):
        args = f"tiny@{version}", "--target", "cpu", "--precision", "int8", "--dest", tmp_path / version
        pulled_document = small.run("pull", *args, "--json").json
        initializers = onnx.load(pulled_document["path"]).graph.initializer
        weights = {item.name: numpy_helper.to_array(item).astype(int) for item in initializers if "_int8" in item.name}
        # Without VNNI, weights are stored plus 128.
        assert max(np.abs(codes - 128 * ("as uint8" in name)).max() for name, codes in weights.items()) == last_number


def test_each_kind_of_int8_is_searched_once() -> None:
    spec = SimpleNamespace(quantization=SimpleNamespace(searches=True))
    exported_stub = SimpleNamespace(model=SimpleNamespace(carries_qdq=False, shards=()))
    schemes = [QuantizationScheme("uint8", bias, "fp32", levels) for bias in (True, False) for levels in (127, 64)]
    schemes.append(QuantizationScheme("int8", False, "fp16"))
    variants = [GraphVariant(precision, scheme) for precision in ("int8", "int8-dynamic") for scheme in schemes]
    kinds = find_searched_kinds([GraphVariant("fp32"), *variants], spec, exported_stub)
    assert kinds == (Searched("uint8"), Searched("uint8", 64), Searched("int8"))
    assert len({kind.name for kind in kinds}) == 3


def _record(project: Project) -> dict[str, Any]:
    (path,) = (project.registry / "records" / "quantize").glob("*.json")
    return json.loads(path.read_text())["value"]


def test_a_floor_of_accuracy_reads_the_samples_labels(small: Project) -> None:
    with np.load(small.folder / "calibration.npz") as stored_arrays:
        arrays = dict(stored_arrays)
    calibration = {"data": "calibration.npz", "labels": "y"}
    small.change_spec(calibration=calibration, quantization={"floor": {"accuracy": 0.001}})
    np.savez(small.folder / "calibration.npz", **arrays, y=np.full(len(arrays["x"]), 99))
    outer_result = small.run("debug", "sensitivity", small.spec)
    assert outer_result.code == 2 and "out of reach: the float model itself has 0.0000" in outer_result.err
    small.change_spec(calibration=calibration | {"labels": "z"})
    result = small.run("debug", "sensitivity", small.spec)
    assert result.code == 2 and "no array 'z'" in result.err
    np.savez(small.folder / "calibration.npz", **arrays, y=np.zeros(len(arrays["x"]), np.float32))
    small.change_spec(calibration=calibration)
    result = small.run("debug", "sensitivity", small.spec)
    assert result.code == 2 and "'y' of calibration.npz is float32; class indices are integers" in result.err


def test_sensitivity_rejects_bad_input_before_it_runs(small: Project) -> None:
    (small.folder / "taken").touch()
    assert "is a file" in small.run("debug", "sensitivity", small.spec, "--out", small.folder / "taken").err
    small.change_spec(calibration=None)
    reduced_result = small.run("debug", "sensitivity", small.spec)
    assert reduced_result.code == 2 and "add calibration.data" in reduced_result.err
