import numpy as np
import onnx
import pytest

from pipeline.quantization.ranges import Ranges
from pipeline.quantization.schemes.cast import cast_float, emulate
from tests.pipeline.quantization.small_nets import run as run_net
from tests.pipeline.quantization.small_nets import x_net, x_values

ZEROS = {"x": np.zeros((2, 5), np.float32)}
EPS = {"eps": np.float32(1e-12)}
# Each gives NaN or nothing at all where its constant becomes zero.
NETS = {
    "divisor": ("y = Div(x, c)", {"c": np.array([1, 1e-9, 1, 1, 2])}, ZEROS),
    "epsilon": ("a = Abs(x) e = Add(a, eps) y = Div(a, e)", EPS, ZEROS),
    "epsilon under a root": ("a = Abs(x) e = Add(a, eps) r = Sqrt(e) y = Div(x, r)", EPS, ZEROS),
    "lower bound": ("a = Abs(x) m = Max(a, eps) u = Identity(m) y = Div(a, u)", EPS, ZEROS),
    "tiny epsilon": (
        "a = Abs(x) e = Add(a, eps) r = Sqrt(e) y = Div(x, r)", {"eps": np.float32(1e-20)}, ZEROS,
    ),
    "logarithm": ("a = Abs(x) e = Add(a, eps) y = Log(e)", EPS, ZEROS),
    "reciprocal": ("a = Abs(x) e = Add(a, eps) y = Reciprocal(e)", EPS, ZEROS),
    "root": ("a = Abs(x) e = Add(a, eps) y = Sqrt(e)", EPS, ZEROS),
    "scaled and back": (
        "s = Mul(x, c) y = Mul(s, d)", {"c": np.float32(1e-9), "d": np.float32(1e9)}, x_values(),
    ),
    "small weights": ("m = MatMul(x, w) y = Mul(m, d)", {"w": np.eye(5) * 1e-9, "d": np.float32(1e9)}, x_values()),
}  # fmt: skip


@pytest.mark.parametrize("name", NETS)
def test_underflowing_values_stay_in_fp32_without_nan(name: str) -> None:
    text, constants, data = NETS[name]
    model = x_net(text, **constants)
    result, notes = cast_float(model, "fp16")
    actual, expected = run_net(emulate(result), data, False), run_net(model, data)
    np.testing.assert_allclose(actual, expected, rtol=2e-3, atol=1e-6)
    assert any("underflow to 0 in fp16" in item.reason for item in notes.float_nodes)
    assert not cast_float(model, "bf16")[1].underflowed


def test_negligible_underflow_is_cast() -> None:
    assert not cast_float(x_net("y = MatMul(x, w)", w=(np.eye(5) + 1e-9)), "fp16")[1].float_nodes
    assert not cast_float(x_net("m = MatMul(x, w) y = Add(m, b)", b=np.full(5, 1e-9)), "fp16")[1].float_nodes
    assert not cast_float(x_net("y = Gemm(x, w, b)", b=np.full(5, 1e-9)), "fp16")[1].float_nodes


def test_a_tensor_measured_as_tiny_stays_and_an_unmeasured_one_is_cast() -> None:
    model = x_net("a = Relu(x) y = Div(a, a)")
    float_nodes = cast_float(model, "fp16", ranges=Ranges({"a": (0.0, 3e-9)}, "minmax", "0" * 64, 1))[1].float_nodes
    assert {item.node for item in float_nodes} == {"Relu_a", "Div_y"}
    assert "reached only 3e-09 in calibration" in float_nodes[0].reason
    # An epsilon that is added to what never comes near zero does not matter.
    model = x_net("a = Abs(x) e = Add(a, eps) y = Div(x, e)", **EPS)
    far_ranges = Ranges({"e": (0.5, 3.0)}, "minmax", "0" * 64, 1)
    assert not cast_float(model, "fp16", ranges=far_ranges)[1].float_nodes and cast_float(model, "fp16")[1].float_nodes


def test_inputs_of_a_logarithm_stay_in_fp32_unless_far_from_zero() -> None:
    net = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["" : 17]> g (float[n, 4] x) => (float[n, 4] y) { p = Softmax(x) y = Log(p) }'
    )

    def reached(low: float) -> Ranges:
        return Ranges({"p": (low, 1.0)}, "minmax", "0" * 64, 16)

    for ranges in (None, reached(1e-9)):
        notes = cast_float(net, "fp16", ranges=ranges)[1]
        assert {item.op_type for item in notes.float_nodes} == {"Softmax", "Log"}
        assert all("a logarithm is taken of 'p'" in item.reason for item in notes.float_nodes)
    assert not cast_float(net, "fp16", ranges=reached(0.01))[1].float_nodes
    assert not cast_float(net, "bf16")[1].float_nodes
