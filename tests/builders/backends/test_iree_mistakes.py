"""What IREE compiles into something else: refused with the node's name, or written so that it is right."""

import numpy as np
import onnx
import pytest
from onnxruntime import InferenceSession

from builders.backends.iree import compile as iree
from builders.backends.iree.compile import rewrite_for_iree
from builders.backends.known_faults import find_faults
from enginesmith.core.errors import ModelError
from tests.conformance.items import torture_item
from tests.conformance.torture import GRAPHS
from tests.conformance.torture.graph import model
from tests.conformance.trial import Item, Run, attempt, backend_of, saved, target_for


@pytest.fixture(scope="module")
def backend():
    pytest.importorskip("iree.compiler")
    pytest.importorskip("iree.runtime")
    return backend_of("iree")


def reasons(model: onnx.ModelProto) -> list[str]:
    """What IREE is known to make something else of."""
    return [f"{node.name} {words}" for _, node, words in find_faults(model, "iree")]


def loop(begins: str, again: str) -> onnx.ModelProto:
    """A Loop of three turns that begins if `begins` says so, and goes on if `again` does."""
    return model(
        f"""g (bool c, float[2] x) => (float[2] y) {{
            times = Constant <value = int64 {{3}}> ()
            yes = Constant <value = bool {{1}}> () no = Constant <value = bool {{0}}> ()
            y = Loop (times, {begins}, x) <body = body (int64 i, bool go, float[2] s) => (bool again, float[2] t) {{
                one = Constant <value = int64 {{1}}> () again = {again} t = Add(s, s) }}>
        }}"""
    )


@pytest.mark.parametrize("begins", ["yes", '""'])
@pytest.mark.parametrize("again", ["Identity(go)", "Identity(yes)", "And(go, yes)", "Or(c, go)", "Cast <to = 9> (one)"])
def test_a_loop_with_a_fixed_trip_count_is_accepted(begins, again):
    assert reasons(loop(begins, again)) == []


@pytest.mark.parametrize(
    ("begins", "again"),
    [
        *(("yes", again) for again in ("Identity(c)", "Identity(no)", "Not(go)", "Less(i, one)", "And(go, c)")),
        *((begins, again) for begins in ("c", "no") for again in ("Identity(go)", "Identity(yes)")),
    ],
)
def test_a_loop_that_may_stop_early_is_refused(begins, again):
    assert [reason for reason in reasons(loop(begins, again)) if "even if its condition is false" in reason]


@pytest.mark.parametrize(
    ("size", "more", "words"),
    [
        (4, "", None),
        ("n", "", "whose dynamic size"),
        (3, ", scan_input_directions = [1]", "ignores scan_"),
        (3, ", scan_output_axes = [1]", "ignores scan_"),
    ],
)
def test_only_a_forward_scan_of_fixed_sizes_is_accepted(size, more, words):
    actual = reasons(
        model(
            f"""g (float[3] start, float[{size}, 3] x) => (float[3] last, float[{size}, 3] y) {{
                last, y = Scan <num_scan_inputs = 1{more}, body = b (float[3] s, float[3] e) =>
                    (float[3] t, float[3] o) {{ t = Add(s, e) o = Neg(s) }}> (start, x) }}"""
        )
    )
    assert [reason for reason in actual if words in reason] if words else actual == []


def inferred(text: str, opset: int = 20, **weights) -> onnx.ModelProto:
    return onnx.shape_inference.infer_shapes(model(f"g {text}", weights, opset), data_prop=True)


def pool(size: int | str, kernel: int, stride: int, rest: str = "", op: str = "AveragePool") -> onnx.ModelProto:
    window = f"kernel_shape = [{kernel}, {kernel}], strides = [{stride}, {stride}]{rest}"
    edges = f"(float[1, 1, {size}, {size}] x) => (float[1, 1, k, l] y)"
    return inferred(f"{edges} {{ y = {op} <ceil_mode = 1, {window}> (x) }}")


