"""Where everything that a model computes passes through one tensor, so that what comes later can begin there."""

from collections.abc import Collection, Mapping

from onnx import ModelProto, TensorProto

from builders.onnx_graphs.bodies import list_reads


def find_waists(model: ModelProto, changed: Collection[str], types: Mapping[str, int]) -> list[tuple[int, str]]:
    """The float tensors that stand between what comes before and after them, as the residual stream does between two
    layers: of the `changed` tensors, what comes later reads no other from before. Each with the index of the node that
    makes it, in order; outputs of the model are none.

    types: element types of the model's tensors.
    """
    graph = model.graph
    outputs, last = {value.name for value in graph.output}, dict[str, int]()
    for index, node in enumerate(graph.node):
        last |= dict.fromkeys(list_reads(node), index)
    last |= dict.fromkeys(outputs, len(graph.node))
    found, crossing = list[tuple[int, str]](), {value.name for value in graph.input if value.name in changed}
    for index, node in enumerate(graph.node):
        crossing -= {name for name in list_reads(node) if last[name] == index}
        crossing |= {name for name in node.output if name in changed and last.get(name, 0) > index}
        alone = next(iter(crossing)) if len(crossing) == 1 else ""
        if alone in node.output and alone not in outputs and types.get(alone) == TensorProto.FLOAT:
            found.append((index, alone))
    return found
