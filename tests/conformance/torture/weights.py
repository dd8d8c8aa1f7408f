"""Weights: shared, large, empty, of odd numbers, in other files and in other encodings."""

import numpy as np
import onnx

from tests.conformance.torture.graph import BATCH, add, model, noise

add(
    "one_weight_at_two_places",
    "g (float[n, 4] x) => (float[n, 4] y) { a = MatMul(x, w) t = Transpose(w) b = MatMul(a, t) y = MatMul(b, w) }",
    {"w": noise(1, 4, 4)},
    core=True,
)
add(
    "equal_weights_with_two_names",
    "g (float[n, 4] x) => (float[n, 4] y) { a = MatMul(x, v) b = Relu(a) y = MatMul(b, w) }",
    {"v": noise(1, 4, 4), "w": noise(1, 4, 4)},
    core=True,
)
add(
    "large_weight",
    "g (float[n, 512] x) => (float[n, 2048] y) { y = MatMul(x, w) }",
    {"w": noise(1, 512, 2048) / 16},
    core=True,
)
add("large_constant_node", lambda: _constant_node(), dims=BATCH, core=True)
add(
    "weights_in_another_file",
    "g (float[n, 8] x) => (float[n, 8] y) { a = MatMul(x, v) y = MatMul(a, w) }",
    {"v": noise(1, 8, 8), "w": noise(2, 8, 8)},
    core=True,
    external=True,
)
add("weights_as_lists_of_numbers", lambda: _listed(), dims=BATCH, core=True)
add(
    "empty_weight",
    "g (float[4, 4] x) => (float[4, 4] y) { y = Concat <axis = 1> (x, none) }",
    {"none": np.zeros((4, 0), "f")},
    words=r"none|empty|zero|size|shape|dim|Concat",
)
add("scalar_weight", "g (float[n, 4] x) => (float[n, 4] y) { y = Mul(x, k) }", {"k": np.array(2.5, "f")}, core=True)
add(
    "weights_of_odd_numbers",
    "g (float[n, 6] x) => (float[n, 6] y) { y = Mul(x, w) }",
    {"w": np.array([-0.0, 1e-40, np.finfo("f").max, np.finfo("f").tiny, 1 + 2**-23, -1], "f")},
    fill=lambda sizes, rng: {"x": np.ones((sizes["n"], 6), "f")},
)
add(
    "weights_not_finite",
    "g (float[n, 4] x) => (float[n, 4] y) { y = Add(x, w) }",
    {"w": np.array([np.inf, -np.inf, 0, np.nan], "f")},
    words=r"nan|inf|finite",
)
add(
    "mask_of_the_least_number",
    "g (float[n, 4] x, bool[n, 4] m) => (float[n, 4] y) { a = Where(m, x, least) y = Softmax(a) }",
    {"least": np.array(np.finfo("f").min, "f")},
)
add(
    "quantized_weight",
    """g (float[n, 8] x) => (float[n, 16] y) {
        q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) v = DequantizeLinear(w, s, z) y = MatMul(d, v)
    }""",
    {
        "s": np.array(0.05, "f"),
        "z": np.array(0, "int8"),
        "w": np.random.default_rng(1).integers(-127, 128, (8, 16)).astype("int8"),
    },
    precision="int8",
    words="int8",
)


def _constant_node():
    onnx_model = model("g (float[n, 256] x) => (float[n, 1024] y) { y = MatMul(x, w) }")
    tensor = onnx.numpy_helper.from_array(noise(1, 256, 1024) / 16, "w")
    onnx_model.graph.node.insert(0, onnx.helper.make_node("Constant", [], ["w"], value=tensor))
    return onnx_model


def _listed():
    onnx_model = model("g (float[n, 2] x) => (float[n, 3] y) { y = MatMul(x, w) }")
    onnx_model.graph.initializer.append(onnx.helper.make_tensor("w", 1, [2, 3], [0.5, -1, 2, 3, 0.25, -4]))
    return onnx_model
