from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import yaml

from enginesmith.registry.store import folder as filestore
from enginesmith.registry.store.base import open_store
from pipeline.compile.causes import _name_file, differences, inputs_of
from pipeline.compile.forecast import open_records
from pipeline.compile.run_context import Work
from pipeline.spec.model import load_spec
from tests.pipeline.projects import SPEC, Project, arrays, weights, write_model

MODEL, CALIBRATION, GOLDEN = "model tiny.onnx", "calibration data calibration.npz", "golden data golden.npz"

SEARCHED = "; if plain calibration misses the limits, build searches for a better quantization"


def planned(project: Project, *words: str) -> tuple[dict[str, Any], list[str]]:
    """The units by name, and the changes."""
    result = project.run("plan", project.spec, "--json", *words)
    assert result.code == 0, result.err
    units = {f"{unit['target']} {unit['precision']}": unit for unit in result.json["units"]}
    return units, result.json["changes"]


def change_data(project: Project, name: str, add: float) -> None:
    data = arrays(project.folder / name)
    data["x"][0, 0] += add
    np.savez(project.folder / name, **data)


def test_a_changed_model_is_the_cause_for_every_precision(built: Project) -> None:
    assert planned(built)[1] == []
    write_model(built.folder / "tiny.onnx", {**weights(), "b1": weights()["b1"] + 1})
    units, changes = planned(built)
    assert {unit["reason"] for unit in units.values() if unit["action"] == "build"} == {f"{MODEL} changed"}
    assert units["cpu int8"]["action"] == "build", "and its scales changed by it"
    assert changes == [f"{MODEL} changed"]
    table = built.run("plan", built.spec).out
    assert f"since the last build: {MODEL} changed" in table
    assert "scales" not in table


def test_a_changed_calibration_sample_is_named_and_builds_what_it_changes(built: Project) -> None:
    change_data(built, "calibration.npz", 4.0)
    units, changes = planned(built)
    assert units["cpu int8"]["reason"] == units["sm_89 int8"]["reason"] == f"{CALIBRATION} changed"
    assert units["cpu fp32"]["action"] == "cached" and not units["cpu fp32"]["proven_again"]
    assert changes == [f"{CALIBRATION} changed"]


def test_a_changed_calibration_sample_without_effect_on_engines_is_reported(project: Project) -> None:
    project.change_spec(targets=["cpu"], calibration={"data": "calibration.npz", "method": "minmax"})
    assert project.build().code == 0
    data = arrays(project.folder / "calibration.npz")["x"]
    smallest_index = np.unravel_index(np.abs(data).argmin(), data.shape)
    data[smallest_index] *= 0.5
    np.savez(project.folder / "calibration.npz", x=data)
    units, changes = planned(project)
    assert {unit["action"] for unit in units.values()} == {"cached"}
    assert changes == [f"{CALIBRATION} changed"]
    assert project.build().json["same_as"] == "tiny@1"
    assert planned(project)[1] == [], "a build has seen it"


@pytest.mark.parametrize("words", [(), ("--no-export",)])
def test_a_changed_golden_value_is_reported_even_if_every_engine_is_cached(built, words):
    change_data(built, "golden.npz", 0.001)
    units, changes = planned(built, *words)
    assert {unit["action"] for unit in units.values()} == {"cached", "refused"}
    assert {name for name, unit in units.items() if unit["proven_again"]} == {"cpu fp32", "cpu int8"}
    assert units["cpu int8"]["reason"].endswith(f"it is proven again: {GOLDEN} changed")
    assert changes == [f"{GOLDEN} changed"]


def test_a_changed_limit_is_a_cause_by_name_and_value(built: Project) -> None:
    built.change_spec(golden={**SPEC["golden"], "metric": {**SPEC["golden"]["metric"], "floor": 0.8}})
    units, changes = planned(built)
    assert "proven again: golden.metric.floor: 0.9 -> 0.8" in units["cpu fp32"]["reason"]
    assert changes == ["golden.metric.floor: 0.9 -> 0.8"]


def test_changed_dims_are_a_cause_by_name_and_value(built: Project) -> None:
    built.change_spec(dims={"batch": {"min": 1, "opt": 4, "max": 16}})
    units, changes = planned(built)
    assert units["sm_89 fp32"]["reason"] == "dims.batch.max: 8 -> 16"
    assert changes == ["dims.batch.max: 8 -> 16"]


