"""The costs of an ONNX graph at given sizes of its dims, by ONNX's own shape inference.

A product of dequantized tensors counts in the stored type of its operands, as an engine computes in it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from builders.backends.optional_methods import TensorType, element_name
from enginesmith.core.errors import ModelError
from enginesmith.core.reports.breakdown import NodeCost
from enginesmith.core.types import TensorSpec
from validation.latency.roofline.costs import CONVOLUTIONS, PRODUCTS, TRANSPOSED_CONVOLUTIONS, cost_of, size_bytes

if TYPE_CHECKING:
    from onnx import GraphProto, NodeProto

_WEIGHTED = {*CONVOLUTIONS, *PRODUCTS, *TRANSPOSED_CONVOLUTIONS}


@dataclass(frozen=True)
class GraphNode:
    """A node with its cost, and the bytes of the tensors that it reads and makes, by name."""

    cost: NodeCost
    reads: Mapping[str, int]
    makes: Mapping[str, int]


@dataclass(frozen=True)
class GraphCosts:
    """The nodes of a graph. unsized: names of nodes with a tensor of unknown shape, which counts 0 bytes."""

    nodes: Sequence[GraphNode]
    outputs: Sequence[str]
    unsized: Sequence[str] = field(default=())

    @property
    def working_bytes(self) -> int:
        """The working set of a run: inputs and constants, and the greatest sum of other tensors alive at once."""
        made = {name: size for node in self.nodes for name, size in node.makes.items()}
        given = {name: size for node in self.nodes for name, size in node.reads.items() if name not in made}
        last = {name: index for index, node in enumerate(self.nodes) for name in node.reads}
        last |= dict.fromkeys(self.outputs, len(self.nodes))
        alive = most = 0
        for index, node in enumerate(self.nodes):
            alive += sum(node.makes.values())
            most = max(most, alive)
            ended = [name for name in {*node.reads, *node.makes} if name in made and last.get(name, index) == index]
            alive -= sum(made[name] for name in ended)
        return sum(given.values()) + most

    @property
    def costs(self) -> list[NodeCost]:
        """Of each node."""
        return [node.cost for node in self.nodes]


def graph_costs(path: Path, inputs: Sequence[TensorSpec], sizes: Mapping[str, int]) -> GraphCosts:
    """The costs of the ONNX model at `path`. inputs: with named dims.  sizes: of each named dim.

    Raises ModelError when its shapes contradict each other.
    """
    import onnx

    from builders.onnx_graphs.outline import load_outline

    model = load_outline(path)
    # Shapes of other tensors follow from those of the inputs.
    shapes = {spec.name: spec.at(sizes) for spec in inputs}
    del model.graph.value_info[:]
    for value in model.graph.input:
        for dim, size in zip(value.type.tensor_type.shape.dim, shapes.get(value.name, ()), strict=False):
            dim.dim_value = size
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    try:
        inferred = onnx.shape_inference.infer_shapes(model, data_prop=True)
    except (onnx.shape_inference.InferenceError, ValueError) as error:
        raise ModelError(f"shapes of {path.name} at {dict(sizes)} cannot be inferred: {error}") from error
    return count(inferred.graph)


def count(graph: "GraphProto") -> GraphCosts:
    """The costs of a graph whose shapes are known. Control flow counts as one node, by what it reads and makes."""
    seen = _tensors(graph)
    behind = {node.output[0]: seen.get(node.input[0]) for node in graph.node if node.op_type == "DequantizeLinear"}
    nodes, unsized = [], []
    for node in graph.node:
        ins = [None if not name else seen.get(name) for name in node.input]
        outs = [seen.get(name) for name in node.output if name]
        name = node.name or f"{node.op_type}_{next(iter(node.output), '')}"
        if None in outs or any(item is None and given for item, given in zip(ins, node.input, strict=True)):
            unsized.append(name)
        known = [item for item in outs if item is not None]
        equation = next((item.s.decode() for item in node.attribute if item.name == "equation"), "")
        cost = cost_of(name, node.op_type, ins, known, _dtype(node, behind), equation)
        nodes.append(_with_edges(node, cost, ins, dict(zip(node.output, outs, strict=False))))
    return GraphCosts(nodes, [value.name for value in graph.output], unsized)


def _with_edges(
    node: "NodeProto", cost: NodeCost, ins: Sequence[TensorType | None], outs: Mapping[str, TensorType | None]
) -> GraphNode:
    moved = cost.moved_bytes > 0
    reads = {name: size_bytes(item) if item else 0 for name, item in zip(node.input, ins, strict=True) if name}
    first = next(iter(reads), None)
    if first is not None:  # what is picked of it, not all
        rest = sum(size for name, size in reads.items() if name != first)
        reads[first] = max(0, min(reads[first], cost.read_bytes - rest)) if moved else reads[first]
    return GraphNode(cost, reads, {name: size_bytes(item) if item else 0 for name, item in outs.items() if name})


def _dtype(node: "NodeProto", behind: Mapping[str, TensorType | None]) -> str | None:
    """The stored type behind both operands, where both come out of a DequantizeLinear."""
    if node.op_type not in _WEIGHTED or len(node.input) < 2:
        return None
    operands = [behind.get(name) for name in node.input[:2]]
    return operands[0][0] if operands[0] and operands[1] else None


def _tensors(graph: "GraphProto") -> dict[str, TensorType]:
    """Type and shape of every tensor that has both."""
    found: dict[str, TensorType] = {}
    for value in (*graph.input, *graph.value_info, *graph.output):
        tensor = value.type.tensor_type
        if tensor.HasField("shape") and all(dim.HasField("dim_value") for dim in tensor.shape.dim):
            found[value.name] = element_name(tensor.elem_type), tuple(dim.dim_value for dim in tensor.shape.dim)
    for item in graph.initializer:
        found[item.name] = (element_name(item.data_type), tuple(item.dims))
    return found
