"""Counting along a dynamic dimension, written so that TVM knows the result's size.

The positions of a transformer's tokens are `Range(0, size of a dimension, 1)`. TVM's importer makes a new symbol of
that size, cannot prove it equal to the dimension's, and then compiles no sum of the two. The running sum of as many
ones, each left out of its own sum, is the same numbers, and its size is the dimension's own symbol.
"""

from typing import Any

import numpy as np


def countable(model: Any) -> None:
    """Rewrite, in the model itself, every such Range whose limit is one dimension of a tensor."""
    from onnx import helper, numpy_helper

    graph = model.graph
    made = {name: node for node in graph.node for name in node.output}
    values = {tensor.name: tensor for tensor in graph.initializer}
    one = numpy_helper.from_array(np.array([1], np.int64))
    rewritten = []
    for node in graph.node:
        size = _one_dimension(node, made, values)
        if size is None:
            rewritten.append(node)
            continue
        ones, axis = f"{node.output[0]}_ones", f"{node.output[0]}_axis"
        graph.initializer.append(numpy_helper.from_array(np.array(0, np.int64), axis))
        rewritten.append(helper.make_node("ConstantOfShape", [size], [ones], name=node.name, value=one))
        rewritten.append(helper.make_node("CumSum", [ones, axis], list(node.output), name=node.name, exclusive=1))
    del graph.node[:]
    graph.node.extend(rewritten)


def _one_dimension(node: Any, made: dict[str, Any], values: dict[str, Any]) -> str | None:
    """The value that holds, as a vector of one, the size up to which `node` counts 0, 1, 2...; None for another."""
    if node.op_type != "Range" or [_scalar(values.get(node.input[index])) for index in (0, 2)] != [0, 1]:
        return None
    scalar = made.get(node.input[1])
    if scalar is None or scalar.op_type not in ("Squeeze", "Reshape"):
        return None
    shape = made.get(scalar.input[0])
    if shape is None or shape.op_type != "Shape":
        return None
    from onnx import helper

    ends = {attribute.name: helper.get_attribute_value(attribute) for attribute in shape.attribute}
    start, end = ends.get("start", 0), ends.get("end", 0)
    return str(shape.output[0]) if end - start == 1 and start >= 0 else None


def _scalar(tensor: Any) -> int | None:
    from onnx import numpy_helper

    if tensor is None:
        return None
    array = numpy_helper.to_array(tensor)
    return int(array) if array.size == 1 and array.dtype == np.int64 else None
