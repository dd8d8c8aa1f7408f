"""Graphs whose bound is known by how they are made."""

from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper


def _model(nodes, inputs, output, constants=()):
    items = [helper.make_tensor_value_info(name, 1, shape) for name, shape in inputs.items()]
    graph = helper.make_graph(nodes, "planted", items, [helper.make_tensor_value_info(*output)], list(constants))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def huge_product(side: int = 768) -> onnx.ModelProto:
    weight = np.random.default_rng(0).standard_normal((side, side), np.float32)
    node = helper.make_node("MatMul", ["x", "w"], ["y"], name="product")
    return _model([node], {"x": [side, side]}, ("y", 1, [side, side]), [numpy_helper.from_array(weight, "w")])


def big_addition(count: int = 4 << 20) -> onnx.ModelProto:
    return _model([helper.make_node("Add", ["x", "x"], ["y"], name="sum")], {"x": [count]}, ("y", 1, [count]))


def many_tiny(count: int = 200) -> onnx.ModelProto:
    kinds = ("Sin", "Cos")
    names = ["x", *(f"t{i}" for i in range(1, count)), "y"]
    nodes = [helper.make_node(kinds[i % 2], [names[i]], [names[i + 1]], name=f"n{i}") for i in range(count)]
    return _model(nodes, {"x": [4]}, ("y", 1, [4]))


def save(model: onnx.ModelProto, path: Path) -> Path:
    onnx.save(model, path)
    return path
