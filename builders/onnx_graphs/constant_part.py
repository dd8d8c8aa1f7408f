"""The part of a graph that computes weights from constants: a quantized weight is dequantized in every run of a graph
that is run as it is written, and one that is kept in float also quantized.

Its results are the same in every run, so that it can be run once. They become inputs of what is left and not constants
of it: a runtime lays constant factors out anew and then adds in another order, so that other bits would come out.
"""

from collections.abc import Iterable, Mapping, Sequence

from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from builders.onnx_graphs.bodies import list_reads
from enginesmith.arrays import Array

CONVERTING = frozenset(("Cast", "DequantizeLinear", "QuantizeLinear"))
# Weights have so many axes. With fewer it may be a size, which a runtime wants to know when it opens the graph.
_LEAST_AXES = 2


def cut_constant_part(model: ModelProto) -> ModelProto | None:
    """The nodes that convert constants of two or more axes, with the float32 tensors that other nodes read as outputs.

    None where a model has no such nodes.
    """
    graph = model.graph
    converting = _list_converting(graph)
    named = {node.output[0] for node in converting}
    read = {name for node in graph.node if not named.intersection(node.output) for name in list_reads(node)}
    wanted = [node.output[0] for node in converting if node.output[0] in read and _makes_floats(node, graph, named)]
    if not wanted:
        return None
    # A name alone is enough: the runtime infers type and shape.
    return _replace_nodes(model, _select_needed(converting, wanted), (), [ValueInfoProto(name=name) for name in wanted])


def cut_varying_part(model: ModelProto, given: Mapping[str, Array]) -> ModelProto:
    """The model with the tensors `given` as further inputs, and without the nodes that only computed these."""
    graph = model.graph
    converting = _list_converting(graph)
    results = {node.output[0] for node in converting}
    wanted = {name for node in graph.node if not results.intersection(node.output) for name in list_reads(node)}
    needed = {node.output[0] for node in _select_needed(converting, wanted - given.keys())}
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, array.shape) for name, array in given.items()]
    nodes = [node for node in graph.node if needed.issuperset(results.intersection(node.output))]
    return _replace_nodes(model, nodes, (*graph.input, *inputs), graph.output)


def _list_converting(graph: GraphProto) -> list[NodeProto]:
    """The nodes that convert constants of at least `_LEAST_AXES` axes, in the graph's order."""
    outputs, given = ({value.name for value in values} for values in (graph.output, graph.input))
    constant = {item.name: len(item.dims) for item in graph.initializer if item.name not in given}
    found = []
    for node in graph.node:
        if node.op_type in CONVERTING and all(name in constant for name in node.input if name):
            axes = constant[node.input[0]]
            if axes >= _LEAST_AXES and node.output[0] not in outputs:
                constant[node.output[0]] = axes
                found.append(node)
    return found


def _makes_floats(node: NodeProto, graph: GraphProto, converted: set[str]) -> bool:
    """Whether a converting node makes float32, as far as the node and the constants it reads say so."""
    if node.op_type == "Cast":
        return any(item.name == "to" and item.i == TensorProto.FLOAT for item in node.attribute)
    if node.op_type == "QuantizeLinear" or node.input[1] in converted:
        return False
    return any(item.name == node.input[1] and item.data_type == TensorProto.FLOAT for item in graph.initializer)


def _select_needed(nodes: Sequence[NodeProto], wanted: Iterable[str]) -> list[NodeProto]:
    """Those of the sorted `nodes` that the `wanted` tensors depend on, in their order."""
    names, found = set(wanted), []
    for node in reversed(nodes):
        if names.intersection(node.output):
            names.update(list_reads(node))
            found.append(node)
    return found[::-1]


def _replace_nodes(
    model: ModelProto, nodes: Sequence[NodeProto], inputs: Iterable[ValueInfoProto], outputs: Iterable[ValueInfoProto]
) -> ModelProto:
    """A model of these nodes, with the constants that they or the outputs read."""
    part = ModelProto(ir_version=model.ir_version, opset_import=model.opset_import, functions=model.functions)
    graph = part.graph
    graph.name = model.graph.name
    graph.node.extend(nodes)
    graph.input.extend(inputs)
    graph.output.extend(outputs)
    read = {name for node in nodes for name in list_reads(node)} | {value.name for value in graph.output}
    graph.initializer.extend(item for item in model.graph.initializer if item.name in read)
    return part
