from pathlib import Path

import numpy as np
import onnx
import pytest

from builders.backends.onnxruntime import OrtSession
from builders.onnx_graphs.outline import write_graph
from builders.onnx_graphs.weights import is_external, set_place
from pipeline.quantization.schemes.cast import cast_float, emulate
from pipeline.quantization.schemes.qdq import quantize_int8
from tests.faults.nets import mlp, rows
from tests.pipeline.quantization.small_nets import CPU, TENSORRT, build, maker, ranges_of
from validation.perturbation.graph import FLIPS, SKIP, traits, with_rounding

HEAD = '<ir_version: 8, opset_import: ["": 20]>'
X = {"x": np.random.default_rng(0).normal(size=(6, 8)).astype(np.float32)}


def answers(folder: Path, model: onnx.ModelProto, skip: bool = False, flips: float = 0.0, runs: int = 1, **inputs):
    """What a model answers; of one with rounding, run by run."""
    onnx.save(model, folder / "model.onnx")
    asked_entries = {SKIP: np.array(skip), FLIPS: np.array(flips, np.float32)} if SKIP in names(model) else {}
    with OrtSession(folder / "model.onnx", optimized=False) as session:
        items = [next(iter(session.run({**(inputs or X), **asked_entries}).values())) for _ in range(runs)]
    return items if runs > 1 else items[0]


def names(model: onnx.ModelProto) -> set[str]:
    return {value.name for value in model.graph.input}


BRANCHES = """
    zero = Constant<value_float=0.0>() total = ReduceSum<keepdims=0>(x) more = Greater(total, zero)
    y = If(more)<
        then_branch = one () => (float[n,8] a) { a = Exp(x) },
        else_branch = two () => (float[n,8] b) { b = Tanh(x) }
    >
"""
LOOP = """
    times = Constant<value_int=3>() go = Constant<value = bool {1}>()
    y = Loop(times, go, x)<
        body = step (int64 i, bool c, float[n,8] s) => (bool d, float[n,8] t) { d = Identity(c) t = Tanh(s) }
    >
"""


NET = f"{HEAD} net (float[n,8] x) => (float[n,8] y) {{%s}}"
CALLS = (
    '<ir_version: 8, opset_import: ["": 20, "own": 1]> net (float[n,8] x) => (float[n,8] y) { y = own.twice(x) }'
    '<domain: "own", opset_import: ["": 20]> twice (a) => (b) { c = Exp(a) b = Exp(c) }'
)


@pytest.mark.parametrize(
    "text",
    [
        *(NET % body for body in (BRANCHES, LOOP, "h = Exp(x) y = Softmax<axis=-1>(h)")),
        NET % "s = Shape(x) z = Tanh(x) y = Reshape(z, s)",
        CALLS,
    ],
)
def test_results_move_by_rounding_alone_within_branches_loops_and_functions_too(tmp_path, text):
    model = onnx.parser.parse_model(text)
    expected, result = answers(tmp_path, model), answers(tmp_path, with_rounding(model))
    assert not np.array_equal(expected, result)
    np.testing.assert_allclose(result, expected, rtol=1e-4)


@pytest.mark.parametrize(
    "text", ["t = Div(w, two) r = Mul(t, two)", "t = Mul(w, two) s = CumSum(t, axis) r = Identity(s)"]
)
def test_sums_of_integers_are_not_perturbed(tmp_path, text):
    text = f"w = Round(x) two = Constant<value_float=2.0>() axis = Constant<value_int=1>() {text} y = Floor(r)"
    model = onnx.parser.parse_model(f"{HEAD} net (float[n,8] x) => (float[n,m] y) {{{text}}}")
    expected = answers(tmp_path, model)
    assert all(np.array_equal(result, expected) for result in answers(tmp_path, with_rounding(model), runs=8))
    body = "axis = Constant<value_int=1>() s = CumSum(x, axis) f = Floor(s) y = Sub(s, f)"
    fractions = onnx.parser.parse_model(NET % body)
    assert not np.array_equal(answers(tmp_path, fractions), answers(tmp_path, with_rounding(fractions)))


def test_exact_operators_are_not_rounded(tmp_path):
    text = "a = Relu(x) b = Transpose<perm=[1,0]>(a) c = Concat<axis=0>(b, b) y = Abs(c)"
    model = onnx.parser.parse_model(f"{HEAD} net (float[n,8] x) => (float[m,n] y) {{{text}}}")
    assert np.array_equal(answers(tmp_path, model), answers(tmp_path, with_rounding(model)))


