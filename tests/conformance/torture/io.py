"""What goes in and comes out: every dtype, and outputs that are hardly computed."""

import numpy as np
import onnx

from tests.conformance.torture.graph import BATCH, add, model, noise

_TYPES = r"int|bool|float|bf16|fp16|fp64|double|half|dtype|type|cast"

for _dtype, _words in (
    ("int64", _TYPES),
    ("int32", _TYPES),
    ("int16", r"int16"),
    ("int8", r"int8"),
    ("uint8", r"uint8"),
    ("uint16", r"uint16"),
    ("uint32", r"uint32"),
    ("uint64", r"uint64"),
    ("double", r"float64|double"),
):
    _text = "g (T[n, 4] x, T[n, 4] z) => (T[n, 4] y) { y = Add(x, z) }".replace("T", _dtype)
    add(f"add_of_{_dtype}", _text, words=_words + "|Add")
add(
    "int64_beyond_what_int32_holds",
    "g (int64[n] x) => (int64[n] y) { big = Constant <value = int64[1] {6000000000}> () y = Add(x, big) }",
    fill=lambda sizes, rng: {"x": rng.integers(-(2**40), 2**40, sizes["n"])},
    words=_TYPES,
)
add(
    "int64_beyond_what_a_double_holds",
    "g (int64[n] x) => (int64[n] y) { one = Constant <value = int64[1] {1}> () y = Sub(x, one) }",
    fill=lambda sizes, rng: {"x": np.full(sizes["n"], 2**62 + 1)},
    words=_TYPES,
)
add(
    "bools",
    "g (bool[n] x, bool[n] z) => (bool[n] y, bool[n] w) { y = And(x, z) q = Xor(x, z) w = Not(q) }",
    words=_TYPES + "|And|Xor|Not",
)
add(
    "bool_that_chooses",
    "g (bool[n, 4] c, float[n, 4] x) => (float[n, 4] y, int64[n, 4] i) "
    "{ m = Neg(x) y = Where(c, x, m) i = Cast <to = 7> (c) }",
    words=_TYPES,
)
add(
    "lookup_by_int64",
    "g (int64[n] ids) => (float[n, 6] y) { y = Gather(table, ids) }",
    {"table": noise(1, 5, 6)},
    fill=lambda sizes, rng: {"ids": rng.integers(-5, 5, sizes["n"])},
)
add(
    "float16_in_and_out",
    "g (float16[n, 8] x) => (float16[n, 3] y) { a = MatMul(x, w) y = Relu(a) }",
    {"w": noise(1, 8, 3, dtype="float16")},
    precision="fp16",
)
add("bfloat16_in_and_out", lambda: _bfloat16(), dims=BATCH, precision="bf16", words=r"bf16|bfloat16")
add("output_is_an_input", lambda: _passed_on(), dims=BATCH, words=r"'x'|output|\bx\b|Identity")
add("output_is_a_copy_of_an_input", "g (float[n, 4] x) => (float[n, 4] y) { y = Identity(x) }")
add(
    "output_is_a_constant",
    "g (float[n, 4] x) => (float[2] c, float[n, 4] y) { y = Relu(x) }",
    {"c": noise(1, 2)},
    words=r"'c'|output|constant|initializer|\bc\b",
)
add(
    "nothing_but_a_constant",
    "g (float[n, 4] x) => (float[2] y) { y = Constant <value = float[2] {1.5, -0.25}> () }",
    words=r"operator|constant|'x'|input|'y'",
)
add(
    "same_value_twice_among_the_outputs",
    lambda: _twice(),
    dims=BATCH,
    words=r"duplicate|twice|SSA|'y'|unique|\by\b|output",
)
add(
    "two_outputs_that_are_copies", "g (float[n, 4] x) => (float[n, 4] y, float[n, 4] z) { y = Relu(x) z = Identity(y) }"
)
add(
    "input_that_nothing_reads",
    "g (float[n, 4] x, float[n, 2] spare) => (float[n, 4] y) { y = Relu(x) }",
    words=r"spare|unused",
)
add(
    "outputs_not_in_the_order_of_work",
    "g (float[n, 4] x) => (float[n, 4] b, float[n, 4] a) { a = Relu(x) b = Neg(a) }",
    core=True,
)
add("input_with_a_default", lambda: _default(), dims=BATCH, words=r"'k'|\bk\b|default|initializer")
add(
    "optional_inputs_left_out",
    'g (float[n, 4] x) => (float[n, 4] y) { most = Constant <value = float {0.5}> () y = Clip(x, "", most) }',
)
add(
    "optional_inputs_left_out_in_the_middle",
    'g (float[4, 2, 4] x) => (float[4, 2, 8] y) { y = Resize <mode = "nearest"> (x, "", "", sizes) }',
    {"sizes": np.array([4, 2, 8])},
    words="Resize",
)
add("optional_output_left_out", 'g (float[n, 4] x) => (float[n, 4] y) { y, "" = Dropout(x) }', words=r"Dropout|output")
add(
    "nan_and_infinities_pass",
    "g (float[n, 4] x) => (float[n, 4] y, bool[n, 4] w) { y = Neg(x) w = IsNaN(x) }",
    fill=lambda sizes, rng: {"x": np.tile(np.array([np.nan, np.inf, -np.inf, -0.0], "f"), (sizes["n"], 1))},
    words=r"IsNaN",
)
add(
    "strings",
    "g (string[n] x) => (string[n] y) { y = Identity(x) }",
    fill=lambda sizes, rng: {"x": np.array(["a"] * sizes["n"], object)},
    words=r"string|object|str",
)
add(
    "a_sequence_inside",
    "g (float[n, 4] x) => (float[n, 4] y) { s = SequenceConstruct(x, x) zero = Constant <value = int64 {0}> () "
    "y = SequenceAt(s, zero) }",
    words=r"[Ss]equence",
)


def _bfloat16():
    onnx_model = model("g (bfloat16[n, 8] x) => (bfloat16[n, 3] y) { a = MatMul(x, w) y = Relu(a) }")
    onnx_model.graph.initializer.append(
        onnx.helper.make_tensor("w", onnx.TensorProto.BFLOAT16, [8, 3], noise(1, 24).astype("f").tolist())
    )
    return onnx_model


def _passed_on():
    onnx_model = model("g (float[n, 4] x) => (float[n, 4] y) { y = Relu(x) }")
    onnx_model.graph.output.append(onnx_model.graph.input[0])
    return onnx_model


def _twice():
    onnx_model = model("g (float[n, 4] x) => (float[n, 4] y) { y = Relu(x) }")
    onnx_model.graph.output.append(onnx_model.graph.output[0])
    return onnx_model


def _default():
    onnx_model = model("g (float[n, 4] x, float[1] k) => (float[n, 4] y) { y = Mul(x, k) }")
    onnx_model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([2.5], "f"), "k"))
    return onnx_model
