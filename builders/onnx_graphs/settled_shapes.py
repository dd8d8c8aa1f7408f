"""Reshapes whose shape is computed from sizes, with that shape as a constant.

Exporters write `Reshape(x, Concat(Gather(Shape(x), 0), [-1]))`. What it comes to follows from the sizes of the tensors,
and compilers that see a tensor there, where a shape is meant, refuse the node.
"""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from builders.onnx_graphs.bodies import list_reads

if TYPE_CHECKING:
    import onnx

# A size; the name of a dynamic dim; None for one of which nothing is known.
Dims = Sequence[int | str | None]


def settle_shapes(model: "onnx.ModelProto") -> None:
    """Write each Reshape's shape as a constant where shape inference knows all of its sizes but one, in place.

    A dynamic size that is that of the input at the same place is copied (0). Nodes that nothing reads then are dropped.
    """
    from onnx import numpy_helper

    _lift_constants(model.graph)
    sizes = _infer_sizes(model)
    constants = {tensor.name for tensor in model.graph.initializer}
    settled = False
    for node in model.graph.node:
        if node.op_type != "Reshape" or node.domain or len(node.input) < 2 or node.input[1] in constants:
            continue
        shape = _shape(sizes.get(node.input[0]), sizes.get(node.output[0]))
        if shape is not None:
            name = f"{node.output[0]}_sizes"
            model.graph.initializer.append(numpy_helper.from_array(np.array(shape, np.int64), name))
            node.input[1], settled = name, True
            del node.attribute[:]  # allowzero: that 0 is no copy
    if settled:
        _drop_unread(model.graph)


def _lift_constants(graph: "onnx.GraphProto") -> None:
    """Constant nodes as initializers, in place: inference reads numbers there alone."""
    kept = []
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute[0].name == "value":
            graph.initializer.append(node.attribute[0].t)
            graph.initializer[-1].name = node.output[0]
        else:
            kept.append(node)
    del graph.node[:]
    graph.node.extend(kept)


def _infer_sizes(model: "onnx.ModelProto") -> dict[str, Dims]:
    """Name -> dims, from the inputs and weights alone: what is stated of outputs may be wrong."""
    import onnx

    stated = [(value, onnx.TypeProto.FromString(value.type.SerializeToString())) for value in model.graph.output]
    for value, _ in stated:
        value.type.tensor_type.ClearField("shape")
    graph = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    for value, kind in stated:
        value.type.CopyFrom(kind)
    found: dict[str, Dims] = {tensor.name: list(tensor.dims) for tensor in graph.initializer}
    for value in (*graph.value_info, *graph.input, *graph.output):
        if value.type.tensor_type.HasField("shape"):
            dims = value.type.tensor_type.shape.dim
            found[value.name] = [d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in dims]
    return found


def _shape(before: Dims | None, after: Dims | None) -> list[int] | None:
    """The shape to write: sizes, 0 for one of the input's, -1 once; None where that is not enough, or nothing is left
    to be told by -1 (sizes of 0)."""
    if before is None or after is None or 0 in before or 0 in after:
        return None
    copied = [isinstance(size, str) and at < len(before) and before[at] == size for at, size in enumerate(after)]
    shape = [0 if same else size if isinstance(size, int) else -1 for same, size in zip(copied, after, strict=True)]
    return shape if Counter(shape)[-1] <= 1 else None


def _drop_unread(graph: "onnx.GraphProto") -> None:
    """Remove the nodes whose outputs nothing reads, in place."""
    read = {value.name for value in graph.output}
    kept = []
    for node in reversed(graph.node):
        if read.intersection(node.output):
            kept.append(node)
            read.update(list_reads(node))
    del graph.node[:]
    graph.node.extend(reversed(kept))
