"""The parts of an ONNX model wherever they are: in its graph, in the graphs inside nodes, in its functions."""

from collections.abc import Iterable, Iterator

import onnx

from builders.onnx_graphs.bodies import list_bodies


def all_nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """The nodes of the graph and of every function, with those of graphs inside nodes."""
    yield from nodes_in(model.graph.node)
    for function in model.functions:
        yield from nodes_in(function.node)


def nodes_in(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """These nodes and those of the graphs inside them."""
    for node in nodes:
        yield node
        for inner in list_bodies(node):
            yield from nodes_in(inner.node)


def all_graphs(model: onnx.ModelProto) -> Iterator[onnx.GraphProto]:
    """The graph, and every graph inside a node, of functions too."""
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
    """All names in the model that its meaning depends on. Protobuf gives bytes for one that is not UTF-8."""
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