def cells(rows: int, op: str, more: str = "", **weights) -> onnx.ModelProto:
    inputs = f"float[5, 2, 4] x, float[1, {rows}, 4] w, float[1, {rows}, 3] r{more}"
    return inferred(f"({inputs}) => (float[5, 1, 2, 3] y) {{ y = {op} }}", **weights)


def padding(mode: str, *pads: int) -> onnx.ModelProto:
    return inferred(f'(float[n, 3] x) => (float[k, 3] y) {{ y = Pad <mode = "{mode}"> (x, p) }}', p=np.array(pads))


PADS = ", pads = [1, 1, 1, 1]"
LENGTHS = 'LSTM <hidden_size = 3> (x, w, r, "", lengths)'
PEEPHOLE = 'LSTM <hidden_size = 3> (x, w, r, "", "", "", "", p)'
GRU = 'GRU <hidden_size = 3, activations = ["{}", "{}"]> (x, w, r)'


@pytest.mark.parametrize(
    ("graph", "words"),
    [
        (pool(8, 4, 3), "too much"),
        (pool(7, 2, 2, ", count_include_pad = 1"), "too much"),
        (pool("s", 3, 3), "too much"),
        (pool(7, 2, 2, PADS), "begin behind"),
        (inferred("(uint8[4] a, uint8[4] b) => (uint8[4] y) { y = Div(a, b) }"), "reads uint8 as signed"),
        (inferred("(uint8[1,1,4,4] a) => (uint8[1,1,k,l] y) { y = MaxPool <kernel_shape=[2,2]> (a) }"), "reads uint8"),
        (cells(12, LENGTHS, lengths=np.array([5, 3], "int32")), "ignores sequence_lens"),
        (cells(12, PEEPHOLE, ", float[1, 9] p"), "peephole"),
        (cells(9, GRU.format("HardSigmoid", "Tanh")), "than HardSigmoid; use Sigmoid"),
        (cells(3, "RNN <hidden_size = 3, clip = 0.5> (x, w, r)"), "ignores clip"),
        (padding("edge", -1, 0, 0, 0), "negative; crop with Slice"),
        (padding("wrap", 1, 0, 0, 0), "compiles without end"),
        (inferred("(float[2, 3, 4] x) => (float[2, 3, 4] y) { y = Hardmax(x) }", 11), "opset 13 or later"),
        (inferred("(float[2, 2] x) => (float y) { y = Det(x) }"), "divides by zero"),
        (inferred("(float[1,1,4,4] x, float[1,3,3,2] p) => (float[1,1,3,3] y) { y = GridSample(x, p) }"), "far out"),
    ],
)
def test_a_miscompiled_operator_is_refused_by_name_with_the_remedy(graph, words):
    (result,) = reasons(graph)
    assert words in result and ";" in result


@pytest.mark.parametrize(
    "graph",
    [
        pool(9, 4, 3),
        pool(8, 2, 2, ", count_include_pad = 1"),
        pool("s", 2, 2),
        pool("s", 3, 3, PADS),
        pool(8, 3, 3, PADS, "MaxPool"),
        pool("s", 3, 2, PADS, "MaxPool"),
        inferred("(int8[4] a, int8[4] b) => (int8[4] y) { y = Div(a, b) }"),
        inferred("(uint8[4] a, uint8[4] b) => (uint8[4] y) { y = Max(a, b) }"),
        cells(12, LENGTHS, lengths=np.array([5, 5], "int32")),
        cells(9, GRU.format("Tanh", "Relu")),
        padding("edge", 1, 0, 2, 0),
        padding("reflect", 0, 0, -1, 0),
        inferred("(float[2, 3, 4] x) => (float[2, 3, 4] y) { y = Hardmax <axis = 2> (x) }", 11),
    ],
)
def test_correctly_compiled_graphs_are_accepted(graph):
    assert reasons(graph) == []