def test_changes_are_reported_only_by_the_next_build(built: Project) -> None:
    model = onnx.load(built.folder / "tiny.onnx")
    model.doc_string = "a comment"
    onnx.save(model, built.folder / "tiny.onnx")
    units, changes = planned(built)
    assert {unit["action"] for unit in units.values()} == {"cached", "refused"}
    assert changes == [f"{MODEL} changed"]
    assert built.build().json["same_as"] == "tiny@1"
    assert planned(built)[1] == []


@pytest.mark.slow
def test_results_that_returned_to_a_record_are_not_rebuilt(built: Project) -> None:
    """A, B and A again: of the model, its calibration and golden data, a limit; with a new precision beside it."""
    files = {name: (built.folder / name).read_bytes() for name in ("tiny.onnx", "calibration.npz", "golden.npz")}
    spec = built.spec.read_bytes()
    write_model(built.folder / "tiny.onnx", {**weights(), "b1": weights()["b1"] + 1})
    for name in ("calibration.npz", "golden.npz"):
        change_data(built, name, 4.0)
    built.change_spec(golden={**SPEC["golden"], "metric": {**SPEC["golden"]["metric"], "floor": 0.1}})
    assert built.build().code == 0
    for name, data in files.items():
        (built.folder / name).write_bytes(data)
    built.spec.write_bytes(spec)
    built.change_spec(precisions=["fp32", "int8", "fp16"])
    for words in (("--no-export",), ()):
        units, changes = planned(built, *words)
        assert {name for name, unit in units.items() if unit["action"] != "cached"} >= {"cpu fp16", "sm_89 fp16"}
        assert units["cpu fp32"]["action"] == units["cpu int8"]["action"] == "cached"
        assert changes == [
            *(f"{name} changed" for name in (MODEL, CALIBRATION, GOLDEN)),
            "golden.metric.floor: 0.1 -> 0.9",
        ]


def test_a_partial_build_leaves_the_causes_of_other_units(built: Project) -> None:
    write_model(built.folder / "tiny.onnx", {**weights(), "b1": weights()["b1"] * 1.001})
    assert built.build("--target", "cpu", "--precision", "fp32").code == 0
    units, _ = planned(built)
    assert units["cpu fp32"]["action"] == "cached" and units["sm_89 fp32"]["reason"] == f"{MODEL} changed"


def snapshot(place: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in place.rglob("*") if file.is_file()}


def test_without_an_export_a_plan_writes_nothing_and_lists_unknowns(built, monkeypatch):
    write_model(built.folder / "tiny.onnx", weights(seed=5))
    snapshot_before = snapshot(built.registry)
    monkeypatch.setattr("builders.execution.local.LocalExecutor.run", lambda *_: pytest.fail("it runs something"))
    monkeypatch.setattr(filestore.os, "access", lambda *_: False)  # a registry that is not this user's
    units, changes = planned(built, "--no-export")
    assert {unit["action"] for unit in units.values()} == {"unknown"}
    assert units["cpu int8"]["reason"] == f"{MODEL} changed; the action is known once the model is exported{SEARCHED}"
    assert units["cpu int8"]["build_key"] is None and units["cpu int8"]["request"] is None
    assert changes == [f"{MODEL} changed"]
    result = built.run("plan", built.spec, "--no-export")
    assert "0 build, 0 cached, 0 refused, 6 unknown" in result.out and "6 of 6 units are unknown" in result.err
    assert snapshot(built.registry) == snapshot_before


def test_without_an_export_uncalibrated_units_are_known(built: Project) -> None:
    change_data(built, "calibration.npz", 100.0)
    units, _ = planned(built, "--no-export")
    assert units["cpu fp32"]["action"] == "cached" and units["sm_75 fp32"]["action"] == "refused"
    expected = f"{CALIBRATION} changed; the action is known once the model is quantized{SEARCHED}"
    assert units["cpu int8"]["reason"] == expected


