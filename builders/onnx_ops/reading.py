"""Reads an ONNX file into plain values: nodes with decoded attributes, and constants as numpy arrays."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.inliner
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from builders.onnx_graphs.bodies import walk_nodes
from builders.onnx_ops.table import NumpyArray
from enginesmith.core.errors import ModelError

# The newest that the table of operators was written for.
NEWEST_OPSET = 28
_OWN_DOMAINS = ("", "ai.onnx")
_SCALARS = {"value_float": np.float32, "value_int": np.int64}


@dataclass(frozen=True)
class Node:
    """One node. inputs: names, '' for one that is left out.  attributes: decoded; a graph is a `Body`.  name, op_type,
    domain: as the file has them.  outputs: names, '' for one that is left out."""

    name: str
    op_type: str
    domain: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]

    def __str__(self) -> str:
        kind = f"{self.domain}.{self.op_type}" if self.domain else self.op_type
        return f"node {self.name or self.outputs[0]!r} ({kind})"

    def bodies(self) -> Iterator["Body"]:
        """The graphs among its attributes."""
        return (value for value in self.attributes.values() if isinstance(value, Body))

    def reads(self) -> set[str]:
        """Every name that the node reads, including outer names that its graphs read."""
        return {name for name in self.inputs if name}.union(*(body.free() for body in self.bodies()))


@dataclass(frozen=True)
class Body:
    """A graph: the model's, or that of a branch, which reads names from around it.

    elements: name -> dtype, where the file states one.
    nodes: in an order in which each reads what is there.  constants: name -> array.
    """

    nodes: tuple[Node, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    constants: Mapping[str, NumpyArray]
    elements: Mapping[str, np.dtype[Any]]
    opset: int

    def free(self) -> set[str]:
        """The names that it reads from around it."""
        bound_names = {name for node in self.nodes for name in node.outputs} | set(self.inputs) | set(self.constants)
        return set(self.outputs).union(*(node.reads() for node in self.nodes)) - bound_names


def read(path: Path, operators: Collection[str]) -> Body:
    """Read a model, with its external data. operators: those that are not replaced by the function that defines them.

    Raises ModelError for a file that is no model, and for inputs or outputs that are no tensors.
    """
    try:
        model = onnx.load(path)
    except Exception as error:  # protobuf's, onnx's and the file system's classes alike
        raise ModelError(f"{path.name} cannot be read: {error}; export it again") from error
    return read_model(model, operators)


def read_model(model: ModelProto, operators: Collection[str]) -> Body:
    """As `read`, of a model in memory."""
    opset = max((entry.version for entry in model.opset_import if entry.domain in _OWN_DOMAINS), default=0)
    if not 1 <= opset <= NEWEST_OPSET:
        raise ModelError(f"opset {opset} is not in 1..{NEWEST_OPSET}; use onnx.version_converter")
    for value in (*model.graph.input, *model.graph.output):
        if value.type.WhichOneof("value") != "tensor_type":
            raise ModelError(f"{value.name!r} is not a tensor; only tensors can be inputs and outputs")
    if model.graph.sparse_initializer:
        raise ModelError("the model has sparse tensors; export it with dense ones")
    return _body(_inline_functions(model, operators).graph, opset, {})


def _inline_functions(model: ModelProto, operators: Collection[str]) -> ModelProto:
    """The model without local functions, and with the function bodies of operators that are not known."""
    model = onnx.inliner.inline_local_functions(model)
    unknown_types = {node.op_type for node in walk_nodes(model.graph) if node.domain in _OWN_DOMAINS}
    unknown_types -= {*operators, "Constant"}
    if not unknown_types:
        return model
    typed_model = onnx.shape_inference.infer_shapes(model)  # some bodies depend on types, including types of weights
    weights = [
        helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        for tensor in typed_model.graph.initializer
    ]
    typed_model.graph.value_info.extend(weights)
    names = [("", name) for name in sorted(unknown_types)]
    try:
        return onnx.inliner.inline_selected_functions(typed_model, names, inline_schema_functions=True)
    except RuntimeError:  # it has no word for optional inputs of some bodies: the operator is then refused by name
        return model


def _body(graph: GraphProto, opset: int, outer_elements: Mapping[str, int]) -> Body:
    types = {**outer_elements, **_elements(graph)}
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    nodes = []
    for node in graph.node:
        if node.op_type == "Constant" and node.domain in _OWN_DOMAINS:
            constants[node.output[0]] = _constant(node)
        else:
            attributes = {attribute.name: _attribute(node, attribute, opset, types) for attribute in node.attribute}
            if node.op_type == "QuantizeLinear" and not attributes.get("output_dtype"):
                zero_name = node.input[2] if len(node.input) > 2 else ""
                attributes["output_dtype"] = types.get(zero_name) or TensorProto.UINT8
            domain = "" if node.domain in _OWN_DOMAINS else node.domain
            nodes.append(Node(node.name, node.op_type, domain, tuple(node.input), tuple(node.output), attributes))
    return Body(
        tuple(nodes),
        tuple(value.name for value in graph.input if value.name not in constants),
        tuple(value.name for value in graph.output),
        constants,
        {name: helper.tensor_dtype_to_np_dtype(element) for name, element in types.items() if element},
        opset,
    )


def _elements(graph: GraphProto) -> dict[str, int]:
    """Name -> ONNX's element type, of values that state one."""
    stated_types = {value.name: value.type.tensor_type.elem_type for value in (*graph.input, *graph.value_info)}
    stated_types |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    constant_nodes = (node for node in graph.node if node.op_type == "Constant" and node.attribute)
    return stated_types | {node.output[0]: node.attribute[0].t.data_type for node in constant_nodes}


def _constant(node: NodeProto) -> NumpyArray:
    name = node.attribute[0].name if node.attribute else ""
    if name not in ("value", "value_float", "value_floats", "value_int", "value_ints"):
        raise ModelError(f"constant {node.output[0]!r} is not a dense tensor of numbers; export the model without it")
    value = helper.get_attribute_value(node.attribute[0])
    return numpy_helper.to_array(value) if name == "value" else np.array(value, _SCALARS[name.rstrip("s")])


def _attribute(node: NodeProto, attribute: AttributeProto, opset: int, elements: Mapping[str, int]) -> Any:
    if attribute.ref_attr_name:
        source_text = f"attribute {attribute.name} refers to the function's attribute {attribute.ref_attr_name}"
        raise ModelError(f"node {node.name!r}: {source_text}; inline the model's functions (onnx.inliner)")
    value = helper.get_attribute_value(attribute)
    if attribute.type == AttributeProto.GRAPH:
        return _body(value, opset, elements)
    if attribute.type == AttributeProto.TENSOR:
        return numpy_helper.to_array(value)
    if attribute.type == AttributeProto.STRING:
        return value.decode(errors="replace")
    if attribute.type == AttributeProto.STRINGS:
        return [text.decode(errors="replace") for text in value]
    return list(value) if attribute.type in (AttributeProto.INTS, AttributeProto.FLOATS) else value
