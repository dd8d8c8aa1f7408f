from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto

from builders.backends.onnxruntime import OnnxRuntime, OrtSession
from enginesmith.core.types import BuildRequest, Engine, Target
from tests.pipeline.quantization.small_nets import build as net

FLOAT = TensorProto.FLOAT
REQUEST = BuildRequest("", "fp32", Target("cpu"), "onnxruntime", (), (), ())
X = {"x": np.random.default_rng(3).normal(size=(2, 64)).astype(np.float32)}


def stored_as(dtype: str, scaled: bool = True) -> ModelProto:
    """A MatMul by a weight that is stored in a narrow type, with the scale of each column beside it."""
    rng = np.random.default_rng(1)
    weights = {"q": rng.integers(-127, 128, (64, 96)), "s": rng.random((1, 96)) / 100}
    scale = f"f = Cast<to={FLOAT}>(q) w = Mul(f, s)" if scaled else f"w = Cast<to={FLOAT}>(q)"
    model = net("float[n,64] x", "float[n,96] y", f"{scale} y = MatMul(x, w)", weights)
    for item in model.graph.initializer:
        if item.name == "q":
            item.CopyFrom(onnx.numpy_helper.from_array(weights["q"].astype(dtype), "q"))
    return model


def built(model: ModelProto, folder: Path, optimization: str = "extended") -> Engine:
    onnx.save(model, folder / "model.onnx")
    return OnnxRuntime(graph_optimization=optimization).build(REQUEST, folder / "model.onnx", folder)


@pytest.mark.parametrize(("dtype", "times"), [("int8", 1.3), ("uint8", 1.3), ("float16", 2.3)])
def test_narrow_weights_stay_narrow_with_a_note(dtype: str, times: float, tmp_path: Path) -> None:
    engine = built(stored_as(dtype), tmp_path)
    assert engine.size_bytes < times * 64 * 96 + 2000
    assert any("1 weight is stored in the narrow source type" in note for note in engine.notes)
    expected = OrtSession(tmp_path / "model.onnx", optimized=False).run(X)["y"]
    np.testing.assert_allclose(OrtSession(engine.path).run(X)["y"], expected, rtol=1e-5, atol=1e-5)
    assert not engine.requires or all("session" not in str(item).lower() for item in engine.requires)


def test_float_weights_and_saved_layouts_stay_unchanged(tmp_path: Path) -> None:
    plain_net = net("float[n,64] x", "float[n,96] y", "y = MatMul(x, w)", {"w": np.ones((64, 96))})
    assert not any("narrow" in note for note in built(plain_net, tmp_path).notes)
    wide_build = built(stored_as("int8"), tmp_path, "all")
    assert wide_build.size_bytes > 4 * 64 * 96
    assert any("1 narrow weight is stored as fp32, as graph_optimization" in note for note in wide_build.notes)


def test_weights_behind_dequantize_linear_are_multiplied_in_float(tmp_path: Path) -> None:
    weights = {"q": np.zeros((64, 96)), "s": np.random.default_rng(1).random(96) / 100}
    nodes = "w = DequantizeLinear<axis=1>(q, s) y = MatMul(x, w)"
    model = net("float[n,64] x", "float[n,96] y", nodes, weights)
    narrow_array = np.random.default_rng(1).integers(-127, 128, (64, 96)).astype("int8")
    next(item for item in model.graph.initializer if item.name == "q").CopyFrom(
        onnx.numpy_helper.from_array(narrow_array, "q")
    )
    engine = built(model, tmp_path)
    assert engine.size_bytes < 1.3 * narrow_array.size + 2000
    expected = OrtSession(tmp_path / "model.onnx", optimized=False).run(X)["y"]
    np.testing.assert_allclose(OrtSession(engine.path).run(X)["y"], expected, rtol=1e-5, atol=1e-5)
