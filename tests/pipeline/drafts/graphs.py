"""Small ONNX graphs with the dims that exporters write."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Axes = Sequence[int | str | None]


def value(name: str, shape: Axes, kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def save(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    constants: Sequence[TensorProto] = (),
) -> Path:
    graph = helper.make_graph(nodes, "g", inputs, outputs, constants)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def write(
    path: Path, nodes: Sequence[onnx.NodeProto], inputs: Sequence[onnx.ValueInfoProto], **weights: object
) -> Path:
    """A graph whose only output is `y`, of a rank that the last node decides."""
    constants = [numpy_helper.from_array(np.asarray(array, "f4"), name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "g", inputs, [helper.make_empty_tensor_value_info("y")], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(onnx.shape_inference.infer_shapes(model), path)
    return path


def halving(path: Path, batch: int | str | None = -1) -> Path:
    """Takes images whose height and width are multiples of 4: each half is added to its own upsampling."""
    nodes = [
        helper.make_node("MaxPool", ["x"], ["half"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("MaxPool", ["half"], ["quarter"], kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Resize", ["quarter", "", "scales"], ["large"], mode="nearest"),
        helper.make_node("Add", ["large", "x"], ["y"]),
    ]
    return write(path, nodes, [value("x", [batch, 3, "?", "?"])], scales=[1, 1, 4, 4])


def with_state(path: Path) -> Path:
    """Axis 0 of one input and axis 1 of the other must be equal, and neither has a name."""
    nodes = [
        helper.make_node("Split", ["state"], ["h", "c"], axis=0),
        helper.make_node("Squeeze", ["h", "zero"], ["flat"]),
        helper.make_node("Concat", ["x", "flat"], ["y"], axis=1),
    ]
    zero = numpy_helper.from_array(np.array([0]), "zero")
    inputs = [value("x", [None, 5]), value("state", [2, None, 3])]
    return save(path, nodes, inputs, [value("y", [None, 8])], [zero])
