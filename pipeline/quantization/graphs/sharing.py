"""Tensors that quantized and other nodes share: each side gets its own, so that Q/DQ changes only what it should."""

from collections.abc import Iterable, Mapping, Sequence

from onnx import ModelProto, NodeProto, helper

from pipeline.quantization.graphs.graph import constants, consumers, sort_nodes
from pipeline.quantization.graphs.sites import Site


def own_weights(model: ModelProto, sites: Sequence[Site]) -> None:
    """Give a weight that something else reads too, or in another channel axis, a copy for each axis among the sites.

    Q/DQ on a shared weight would quantize the other readers too (an embedding tied to the last projection).
    """
    readers, given = consumers(model.graph), constants(model.graph)
    by_name = {node.name: node for node in model.graph.node}
    groups: dict[tuple[str, int], list[Site]] = {}
    for site in sites:
        groups.setdefault((site.weight, site.axis), []).append(site)
    for (weight, axis), group in groups.items():
        if len(readers[weight]) > len(group):
            copy = model.graph.initializer.add()
            copy.CopyFrom(given[weight])
            copy.name = _fresh(f"{weight}_axis{axis}", given)
            for site in group:
                by_name[site.node].input[1] = copy.name


def part_readers(model: ModelProto, sites: Sequence[Site], written: set[str]) -> dict[str, str]:
    """Let quantized readers read an Identity where others read the tensor too: alias -> tensor.

    written: tensors that int8 nodes write; those are quantized for everybody.
    """
    graph, readers = model.graph, consumers(model.graph)
    outputs = {value.name for value in graph.output}
    aliases: dict[str, str] = {}
    for tensor, nodes in _quantized_readers(model, sites).items():
        if tensor not in written and (tensor in outputs or len(readers[tensor]) > len(nodes)):
            alias = _fresh(f"{tensor}_int8", readers)
            aliases[alias] = tensor
            for node in nodes:
                node.input[0] = alias
    graph.node.extend(helper.make_node("Identity", [tensor], [alias], name=alias) for alias, tensor in aliases.items())
    sort_nodes(graph)  # onnxruntime's type inference reads the nodes in order
    return aliases


def join_readers(model: ModelProto, aliases: Mapping[str, str]) -> None:
    """Take the Identity nodes of `part_readers` out again."""
    for node in [node for node in model.graph.node if node.op_type == "Identity" and node.output[0] in aliases]:
        model.graph.node.remove(node)
    for node in model.graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = aliases.get(name, name)


def _quantized_readers(model: ModelProto, sites: Sequence[Site]) -> dict[str, list[NodeProto]]:
    by_name = {node.name: node for node in model.graph.node}
    reading: dict[str, list[NodeProto]] = {}
    for site in sites:
        reading.setdefault(site.activation, []).append(by_name[site.node])
    return reading


def _fresh(name: str, taken: Iterable[str]) -> str:
    used = set(taken)
    while name in used:
        name += "_"
    return name