LOW, HIGH, BYTES = np.float32(-1), np.float32(1), np.uint8([[200, 130], [0, 7]])
FLOATS = np.array([np.nan, -np.inf, np.inf, -3.5, -0.0, 0, 0.25, 2, 7], "f")
BASES, EXPONENTS = (
    np.ravel(grid).astype("f") for grid in np.meshgrid([-2, -1, -0.5, 0, 0.5, 1, 2], [-3, -2, -0.5, 0, 0.5, 1, 2, 3])
)


@pytest.mark.parametrize(
    ("text", "opset", "weights", "feed"),
    [
        ("(float[9] x) => (float[9] y) { y = Clip(x, a, b) }", 20, {"a": LOW, "b": HIGH}, {"x": FLOATS}),
        ("(float[k] x) => (float[k] y) { y = Clip(x, a, b) }", 20, {"a": HIGH, "b": LOW}, {"x": FLOATS[1:]}),
        ('(int64[4] x) => (int64[4] y) { y = Clip(x, "", b) }', 13, {"b": 2}, {"x": [-9, 2, 3, 2**40]}),
        ("(float[k] x, float[k] e) => (float[k] y) { y = Pow(x, e) }", 20, {}, {"x": BASES, "e": EXPONENTS}),
        ("(float[3] x, int64[3] e) => (float[3] y) { y = Pow(x, e) }", 13, {}, {"x": BASES[:3], "e": [0, 3, -1]}),
        *(
            (
                f"(float[2, 3] x) => (float[2, 3] y) {{ y = LpNormalization <axis = {axis}, p = {p}> (x) }}",
                opset,
                {},
                {"x": np.array([[0, 0, 0], [1, -2, 0]], "f")},
            )
            for axis in (0, -1)
            for p in (1, 2)
            for opset in (13, 20)
        ),
        ("(uint8[2, 2] x) => (int32[2, 2] y) { y = MatMulInteger(x, w) }", 20, {"w": BYTES}, {"x": BYTES}),
        *(
            (
                f"(float[n, 5] x, int64[2] from) => (float[k, l] y) {{ y = Slice(x, {start}, to, {axes}, steps) }}",
                13,
                {"to": [-100, 0], "steps": [-1, -2], "axes": [-1, 0], "fixed": start_at},
                {"x": np.arange(20, dtype="f").reshape(4, 5), "from": start_at},
            )
            for start in ("fixed", "from")
            for axes in ("axes", '""')
            for start_at in ([100, 2], [-1, 2**40], [3, 3], [0, 100])
        ),
        (
            "(float[n, 5] x, int32[1] from) => (float[k, l] y) { y = Slice(x, from, to, axes, steps) }",
            13,
            {"to": np.array([-100], "int32"), "steps": np.array([-1], "int32"), "axes": np.array([0], "int32")},
            {"x": np.arange(10, dtype="f").reshape(2, 5), "from": np.array([9], "int32")},
        ),
    ],
)
def test_rewritten_graphs_compute_the_same(text, opset, weights, feed):
    """Whether IREE gets it right then, the torture graphs say."""
    inputs = inferred(text, opset, **{name: np.asarray(array) for name, array in weights.items()})
    model = onnx.ModelProto.FromString(inputs.SerializeToString())
    rewrite_for_iree(model.graph, opset)
    assert [node.op_type for node in model.graph.node] != [
        node.op_type for node in inputs.graph.node
    ] or "fixed, " in text
    onnx.checker.check_model(model)
    fed_arrays = {value.name: np.asarray(feed[value.name]) for value in inputs.graph.input}
    sessions = [InferenceSession(m.SerializeToString(), providers=["CPUExecutionProvider"]) for m in (inputs, model)]
    expected, actual_output = (session.run(None, fed_arrays)[0] for session in sessions)
    np.testing.assert_allclose(actual_output, expected, rtol=1e-6)


