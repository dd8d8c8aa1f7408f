"""Single operators on torch's arrays, against numpy and ONNX Runtime, where the other tests do not take them."""

import numpy as np
import onnx
import pytest
import torch

from builders.backends.onnxruntime import OrtSession
from tests.builders.onnx_torch import to_module


def ran(tmp_path, text, *arrays, opset=24):
    onnx.save(
        onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": {opset}]> g {text}'), tmp_path / "model.onnx"
    )
    return to_module(tmp_path / "model.onnx")(*map(torch.from_numpy, arrays))[0].numpy()


@pytest.mark.parametrize(("kind", "ends"), [("bool", (False, True)), ("int32", (-(2**31), 2**31 - 1))])
def test_the_maximum_of_nothing_is_the_types_minimum_and_vice_versa(tmp_path, kind, ends):
    for operator, expected in zip(("ReduceMax", "ReduceMin"), ends, strict=True):
        text = f"({kind}[2, n] x) => ({kind}[2] y) <int64[1] at = {{1}}> {{ y = {operator} <keepdims = 0> (x, at) }}"
        assert ran(tmp_path, text, np.zeros((2, 0), kind), opset=20).tolist() == [expected] * 2


@pytest.mark.parametrize(
    "node",
    [
        "y = AveragePool <kernel_shape = [2, 2]> (x)",
        "y = AveragePool <kernel_shape = [2, 2], dilations = [2, 2]> (x)",
        "y = LpPool <kernel_shape = [3, 2], strides = [2, 1], pads = [1, 0, 1, 1]> (x)",
        "values, y = MaxPool <kernel_shape = [3, 2], strides = [2, 1], pads = [1, 0, 1, 0]> (x)",
        "y = Conv <pads = [0, 1, 1, 0], strides = [1, 2]> (x, w)",
        'y = ConvTranspose <auto_pad = "SAME_LOWER", strides = [2, 2]> (x, v)',
        'y = Resize <mode = "cubic"> (x, , scales)',
        'y = GridSample <mode = "bicubic", padding_mode = "reflection"> (x, grid)',
        "y = Pad (x, edges)",
        "y = LpNormalization <axis = 1> (x)",
    ],
)
def test_single_plane_cases_of_onnx_also_hold_for_several_planes(tmp_path, node):
    shapes = {"x": (2, 3, 7, 6), "w": (4, 3, 2, 3), "v": (3, 2, 3, 3), "grid": (2, 4, 5, 2)}
    inputs = ", ".join(f"float[{', '.join(map(str, shape))}] {name}" for name, shape in shapes.items())
    text = f"""({inputs}) => ({"int64" if "MaxPool" in node else "float"}[n, c, h, k] y)
               <float[4] scales = {{1.0, 1.0, 2.0, 1.5}}, int64[8] edges = {{1, 0, 2, 0, 0, 1, 0, 3}}> {{ {node} }}"""
    rng = np.random.default_rng(0)
    input_arrays = {name: rng.uniform(-1, 1, shape).astype("f") for name, shape in shapes.items()}
    actual = ran(tmp_path, text, *input_arrays.values(), opset=19)
    expected = OrtSession(tmp_path / "model.onnx", optimized=False).run(input_arrays)["y"]
    np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_running_products_go_forward(tmp_path):
    text = "(float[2, 3] x) => (float[2, 3] y) <int64 axis = {1}> { y = CumProd (x, axis) }"
    x = np.arange(1, 7, dtype="f").reshape(2, 3)
    assert (ran(tmp_path, text, x, opset=26) == np.cumprod(x, 1)).all()


@pytest.mark.parametrize("causal", [0, 1])
def test_a_query_attends_to_the_keys_that_are_filled_and_not_to_later_ones(tmp_path, causal):
    text = f"""(float[2, 1, 2, 4] q, float[2, 1, 5, 4] k, float[2, 1, 5, 4] v, int64[2] filled) => (float[2, 1, 2, 4] y)
               {{ y = Attention <is_causal = {causal}> (q, k, v, , , , filled) }}"""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 1, length, 4)).astype("f") for length in (2, 5, 5))
    filled_array = np.array([3, 5])
    expected = np.empty_like(q)
    for sample, count in enumerate(filled_array):
        for row in range(2):  # the queries are the last of the keys that are filled
            seen_slice = slice(0, count - 1 + row if causal else count)
            scores = q[sample, 0, row] @ k[sample, 0, seen_slice].T / 2
            weights = np.exp(scores - scores.max())
            expected[sample, 0, row] = weights @ v[sample, 0, seen_slice] / weights.sum()
    np.testing.assert_allclose(ran(tmp_path, text, q, k, v, filled_array), expected, atol=1e-5)


def test_without_key_counts_the_first_query_sees_only_the_first_key(tmp_path):
    text = """(float[1, 1, 2, 4] q, float[1, 1, 3, 4] k, float[1, 1, 3, 4] v) => (float[1, 1, 2, 4] y)
              { y = Attention <is_causal = 1> (q, k, v) }"""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 1, length, 4)).astype("f") for length in (2, 3, 3))
    np.testing.assert_allclose(ran(tmp_path, text, q, k, v)[0, 0, 0], v[0, 0, 0], atol=1e-6)
