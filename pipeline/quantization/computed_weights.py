"""Weights that nodes compute of constants alone: made float32 constants where a node that is to be quantized reads one.

Quantizers that write no Q/DQ nodes store a weight as int8 and put Cast, Sub and Mul behind it; a weight that is
normalised has its norm, a Div and a Mul there; converters write Transpose, Reshape, Split or ConstantOfShape. To a
search for weights all these are no constants, and such a node would stay in float. An embedding's weight stays as it
is: it is not quantized, and would be four times larger.
"""

from collections.abc import Collection, Iterator, Mapping

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from builders.onnx_graphs.bodies import list_bodies, list_reads
from builders.onnx_graphs.weights import find_external, from_array, to_array
from builders.reference import open_interpreter
from enginesmith.arrays import Array
from pipeline.quantization.graph import constants, unused_name

# Nodes that draw their results, and those that say how a weight came quantized.
_STAYING = ("Bernoulli", "DequantizeLinear", "Multinomial", "QuantizeLinear", "Random")


def fold_computed_weights(model: ModelProto, readers: Collection[str]) -> int:
    """Put float32 constants in the place of the computed weights and biases of nodes of the types `readers`, and of
    other names for constants, in place. model: tidy.

    Gives how many. The nodes that computed them are removed where nothing else reads them.
    """
    graph = model.graph
    given, made, outside = constants(graph), _find_computing(graph), find_external(graph)
    outputs = {value.name for value in graph.output}
    names = {node.name for node in made.values()}
    taken = {name for node in graph.node for name in node.output} | given.keys()
    folded = 0
    for name in dict.fromkeys(_list_wanted(graph, made, readers)):
        values = None if name in outputs else _compute(model, name, given, made)
        if values is None or values.dtype != np.float32:
            continue
        taken.add(fresh := unused_name(name, taken))
        results = made.pop(name).output
        results[[*results].index(name)] = fresh
        given[name] = from_array(values, name, outside)
        graph.initializer.append(given[name])
        folded += 1
    if folded:
        _remove_unread(graph, names)
    return folded


def _find_computing(graph: GraphProto) -> dict[str, NodeProto]:
    """The nodes that depend on constants alone, by their results."""
    known, found = {*constants(graph)}, dict[str, NodeProto]()
    for node in graph.node:
        stays = node.op_type.startswith(_STAYING) or node.domain not in ("", "ai.onnx") or list_bodies(node)
        if not stays and known.issuperset(filter(None, node.input)):
            known.update(node.output)
            found |= dict.fromkeys(filter(None, node.output), node)
    return found


def _list_wanted(graph: GraphProto, made: Mapping[str, NodeProto], readers: Collection[str]) -> Iterator[str]:
    for node in graph.node:
        for index, name in enumerate(node.input):
            if name in made and (made[name].op_type == "Identity" or (node.op_type in readers and index > 0)):
                yield name


def _compute(
    model: ModelProto, name: str, given: Mapping[str, TensorProto], made: Mapping[str, NodeProto]
) -> Array | None:
    """The values of a tensor that nodes make out of constants; None where they do not run."""
    read, unread, needed = set[str](), {name}, set[str]()
    while unread:
        read.add(found := unread.pop())
        if found in made:
            needed.add(made[found].name)
            unread |= {*filter(None, made[found].input)} - read
    nodes = [node for node in model.graph.node if node.name in needed]
    held = {item: given[item] for item in sorted(read & given.keys())}
    inputs = [helper.make_tensor_value_info(item, tensor.data_type, tensor.dims) for item, tensor in held.items()]
    graph = helper.make_graph(nodes, "weight", inputs, [ValueInfoProto(name=name)])
    part = helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)
    try:
        session = open_interpreter(part.SerializeToString(), f"weight {name!r}", threads=1)
        return np.asarray(session.run([name], {item: to_array(tensor) for item, tensor in held.items()})[0])
    except Exception:  # the interpreter's errors share no base class; what it cannot compute stays in float
        return None


def _remove_unread(graph: GraphProto, names: Collection[str]) -> None:
    """Remove, in place, those of the nodes called `names` that nothing reads any more."""
    left = list[NodeProto]()
    read = {value.name for value in graph.output}
    for node in reversed(graph.node):
        if node.name not in names or read.intersection(node.output):
            left.append(node)
            read.update(list_reads(node))
    kept = left[::-1]
    del graph.node[:]
    graph.node.extend(kept)
