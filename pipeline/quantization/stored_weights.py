"""Weights that came stored in int8 or fp16: made float32 constants where a node that is to be quantized reads one.

Quantizers that write no Q/DQ nodes store a weight as int8 and put Cast, Sub and Mul behind it. To a search for weights
that is no constant, and a graph of such a model would have no node in int8. An embedding's weight stays as it is: it is
not quantized, and would be four times larger.
"""

from collections.abc import Collection, Mapping

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto

from builders.onnx_graphs.bodies import list_reads
from builders.onnx_graphs.weights import find_external, from_array, to_array
from enginery.arrays import Array
from pipeline.quantization.graph import attribute_of, constants

_WIDENING = ("Cast", "Identity", "Mul", "Sub", "Transpose")
# The longest chain of nodes behind a stored weight.
_LONGEST = 6


def widen_stored_weights(graph: GraphProto, readers: Collection[str]) -> int:
    """Put float32 constants in the place of stored weights that nodes of the types `readers` multiply by, in place.

    Gives how many. The nodes that widened them are removed where nothing else reads them.
    """
    given, made = constants(graph), {name: node for node in graph.node for name in node.output}
    wanted = dict.fromkeys(
        node.input[1]
        for node in graph.node
        if node.op_type in readers and len(node.input) > 1 and node.input[1] in made
    )
    widened, outside = 0, find_external(graph)
    for name in wanted:
        values = _widen(name, given, made, _LONGEST)
        if values is None or values.dtype != np.float32:
            continue
        graph.node.remove(made.pop(name))
        graph.initializer.append(from_array(np.ascontiguousarray(values), name, outside))
        widened += 1
    if widened:
        _remove_unread(graph)
    return widened


def _widen(name: str, given: Mapping[str, TensorProto], made: Mapping[str, NodeProto], depth: int) -> Array | None:
    """The values of a tensor that a short chain of moves and widening makes out of constants; else None."""
    if name in given:
        return to_array(given[name])
    node = made.get(name)
    if node is None or depth == 0 or node.domain not in ("", "ai.onnx"):
        return None
    if node.op_type not in _WIDENING:
        return None
    if node.op_type == "Cast" and attribute_of(node, "to", 0) != TensorProto.FLOAT:
        return None
    operands = [_widen(each, given, made, depth - 1) for each in node.input]
    return None if any(each is None for each in operands) else _compute(node, [o for o in operands if o is not None])


def _compute(node: NodeProto, operands: list[Array]) -> Array:
    first, *rest = operands
    match node.op_type:
        case "Cast":
            return first.astype(np.float32)
        case "Mul":
            return np.asarray(first * rest[0])
        case "Sub":
            return np.asarray(first - rest[0])
        case "Transpose":
            return first.transpose(attribute_of(node, "perm", [*reversed(range(first.ndim))]))
        case _:
            return first


def _remove_unread(graph: GraphProto) -> None:
    """Remove, in place, the widening nodes that nothing reads any more."""
    outputs = {value.name for value in graph.output}
    while True:
        read = {name for node in graph.node for name in list_reads(node)} | outputs
        dead = [node for node in graph.node if node.op_type in _WIDENING and not read & {*node.output}]
        if not dead:
            return
        for node in dead:
            graph.node.remove(node)
