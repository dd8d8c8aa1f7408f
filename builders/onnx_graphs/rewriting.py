"""Known types and constants of a graph's values, and replacement of nodes."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from builders.onnx_graphs.bodies import list_bodies, set_items
from enginesmith.core.types import Untyped

if TYPE_CHECKING:
    import onnx


@dataclass
class Scope:
    """Known facts about the values that a graph can read.

    types: name -> `TypeProto.Tensor`.  arrays: name -> `TensorProto`, of constants.  true_names: names of values that
    are always true, or integers other than 0.  makers: name -> the node that computes it, of this graph only.  inputs:
    names of this graph's inputs that are no constants.
    """

    opset: int = 0
    types: dict[str, Untyped] = field(default_factory=dict)
    arrays: dict[str, Untyped] = field(default_factory=dict)
    true_names: frozenset[str] = frozenset()
    makers: Mapping[str, Untyped] = field(default_factory=dict)
    inputs: Collection[str] = ()
    nodes: Sequence[Untyped] = ()

    def inside(self, graph: Untyped, node: Untyped = None) -> "Scope":
        """The scope of a graph in this one. node: whose body it is."""
        values = (*graph.value_info, *graph.input, *graph.output)
        constants = {tensor.name: tensor for tensor in graph.initializer}
        inputs = {value.name for value in graph.input} - constants.keys()
        for graph_node in graph.node:
            if graph_node.op_type == "Constant" and graph_node.attribute[0].name == "value":
                constants[graph_node.output[0]] = graph_node.attribute[0].t
        types = {value.name: value.type.tensor_type for value in values if value.type.tensor_type.elem_type}
        outer_true_names = self.true_names | ({graph.input[1].name} if self.begins(node) else set())
        return replace(
            self,
            types={**self.types, **types},
            arrays={**self.arrays, **constants},
            true_names=_list_true(graph, outer_true_names),
            makers={name: graph_node for graph_node in graph.node for name in graph_node.output},
            inputs=inputs,
            nodes=graph.node,
        )

    def begins(self, node: Untyped) -> bool:
        """Whether a node is a Loop whose condition at its begin is always true."""
        if node is None or node.op_type != "Loop":
            return False
        return len(node.input) < 2 or not node.input[1] or node.input[1] in self.true_names

    def array(self, name: str) -> "np.ndarray | None":
        """A constant's array, mapped where its bytes lie in a file; None of another value."""
        from builders.onnx_graphs.weights import to_array

        return to_array(self.arrays[name]) if name in self.arrays else None

    def sizes(self, name: str) -> Sequence[int | None] | None:
        """A value's sizes, None for a dynamic one; None when not even its rank is known."""
        if name in self.arrays:
            return tuple(self.arrays[name].dims)
        if name not in self.types or not self.types[name].HasField("shape"):
            return None
        return [dim.dim_value if dim.HasField("dim_value") else None for dim in self.types[name].shape.dim]

    def dtype(self, name: str) -> "np.dtype | None":
        """A value's dtype; None when it is not known."""
        from onnx import helper

        if name in self.arrays:
            return helper.tensor_dtype_to_np_dtype(self.arrays[name].data_type)
        return helper.tensor_dtype_to_np_dtype(self.types[name].elem_type) if name in self.types else None


def attributes_of(node: Untyped) -> dict[str, Untyped]:
    """A node's attributes by name."""
    from onnx import helper

    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}


def _list_true(graph: "onnx.GraphProto", outer_true_names: frozenset[str]) -> frozenset[str]:
    """Names of values in a graph that are always true, or whole numbers other than 0."""
    from onnx import TensorProto

    true_names = {*outer_true_names, *(tensor.name for tensor in graph.initializer if _is_true(tensor))}
    for node in graph.node:
        input_flags = [name in true_names for name in node.input]
        attributes = {attribute.name: attribute for attribute in node.attribute}
        if (
            (node.op_type == "Constant" and "value" in attributes and _is_true(attributes["value"].t))
            or (node.op_type in ("Identity", "And") and all(input_flags))
            or (node.op_type == "Or" and any(input_flags))
            or (node.op_type == "Cast" and attributes["to"].i == TensorProto.BOOL and all(input_flags))
        ):
            true_names.add(node.output[0])
    return frozenset(true_names)


def _is_true(tensor: "onnx.TensorProto") -> bool:
    from onnx import TensorProto

    from builders.onnx_graphs.weights import to_array

    if tensor.data_type not in (TensorProto.BOOL, TensorProto.INT32, TensorProto.INT64):
        return False
    return bool(np.prod(tensor.dims) == 1 and to_array(tensor).all())


class Writer:
    """Makes the nodes that take the place of one, under its name, so that the compiler's errors name that node.

    Called with an operator, its inputs and attributes it adds a node and gives the name of its output.
    """

    def __init__(self, node: "onnx.NodeProto", opset: int) -> None:
        self.node = node
        self.opset = opset
        self.nodes: list[onnx.NodeProto] = []

    def constant(self, array: object) -> str:
        """The name of a constant."""
        from onnx import numpy_helper

        return self("Constant", value=numpy_helper.from_array(np.asarray(array)))

    def __call__(self, operator: str, *inputs: str, **attributes: Untyped) -> str:
        """The name of a new node's output."""
        return self.last(operator, inputs, [f"{self.node.output[0]}_{len(self.nodes)}"], **attributes)

    def last(self, operator: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Untyped) -> str:
        """Add a node of the type `operator` with these names of inputs and outputs; the name of the first output."""
        from onnx import helper

        self.nodes.append(helper.make_node(operator, inputs, outputs, name=self.node.name, **attributes))
        return outputs[0]


Writing = Callable[[Writer, Scope], "list[onnx.NodeProto] | None"]


def rewrite(
    graph: "onnx.GraphProto", opset: int, rules: Mapping[str, Writing], outer_scope: Scope | None = None
) -> None:
    """Replace nodes of a graph with inferred shapes by the nodes that the rules make, in place and in inner graphs too.

    rules: operator -> rule.  outer_scope: known facts around an inner graph; None for the model's graph.
    """
    scope = (outer_scope or Scope(opset)).inside(graph)
    new_nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        for body in list_bodies(node):
            rewrite(body, opset, rules, scope)
        rule = rules.get(node.op_type) if node.domain in ("", "ai.onnx") else None
        replacements = rule(Writer(node, opset), scope) if rule else None
        new_nodes.extend([node] if replacements is None else replacements)
    set_items(graph.node, new_nodes)
