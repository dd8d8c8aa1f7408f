import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from builders.onnx_graphs.structure import find_dependences, find_source, find_tables

W = numpy_helper.from_array(np.ones((4, 4), np.float32), "w")


def graph(*nodes: onnx.NodeProto) -> onnx.GraphProto:
    """A graph of x and mask; its output is the last node's."""
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4]) for name in ("x", "mask")]
    value_info = helper.make_tensor_value_info(nodes[-1].output[0], TensorProto.FLOAT, None)
    return helper.make_graph([*nodes], "g", inputs, [value_info], [W])


def node(op_type: str, inputs: str, output: str = "y") -> onnx.NodeProto:
    return helper.make_node(op_type, inputs.split(), [output])


@pytest.mark.parametrize(
    ("nodes", "dependence", "source"),
    [
        ([node("MatMul", "x w")], "computed", "y"),
        ([node("Identity", "mask")], "handed on", "mask"),
        ([node("Cast", "mask", "a"), node("Reshape", "a w", "b"), node("Identity", "b")], "handed on", "mask"),
        ([node("Neg", "mask", "a"), node("Identity", "a")], "computed", "a"),
        ([node("Identity", "w")], "constant", "w"),
        ([node("Shape", "x", "a"), node("ConstantOfShape", "a")], "constant", "y"),
        ([node("Shape", "x", "a"), node("Mul", "a mask")], "computed", "y"),
        ([node("RandomNormalLike", "w")], "computed", "y"),
    ],
)
def test_an_output_is_constant_passed_on_or_computed(nodes, dependence, source):
    onnx_graph = graph(*nodes)
    assert find_dependences(onnx_graph) == {"y": dependence}
    assert find_source(onnx_graph, "y") == source


def test_tensors_captured_by_a_body_count():
    body = helper.make_graph(
        [node("Neg", "x", "inner")], "body", [], [helper.make_tensor_value_info("inner", TensorProto.FLOAT, None)]
    )
    branch = helper.make_node("If", ["w"], ["y"], then_branch=body, else_branch=body)
    assert find_dependences(graph(branch)) == {"y": "computed"}


def test_the_table_of_an_input_is_the_smallest_selected_one():
    nodes = [
        node("Cast", "x", "i"),
        helper.make_node("Gather", ["w", "i"], ["b"], axis=1),
        node("Gather", "big i", "a"),
    ]
    nodes += [node("DequantizeLinear", "big s", "d"), node("Gather", "d mask", "c"), node("Gather", "a mask", "y")]
    onnx_graph = graph(*nodes)
    onnx_graph.initializer.append(numpy_helper.from_array(np.ones((9, 2), np.float32), "big"))
    assert find_tables(onnx_graph) == {"x": 4, "mask": 9}
    assert find_tables(graph(node("EmbedLayerNormalization", "x mask w p w"))) == {"x": 4, "mask": 4}
