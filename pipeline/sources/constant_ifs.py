"""Replaces an If by the branch that it takes, if its condition follows from constants and known shapes.

Exporters write such conditions where a program tests a rank or a size: `squeeze` of an axis only if it is 1. No
compiler here casts, quantizes or fuses nodes inside control flow; a branch would stay in float.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes import common

from builders.onnx_graphs.bodies import walk_nodes
from enginesmith.arrays import Array

# Unknown dims are masked.
_Known = np.ma.MaskedArray
# Larger constants are not shapes, and are not evaluated.
_LARGEST = 256
_DEEPEST = 64
# Operators that take sizes, pads or axes -> index of the first such input.
_TAKE_SIZES = {"ConstantOfShape": 0, "Expand": 1, "Pad": 1, "Reshape": 1, "Slice": 1, "Tile": 1}
_COMPARING: Mapping[str, Callable[..., _Known]] = {
    "Add": np.ma.add,
    "And": np.ma.logical_and,
    "Equal": np.ma.equal,
    "Greater": np.ma.greater,
    "GreaterOrEqual": np.ma.greater_equal,
    "Less": np.ma.less,
    "LessOrEqual": np.ma.less_equal,
    "Mul": np.ma.multiply,
    "Not": np.ma.logical_not,
    "Or": np.ma.logical_or,
    "Sub": np.ma.subtract,
}


def fold_constant_ifs(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model without the Ifs whose condition is known; the same object if there are none.

    An inlined branch can make another condition known, so shapes are inferred again after each round.
    """
    current_model = model
    while any(node.op_type == "If" for node in walk_nodes(current_model.graph)):
        shaped_model = onnx.shape_inference.infer_shapes(current_model, data_prop=True)
        ir_model = ir.from_proto(shaped_model)
        settled_count = _settle_sizes(ir_model.graph)
        if not _fold(ir_model.graph) and not settled_count:
            break
        common.RemoveUnusedNodesPass()(ir_model)
        common.NameFixPass()(ir_model)
        current_model = ir.to_proto(ir_model)
        del current_model.graph.value_info[:]
    return current_model


def _settle_sizes(graph: ir.Graph) -> int:
    """Replace computed sizes, pads and axes of a graph's nodes by constants, in place; return their number.

    Shape inference does not evaluate the nodes with which exporters compute pads; sizes behind pads stay unknown.
    """
    settled_count = 0
    for node in [node for node in graph if node.op_type in _TAKE_SIZES and node.domain == ""]:
        for position, value in enumerate(node.inputs):
            if position < _TAKE_SIZES[node.op_type] or value is None or value.producer() is None:
                continue
            size_array = None if ir.convenience.get_const_tensor(value) is not None else _evaluate(value, _DEEPEST)
            if size_array is not None and size_array.dtype == np.int64 and not np.ma.is_masked(size_array):
                settled_count += 1
                constant = ir.Value(
                    name=f"{value.name}_{node.op_type}_{position}", const_value=ir.tensor(size_array.data)
                )
                while constant.name in graph.initializers:
                    constant.name = f"{constant.name}_"
                graph.register_initializer(constant)
                node.replace_input_with(position, constant)
    return settled_count


def _fold(graph: ir.Graph) -> int:
    """Inline the taken branches of a graph's Ifs with known conditions, in place; return their number.

    Ifs inside other nodes stay: a branch that never runs can be invalid for the sizes of the model's inputs, and a
    runtime that knows its ranks would refuse the model.
    """
    count = 0
    for node in [node for node in graph if node.op_type == "If" and node.domain == ""]:
        condition = None if node.inputs[0] is None else _evaluate(node.inputs[0], _DEEPEST)
        if condition is not None and condition.size == 1 and not np.ma.is_masked(condition):
            branch_name = "then_branch" if bool(condition.reshape(-1)[0]) else "else_branch"
            _inline(graph, node, node.attributes[branch_name].as_graph())
            count += 1
    return count


def _inline(graph: ir.Graph, node: ir.Node, branch: ir.Graph) -> None:
    """Replace an If by the nodes of one of its branches, in place."""
    results = list(branch.outputs)
    branch.outputs[:] = []
    for value in list(branch.initializers.values()):
        del branch.initializers[str(value.name)]
        while value.name in graph.initializers:
            value.name = f"{value.name}_"
        graph.register_initializer(value)
    nodes = list(branch)
    branch.remove(nodes)
    graph.insert_before(node, nodes)
    branch_inputs, node_copies = list[ir.Value](), list[ir.Node]()
    for value in results:
        if value.producer() not in nodes or value in branch_inputs:  # captured, a constant, or returned twice
            node_copies.append(ir.node("Identity", [value]))
            value = node_copies[-1].outputs[0]
        branch_inputs.append(value)
    ir.convenience.replace_nodes_and_values(graph, node, [node], node_copies, list(node.outputs), branch_inputs)