@pytest.mark.parametrize(
    "text",
    [
        "(float[4] x) => (float[4] y) { y = Pow(x, one) }",
        "(float[4] x) => (float[4] y) { y = Pow(one, x) }",
        "(float[8] x) => (float[k] y) { y = Slice(x, zero, four, zero, two) }",
        "(float[8] x) => (float[k] y) { y = Slice(x, back, zero, zero, back) }",
        "(int8[2, 2] x, uint8[2, 2] w) => (int32[2, 2] y) { y = MatMulInteger(x, w) }",
    ],
)
def test_graphs_that_need_no_rewriting_stay_unchanged(text):
    numbers = {"one": np.float32(1), "zero": [0], "two": [2], "four": [4], "back": [-1]}
    graph = inferred(text, **{name: np.asarray(array) for name, array in numbers.items()}).graph
    node_before = list(graph.node)
    rewrite_for_iree(graph, 20)
    assert list(graph.node) == node_before


def test_a_loop_state_keeps_its_input_shape():
    graph = loop("yes", "Identity(go)").graph
    body = graph.node[-1].attribute[0].g
    body.output[1].type.tensor_type.ClearField("shape")
    rewrite_for_iree(graph, 20)
    assert body.output[1].type == body.input[2].type and body.output[0].type.tensor_type.elem_type == 9


def test_unsigned_numbers_stay_unsigned(backend, tmp_path):
    uint8_model = model("g (uint8[2] x, uint8[2] w) => (uint8[2] y) { y = Add(x, w) }")
    inputs = {"x": np.array([200, 1], "uint8"), "w": np.array([50, 255], "uint8")}
    run = Run(inputs, {"y": np.array([250, 0], "uint8")})
    item = Item("sum", lambda folder: saved(uint8_model, folder), lambda inputs, outputs: [run])
    result = attempt(backend, target_for(backend), item, tmp_path)
    assert result.kind == "passed", result


def test_operators_at_their_edges_are_right_or_refused(backend, tmp_path):
    names = ["averages_of_windows_beyond_the_edge", "division_of_unsigned_numbers"]
    right = ["power_of_numbers_below_zero_by_an_input", "normalization_of_zeros", "clip_of_unsigned_numbers"]
    result = {name: attempt(backend, target_for(backend), torture_item(name), tmp_path) for name in (*names, *right)}
    assert {name for name in result if result[name].kind == "refused"} == set(names), result
    assert {name for name in result if result[name].kind == "passed"} == set(right), result


def test_the_error_names_the_node_and_comes_before_the_compiler(backend, tmp_path, monkeypatch):
    monkeypatch.setattr(iree, "_compiler", lambda: pytest.fail("it was compiled"))
    loop_model = loop("c", "Identity(go)")
    loop_model.graph.node[-1].name = "decoder/steps"
    onnx.save(loop_model, tmp_path / "m.onnx")
    with pytest.raises(ModelError, match=r"node 'decoder/steps' \(Loop\) runs .* became false; .* or use onnxr"):
        iree.compile_model(tmp_path / "m.onnx", tmp_path, [])


def test_endless_loops_are_refused_and_finite_ones_are_right(backend, tmp_path):
    names = [name for name in GRAPHS if name.startswith("loop_that") or name == "loop_until_the_data_says_stop"]
    right = ["loop_as_often_as_an_input_says", "loop_within_a_loop"]
    result = {name: attempt(backend, target_for(backend), torture_item(name), tmp_path) for name in (*names, *right)}
    assert {result[name].kind for name in names} == {"refused"} and len(names) == 5, result
    assert result["loop_within_a_loop"].kind == "passed", result


@pytest.mark.parametrize("name", [name for name in GRAPHS if name.startswith("slice_backwards")])
def test_a_backward_slice_begins_at_the_last_entry(backend, tmp_path, name):
    """It read what lies in front of the tensor."""
    result = attempt(backend, target_for(backend), torture_item(name), tmp_path)
    assert result.kind == "passed", result
