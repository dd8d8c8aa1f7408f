"""Lists all parts of an ONNX model, also those inside nodes and functions, and inlines its local functions."""

from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter

import onnx
from onnx import inliner

from builders.onnx_graphs.bodies import list_bodies
from enginesmith.core.errors import ModelError


def all_nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """The nodes of the graph and of every function, with those of graphs inside nodes."""
    yield from nodes_in(model.graph.node)
    for function in model.functions:
        yield from nodes_in(function.node)


def nodes_in(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """These nodes, and the nodes of the graphs inside them."""
    for node in nodes:
        yield node
        for body in list_bodies(node):
            yield from nodes_in(body.node)


def all_graphs(model: onnx.ModelProto) -> Iterator[onnx.GraphProto]:
    """The graph, and every graph inside a node, also in functions."""
    yield model.graph
    for node in all_nodes(model):
        yield from list_bodies(node)


def all_attributes(model: onnx.ModelProto) -> Iterator[onnx.AttributeProto]:
    """The attributes of every node, and the defaults of functions' attributes."""
    for node in all_nodes(model):
        yield from node.attribute
    for function in model.functions:
        yield from function.attribute_proto


def all_tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Every dense tensor of initializers and attributes."""
    for graph in all_graphs(model):
        yield from graph.initializer
    for attribute in all_attributes(model):
        yield from (*([attribute.t] if attribute.HasField("t") else []), *attribute.tensors)


def has_sparse(model: onnx.ModelProto) -> bool:
    """Whether the model has a sparse tensor."""
    return any(graph.sparse_initializer for graph in all_graphs(model)) or any(
        attribute.HasField("sparse_tensor") or attribute.sparse_tensors for attribute in all_attributes(model)
    )


def texts(model: onnx.ModelProto) -> Iterator[str | bytes]:
    """All names in the model that its meaning depends on. Protobuf returns bytes for a name that is not UTF-8."""
    for node in all_nodes(model):
        yield from (node.name, node.op_type, node.domain, *node.input, *node.output)
    for attribute in all_attributes(model):
        yield from (attribute.name, attribute.ref_attr_name)
    for tensor in all_tensors(model):
        yield tensor.name
        yield from (text for entry in tensor.external_data for text in (entry.key, entry.value))
    for graph in all_graphs(model):
        for value in (*graph.input, *graph.output, *graph.value_info):
            yield value.name
            yield from (dim.dim_param for dim in value.type.tensor_type.shape.dim)
    for function in model.functions:
        yield from (function.name, function.domain, function.overload, *function.input, *function.output)
        yield from function.attribute
    yield from (entry.domain for entry in model.opset_import)


# A model of a few kilobytes can expand to more nodes than fit in memory (each function calls the previous one twice),
# and functions can be recursive. So the number of nodes is computed before inlining. onnx's inliner is used because the
# time of onnx_ir's grows with the square of the nodes (10,000 nodes: 37 s, against 0.03 s).

# The greatest number of nodes after inlining, and the greatest depth of graphs. Protobuf reads 100 nested messages, and
# a graph inside a node adds three.
MOST_NODES, DEEPEST = 1_000_000, 30

_Name = tuple[str, str, str]


def inline_functions(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with its local functions inlined; the same object if it has none.

    Raises ModelError for functions that call themselves or are defined twice, and for a result that is too large.
    """
    functions = {_name(function.domain, function.name, function.overload): function for function in model.functions}
    if len(functions) < len(model.functions):
        raise ModelError("the model defines a function twice; export it again")
    sizes: dict[_Name, tuple[int, int]] = {}
    callees = {
        name: {callee for node in nodes_in(function.node) if (callee := _called_name(node)) in functions}
        for name, function in functions.items()
    }
    try:
        for name in TopologicalSorter(callees).static_order():
            sizes[name] = _size(functions[name].node, sizes)
    except CycleError as error:
        cycle = " -> ".join(f"{domain}::{name}"[:80] for domain, name, _ in error.args[1][:5])
        raise ModelError(f"the model's functions call themselves: {cycle}; export it again") from error
    count, depth = _size(model.graph.node, sizes)
    if count > MOST_NODES or depth > DEEPEST:
        raise ModelError(
            f"the model has {min(count, 10**18)} nodes or more in graphs {depth} deep, with functions inlined; at most "
            f"{MOST_NODES} and {DEEPEST} can be built: export it with fewer"
        )
    return inliner.inline_local_functions(model) if functions else model


def _size(nodes: Iterable[onnx.NodeProto], function_sizes: Mapping[_Name, tuple[int, int]]) -> tuple[int, int]:
    """The number of nodes after inlining, and the depth of graphs inside them. function_sizes: both, by function."""
    count = depth = 0
    for node in nodes:
        node_count, node_depth = function_sizes.get(_called_name(node), (1, 0))
        for graph in list_bodies(node):
            body_count, body_depth = _size(graph.node, function_sizes)
            node_count, node_depth = node_count + body_count, max(node_depth, body_depth + 1)
        count, depth = count + node_count, max(depth, node_depth)
    return count, depth


def _called_name(node: onnx.NodeProto) -> _Name:
    return _name(node.domain, node.op_type, node.overload)


def _name(domain: str, name: str, overload: str) -> _Name:
    return ("" if domain == "ai.onnx" else domain, name, overload)