def _evaluate(value: ir.Value, depth_left: int) -> _Known | None:
    """The value of a small tensor, with unknown dims masked; None if it does not follow from constants and shapes."""
    constant = ir.convenience.get_const_tensor(value)
    if constant is not None:
        return np.ma.asarray(constant.numpy()) if math.prod(constant.shape.numpy()) <= _LARGEST else None
    node = value.producer()
    if node is None or node.domain != "" or depth_left == 0 or not node.inputs or node.inputs[0] is None:
        return None
    if node.op_type in ("Shape", "Size"):
        dims = _dims(node.inputs[0], depth_left)
        if dims is None or node.op_type == "Shape":
            return None if dims is None else dims[_integer(node, "start", 0) : _integer(node, "end", len(dims))]
        return None if np.ma.is_masked(dims) else np.ma.asarray(np.prod(dims.data, dtype=np.int64))
    if node.op_type not in (*_COMPARING, *_MOVES):
        return None
    operands = [None if operand is None else _evaluate(operand, depth_left - 1) for operand in node.inputs]
    operand_values = [operand for operand in operands if operand is not None]
    if len(operand_values) < len(operands):
        return None
    try:
        if node.op_type in _COMPARING:
            return np.ma.asarray(_COMPARING[node.op_type](*operand_values))
        return _MOVES[node.op_type](node, operand_values)
    except (IndexError, TypeError, ValueError):  # a malformed node; the checker reports it
        return None


def _dims(value: ir.Value, depth_left: int) -> _Known | None:
    """The dims of a tensor, with unknown ones masked; None if its rank is unknown."""
    if value.shape is None:
        array = _evaluate(value, depth_left - 1)
        return None if array is None else np.ma.asarray(np.array(array.shape, np.int64))
    dims = list(value.shape)
    unknown_mask = [not isinstance(dim, int) for dim in dims]
    return np.ma.array([dim if isinstance(dim, int) else 0 for dim in dims], mask=unknown_mask, dtype=np.int64)


def _integer(node: ir.Node, name: str, default: int) -> int:
    return node.attributes[name].as_int() if name in node.attributes else default


def _axes(node: ir.Node, operands: Sequence[_Known]) -> tuple[int, ...] | None:
    if len(operands) > 1:
        return tuple(int(axis) for axis in operands[1].reshape(-1))
    return tuple(node.attributes["axes"].as_ints()) if "axes" in node.attributes else None


def _gather(node: ir.Node, operands: Sequence[_Known]) -> _Known:
    if np.ma.is_masked(operands[1]):
        raise ValueError("an index is not known")
    return np.ma.asarray(operands[0].take(operands[1].data, axis=_integer(node, "axis", 0)))


def _constant_of_shape(node: ir.Node, operands: Sequence[_Known]) -> _Known:
    sizes = [int(size) for size in _whole(operands[0])]
    if math.prod(sizes) > _LARGEST:
        raise ValueError("not small")
    value = node.attributes["value"].as_tensor().numpy() if "value" in node.attributes else np.zeros(1, np.float32)
    return np.ma.asarray(np.full(sizes, value.item(), value.dtype))


def _reshape(node: ir.Node, operands: Sequence[_Known]) -> _Known:
    sizes, is_zero_copy = [int(size) for size in _whole(operands[1])], not _integer(node, "allowzero", 0)
    return operands[0].reshape(
        [operands[0].shape[axis] if is_zero_copy and not size else size for axis, size in enumerate(sizes)]
    )


def _slice(operands: Sequence[_Known]) -> _Known:
    starts, ends, *options = map(_whole, operands[1:])
    axes = options[0] if options else np.arange(len(starts))
    steps = options[1] if len(options) > 1 else np.ones_like(starts)
    slices = [slice(None)] * operands[0].ndim
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        size = operands[0].shape[int(axis)]
        slices[int(axis)] = slice(int(start), None if step < 0 and end < -size else int(end), int(step))
    return np.ma.asarray(operands[0][tuple(slices)])


def _transpose(node: ir.Node, operands: Sequence[_Known]) -> _Known:
    permutation = node.attributes["perm"].as_ints() if "perm" in node.attributes else None
    return np.ma.asarray(operands[0].transpose(permutation))


def _whole(operand: _Known) -> Array:
    """The numbers of an operand. Raises ValueError if one is unknown."""
    if np.ma.is_masked(operand):
        raise ValueError("a number is not known")
    return np.asarray(operand.data)


def _concat(node: ir.Node, operands: Sequence[_Known]) -> _Known:
    array = np.ma.concatenate(list(operands), _integer(node, "axis", 0))  # type: ignore[no-untyped-call]
    return np.ma.asarray(array)


_MOVES: Mapping[str, Callable[[ir.Node, Sequence[_Known]], _Known]] = {
    "Cast": lambda node, operands: np.ma.asarray(operands[0].astype(ir.DataType(_integer(node, "to", 1)).numpy())),
    "Concat": _concat,
    "ConstantOfShape": _constant_of_shape,
    "Gather": _gather,
    "Identity": lambda _, operands: operands[0],
    "Reshape": _reshape,
    "Slice": lambda _, operands: _slice(operands),
    "Squeeze": lambda node, operands: np.ma.asarray(np.squeeze(operands[0], _axes(node, operands))),
    "Transpose": _transpose,
    "Unsqueeze": lambda node, operands: np.ma.asarray(np.ma.expand_dims(operands[0], _axes(node, operands) or ())),
}
