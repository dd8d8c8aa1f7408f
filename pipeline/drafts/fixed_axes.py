"""Sizes that the weights behind an input say, where an exporter left every axis dynamic."""

from collections.abc import Iterator, Mapping, Sequence

import onnx

# The axis of a tensor, given as first input, and the axis of the weight that says its size.
_WEIGHTED: Mapping[str, tuple[int, int]] = {
    "BatchNormalization": (1, 0),
    "Conv": (1, 1),
    "ConvTranspose": (1, 0),
    "MatMul": (-1, -2),
}
_SAME_AXES = frozenset({"Cast", "Identity"})


def fixed_axes(graph: onnx.GraphProto) -> dict[tuple[str, int], int]:
    """(input, axis) and the only size with which the graph can run: the channels of a convolution, the features of a
    matrix product. Looked at are weights that the input meets first, behind casts and transpositions too."""
    weights = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    constants = [node for node in graph.node if node.op_type == "Constant"]
    weights |= {node.output[0]: tuple(item.t.dims) for node in constants for item in node.attribute}
    users: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        users.setdefault(node.input[0] if node.input else "", []).append(node)
    found: dict[tuple[str, int], int] = {}
    for value in graph.input:
        axes = range(len(value.type.tensor_type.shape.dim))
        for axis, size in _sizes(value.name, [*axes], users, weights):
            found.setdefault((value.name, axis), size)
    return found


def _sizes(
    name: str, axes: Sequence[int], users: Mapping[str, list[onnx.NodeProto]], weights: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[int, int]]:
    """(axis of the input, size) for each weight that a tensor meets. axes: the input's axes in the tensor's order."""
    for node in users.get(name, ()):
        if node.op_type in _SAME_AXES:
            yield from _sizes(node.output[0], axes, users, weights)
        elif node.op_type == "Transpose":
            order = next((item.ints for item in node.attribute if item.name == "perm"), [*reversed(range(len(axes)))])
            yield from _sizes(node.output[0], [axes[axis] for axis in order], users, weights)
        elif node.op_type in _WEIGHTED and len(node.input) > 1 and (dims := weights.get(node.input[1])):
            axis, of_weight = _WEIGHTED[node.op_type]
            if -len(axes) <= axis < len(axes) and -len(dims) <= of_weight < len(dims):
                groups = next((item.i for item in node.attribute if item.name == "group"), 1)
                yield axes[axis], dims[of_weight] * (groups if node.op_type == "Conv" else 1)
