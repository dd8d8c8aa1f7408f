import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from onnx import TensorProto, helper

from pipeline.quantization.graph import element_types, tidy
from pipeline.quantization.insertion_points import activations
from pipeline.quantization.ranges import Ranges
from pipeline.quantization.schemes.cast import cast_float, emulate, find_last_nodes, needs_emulation
from pipeline.quantization.schemes.half_floats import LARGEST_FACTOR
from tests.pipeline.quantization import small_nets as nets
from validation.fuzz.cases import FACTORS

HALF = {"fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}


def x_net(text: str, opset: int = 20, **weights: object) -> onnx.ModelProto:
    return nets.x_net(text, opset, **{"w": np.eye(5), **weights})


def lost_db(model: onnx.ModelProto, result: onnx.ModelProto, data: dict[str, np.ndarray] | None = None) -> float:
    """The SQNR of a graph as it computes in 16 bits."""
    inputs = data or nets.x_values()
    return nets.sqnr_db(nets.run(model, inputs), nets.run(emulate(result), inputs, optimized=False))


def kept_nodes(model: onnx.ModelProto, precision: str = "fp16", ranges: Ranges | None = None) -> set[str]:
    _, notes = cast_float(model, precision, ranges=ranges)
    return {item.node for item in notes.float_nodes}


@pytest.mark.parametrize(("precision", "floor_db"), [("fp16", 55), ("bf16", 40)])
@pytest.mark.parametrize("net", nets.NETS)
def test_the_cast_graph_computes_the_same_function(net: str, precision: str, floor_db: float) -> None:
    make, data, _ = nets.NETS[net]
    result, _ = cast_float(make(), precision)
    assert lost_db(make(), result, data()) > floor_db
    # onnxruntime's CPU has no bf16 kernels
    assert precision == "bf16" or nets.sqnr_db(nets.run(make(), data()), nets.run(result, data())) > 55


@pytest.mark.parametrize("precision", HALF)
def test_every_node_of_a_plain_net_is_cast_and_the_edges_stay_fp32(precision: str) -> None:
    result, notes = cast_float(nets.conv_net(), precision)
    assert notes.float_nodes == () and notes.cast == len(nets.conv_net().graph.node)
    assert {item.data_type for item in result.graph.initializer} == {HALF[precision]}
    assert [v.type.tensor_type.elem_type for v in (*result.graph.input, *result.graph.output)] == [1, 1]
    assert nets.of_type(result, "Cast")[0].input[0] == "image" and len(nets.of_type(result, "Cast")) == 2


def test_inputs_and_outputs_are_cast_on_request() -> None:
    result, _ = cast_float(nets.conv_net(), "fp16", keep_io=False)
    assert [v.type.tensor_type.elem_type for v in (*result.graph.input, *result.graph.output)] == [10, 10]
    assert not nets.of_type(result, "Cast")
    half_fields = {"image": nets.images()["image"].astype(np.float16)}
    assert nets.sqnr_db(nets.run(nets.conv_net(), nets.images()), nets.run(result, half_fields)) > 50


def test_nodes_stay_in_fp32_by_name() -> None:
    result, notes = cast_float(nets.conv_net(), "fp16", keep={"Gemm_logits": "the spec keeps it in fp32"})
    assert [(item.node, item.reason) for item in notes.float_nodes] == [("Gemm_logits", "the spec keeps it in fp32")]
    assert nets.constant(result, "w3").dtype == np.float32
    assert "left in fp32: Gemm_logits (Gemm): the spec keeps it in fp32" in notes.lines()


def test_the_last_nodes_follow_the_last_products() -> None:
    texts = "m = MatMul(x, w) b = Add(m, c) y = Softmax(b)", "h = Relu(x) y = Gemm(h, w, c)", "y = MatMul(x, w)"
    texts += ("m = MatMul(x, w) a = Add(x, m) n = Softmax(a) k = MatMul(n, w) b = Add(a, k) y = Relu(b)",)
    last_nodes = [{*find_last_nodes(x_net(text, c=np.ones(5)))} for text in texts]
    assert last_nodes == [{"Add_b", "Softmax_y"}, {"Gemm_y"}, set(), {"Add_b", "Relu_y"}]


@pytest.mark.parametrize("precision", HALF)
def test_a_mask_of_the_lowest_float32_stays_in_fp32_up_to_the_softmax(precision: str) -> None:
    assert kept_nodes(nets.attention_net(), precision) == {"Mul_m2", "Add_s2", "Softmax_p"}
    arrays = nets.sentences()
    arrays["mask"][0] = 0  # a row that is masked out altogether: -inf everywhere would give NaN
    result, _ = cast_float(nets.attention_net(), precision)
    assert np.isfinite(nets.run(emulate(result), arrays, optimized=False)).all()
    # masks that fit are cast
    assert kept_nodes(nets.attention_net(-1e4)) == set() and kept_nodes(nets.attention_net(-1e9), "bf16") == set()


def test_infinite_constants_are_representable() -> None:
    text = "p = Greater(x, zero) m = Where(p, x, fill) y = Softmax(m)"
    model = x_net(text, zero=np.float32(-1), fill=np.float32(-np.inf))
    assert kept_nodes(model) == set()
    assert lost_db(model, cast_float(model, "fp16")[0]) > 50


def test_a_square_stays_in_fp32_until_its_range_is_measured() -> None:
    # a LayerNorm in small operators: everything from the square to the root
    text = "q = Pow(x, two) m = ReduceMean(q, axes) e = Add(m, eps) r = Sqrt(e) y = Div(x, r)"
    model = x_net(text, two=np.float32(2), axes=np.array([1]), eps=np.float32(1e-5))
    assert kept_nodes(model) == {"Pow_q", "ReduceMean_m", "Add_e", "Sqrt_r"} and kept_nodes(model, "bf16") == set()
    assert kept_nodes(model, ranges=nets.ranges_of(model, nets.x_values(), activations(model))) == set()
    large_arrays = nets.x_values(1000.0)
    measured_ranges = nets.ranges_of(model, large_arrays, activations(model))
    assert kept_nodes(model, ranges=measured_ranges) == {"Pow_q", "ReduceMean_m", "Add_e", "Sqrt_r"}
    kept_names, _ = cast_float(model, "fp16", ranges=measured_ranges)
    assert lost_db(model, kept_names, large_arrays) > 55


def test_quadratic_growth_needs_room_for_the_proofs_largest_input() -> None:
    text = """
        q = Mul(x, x) m = ReduceMean(q) r = Sqrt(m) i = Reciprocal(r) j = Div(six, r) k = Pow(m, e)
        a = Div(x, r) b = Mul(x, i) c = Mul(x, j) d = Mul(x, k) n = Sum(a, b, c, d) o = Mul(n, n)
        f = Add(x, six) g = Clip(f, zero, six) h = Mul(x, g) l = Clip(x, zero, large) s = Mul(x, l)
        E = Greater(x, zero) F = Cast<to = 1>(E) G = Mul(x, F) H = Shape(x) I = Cast<to = 1>(H) J = ReduceMax(I)
        K = Mul(x, J) L = Sum(o, h, G, K) y = MatMul(L, w)
    """
    ranges = Ranges(dict.fromkeys("qmrijkabcdnofghlsEFGHIJKL", (0.0, 20.0)), "minmax", "0" * 64, 1)
    names = kept_nodes(x_net(text, six=6.0, zero=0.0, large=1e4, e=-0.5), ranges=ranges)
    assert names == {"Mul_q", "ReduceMean_m", "Sqrt_r", "Pow_k", "Mul_s"} and max(FACTORS.values()) == LARGEST_FACTOR


def test_positions_and_large_angles_use_fp32() -> None:
    text = """
        l = MatMul(x, w) a = Mul(l, f) c = Cos(a) s = Sin(l) t = Mul(c, s)
        g = Reshape(l, k) d = Add(g, one) i = Reshape(t, m) h = GridSample(i, d) y = Reshape(h, n)
    """
    constants = {"f": np.float32(9), "one": np.float32(1), "k": np.array([1, -1, 1, 2]), "m": np.array([1, 1, -1, 5])}
    ranges = Ranges({"a": (0.0, 9.0), "l": (0.0, 1.0)}, "minmax", "0" * 64, 1)
    kept_names = kept_nodes(x_net(text, **constants, n=np.array([-1, 5])), ranges=ranges)
    assert kept_names == {"Mul_a", "Cos_c", "Reshape_g", "Add_d", "GridSample_h"}


def test_measured_ranges_need_headroom() -> None:
    model = x_net("a = Relu(x) y = MatMul(a, w)")
    ranges = Ranges({"a": (0.0, 32752.0)}, "minmax", "0" * 64, 1)
    near_ranges = Ranges({"a": (0.0, 32753.0)}, "minmax", "0" * 64, 1)
    assert kept_nodes(model, ranges=ranges) == set() and kept_nodes(model, ranges=near_ranges) == {"Relu_a", "MatMul_y"}
    notes = cast_float(model, "fp16", ranges=near_ranges)[1]
    assert notes.float_nodes[0].reason == "tensor 'a' reached 32753 in calibration; fp16 ends at 65504"
    assert kept_nodes(x_net("y = Relu(x)"), ranges=Ranges({"x": (0.0, 1e6)}, "minmax", "0" * 64, 1)) == {"Relu_y"}


def test_underflowing_weights_are_counted() -> None:
    model = x_net("y = MatMul(x, small)", small=np.diag([1e-9, 1e-9, 1e-3, 1, 0]))
    notes = cast_float(model, "fp16")[1]
    assert notes.underflowed == (("small", 2, 25),) and "small: 2 of 25 values underflow to 0" in notes.lines()
    assert cast_float(model, "bf16")[1].underflowed == ()


def test_operators_without_a_16_bit_form_stay() -> None:
    # the scales of Resize and the limits of Range are fp32 by schema
    text = "r = Range(zero, five, one) s = Add(x, r) i = Unsqueeze(s, axes)"
    text += 'z = Resize<mode="nearest">(i, , scales) y = Squeeze(z, axes)'
    weights = {"zero": np.float32(0), "one": np.float32(1), "five": np.float32(5), "axes": np.array([0])}
    model = x_net(text, **weights, scales=np.ones(3, np.float32))
    result, notes = cast_float(model, "fp16")
    assert [(item.node, item.reason) for item in notes.float_nodes] == [
        ("Range_r", "Range has no fp16 form in opset 20")
    ]
    assert nets.constant(result, "scales").dtype == np.float32
    assert lost_db(model, result) > 55


def test_result_types_from_an_attribute_follow_the_cast() -> None:
    model = x_net("p = Greater(x, w0) f = Cast<to=1>(p) y = Mul(f, x)", w0=np.zeros(5))
    result, notes = cast_float(model, "fp16")
    assert notes.float_nodes == () and nets.named(result, "Cast_f").attribute[0].i == TensorProto.FLOAT16
    # the comparison sees the exact input
    assert nets.named(result, "Greater_p").input[0] == "x"
    assert lost_db(model, result) > 55


def test_control_flow_keeps_fp32_and_reads_what_it_captures_in_fp32() -> None:
    body = "then_branch = p () => (float[n,5] t) {t = Add(a, a)}, else_branch = q () => (float[n,5] e) {e = Neg(a)}"
    model = x_net(f"a = MatMul(x, w) b = If (flag) <{body}> c = MatMul(b, w) y = Relu(c)", flag=np.array(True))
    result, notes = cast_float(model, "fp16")
    assert [(item.node, item.reason) for item in notes.float_nodes] == [("If_b", "control flow")]
    assert nets.constant(result, result.graph.initializer[0].name).dtype != np.float32
    expected = 2 * np.maximum(nets.x_values()["x"], 0)
    assert nets.sqnr_db(expected, nets.run(result, nets.x_values())) > 55  # onnxruntime refuses a branch of mixed types
    assert nets.sqnr_db(expected, nets.run(emulate(result), nets.x_values(), False)) > 55


def test_a_graph_with_only_cast_copies_is_no_fp16_graph():
    """Silero's VAD is an If and an Identity for each output."""
    body = "then_branch = a () => (float[n,5] t) { t = Relu(x) }, else_branch = b () => (float[n,5] e) { e = Neg(x) }"
    _, notes = cast_float(x_net(f"z = If (flag) <{body}> y = Identity(z)", flag=np.array(True)), "fp16")
    assert notes.cast == 0 and "control flow" in notes.idle


def test_an_output_that_the_net_also_reads_is_fp32() -> None:
    model = nets.build(
        "float[batch,5] x", "float[batch,5] a, float[batch,5] y", "a = Relu(x) y = MatMul(a, w)", {"w": np.eye(5)}
    )
    result, notes = cast_float(model, "fp16")
    assert notes.cast == 2 and element_types(result)["a"] == TensorProto.FLOAT
    assert nets.run(result, nets.x_values()).dtype == np.float32
    assert nets.named(result, "MatMul_y").input[0] != "a"


def test_local_functions_are_inlined() -> None:
    text = """
        <ir_version: 8, opset_import: ["": 20, "local": 1]>
        net (float[N] x) => (float[N] y) { y = local.twice(x) }
        <domain: "local", opset_import: ["": 20]>
        twice (a) => (b) { b = Add(a, a) }
    """
    result, notes = cast_float(onnx.parser.parse_model(text), "fp16")
    assert notes.float_nodes == () and len(nets.of_type(result, "Add")) == 1


def test_unknown_operators_stay_and_are_listed() -> None:
    model = x_net("a = Relu(x) b = com.vendor.Secret(a) y = Relu(b)")
    model.opset_import.append(helper.make_opsetid("com.vendor", 1))
    _, notes = cast_float(model, "fp16")
    assert {item.node for item in notes.float_nodes} == {"Secret_b", "Relu_y"}
    assert "type cannot be inferred" in notes.float_nodes[0].reason


@pytest.mark.parametrize("opset", [13, 15, 17, 18, 19, 21, 22])
@pytest.mark.parametrize("precision", HALF)
def test_every_opset_from_13_on_is_cast(opset: int, precision: str) -> None:
    result, _ = cast_float(nets.conv_net(opset), precision)
    assert lost_db(nets.conv_net(opset), result, nets.images()) > 40


@pytest.mark.parametrize("precision", HALF)
@pytest.mark.parametrize("net", nets.NETS)
def test_the_argument_is_unchanged_and_the_result_repeats(net: str, precision: str) -> None:
    make = nets.NETS[net][0]
    model = make()
    model_bytes_before = model.SerializeToString()
    result, _ = cast_float(model, precision)
    assert model.SerializeToString() == model_bytes_before
    assert result.SerializeToString() == cast_float(make(), precision)[0].SerializeToString()
    onnx.checker.check_model(result, full_check=True)


@pytest.mark.parametrize(("precision", "sm"), [("fp16", "SM75"), ("fp16", "SM89"), ("bf16", "SM80"), ("bf16", "SM120")])
@pytest.mark.parametrize("net", nets.NETS)
def test_tensorrt_rtx_builds_cast_graphs(net: str, precision: str, sm: str) -> None:
    make, _, shapes = nets.NETS[net]
    assert nets.compiles(cast_float(make(), precision)[0], sm, shapes) == ""


def test_a_constant_output_is_unchanged() -> None:
    outputs, nodes = "float[3] anchors, float[n,5] y", "y = MatMul(x, w) anchors = Identity(k)"
    model = nets.build("float[n,5] x", outputs, nodes, {"w": np.eye(5), "k": [0.1, 0.2, 0.3]})
    result, notes = cast_float(model, "fp16")
    assert notes.cast == 1
    np.testing.assert_array_equal(nets.run(result, {"x": np.zeros((1, 5), "f4")}), np.asarray([0.1, 0.2, 0.3], "f4"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *((f'ScatterND<reduction="{reduction}">(h, rows, h)', ["ScatterND"]) for reduction in ("add", "max")),
        ('ScatterND<reduction="none">(h, all, h)', []),
        ("MeanVarianceNormalization<axes=[1]>(h)", ["MeanVarianceNormalization"]),
    ],
)
def test_operators_that_onnxruntimes_cpu_has_only_in_fp32_stay(text: str, expected: list[str]) -> None:
    """Of a scatter that reduces, as message passing over edges is made, it has a kernel that raises when it runs."""
    rows = np.arange(16)[:, None]
    model = x_net(f"h = MatMul(x, w)\n y = {text}", rows=rows // 2, all=rows)
    result, notes = cast_float(model, "fp16")
    assert [item.op_type for item in notes.float_nodes] == expected
    assert nets.sqnr_db(nets.run(model, nets.x_values()), nets.run(result, nets.x_values())) > 55


DTYPES = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16}
CHAIN = nets.build(
    "float[N] x", "float[N] y", "a = Mul(x, k) b = Add(a, x) c = Identity(b) y = Mul(b, c)", {"k": np.float32(0.3)}
)
EMULATED = {name: emulate(cast_float(CHAIN, name)[0]) for name in DTYPES}


@settings(max_examples=60, deadline=None)
@given(
    hnp.arrays(np.float32, st.integers(1, 9), elements=st.floats(-1e4, 1e4, width=32)), st.sampled_from(sorted(DTYPES))
)
def test_every_tensor_is_rounded_once_to_nearest_even(x: np.ndarray, precision: str) -> None:
    def rounded(values: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            return values.astype(DTYPES[precision]).astype(np.float32)

    half_value, k = rounded(x), rounded(np.float32([0.3]))
    with np.errstate(over="ignore"):
        b = rounded(rounded(half_value * k) + half_value)
        expected = rounded(b * b)
    np.testing.assert_array_equal(nets.run(EMULATED[precision], {"x": x}, optimized=False), expected)


def test_fp16_overflow_is_detected_although_onnxruntime_hides_it() -> None:
    model = nets.build("float[N] x", "float[N] y", "b = Identity(x) a = Mul(x, b) y = Sqrt(a)", {})
    half_model, x = cast_float(model, "fp16")[0], {"x": np.float32([1000])}
    assert np.isposinf(nets.run(emulate(half_model), x, optimized=False)).all()
    assert nets.run(half_model, x) == 1000  # the day this fails, onnxruntime computes fp16 for real


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize(("make", "data"), [(nets.conv_net, nets.images), (nets.attention_net, nets.sentences)])
def test_only_the_casts_are_16_bit(make: object, data: object, precision: str) -> None:
    result = emulate(cast_float(make(), precision)[0])
    types = element_types(result)
    for node in result.graph.node:
        if node.op_type != "Cast":
            assert {TensorProto.FLOAT16, TensorProto.BFLOAT16}.isdisjoint(types[name] for name in node.output)
    assert nets.run(result, data(), optimized=False).dtype == np.float32


def test_16_bit_outputs_become_fp32_and_inputs_accept_existing_data() -> None:
    half_model, model = (cast_float(nets.conv_net(), "fp16", keep_io=keep_io)[0] for keep_io in (False, True))
    output = nets.run(emulate(half_model), {"image": nets.images()["image"].astype(np.float16)}, optimized=False)
    assert output.dtype == np.float32
    assert np.abs(output - nets.run(emulate(model), nets.images(), optimized=False)).max() < 2e-3 * np.abs(output).max()


def test_only_16_bit_floats_and_constant_nodes_need_emulation() -> None:
    plain_build = nets.build("float[N] x", "float[N] y", "y = Mul(x, k)", {"k": np.float32(0.3)})
    lifted_build = nets.build("float[N] x", "float[N] y", "k = Constant <value_float = 0.3> () y = Mul(x, k)", {})
    inner_build = nets.build("float[N] x", "float[N] y", "h = Cast <to = 10> (x) y = Cast <to = 1> (h)", {})
    assert not needs_emulation(plain_build)
    assert all(needs_emulation(model) for model in (lifted_build, inner_build, cast_float(plain_build, "fp16")[0]))
    assert emulate(plain_build).graph.node == tidy(plain_build).graph.node
