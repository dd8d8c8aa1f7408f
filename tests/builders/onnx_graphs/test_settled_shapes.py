import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

from builders.onnx_graphs.structure import settle_shapes

MERGED = """
    <ir_version: 8, opset_import: ["": 17]>
    g (float[n, t, 6] x) => (float[n, t, 2, 3] y)
    <int64 first = {0}, int64 second = {1}, int64[1] at = {0}, int64[2] rest = {2, 3}> {
        s = Shape (x) n0 = Gather (s, first) t0 = Gather (s, second)
        n1 = Unsqueeze (n0, at) t1 = Unsqueeze (t0, at)
        shape = Concat <axis = 0> (n1, t1, rest)
        y = Reshape (x, shape)
    }
"""
SPLIT = """
    <ir_version: 8, opset_import: ["": 17]>
    g (float[n, 4, t] x) => (float[m, 2] y) <int64 last = {2}, int64[1] at = {0}, int64[1] two = {2}> {
        s = Shape (x) t0 = Gather (s, last) t1 = Unsqueeze (t0, at) twice = Mul (t1, two)
        shape = Concat <axis = 0> (twice, two)
        y = Reshape (x, shape)
    }
"""
DATA = """
    <ir_version: 8, opset_import: ["": 17]>
    g (float[n, 6] x, int64[2] given) => (float[a, b] y) { y = Reshape (x, given) }
"""


def shapes(model):
    constants = {tensor.name: numpy_helper.to_array(tensor).tolist() for tensor in model.graph.initializer}
    return [constants.get(node.input[1]) for node in model.graph.node if node.op_type == "Reshape"]


@pytest.mark.parametrize(
    ("text", "shape", "nodes"),
    [(MERGED, [0, 0, 2, 3], 1), (SPLIT, [-1, 2], 1), (DATA, None, 1)],
    ids=["0", "-1", "data"],
)
def test_a_shape_becomes_a_constant_if_the_sizes_determine_it(text, shape, nodes):
    model = onnx.parser.parse_model(text)
    settle_shapes(model)
    assert shapes(model) == [shape] and len(model.graph.node) == nodes
    onnx.checker.check_model(model, full_check=True)


@pytest.mark.parametrize("sizes", [(1, 5), (3, 2)])
def test_the_outputs_are_the_same_at_every_size(sizes):
    model = onnx.parser.parse_model(MERGED)
    x = np.arange(np.prod([*sizes, 6]), dtype="f").reshape(*sizes, 6)
    (expected,) = ReferenceEvaluator(model).run(None, {"x": x})
    settle_shapes(model)
    np.testing.assert_array_equal(ReferenceEvaluator(model).run(None, {"x": x})[0], expected)


@pytest.mark.parametrize(
    ("old", "new"),
    [("(n1, t1, rest)", "(t1, n1, rest)"), ("[n, t, 6]", "[n, t, 0]")],
    ids=["two sizes that are not where they were, whatever the output states", "no elements"],
)
def test_a_shape_that_is_not_constant_stays(old, new):
    model = onnx.parser.parse_model(MERGED.replace(old, new).replace("{2, 3}", "{2, 0}" if "0" in new else "{2, 3}"))
    settle_shapes(model)
    assert shapes(model) == [None]


def test_declared_output_shapes_are_kept():
    model = onnx.parser.parse_model(MERGED)
    settle_shapes(model)
    assert [dim.dim_param or dim.dim_value for dim in model.graph.output[0].type.tensor_type.shape.dim] == [
        "n",
        "t",
        2,
        3,
    ]
