import numpy as np
import onnx
import pytest

from enginesmith.core.errors import ModelError
from enginesmith.core.types import QUANTIZED
from pipeline.quantization.ranges import Ranges
from pipeline.quantization.schemes.cast import emulate
from pipeline.quantization.schemes.write import write
from tests.pipeline.quantization import small_nets as nets

SCHEMES = [(precision, nets.TENSORRT) for precision in ("int8", "fp8", "int4")]
SCHEMES += [("int8", nets.TENSORRT_FP32), ("int8", nets.CPU), ("int8-dynamic", nets.CPU), ("int4", nets.CPU)]
every_scheme = pytest.mark.parametrize(("precision", "scheme"), SCHEMES)


def two_layers(depth: int = 64) -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    weights = {"w": rng.normal(size=(depth, 64)) / 8, "v": rng.normal(size=(64, 5)) / 8}
    return nets.build(f"float[batch,{depth}] x", "float[batch,5] y", "a = MatMul(x, w) y = MatMul(a, v)", weights)


def inputs(count: int = 16) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(1).normal(size=(count, 64)).astype(np.float32)}


def written(model, data, precision, scheme):
    return write(model, precision, scheme, nets.measured(model, data))


def check(model: onnx.ModelProto, data: dict[str, np.ndarray], precision: str, scheme: object, floor: float) -> None:
    result, _ = written(model, data, precision, scheme)
    actual = nets.run(emulate(result), data, optimized=False)
    assert np.isfinite(actual).all() and nets.sqnr_db(nets.run(model, data), actual) > floor


@pytest.mark.parametrize(("precision", "scheme"), [item for item in SCHEMES if item[0] in ("int8", "fp8")])
@pytest.mark.parametrize(
    ("pair", "reason"),
    [
        ((0.0, 0.0), "was zero in every calibration sample"),
        ((3.0, 3.0), "was 3 everywhere in calibration"),
        ((-1e36, 1.0), "reaches 1e+36, as a mask does"),
        ((-np.inf, 1.0), "is not finite"),
        ((np.nan, np.nan), "is not finite"),
    ],
)
def test_uninformative_ranges_leave_the_node_in_float(precision, scheme, pair, reason):
    ranges = Ranges({"x": (-3.0, 3.0), "a": pair}, "minmax", "0" * 64, 16)
    result, notes = write(two_layers(), precision, scheme, ranges)
    assert notes.quantized == ("MatMul_a",)
    assert [(item.node, reason in item.reason) for item in notes.float_nodes] == [("MatMul_y", True)]
    assert nets.sqnr_db(nets.run(two_layers(), inputs()), nets.run(emulate(result), inputs(), optimized=False)) > 20


@pytest.mark.parametrize("count", [1, 16])
@every_scheme
def test_one_sample_is_enough_for_itself(precision: str, scheme: object, count: int) -> None:
    check(two_layers(), inputs(count), precision, scheme, {"int4": 14, "fp8": 22}.get(precision, 25))


@pytest.mark.parametrize("opset", range(13, 24))
@every_scheme
def test_every_opset_from_13_to_23_is_quantized(precision: str, scheme: object, opset: int) -> None:
    check(nets.conv_net(opset), nets.images(), precision, scheme, 22)


@every_scheme
def test_one_weight_may_have_two_readers(precision: str, scheme: object) -> None:
    weights = {"w": np.random.default_rng(0).normal(size=(64, 64)) / 8}
    text = "a = MatMul(x, w) r = Relu(a) b = MatMul(r, w) c = Gemm<transB=1>(b, w) y = Add(c, w0)"
    model = nets.build("float[batch,64] x", "float[batch,64] y", text, weights | {"w0": np.zeros(64)})
    check(model, inputs(), precision, scheme, 11 if precision == "int4" else 22)


@every_scheme
def test_masks_of_minus_infinity_and_shape_arithmetic_are_not_changed(precision: str, scheme: object) -> None:
    model, data = nets.attention_net(), nets.sentences()
    result, _ = written(model, data, precision, scheme)
    quantizers = {"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"}
    behind = {name for node in result.graph.node if node.op_type in quantizers for name in node.output}
    loaded_inputs = {*nets.named(result, "Softmax_p").input, *nets.named(result, "Add_s2").input}
    assert not behind & loaded_inputs
    assert np.isfinite(nets.run(emulate(result), data, optimized=False)).all()


@every_scheme
def test_an_empty_batch_gives_an_empty_result(precision: str, scheme: object) -> None:
    ranges = Ranges({"x": (-3.0, 3.0), "a": (-3.0, 3.0)}, "minmax", "0" * 64, 16)
    result, _ = write(two_layers(), precision, scheme, ranges)
    if precision == "int8-dynamic":
        pytest.skip("onnxruntime's DynamicQuantizeLinear takes no empty tensor; an engine's dims begin at 1")
    assert nets.run(result, {"x": np.zeros((0, 64), np.float32)}).shape == (0, 5)


