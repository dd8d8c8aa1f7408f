"""Rewrites of graphs that ONNX Runtime has optimized, with the same results: two for speed, one against a crash.

`fuse_bias`: the kernel MatMulIntegerToFloat adds a bias while it scales the sums, at no cost; ONNX Runtime's optimizer
gives it one only in graphs whose scales are made at run time. With fixed scales (Q/DQ) an Add is left behind it, one
more pass over the result.

`split_convolutions`: ONNX Runtime's integer convolution reads all weights for every few rows of its result. Weights
larger than the L2 cache come from the next level each time: on ResNet-18 the last three convolutions (512 by 512
channels, 3x3, 2.4 MB) took 0.96 ms each, at 58 % of the rate of those before them. Cut by output channels, each part's
weights stay in L2 over all rows, and the results are put together as bytes: the whole net gains 7 % with one image and
6 % with eight.

`cast_first`: opening a graph with a Transpose, a Cast and a MatMul in this order can end the process. ONNX Runtime's
MatmulTransposeFusion swaps such a Cast and Transpose where the Transpose moves the first axis behind others (time and
batch of a recurrent layer). Where it then fuses nothing, as with weights of two axes, the new nodes have no schema, and
NchwcTransformer, the next with all optimizations, dereferences it: a segmentation fault, seen in 1.31 and reported of
1.24 (https://github.com/microsoft/onnxruntime/issues/28392). The Casts of fp16 graphs are inserted after that fusion,
so that the saved file has this order; it is saved with the Cast first, for sessions with any options.
"""

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from builders.onnx_graphs.bodies import walk_graphs, walk_nodes
from builders.onnx_graphs.outline import load_outline
from builders.onnx_graphs.shards import write_graph
from builders.onnx_graphs.weights import load_graph, to_array

_BIAS_INPUT = 6
# Measured with 1.31 on a CPU with 1 MiB of L2 to a core, ResNet-18: parts of 64, 128 and 192 channels (0.3 to 0.9 MB)
# are equally fast, parts of 1.2 MB gain half as much. Convolutions below `SPLIT_BYTES` gain nothing.
SPLIT_BYTES = 1_000_000
PART_BYTES = 600_000
# The kernel computes so many output channels at a time.
CHANNELS = 64
_WEIGHT, _PER_CHANNEL = 3, (3, 4, 5, 8)  # weight; weight, its scales and zero points, bias
# Left out where a session optimises a graph, saves it and applies the layout in one go.
FUSION = "MatmulTransposeFusion"
_READERS = ("MatMul", "FusedMatMul")


def rewrite_optimized(path: Path, *, faster: bool) -> tuple[str, ...]:
    """Rewrite an optimized model on disk; notes on what was done. faster: whether with the rewrites for speed."""

    def rewrite(model: ModelProto) -> tuple[int, int]:
        return cast_first(model), fuse_bias(model) + split_convolutions(model) if faster else 0

    swapped, others = rewrite(load_outline(path))
    if swapped + others:
        model = load_graph(path)
        rewrite(model)
        write_graph(model, path)
    if not swapped:
        return ()
    return (
        f"Casts between a Transpose and a MatMul, put before the Transpose: {swapped}; "
        "onnxruntime would end the process that opens the engine",
    )


def fuse_bias(model: ModelProto) -> int:
    """Give each integer MatMul the bias that is added behind it, in place; gives how many."""
    graph = model.graph
    made = {name: node for node in graph.node for name in node.output}
    reads = Counter(name for node in graph.node for name in node.input)
    reads.update(value.name for value in graph.output)
    given = {item.name: item for item in graph.initializer}
    folded = 0
    for node in [node for node in graph.node if node.op_type == "Add"]:
        for product, bias in (node.input, reversed(node.input)):
            maker = made.get(product)
            if maker and reads[product] == 1 and _takes(maker, given.get(bias), given):
                unset = [""] * (_BIAS_INPUT - len(maker.input))
                maker.input[:] = [*maker.input[:_BIAS_INPUT], *unset, bias]
                maker.output[0] = node.output[0]
                graph.node.remove(node)
                made[node.output[0]] = maker
                folded += 1
                break
    return folded


def _takes(node: NodeProto, bias: TensorProto | None, given: dict[str, TensorProto]) -> bool:
    """Whether a node is an integer MatMul without a bias, and the bias has one float32 for each of its columns."""
    if node.op_type != "MatMulIntegerToFloat" or any(node.input[_BIAS_INPUT:]):
        return False
    weight = given.get(node.input[1])
    if bias is None or weight is None or bias.data_type != TensorProto.FLOAT:
        return False
    return list(bias.dims) == [weight.dims[-1]]


