"""Graphs that end the process that opens them in ONNX Runtime: a Transpose, a Cast and a MatMul in this order.

Its MatmulTransposeFusion swaps such a Cast and Transpose where the Transpose moves the first axis behind others (time
and batch of a recurrent layer). Where it then fuses nothing, as with weights of two axes, the new nodes have no schema,
and NchwcTransformer, the next with all optimizations, dereferences it: a segmentation fault, seen in 1.31 and reported
of 1.24 (https://github.com/microsoft/onnxruntime/issues/28392). The Casts of fp16 graphs are inserted behind that
fusion, so the saved file has the three in that order, and the next session that opens it ends. Files are saved here
with the Cast first, for sessions with any options.
"""

from collections import Counter
from pathlib import Path

import onnx
from onnx import GraphProto, ModelProto, NodeProto

from builders.onnx_graphs.bodies import walk_graphs, walk_nodes

# What may be left out of a session that optimises and saves a graph in one go.
FUSION = "MatmulTransposeFusion"
_READERS = ("MatMul", "FusedMatMul")


def file_moves_first_axis(path: Path) -> bool:
    """Whether a model on disk has a Transpose that the fusion may swap with a Cast."""
    model = onnx.load(path, load_external_data=False)
    return any(_moves_first_axis(node) for node in walk_nodes(model.graph))


def cast_first(path: Path) -> tuple[str, ...]:
    """Swap each such Transpose and Cast in a model on disk, which computes the same; a note that says how many."""
    model = onnx.load(path)
    swapped = swap_in_place(model)
    if not swapped:
        return ()
    onnx.save(model, path)
    return (
        f"Casts between a Transpose and a MatMul, put before the Transpose: {swapped}; "
        "onnxruntime would end the process that opens the engine",
    )


def swap_in_place(model: ModelProto) -> int:
    """The same on a model in memory; gives how many."""
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
