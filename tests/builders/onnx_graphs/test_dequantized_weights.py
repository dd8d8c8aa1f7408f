import numpy as np
import onnx
import pytest
from onnxruntime import InferenceSession

from builders.backends.tensorrt import TensorRTRTX
from builders.onnx_graphs.weights import dequantize_stored_weights
from enginesmith.core.types import ShapeProfile, TensorSpec
from tests.builders import graphs

RTX = TensorRTRTX()
X = np.arange(4, dtype=np.int64).reshape(2, 2)
FLOAT, HALF = 1, 10
Model = onnx.ModelProto


def net(scale: str, kind: int = FLOAT, opset: int = 17, behind: str = "w = Mul(c, s)", weight: str = "int8") -> Model:
    """An embedding of [4, 3] int8 with scales, read by a Gather."""
    result = {FLOAT: "float", HALF: "float16"}[kind]
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : {opset}]> g (int64[batch, 2] x) => ({result}[batch, 2, 3] y)
            <{weight}[4, 3] q = {{1, -2, 3, 4, 5, -6, 7, 8, 9, -128, 127, 0}}, float{scale}>
            {{ c = Cast <to = {kind}> (q) {behind} y = Gather(w, x) }}"""
    )
    if kind == HALF:
        scales = model.graph.initializer[1]
        scales.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(scales).astype(np.float16), "s"))
    return model


SCALES = ["[4, 1] s = {0.1, 0.2, 0.3, 0.4}", "[1, 3] s = {0.1, 0.2, 0.3}", " s = {0.7}", "[1] s = {3}"]


@pytest.mark.parametrize("kind", [FLOAT, HALF])
@pytest.mark.parametrize("scale", SCALES)
def test_numbers_are_bit_identical(scale, kind):
    model = net(scale, kind)
    output_before = InferenceSession(model.SerializeToString()).run(None, {"x": X})[0]
    assert dequantize_stored_weights(model) == 1
    onnx.checker.check_model(model, full_check=True)
    narrowed_names = [] if kind == FLOAT else ["Cast"]
    assert [node.op_type for node in model.graph.node] == ["DequantizeLinear", *narrowed_names, "Gather"]
    np.testing.assert_array_equal(output_before, InferenceSession(model.SerializeToString()).run(None, {"x": X})[0])


@pytest.mark.parametrize(
    "behind", ["w = Add(c, s)", "d = Mul(c, s) w = Add(d, c)", "w = Mul(c, c)", "w = Identity(c)"], ids=str.split
)
def test_a_cast_with_an_unclear_scale_has_scale_1(behind):
    model = net("[4, 1] s = {0.1, 0.2, 0.3, 0.4}", behind=behind)
    output_before = InferenceSession(model.SerializeToString()).run(None, {"x": X})[0]
    assert dequantize_stored_weights(model) == 1
    assert model.graph.node[0].op_type == "DequantizeLinear" and len(model.graph.node) > 2
    np.testing.assert_array_equal(output_before, InferenceSession(model.SerializeToString()).run(None, {"x": X})[0])


@pytest.mark.parametrize("model", [net("[4, 1] s = {1, 2, 3, 4}", opset=12), net(" s = {1}", weight="int32")])
def test_other_weights_and_opsets_without_an_axis_stay(model):
    assert dequantize_stored_weights(model) == 0


@pytest.mark.parametrize("kind", [FLOAT, HALF])
def test_tensorrt_for_rtx_accepts_them(tmp_path, kind):
    model = net("[4, 1] s = {0.1, 0.2, 0.3, 0.4}", kind)
    onnx.save(model, tmp_path / "model.onnx")
    result = TensorSpec("y", "float32" if kind == FLOAT else "float16", ("batch", 2, 3))
    shapes = ShapeProfile((("x", (1, 2), (1, 2), (4, 2)),))
    request = graphs.request(
        "sm_80", "fp32", inputs=(TensorSpec("x", "int64", ("batch", 2)),), outputs=(result,), profiles=(shapes,)
    )
    assert RTX.refuses(request) is None
    assert RTX.build(request, tmp_path / "model.onnx", tmp_path).path.stat().st_size > 0
