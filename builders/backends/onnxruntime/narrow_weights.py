"""Weights that came as int8 or fp16 stay so in the file that ONNX Runtime saves, where it would widen them to float32.

A weight that is stored narrow and widened by a Cast, a shift and a scale (Cast, Sub, Mul: what quantizers without Q/DQ
nodes write) is a constant to its optimizer, which computes it once and saves the result: MiniLM with int8 weights, 22.9
MB, became a file of 90.3 MB. Here the narrow constants and the nodes that widen them take the place of each constant
that they give bit by bit. A session that optimizes, as every one does by default, computes them again as it opens the
file, so that nothing is slower afterwards. DequantizeLinear and integer operators are left alone by ONNX Runtime.
"""

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper

from builders.onnx_graphs.outline import load_outline
from builders.onnx_graphs.shards import in_shards, write_graph
from builders.onnx_graphs.weights import embed, is_external, load_graph, size_of, to_array
from enginesmith.arrays import Array
from enginesmith.core.text import pluralize

# Smaller constants are scales, offsets and shapes.
_SMALLEST_BYTES = 1024
# A chain of widening nodes is this long at most.
_LONGEST = 4
_FLOAT = int(TensorProto.FLOAT)


def keep_narrow_weights(path: Path, source: Path) -> tuple[str, ...]:
    """Put narrow constants back into the optimized model `path`, which was made from `source`; a note where it did."""
    if not find_widened(load_outline(source)):
        return ()
    model = load_graph(source)
    chains = find_widened(model)
    for tensor in [] if in_shards(model) else _constants(model).values():
        if is_external(tensor):
            embed(tensor)
    engine = load_graph(path)
    before, kept = size_of(engine), restore_chains(engine, model, chains)
    if not kept:
        return ()
    write_graph(engine, path)
    count = pluralize(kept, "weight is", "weights are")
    saved = f"{size_of(engine) / 1e6:.1f} MB instead of {before / 1e6:.1f}"
    return (f"{count} stored narrow, as they came, and widened to fp32 when the engine is opened: {saved}",)


def note_widened(source: Path) -> tuple[str, ...]:
    """The note on an engine whose graph is not optimized again when it is opened, so that nothing narrow is kept."""
    chains = find_widened(load_outline(source)).values()
    count = len({chain[0].output[0] for chain in chains})  # a chain's beginning is one too
    if not count:
        return ()
    came = pluralize(count, "weight that came narrow is", "weights that came narrow are")
    return (f"{came} stored as fp32, because graph_optimization 'all' saves the final graph; 'extended' keeps them",)


def find_widened(model: ModelProto) -> dict[str, tuple[NodeProto, ...]]:
    """Float32 tensor -> the nodes that make it out of constants, in order, where it is larger than those."""
    given = _constants(model)
    made = {name: node for node in model.graph.node for name in node.output}
    found = dict[str, tuple[NodeProto, ...]]()
    for node in model.graph.node:
        chain = _chain(node, made, given, _LONGEST)
        if chain and _narrows(chain, given):
            found[node.output[0]] = chain
    return found


def restore_chains(engine: ModelProto, source: ModelProto, chains: Mapping[str, tuple[NodeProto, ...]]) -> int:
    """Replace the engine's constants that chains of the source give, in place; gives how many."""
    given, there = _constants(source), {item.name: item for item in engine.graph.initializer}
    taken = {name for node in engine.graph.node for name in node.output} | {item.name for item in engine.graph.input}
    nodes, kept = dict[str, NodeProto](), list[str]()
    for name, chain in chains.items():
        made = {result for node in chain for result in node.output}
        if name not in there or made & taken or not _gives(chain, given, there[name]):
            continue
        for node in chain:
            nodes[node.output[0]] = node
            for read in node.input:
                if read in given and read not in there:
                    engine.graph.initializer.append(_renamed(given[read], read))
                    there[read] = engine.graph.initializer[-1]
        kept.append(name)
    if kept:
        left = [item for item in engine.graph.initializer if item.name not in nodes]
        del engine.graph.initializer[:]
        engine.graph.initializer.extend(left)
        rest = list(engine.graph.node)
        del engine.graph.node[:]
        engine.graph.node.extend([*nodes.values(), *rest])
    return len(kept)


def _chain(
    node: NodeProto, made: Mapping[str, NodeProto], given: Mapping[str, TensorProto], depth: int
) -> tuple[NodeProto, ...] | None:
    """The node behind those that make its inputs, where all of them widen constants; else None."""
    if depth == 0 or node.domain not in ("", "ai.onnx") or node.op_type not in ("Cast", "Mul", "Sub"):
        return None
    if node.op_type == "Cast" and _target(node) != _FLOAT:
        return None
    chain = dict[str, NodeProto]()
    for name in node.input:
        if name in given:
            continue
        before = _chain(made[name], made, given, depth - 1) if name in made else None
        if before is None:
            return None
        chain |= {item.output[0]: item for item in before}
    return (*chain.values(), node)


def _narrows(chain: tuple[NodeProto, ...], given: Mapping[str, TensorProto]) -> bool:
    """Whether the constants that a chain reads, one of them narrow, take 3/4 of its result's bytes at most."""
    read = {name: given[name] for node in chain for name in node.input if name in given}
    narrow = [
        item.dims
        for node in chain
        if node.op_type == "Cast" and (item := read.get(node.input[0])) is not None and item.data_type != _FLOAT
    ]
    if not narrow:
        return False
    result = 4 * max(math.prod(dims) for dims in narrow)
    return bool(result >= _SMALLEST_BYTES and sum(map(_size_bytes, read.values())) <= 0.75 * result)


def _gives(chain: tuple[NodeProto, ...], given: Mapping[str, TensorProto], wanted: TensorProto) -> bool:
    """Whether a chain makes the very bits of a constant."""
    values = dict[str, Array]()
    for node in chain:
        operands = [values[name] if name in values else to_array(given[name]) for name in node.input]
        if node.op_type == "Cast":
            values[node.output[0]] = operands[0].astype(np.float32)
        else:
            operation = np.multiply if node.op_type == "Mul" else np.subtract
            values[node.output[0]] = operation(operands[0], operands[1])
    result = values[chain[-1].output[0]]
    return result.dtype == np.float32 and np.array_equal(result.view(np.int32), to_array(wanted).view(np.int32))


def _size_bytes(item: TensorProto) -> int:
    return int(math.prod(item.dims) * helper.tensor_dtype_to_np_dtype(item.data_type).itemsize)


def _target(node: NodeProto) -> int:
    return next((int(item.i) for item in node.attribute if item.name == "to"), 0)


def _constants(model: ModelProto) -> dict[str, TensorProto]:
    """Constants by name: initializers, and Constant nodes that hold a tensor."""
    inner = {
        node.output[0]: helper.get_node_attr_value(node, "value")
        for node in model.graph.node
        if node.op_type == "Constant" and [item.name for item in node.attribute] == ["value"]
    }
    return {item.name: item for item in model.graph.initializer} | inner


def _renamed(item: TensorProto, name: str) -> TensorProto:
    copy = TensorProto()
    copy.CopyFrom(item)
    copy.name = name
    return copy