@every_scheme
def test_an_empty_weight_is_unchanged_and_listed(precision: str, scheme: object) -> None:
    model = nets.build(
        "float[batch,64] x", "float[batch,0] y", "y = MatMul(x, w)", {"w": np.zeros((64, 0), np.float32)}
    )
    notes = write(model, precision, scheme, Ranges({"x": (-1.0, 1.0)}, "minmax", "0" * 64, 1))[1]
    assert [item.reason for item in notes.float_nodes if item.op_type == "MatMul"] == ["its weight is empty"]


@every_scheme
def test_channels_of_zeros_and_huge_weights_are_quantized(precision: str, scheme: object) -> None:
    weights = np.random.default_rng(0).normal(size=(64, 64)) / 8
    weights[:, 0], weights[:, 1] = 0, weights[:, 1] * 1e3
    text = "c = Gemm(x, w, b) y = Relu(c)"
    model = nets.build("float[batch,64] x", "float[batch,64] y", text, {"w": weights, "b": np.linspace(-3, 3, 64)})
    result = write(model, precision, scheme, Ranges({"x": (-4.0, 4.0)}, "minmax", "0" * 64, 1))[0]
    actual = nets.run(emulate(result), inputs(), optimized=False)
    expected = nets.run(model, inputs())
    assert nets.sqnr_db(expected[:, 2:], actual[:, 2:]) > (14 if precision == "int4" else 22)
    np.testing.assert_allclose(actual[:, 0], expected[:, 0], atol=0.01)


@pytest.mark.parametrize("precision", QUANTIZED)
def test_a_partly_quantized_model_stays_unchanged(precision: str) -> None:
    text = "q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) a = MatMul(d, w) y = MatMul(a, v)"
    weights = {"s": np.float32(0.03), "z": np.int8(0), "w": np.eye(64), "v": np.ones((64, 5))}
    model = nets.build("float[batch,64] x", "float[batch,5] y", text, weights)
    result, notes = write(model, precision, nets.CPU, Ranges({"a": (-1.0, 1.0)}, "minmax", "0" * 64, 1))
    assert notes.passed_through
    assert result.SerializeToString() == model.SerializeToString()


def test_an_opset_that_cannot_be_raised_gives_a_remedy() -> None:
    model = two_layers()
    model.opset_import[0].version = 6
    model.graph.node.append(
        onnx.helper.make_node("Upsample", ["y"], ["u"], name="up", mode="nearest", scales=[1.0, 2.0])
    )
    del model.graph.output[:]
    model.graph.output.append(onnx.helper.make_tensor_value_info("u", 1, ["batch", 10]))
    with pytest.raises(ModelError, match="export with opset"):
        write(model, "int4", nets.CPU)


@every_scheme
def test_dynamic_shapes_keep_their_names(precision: str, scheme: object) -> None:
    ranges = Ranges({"x": (-3.0, 3.0), "a": (-3.0, 3.0)}, "minmax", "0" * 64, 16)
    result, _ = write(two_layers(), precision, scheme, ranges)
    assert [v.type.tensor_type.shape.dim[0].dim_param for v in (*result.graph.input, *result.graph.output)] == [
        "batch"
    ] * 2
    assert nets.of_type(result, "MatMul") or nets.of_type(result, "MatMulInteger")


@every_scheme
def test_unreachable_products_are_listed(precision: str, scheme: object) -> None:
    rng = np.random.default_rng(0)
    weights = {name: rng.normal(size=(64, 64)) / 8 for name in ("w", "v", "u")}
    weights |= {"g": rng.normal(size=(1, 256, 64)) / 8, "h": rng.normal(size=(1, 256, 64)) / 8, "axes": np.array([0])}
    text = """
        a = MatMul(x, w)
        l = MatMul(u, a)
        s = Unsqueeze(l, axes)
        r, state = LSTM<hidden_size=64>(s, g, h)
        f = Squeeze(state)
        t = ReduceSum<keepdims=0>(f)
        yes = Greater(t, t)
        y = If (yes) <
            then_branch = then () => (float[64,64] one) { one = MatMul(f, v) },
            else_branch = other () => (float[64,64] two) { two = MatMul(v, f) }
        >
    """
    model = nets.build("float[64,64] x", "float[64,64] y", text, weights)
    data = inputs(64)
    _, notes = written(model, data, precision, scheme)
    assert len(notes.quantized) == 1
    reasons = {item.op_type: item.reason for item in notes.float_nodes}
    assert "first operand" in reasons["MatMul"] and "recurrent" in reasons["LSTM"]
    assert "2 of the nodes in its bodies multiply" in reasons["If"]