@pytest.mark.parametrize(("op_type", "units"), [("Sigmoid", 4), ("Elu", 1), ("Tanh", 0)])
def test_results_near_zero_get_the_rounding_error_of_a_difference(tmp_path, op_type, units):
    model = onnx.parser.parse_model(f"{HEAD} net (float[n,8] x) => (float[n,8] y) {{y = {op_type}(x)}}")
    x = np.full((64, 8), {"Sigmoid": -18.0, "Elu": -1e-9, "Tanh": 1e-9}[op_type], np.float32)
    moved_answers = answers(tmp_path, with_rounding(model), x=x) - answers(tmp_path, model, x=x)
    assert 0.8 * units * 2**-24 <= np.abs(moved_answers).max() <= (units + 1e-4) * 2**-24


def test_a_mask_of_the_lowest_number_does_not_overflow(tmp_path):
    model = build("float[n,8] x", "float[n,8] y", "m = Mul(mask, one) s = Add(x, m) y = Softmax<axis=-1>(s)",
                  {"mask": np.full(8, np.finfo(np.float32).min), "one": np.float32(1)})  # fmt: skip
    assert np.isfinite(answers(tmp_path, with_rounding(model))).all()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("r = RandomNormalLike(x) y = Add(x, r)", "RandomNormalLike gives random results"),
        ("y = com.microsoft.QuickGelu(x)", "the type of 'y', which QuickGelu makes, is not known"),
        ("q = QuantizeLinear<axis=1>(x, steps, zeros) y = DequantizeLinear<axis=1>(q, steps, zeros)", "is not one"),
    ],
)  # fmt: skip
def test_operators_without_perturbation_are_reported(text, reason):
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 20, "com.microsoft": 1]> net (float[n,8] x) => (float[n,8] z) '
        f"<float[8] steps = {{1, 1, 1, 1, 1, 1, 1, 1}}, int8[8] zeros = {{0, 0, 0, 0, 0, 0, 0, 0}}> "
        f"{{{text} z = Tanh(y)}}"
    )
    with pytest.raises(ValueError, match=reason):
        with_rounding(model)


def test_a_new_session_repeats_the_draws_and_each_run_draws_anew(tmp_path):
    model = with_rounding(mlp())
    first_answers, second_answers = answers(tmp_path, model, runs=2, **rows())
    again = answers(tmp_path, model, runs=2, **rows())
    assert np.array_equal([first_answers, second_answers], again) and not np.array_equal(first_answers, second_answers)


@pytest.mark.parametrize("zeros", [0, 300])
def test_about_the_requested_number_of_elements_changes(tmp_path, zeros):
    net = build("float[n,8] x", "float[n,8] y", "q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z)",
                {"s": np.float32(0.02), "z": np.int8(0)})  # fmt: skip
    x = {"x": np.random.default_rng(0).uniform(-2, 2, size=(500, 8)).astype(np.float32)}
    x["x"][:zeros] = 0  # on a number of the grid, as most elements behind Relu
    exact_answers, model = answers(tmp_path, net, **x), with_rounding(net)
    numbers = [int((result != exact_answers).sum()) for result in answers(tmp_path, model, flips=200.0, runs=4, **x)]
    assert 150 < np.mean(numbers) < 250
    assert all(int((result != exact_answers).sum()) < 3 for result in answers(tmp_path, model, runs=4, **x))


@pytest.mark.parametrize("flips", [0.0, 4.0])
def test_a_tensor_of_zeros_stays_zero(tmp_path, flips):
    net = build("float[n,8] x", "float[n,8] y", "q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z)",
                {"s": np.float32(0.02), "z": np.int8(0)})  # fmt: skip
    assert not answers(tmp_path, with_rounding(net), flips=flips, x=np.zeros((3, 8), np.float32)).any()


def test_a_graph_of_an_old_opset_is_rounded_too(tmp_path):
    net = build("float[n,8] x", "float[n,8] y", "m = MatMul(x, w) y = Clip<min=-1.0, max=1.0>(m)", {"w": np.eye(8)}, 9)
    x = np.random.default_rng(0).standard_normal((3, 8)).astype("f4")
    rounded_answers = answers(tmp_path, with_rounding(net, "fp16"), x=x)
    assert 0 < np.abs(rounded_answers - answers(tmp_path, net, x=x)).max() < 1e-3


def test_16_bit_rounding_is_optional(tmp_path):
    graph = emulate(cast_float(mlp(), "fp16")[0])
    model = with_rounding(graph)
    assert traits(model) == (True, False)
    rounded_answers, whole_answers = answers(tmp_path, graph, **rows()), answers(tmp_path, mlp(), **rows())
    plain, left_out = (answers(tmp_path, model, skip, **rows()) for skip in (False, True))
    error = {name: np.square(value - whole_answers).sum() for name, value in (("kept", plain), ("left out", left_out))}
    assert error["left out"] < error["kept"] < 4 * np.square(rounded_answers - whole_answers).sum()