def split_convolutions(model: ModelProto) -> int:
    """Split the large integer convolutions, in place; gives how many."""
    given = {item.name: item for item in model.graph.initializer}
    nodes, split = list[NodeProto](), 0
    for node in model.graph.node:
        width = _width(node, given)
        nodes += _parts(model, node, width, given) if width else [node]
        split += bool(width)
    if split:
        del model.graph.node[:]
        model.graph.node.extend(nodes)
        read = {name for node in model.graph.node for name in node.input}
        read.update(value.name for value in model.graph.output)
        # A body within a node could read a constant too: then all stay.
        bodies = any(item.type == onnx.AttributeProto.GRAPH for node in model.graph.node for item in node.attribute)
        for item in [] if bodies else [item for item in model.graph.initializer if item.name not in read]:
            model.graph.initializer.remove(item)
    return split


def _width(node: NodeProto, given: Mapping[str, TensorProto]) -> int:
    """Output channels of a part; 0 for a node that stays whole."""
    if node.op_type != "QLinearConv" or node.domain not in ("", "ai.onnx"):
        return 0
    weight = given.get(node.input[_WEIGHT])
    whole = all(given.get(name) for index, name in enumerate(node.input) if index in _PER_CHANNEL and name)
    groups = next((item.i for item in node.attribute if item.name == "group"), 1)
    if weight is None or not whole or groups != 1 or math.prod(weight.dims[2:]) == 1:
        return 0
    channels, depth = weight.dims[0], math.prod(weight.dims[1:])
    width = max(CHANNELS, PART_BYTES // depth // CHANNELS * CHANNELS)
    return width if channels * depth > SPLIT_BYTES and width < channels else 0


def _parts(model: ModelProto, node: NodeProto, width: int, given: Mapping[str, TensorProto]) -> list[NodeProto]:
    """The nodes in the place of a convolution: parts of `width` output channels each, and their Concat."""
    channels = given[node.input[_WEIGHT]].dims[0]
    parts = []
    for start in range(0, channels, width):
        part = NodeProto()
        part.CopyFrom(node)
        part.name, part.output[0] = (f"{name}/{start}" for name in (node.name, node.output[0]))
        for index in _PER_CHANNEL:
            if index < len(node.input) and node.input[index]:
                values = to_array(given[node.input[index]])
                if values.ndim and len(values) == channels:
                    part.input[index] = f"{node.input[index]}/{node.name}/{start}"
                    own = np.ascontiguousarray(values[start : start + width])
                    model.graph.initializer.append(numpy_helper.from_array(own, part.input[index]))
        parts.append(part)
    results = [part.output[0] for part in parts]
    return [*parts, helper.make_node("Concat", results, [node.output[0]], name=f"{node.name}/concat", axis=1)]


def file_moves_first_axis(path: Path) -> bool:
    """Whether a model on disk has a Transpose that the fusion may swap with a Cast."""
    model = load_outline(path)
    return any(_moves_first_axis(node) for node in walk_nodes(model.graph))


def cast_first(model: ModelProto) -> int:
    """Swap the Transpose and Cast before a MatMul, in place; gives how many."""
    reads = Counter(name for node in walk_nodes(model.graph) for name in node.input)
    reads.update(value.name for graph in walk_graphs(model.graph) for value in graph.output)
    return sum(_swap(graph, reads) for graph in walk_graphs(model.graph))


def _swap(graph: GraphProto, reads: Counter[str]) -> int:
    maker = {name: node for node in graph.node for name in node.output}
    multiplied = {name for node in graph.node if node.op_type in _READERS for name in node.input}
    casts = [node for node in graph.node if node.op_type == "Cast" and node.output[0] in multiplied]
    pairs = [(maker.get(cast.input[0]), cast) for cast in casts]
    found = [(transpose, cast) for transpose, cast in pairs if transpose and _moves_first_axis(transpose)]
    for transpose, cast in found:
        moved = NodeProto()
        moved.CopyFrom(transpose)
        before, result = f"{cast.output[0]}/cast_first", cast.output[0]
        cast.input[0], cast.output[0] = transpose.input[0], before
        moved.input[0], moved.output[0] = before, result
        graph.node.insert(list(graph.node).index(cast) + 1, moved)
        reads[transpose.output[0]] -= 1
        if reads[transpose.output[0]]:
            moved.name += "/cast_first"
        else:
            graph.node.remove(transpose)
    return len(found)


def _moves_first_axis(node: NodeProto) -> bool:
    """Whether a node is a Transpose of three or more axes that moves the first to one of the last two places."""
    perms = [list(item.ints) for item in node.attribute if item.name == "perm"]
    if node.op_type != "Transpose" or not perms:
        return False
    front, last = perms[0][:-2], perms[0][-2:]
    return bool(front) and front == [*range(1, len(front) + 1)] and 0 in last
