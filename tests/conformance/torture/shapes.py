"""Shapes that are known only when the engine runs, and shapes at the edge of what a shape can be."""

import numpy as np

from enginesmith.core.types import Dim, TensorSpec
from tests.conformance.torture.graph import BATCH, add, model, noise

_DYNAMIC = r"Slice|[sS]hape|dynamic|dim|depend|rank|starts|ends|size|empty|zero"

add(
    "plain",
    "g (float[n, 8] x) => (float[n, 3] y) { a = MatMul(x, w) b = Add(a, c) r = Relu(b) y = MatMul(r, v) }",
    {"w": noise(1, 8, 16), "c": noise(2, 16), "v": noise(3, 16, 3)},
    core=True,
)
add(
    "plain_with_one_shape_alone",
    "g (float[2, 3, 8, 8] x) => (float[2, 4, 8, 8] y) { a = Conv <pads = [1, 1, 1, 1]> (x, w) y = Sigmoid(a) }",
    {"w": noise(1, 4, 3, 3, 3)},
    core=True,
)
add(
    "two_dynamic_dims",
    "g (float[n, t, 4] x) => (float[n, t, 4] y) { s = Softmax <axis = 1> (x) m = MatMul(s, w) y = Add(m, x) }",
    {"w": noise(1, 4, 4)},
    dims=(*BATCH, Dim("t", 1, 3, 7)),
    feeds=({"n": 1, "t": 7}, {"n": 8, "t": 1}, {"n": 5, "t": 3}),
    core=True,
)
add("one_dim_in_two_inputs", "g (float[n, 4] x, float[4, n] z) => (float[n, n] y) { y = MatMul(x, z) }")
add("one_dim_twice_in_one_input", "g (float[n, n] x) => (float[n, n] y) { t = Transpose(x) y = MatMul(x, t) }")
add(
    "slice_at_places_that_are_inputs",
    "g (float[n, 8] x, int64[1] from, int64[1] to) => (float[n, m] y) { a = Constant <value = int64[1] {1}> () "
    "y = Slice(x, from, to, a) }",
    fill=lambda sizes, rng: {"from": np.array([1 + sizes["n"] % 3]), "to": np.array([-1])},
    words=_DYNAMIC,
)
add(
    "slice_backwards_beyond_the_end",
    "g (float[n, 8] x) => (float[n, 8] y) { y = Slice(x, from, to, axes, steps) }",
    {"from": np.array([100]), "to": np.array([np.iinfo("int64").min]), "axes": np.array([-1]), "steps": np.array([-1])},
    words=_DYNAMIC,
)
add(
    "slice_backwards_from_beyond_a_dynamic_end",
    "g (float[n, 3] x) => (float[k, 3] y) { y = Slice(x, from, to, axes, steps) }",
    {"from": np.array([6]), "to": np.array([-100]), "axes": np.array([0]), "steps": np.array([-2])},
    words=_DYNAMIC,
)
add(
    "slice_by_half_of_the_shape",
    """g (float[n, 4] x) => (float[m, 4] y) {
        s = Shape <start = 0, end = 1> (x) more = Add(s, one) half = Div(more, two) y = Slice(x, zero, half, zero)
    }""",
    {"zero": np.array([0]), "one": np.array([1]), "two": np.array([2])},
    words=_DYNAMIC,
)
add(
    "reshape_to_what_another_input_is",
    "g (float[n, 4] x, float[4, n] z) => (float[4, n] y) { s = Shape(z) r = Reshape(x, s) y = Add(r, z) }",
    words=_DYNAMIC,
)
add(
    "shape_as_an_output",
    "g (float[n, 4] x) => (int64[2] s, float[n, 4] y) { s = Shape(x) y = Relu(x) }",
    words=_DYNAMIC,
)
add(
    "range_as_long_as_the_batch",
    """g (float[n, 4] x) => (float[n, 4] y) {
        s = Shape <start = 0, end = 1> (x) e = Squeeze(s) r = Range(zero, e, one)
        f = Cast <to = 1> (r) c = Unsqueeze(f, axis) y = Mul(x, c)
    }""",
    {"zero": np.array(0), "one": np.array(1), "axis": np.array([1])},
    words=_DYNAMIC + "|Range",
)
add(
    "as_many_rows_as_are_positive",
    "g (float[n] x) => (int64[1, m] y) { p = Relu(x) y = NonZero(p) }",
    words=_DYNAMIC + "|NonZero",
)
add(
    "as_many_of_the_greatest_as_an_input_says",
    "g (float[n, 8] x, int64[1] k) => (float[n, m] y, int64[n, m] i) { y, i = TopK(x, k) }",
    fill=lambda sizes, rng: {"k": np.array([1 + sizes["n"] % 4])},
    words=_DYNAMIC + "|TopK",
)
add(
    "no_rows_at_all",
    "g (float[n, 4] x) => (float[n, 3] y, float[3] s) { y = MatMul(x, w) a = Constant <value = int64[1] {0}> () "
    "s = ReduceSum <keepdims = 0> (y, a) }",
    {"w": noise(1, 4, 3)},
    dims=(Dim("n", 0, 4, 8),),
    words=_DYNAMIC + "|min",
)
add(
    "an_empty_slice_in_between",
    """g (float[n, 4] x) => (float[n, 4] y) {
        two = Constant <value = int64[1] {2}> () one = Constant <value = int64[1] {1}> ()
        none = Slice(x, two, two, one) y = Concat <axis = 1> (none, x)
    }""",
    words=_DYNAMIC,
)
add("scalar_output", "g (float[n, 4] x) => (float y) { y = ReduceMean <keepdims = 0> (x) }")
add("scalar_input", "g (float[n, 4] x, float k) => (float[n, 4] y) { y = Mul(x, k) }")
add("scalars_alone", "g (float a, float b) => (float y) { s = Add(a, b) y = Tanh(s) }")
add(
    "axes_without_names",
    lambda: _unnamed(),
    dims=(*BATCH, Dim("t", 1, 3, 7)),
    inputs=(TensorSpec("x", "float32", ("n", "t")),),
)
add(
    "broadcast_between_dims",
    "g (float[n, 1] x, float[1, t] z) => (float[n, t] y) { y = Add(x, z) }",
    dims=(*BATCH, Dim("t", 1, 3, 7)),
)
add(
    "eight_axes",
    "g (float[1, 2, 1, 2, 1, 2, 1, 2] x) => (float[2, 1, 2, 1, 2, 1, 2, 1] y) { y = Transpose(x) }",
    words=r"rank|dim|axes|Transpose",
)


def _unnamed():
    onnx_model = model("g (float[n, t] x) => (float[n, t] y) { y = Softmax(x) }")
    for value in (*onnx_model.graph.input, *onnx_model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            dim.ClearField("dim_param")
    return onnx_model
