from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import onnx
import pytest

from enginesmith.core.types import BuildRequest, QuantizationScheme, Target
from pipeline.compile.run_context import RunContext
from pipeline.compile.steps import gains
from pipeline.orchestration.run import RunOptions, compile_from_records
from pipeline.quantization.search.rates import name_rates
from pipeline.values import Graph, GraphVariant, ModelledFigures
from tests.pipeline.projects import Project
from tests.pipeline.quantization.small_nets import build

# A CPU that no machine of the tests is: its speed is modelled. int4 weights are multiplied as floats there.
ELSEWHERE, HERE = "arm64", "cpu"
UNIT = f"{ELSEWHERE} int4 onnxruntime"


@pytest.fixture
def wide(project: Project) -> Project:
    """A product of as many rows as make it compute-bound, in fp32 and int4."""
    weights: dict[str, object] = {"w": np.random.default_rng(0).standard_normal((128, 128))}
    model = build("float[batch,128] x", "float[batch,128] y", "y = MatMul(x, w)", weights, opset=21)
    onnx.save(model, project.folder / "tiny.onnx")
    samples = np.random.default_rng(1).standard_normal((32, 128)).astype(np.float32)
    np.savez(project.folder / "golden.npz", x=samples)
    np.savez(project.folder / "calibration.npz", x=samples[::-1] / 2)
    project.change_spec(
        inputs={"x": {"dtype": "float32", "shape": ["batch", 128]}}, outputs=["y"], golden={"data": "golden.npz"},
        dims={"batch": {"min": 1, "opt": 4096, "max": 4096}}, precisions=["fp32", "int4"], targets=[ELSEWHERE],
        backends={"onnxruntime": {}},
    )  # fmt: skip
    return project


def test_a_listed_unit_that_is_no_faster_is_built_and_reported(wide: Project) -> None:
    engines = {row["precision"]: row for row in wide.run("build", wide.spec, "--json").json["engines"]}
    figure = "no faster: 1.00 times the speed of arm64 fp32 onnxruntime (modelled, "
    assert engines["int4"]["status"] == "unproven" and figure in engines["int4"]["reason"]
    assert "no faster" not in engines["fp32"]["reason"] and figure in wide.run("plan", wide.spec).out.replace("\n", " ")


def test_a_unit_without_a_required_gain_is_refused_unless_required(wide: Project) -> None:
    wide.change_spec(quantization={"gain": "latency"})
    planned_rows = {row["precision"]: row for row in wide.run("plan", wide.spec, "--json").json["units"]}
    assert planned_rows["int4"]["action"] == "refused" and planned_rows["fp32"]["action"] == "build"
    assert f"1.00 times the speed of {ELSEWHERE} fp32" in planned_rows["int4"]["reason"]
    assert f"'{UNIT}' in build.required, builds it" in planned_rows["int4"]["reason"]
    wide.change_spec(build={"required": [UNIT]})
    required_rows = {row["precision"]: row for row in wide.run("plan", wide.spec, "--json").json["units"]}
    assert required_rows["int4"]["action"] == "build" and "no faster: 1.00" in required_rows["int4"]["reason"]


def test_fewer_bytes_count_as_a_gain_if_the_spec_says_so(wide: Project) -> None:
    wide.change_spec(quantization={"gain": "bytes"})
    planned_rows = {row["precision"]: row for row in wide.run("plan", wide.spec, "--json").json["units"]}
    assert planned_rows["int4"]["action"] == "build"
    assert "0.13 of the bytes of arm64 fp32 onnxruntime (8.2 KiB against 64.0 KiB" in planned_rows["int4"]["reason"]


def test_both_graphs_are_timed_alternately_here(wide: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    wide.change_spec(quantization={"gain": "latency"}, precisions=["fp32", "int8"], targets=[HERE])
    json_before = wide.run("plan", wide.spec, "--json").json
    result = wide.run("build", wide.spec, "--json")
    (reason,) = [row["reason"] for row in result.json["engines"] if row["precision"] == "int8"]
    assert "measured here in " not in "".join(str(entry.reason) for entry in wide.published()[1].engines)
    assert "measured here in " in reason and "times the speed of cpu fp32 onnxruntime" in reason, (json_before, reason)
    second_result = wide.run("plan", wide.spec, "--json")
    (planned_reason,) = [row["reason"] for row in second_result.json["units"] if row["precision"] == "int8"]
    assert "measured here in " in planned_reason, "the plan recalls the race"
    assert compile_from_records(wide.spec, RunOptions(str(wide.registry)))
    monkeypatch.setattr(gains, "machine", lambda: "another")
    assert compile_from_records(wide.spec, RunOptions(str(wide.registry))) is None, (
        "a race that is not on record is there to be run"
    )


@pytest.mark.slow
def test_builds_with_different_timings_give_one_version(wide: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    wide.change_spec(quantization={"gain": "latency"}, precisions=["fp32", "int8"], targets=[HERE])
    original_once, versions = RunContext.once, []
    for ratio in (0.5, 0.6):
        raced = gains.RacedGraphs(ratio, True, "measured here")
        monkeypatch.setattr(
            RunContext,
            "once",
            lambda self, kind, *more, raced=raced: raced if kind == "race" else original_once(self, kind, *more),
        )
        built_document = wide.run("build", wide.spec, "--json").json
        (reason,) = [row["reason"] for row in built_document["engines"] if row["status"] == "refused"]
        assert f"no faster: {ratio:.2f} times the speed of cpu fp32 onnxruntime (measured here" in reason
        versions.append((built_document["version"], built_document["same_as"]))
    assert versions[0] == versions[1] == (versions[0][0], None)
    monkeypatch.setattr(RunContext, "once", original_once)
    monkeypatch.setattr(gains, "LEAST_SPEEDUP", 100)
    rows = wide.run("plan", wide.spec, "--json", "--no-export").json["units"]
    (planned_row,) = [row for row in rows if row["precision"] == "int8"]
    assert planned_row["action"] == "build" and "build measures it" in planned_row["reason"], "whatever is modelled"


def test_graphs_that_cannot_run_here_are_modelled() -> None:
    request = BuildRequest("", "int8", Target(HERE), "onnxruntime", (), (), ())
    scheme, figures = QuantizationScheme("uint8", True, "fp32"), {name_rates(request.target): ModelledFigures(1, 2, 2)}
    graph = Graph(GraphVariant("int8", scheme), "", (), (), modelled=figures)
    spec = SimpleNamespace(quantization=SimpleNamespace(gain="latency"), precision_list=lambda: ["fp32"])
    for fields, shards in (({"shards": (("w", 1),)}, ()), ({"quantized_states": (None,)}, ()), ({}, (("w", 1),))):
        export = SimpleNamespace(model=SimpleNamespace(shards=shards))
        gain = gains.weigh_gain(request, replace(graph, **fields), export, SimpleNamespace(spec=spec))
        assert gain and gain.text.startswith("2.00 times") and "modelled" in gain.text and not gain.is_local