def test_a_plan_reports_its_first_step(project: Project) -> None:
    project.change_spec(precisions=["fp32"], targets=["cpu"], calibration=None)
    first_result = project.run("plan", project.spec, "--no-export")
    assert first_result.code == 0
    assert "no engine for this unit yet; the action is known once the model is exported" in first_result.out
    result = project.run("plan", project.spec)
    assert "export is missing and runs first" in result.err and "export ..." in result.err
    assert "not on record" not in project.run("plan", project.spec).err


def torch_inputs(folder: Path) -> dict[str, dict[str, str]]:
    return inputs_of(Work(load_spec(folder / "net.yaml"), open_records(open_store(folder.parent / "r", create=True))))


def test_inputs_of_a_torch_model_have_its_authors_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "net"
    folder.mkdir()
    spec = {"model": "net", "source": {"torch": "net.py:build", "weights": "w.safetensors", "opset": 18}}
    spec |= {"inputs": {"x": {"shape": [1, 4]}}, "precisions": ["fp32"], "targets": ["cpu"]}
    (folder / "net.yaml").write_text(yaml.safe_dump(spec))
    (folder / "net.py").write_text("import numpy\nfrom layers import Layer\n\ndef build():\n    return Layer()\n")
    (folder / "layers.py").write_text("class Layer: pass\n")
    (folder / "w.safetensors").write_bytes(b"weights")
    export_before = torch_inputs(folder)["export"]
    for name, change in [
        ("w.safetensors", "weights w.safetensors changed"),
        ("net.py", "entry point net.py changed"),
        ("layers.py", "module layers.py changed"),
    ]:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content + b"\n# a comment\n")
        assert differences(export_before, torch_inputs(folder)["export"]) == [change]
        (folder / name).write_bytes(content)
    fields = {"numpy": "99.0"}
    monkeypatch.setattr("pipeline.compile.run_context.version_of", lambda name: fields.get(name, "1.0"))
    monkeypatch.setattr(
        "pipeline.compile.run_context.versions_of", lambda *names: {name: fields.get(name, "1.0") for name in names}
    )
    spec["source"] |= {"opset": 20, "arguments": {"width": 8}}
    (folder / "net.yaml").write_text(yaml.safe_dump(spec))
    changes = differences(export_before, torch_inputs(folder)["export"])
    assert {"source.opset: 18 -> 20", "source.arguments.width: none -> 8"} <= set(changes)
    assert any(change.startswith("version of numpy: ") and change.endswith("-> 99.0") for change in changes)


def test_a_file_that_is_no_longer_read_is_not_listed() -> None:
    digests = "a" * 64, "b" * 64
    assert differences({"module a.py": digests[0]}, {}) == []
    assert differences({}, {"module a.py": digests[1]}) == ["module a.py is new"]
    assert differences({"dims.n.opt": "4"}, {}) == ["dims.n.opt: 4 -> none"]


def test_changed_code_is_reported_in_one_line_by_module() -> None:
    texts = {f"code of pipeline.m{number}": "a" * 64 for number in range(6)}
    assert differences(texts, {**texts, "code of pipeline.m2": "b" * 64}) == ["code of pipeline.m2 changed"]
    second_names = differences(texts, {**texts, "code of pipeline.m2": "b" * 64, "code of pipeline.new": "b" * 64})
    assert second_names == ["code of pipeline.m2 and pipeline.new changed"]
    message = "code of pipeline.m0, pipeline.m1, pipeline.m2 and 3 other modules changed"
    assert differences(texts, dict.fromkeys(texts, "b" * 64)) == [message]
    assert differences(texts, {}) == [message], "code that is reached no more is a change of what refers to it"


@pytest.mark.parametrize(("place", "weights_file", "name"), [
    ("model.py", "w.safetensors", "entry point model.py"),
    ("w.safetensors", "w.safetensors", "weights w.safetensors"),
    ("layers.py", "w.safetensors", "module layers.py"),
    ("layers.py", None, "module layers.py"),
    ("libcube.so", None, "library libcube.so"),
])  # fmt: skip
def test_each_file_is_named_by_its_content(tmp_path: Path, place: str, weights_file: str | None, name: str) -> None:
    source = SimpleNamespace(kind="torch", weights=weights_file, libraries=[SimpleNamespace(file="libcube.so")])
    spec: Any = SimpleNamespace(source=source, source_file="model.py", folder=tmp_path, file=tmp_path.joinpath)
    assert _name_file(place, spec) == name
