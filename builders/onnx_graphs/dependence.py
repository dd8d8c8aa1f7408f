"""What the outputs of an ONNX graph depend on: nothing, one input that they hand on, or what the graph computes."""

from collections.abc import Mapping
from typing import Literal

from onnx import GraphProto, NodeProto

from builders.onnx_graphs.bodies import list_reads

Dependence = Literal["constant", "handed on", "computed"]

# Operators whose result depends on the sizes of their input, and not on its values.
_SIZES = frozenset({"Shape", "Size"})
# Operators that draw numbers, so that their result is no constant.
_DRAWING = ("Random", "Bernoulli", "Multinomial")
# Operators whose result holds the elements of their first input, in another order, shape or type.
_MOVING = frozenset(
    {"Cast", "CastLike", "Dropout", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"}
)


def find_dependences(graph: GraphProto) -> dict[str, Dependence]:
    """By output, what it depends on: 'constant' where no value of an input reaches it (it may follow from their
    sizes), 'handed on' where it is an input, moved or cast, else 'computed'."""
    makers = {name: node for node in graph.node for name in node.output if name}
    given = {value.name for value in graph.input} - {tensor.name for tensor in graph.initializer}
    return {value.name: _find_dependence(value.name, makers, given) for value in graph.output}


def find_source(graph: GraphProto, name: str) -> str:
    """The tensor that `name` is, moved or cast: an input of the graph where it hands one on; `name` itself else."""
    return _follow(name, {output: node for node in graph.node for output in node.output if output})


def _find_dependence(name: str, makers: Mapping[str, NodeProto], given: set[str]) -> Dependence:
    if _follow(name, makers) in given:
        return "handed on"
    seen, unread = set[str](), {name}
    while unread:
        current = unread.pop()
        seen.add(current)
        node = makers.get(current)
        if current in given or (node is not None and node.op_type.startswith(_DRAWING)):
            return "computed"
        if node is not None and node.op_type not in _SIZES:
            unread |= {*list_reads(node)} - seen
    return "constant"


def _follow(name: str, makers: Mapping[str, NodeProto]) -> str:
    while (node := makers.get(name)) is not None and node.op_type in _MOVING and node.output[0] == name:
        name = node.input[0]
    return name