def test_a_float_graph_can_be_rounded_to_16_bits_with_its_weights(tmp_path):
    expected = answers(tmp_path, mlp(), **rows())
    cast_answers = answers(tmp_path, emulate(cast_float(mlp(), "fp16")[0]), **rows())
    actual = answers(tmp_path, with_rounding(mlp(), "fp16"), **rows())
    errors = [np.square(value - expected).sum() for value in (actual, cast_answers)]
    assert 0.5 < errors[0] / errors[1] < 2


@pytest.mark.parametrize("half", ["fp16", "bf16"])
@pytest.mark.parametrize("text", ["a = Abs(x) y = Mul(a, x)", "s = Shape(x) z = Reshape(x, s) y = Mul(z, z)"])
def test_inputs_are_rounded_to_16_bits_too_as_the_cast_graph_rounds_them(tmp_path, text, half):
    model = onnx.parser.parse_model(f"{HEAD} net (float[n,8] x) => (float[n,8] y) {{{text}}}")
    expected, cast_answers = answers(tmp_path, model), answers(tmp_path, emulate(cast_float(model, half)[0]))
    actual = answers(tmp_path, with_rounding(model, half))
    assert np.square(actual - cast_answers).sum() < 0.25 * np.square(cast_answers - expected).sum()


def test_weights_in_shards_are_rounded_in_place(tmp_path: Path) -> None:
    weights = np.random.default_rng(1).normal(size=(8, 64)).astype(np.float32)
    net = build("float[n,8] x", "float[n,64] y", "y = MatMul(x, w)", {"w": weights})
    whole_answers = answers(tmp_path, with_rounding(net, "fp16"))
    (tmp_path / "weights").write_bytes(weights.tobytes())
    set_place(net.graph.initializer[0], str(tmp_path / "weights"), 0, weights.nbytes)
    rounded_model = with_rounding(net, "fp16")
    assert is_external(rounded_model.graph.initializer[0])
    write_graph(rounded_model, tmp_path / "graph.onnx")
    requests = {SKIP: np.array(False), FLIPS: np.array(0, np.float32)}
    with OrtSession(tmp_path / "graph.onnx", optimized=False) as session:
        assert np.array_equal(session.run({**X, **requests})["y"], whole_answers)


@pytest.mark.parametrize("scheme", [CPU, TENSORRT], ids=["uint8", "int8 and fp16"])
def test_a_quantized_graph_has_grids(scheme):
    graph, _ = quantize_int8(mlp(), ranges_of(mlp(), rows(2), ("x", "h", "n", "m", "logits")), scheme)
    assert traits(with_rounding(emulate(graph))) == (scheme is TENSORRT, True)
    assert maker(with_rounding(emulate(graph)), "x_quantized").op_type == "QuantizeLinear"


@pytest.mark.parametrize(("leading_dims", "added"), [("n", "Add(h, b)"), ("n", "Add(b, h)"), ("n,2", "Add(h, b)")])
def test_a_bias_behind_an_integer_product_may_be_added_in_integers(tmp_path, leading_dims, added):
    """ONNX Runtime makes one QGemm of the two, with a bias of int32; of a product of three dims it does not."""
    text = f"""
        q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) v = DequantizeLinear(w, t, z)
        h = MatMul(d, v) y = {added}
    """
    entries = {"s": np.float32(0.02), "t": np.float32(0.5), "z": np.int8(0), "b": np.float32([0.3, 1.7, -2.1, 0])}
    net = build(
        f"float[{leading_dims},8] x", f"float[{leading_dims},4] y", text, entries | {"w": np.ones((8, 4), np.int8)}
    )
    x = {"x": np.full((3, 8) if leading_dims == "n" else (3, 2, 8), 0.2, np.float32)}
    moved_distance = np.abs(answers(tmp_path, with_rounding(net), **x) - answers(tmp_path, net, **x)).max()
    assert (5e-4 < moved_distance < 0.0051) if leading_dims == "n" else moved_distance < 1e-5


@pytest.mark.parametrize("text", [BRANCHES, LOOP])
def test_inputs_read_by_branches_and_loops_are_rounded_to_16_bits(tmp_path, text):
    model = with_rounding(onnx.parser.parse_model(f"{HEAD} net (float[n,8] x) => (float[n,8] y) {{{text}}}"), "fp16")
    input_before = X["x"].astype(np.float16).astype(np.float32)
    assert np.array_equal(answers(tmp_path, model), answers(tmp_path, model, x=input_before))
