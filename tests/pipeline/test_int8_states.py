import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import enginesmith
from enginesmith.core.errors import InputError, IntegrityError
from enginesmith.registry.manifest import parse, request_of
from tests.ensembles import change
from tests.pipeline.projects import arrays, assert_refused
from tests.scheduling import slow_after_first
from tests.stateful import CACHED, RECURRENT, write_stateful

INT8: dict[str, Any] = {
    spec["model"]: change(spec, f"state/{state}/dtype", "int8") for spec, state in ((CACHED, "past"), (RECURRENT, "h"))
}


@pytest.fixture(scope="module", params=slow_after_first(INT8))
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp(request.param) / "project"
    path = write_stateful(folder, change(INT8[request.param], "precisions", ["fp32", "int8", "int8-dynamic"]))
    return folder, enginesmith.build(path, registry=folder.parent / "registry")


def streams_of(pulled: Any) -> tuple[enginesmith.Streams, dict[str, str]]:
    session = ort.InferenceSession(str(pulled.path))
    streams = enginesmith.Streams.described(enginesmith.open_onnx(pulled), pulled.description)
    return streams, {item.name: item.type for item in session.get_inputs()}


def test_quantized_engines_with_int8_states_are_proven(built: tuple[Path, Any], tmp_path: Path) -> None:
    folder, outcome = built
    assert {item.entry.precision: item.entry.status for item in outcome.engines} == dict.fromkeys(
        ("fp32", "int8", "int8-dynamic"), "proven"
    )
    x, answers = arrays(folder / "golden.npz")["x"], {}
    for precision, kind in (("fp32", "tensor(float)"), ("int8", "tensor(int8)"), ("int8-dynamic", "tensor(int8)")):
        pulled_engine = enginesmith.pull(
            f"{outcome.model}@1", registry=folder.parent / "registry", dest=tmp_path, precision=precision
        )
        streams, types = streams_of(pulled_engine)
        (state,) = types.keys() - {"x"}
        assert types[state] == kind
        described_dtypes = {
            item["name"]: item["dtype"] for item in json.loads(pulled_engine.description.read_text())["inputs"]
        }
        assert described_dtypes[state] == kind[7:-1].replace("float", "float32")
        answers[precision] = np.stack([streams.run({"x": x[step : step + 1]})["y"] for step in range(12)])
    for precision in ("int8", "int8-dynamic"):
        assert 0 < np.abs(answers[precision] - answers["fp32"]).max() < 0.15 * np.abs(answers["fp32"]).max()


def test_the_manifest_lists_quantized_states_with_scales(built: tuple[Path, Any]) -> None:
    folder, outcome = built
    place = folder.parent / "registry" / "models" / outcome.model / "versions" / outcome.version
    for entry in parse((place / "manifest.json").read_bytes()).engines:
        assert bool(entry.quantized_states) == (entry.precision != "fp32")
        assert {spec.dtype for spec in entry.inputs} == {"float32"}, "as the model has them"
        request_of(entry)
        for state in entry.quantized_states:
            with pytest.raises(IntegrityError, match="build key"):
                request_of(replace(entry, quantized_states=(replace(state, scale=2 * state.scale),)))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("state/past/dtype", "int4", "state.past.dtype"),
        ("state/past/initial", 1, "state.past.dtype is int8, which needs the initial value 0, not 1; remove dtype"),
        ("inputs/past/dtype", "float16", "past.dtype is int8, which replaces only float32, but the input is float16"),
        ("precisions", ["fp32", "fp16"], "changes nothing: no precision is quantized (fp8, "),
        ("calibration", None, "whose scale comes from real sequences; add calibration.data"),
    ],
)
def test_states_that_cannot_be_int8_are_reported(path: str, value: Any, message: str, tmp_path: Path) -> None:
    assert_refused(write_stateful(tmp_path / "project", change(INT8["cached"], path, value)), message)


def test_a_quantized_model_stays_unchanged(tmp_path: Path) -> None:
    path = write_stateful(tmp_path / "project", change(INT8["cached"], "precisions", ["int8"]))
    model = onnx.load(path.parent / "model.onnx")
    text = """<ir_version: 8, opset_import: ["" : 17]>
        rounded (float[8, 8] w) => (float[8, 8] out) {
            scale = Constant <value = float {0.01}> ()
            zero = Constant <value = int8 {0}> ()
            whole = QuantizeLinear (w, scale, zero)
            out = DequantizeLinear (whole, scale, zero)
        }
    """
    nodes = onnx.parser.parse_model(text).graph.node
    nodes[2].input[0] = "x"
    for node in model.graph.node:
        node.input[:] = ["out" if name == "x" else name for name in node.input]
    for place, node in enumerate(nodes):
        model.graph.node.insert(place, node)
    onnx.save(model, path.parent / "model.onnx")
    assert_refused(path, "state.past.dtype changes nothing: the model already has Q/DQ nodes", InputError)
