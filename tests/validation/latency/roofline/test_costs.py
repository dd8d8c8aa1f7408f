"""Multiplications, bytes and fusion, against counts made by hand."""

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from enginesmith.core.types import TensorSpec
from validation.latency.roofline.breakdown import traffic
from validation.latency.roofline.costs import (
    cost_of,
    graph_cost,
    graph_costs,
    list_uncounted,
    multiplications,
    per_value,
    size_bytes,
)

CONV = """
<ir_version: 10, opset_import: ["" : 20]>
net (float[batch, 3, 8, 8] x) => (float[batch, 10] y) {
    a = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1], group = 1> (x, w, b)
    r = Relu(a)
    f = Flatten(r)
    y = Gemm <transB = 1> (f, m)
}
"""
QDQ = """
<ir_version: 10, opset_import: ["" : 20]>
net (float[batch, 64] x) => (float[batch, 32] y) {
    q = QuantizeLinear(x, s, z)
    d = DequantizeLinear(q, s, z)
    w = DequantizeLinear(k, s, t)
    p = MatMul(d, w)
    y = Relu(p)
}
"""


def saved(path, text, **constants):
    model = onnx.parser.parse_model(text)
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in constants.items())
    onnx.save(model, path)
    return path


@pytest.fixture
def conv(tmp_path):
    weights = {"w": (4, 3, 3, 3), "b": (4,), "m": (10, 256)}
    path = saved(tmp_path / "conv.onnx", CONV, **{name: np.ones(shape, "f") for name, shape in weights.items()})
    return lambda batch: graph_costs(path, [TensorSpec("x", "float32", ("batch", 3, 8, 8))], {"batch": batch})


def test_a_net_is_counted_at_the_size_of_its_bucket(conv):
    result = {node.cost.op_type: node.cost for node in conv(2).nodes}
    assert result["Conv"].macs == 2 * 4 * 8 * 8 * 27 and result["Gemm"].macs == 2 * 10 * 256
    assert result["Conv"].operations == 2 * result["Conv"].macs
    assert (result["Conv"].read_bytes, result["Conv"].written_bytes) == (4 * (2 * 192 + 108 + 4), 4 * 2 * 256)
    assert result["Relu"].operations == 512 and result["Flatten"].moved_bytes == 0
    large_cost, small_cost = (graph_cost(conv(batch).costs, 0, ()) for batch in (4, 2))
    assert large_cost.macs == 2 * small_cost.macs
    assert conv(2).unsized == [] and small_cost.known


def test_working_memory_is_the_tensors_alive_at_once(conv):
    # Two of three tensors in between are alive while the Relu runs, and two while its result is flattened.
    assert conv(1).working_bytes == 4 * (192 + 108 + 4 + 10 * 256) + 4 * 2 * 256
    assert conv(3).working_bytes - conv(1).working_bytes == 4 * 2 * (192 + 2 * 256)


def test_fusion_saves_rewritten_tensors(conv):
    graph = conv(1)
    unfused_total = sum(4 * n for n in (192 + 112 + 256, 256 + 256, 0, 256 + 2560 + 10))
    fused_total = sum(4 * n for n in (192 + 112 + 256, 256 + 2560 + 10))
    result = traffic(graph)
    assert (result.unfused_bytes, result.fused_bytes, result.groups) == (unfused_total, fused_total, 2)
    assert result.source == "model" and 0 < result.saved < 1
    same_traffic = traffic(graph, graph.costs)
    assert same_traffic.source == "runtime" and same_traffic.saved == 0.0


def test_a_quantized_product_counts_as_one_and_its_conversions_fuse(tmp_path):
    weights = np.ones((64, 32), np.int8)
    scales = {"s": np.float32(0.1), "z": np.uint8(3), "t": np.int8(0)}
    path = saved(tmp_path / "q.onnx", QDQ, k=weights, **{name: np.array(value) for name, value in scales.items()})
    graph = graph_costs(path, [TensorSpec("x", "float32", ("batch", 64))], {"batch": 4})
    product = next(node.cost for node in graph.nodes if node.cost.op_type == "MatMul")
    assert product.dtype == "uint8" and product.macs == 4 * 64 * 32
    quantize, multiply = 4 * 256 + 5 + 256, 256 + 5 + 64 * 32 + 5 + 4 * 128
    result = traffic(graph)
    assert result.groups == 2 and abs(result.fused_bytes - quantize - multiply) <= 10
    assert result.unfused_bytes > result.fused_bytes + 4 * (64 * 32 + 256 + 128)


def test_tensors_with_two_readers_stay(tmp_path):
    text = """
    <ir_version: 10, opset_import: ["" : 20]>
    net (float[batch, 64] x) => (float[batch, 64] y) {
        a = MatMul(x, w)
        r = Relu(a)
        y = Add(a, r)
    }
    """
    path = saved(tmp_path / "twice.onnx", text, w=np.ones((64, 64), "f"))
    graph = graph_costs(path, [TensorSpec("x", "float32", ("batch", 64))], {"batch": 2})
    result = traffic(graph)
    # The Relu's result is read by the Add alone, which joins it; the product's is read by both.
    assert result.groups == 2
    assert result.fused_bytes == 4 * ((128 + 64 * 64 + 128) + (128 + 128))


def test_small_types_are_packed_and_gathers_read_only_their_rows():
    assert [size_bytes((kind, (3,))) for kind in ("int4", "bfloat16", "float8e4m3fn", "bool", "float64")] == [
        2,
        6,
        3,
        3,
        24,
    ]
    gather = cost_of("g", "Gather", [("float32", (30000, 64)), ("int64", (2, 8))], [("float32", (2, 8, 64))])
    assert gather.read_bytes == 2 * 8 * 64 * 4 + 2 * 8 * 8 and gather.known


def test_an_unknown_operator_multiplies_nothing_and_is_named():
    odd_cost = cost_of("o", "Frobnicate", [("float32", (8,))], [("float32", (8,))])
    assert (odd_cost.macs, odd_cost.operations, odd_cost.moved_bytes, odd_cost.known) == (0, 0, 64, False)
    assert list_uncounted([odd_cost, odd_cost]) == ("Frobnicate",)


@pytest.mark.parametrize(
    ("op_type", "inputs", "outputs", "expected"),
    [
        ("Conv", [(1, 8, 4, 4), (8, 1, 3, 3)], [(1, 8, 4, 4)], 8 * 16 * 9),  # depthwise
        ("ConvTranspose", [(1, 4, 5, 5), (4, 6, 2, 2)], [(1, 6, 10, 10)], 4 * 25 * 24),
        ("QLinearConv", [(1, 3, 4, 4), (), (), (8, 3, 1, 1)], [(1, 8, 4, 4)], 8 * 16 * 3),
        ("MatMul", [(2, 5, 7, 3), (2, 5, 3, 4)], [(2, 5, 7, 4)], 2 * 5 * 7 * 4 * 3),
        ("MatMul", [(7, 3), (3,)], [(7,)], 21),
        ("Gemm", [(3, 7), (4, 3)], [(7, 4)], 7 * 4 * 3),  # both transposed
        ("MatMulNBits", [(6, 64), (32, 2, 16)], [(6, 32)], 6 * 32 * 64),
        ("LSTM", [(5, 2, 8), (1, 16, 8), (1, 16, 4)], [(5, 1, 2, 4)], 5 * 2 * (16 * 8 + 16 * 4)),
        ("Relu", [(8,)], [(8,)], None),
    ],
)
def test_multiplications_are_counted(op_type, inputs, outputs, expected):
    assert multiplications(op_type, inputs, outputs) == expected


def test_einsum_multiplies_every_combination():
    assert multiplications("Einsum", [(2, 3, 4), (2, 4, 5)], [(2, 3, 5)], "bij,bjk->bik") == 2 * 3 * 4 * 5
    assert per_value("Gemm", (10, 256), transposed=True) == per_value("Gemm", (256, 10)) == 256
