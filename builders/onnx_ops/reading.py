"""Reads an ONNX file into plain values: nodes with decoded attributes, and constants as numpy arrays."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.inliner
import onnx_ir as ir
from onnx import ModelProto, TensorProto, helper
from onnx.helper import tensor_dtype_to_np_dtype

from builders.onnx_ops.library import NumpyArray
from enginery.core.errors import ModelError

NEWEST_OPSET = 28
_OWN_DOMAINS = ("", "ai.onnx")


@dataclass(frozen=True)
class Node:
    """One node. inputs: names, '' for one that is left out.  attributes: decoded; a graph is a `Body`."""

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
        """Every name that it needs, those that its graphs take from around them included."""
        return {name for name in self.inputs if name}.union(*(body.free() for body in self.bodies()))


@dataclass(frozen=True)
class Body:
    """A graph: of the model, or of a branch, which reads names from around it.

    elements: the types of what the file states one for.  opset: of ONNX's own operators.
    """

    nodes: tuple[Node, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    constants: Mapping[str, NumpyArray]
    elements: Mapping[str, np.dtype[Any]]
    opset: int

    def free(self) -> set[str]:
        """The names that it reads from around it."""
        made = {name for node in self.nodes for name in node.outputs} | set(self.inputs) | set(self.constants)
        return set(self.outputs).union(*(node.reads() for node in self.nodes)) - made


def read(path: Path, known: Collection[str]) -> Body:
    """Read a model, with its external data. known: operators that are not to be replaced by what ONNX defines them by.

    Raises ModelError for what is no model, or has inputs or outputs that are no tensors.
    """
    try:
        model = onnx.load(path)
    except Exception as error:  # protobuf's, onnx's and the file system's classes alike
        raise ModelError(f"{path.name} cannot be read: {error}; export it again") from error
    return read_model(model, known)


def read_model(model: ModelProto, known: Collection[str]) -> Body:
    """The same of a model in memory."""
    opset = max((entry.version for entry in model.opset_import if entry.domain in _OWN_DOMAINS), default=0)
    if not 1 <= opset <= NEWEST_OPSET:
        raise ModelError(f"opset {opset} is not in 1..{NEWEST_OPSET}; use onnx.version_converter")
    for value in (*model.graph.input, *model.graph.output):
        if value.type.WhichOneof("value") != "tensor_type":
            raise ModelError(f"{value.name!r} is no tensor; only tensors can be inputs and outputs")
    if model.graph.sparse_initializer:
        raise ModelError("the model has sparse tensors; export it with dense ones")
    try:
        return _body(ir.from_proto(_inlined(model, known)).graph, opset)
    except ir.serde.SerdeError as error:
        raise ModelError(f"the model is invalid: {error.__cause__ or error}; export it again") from error


def _inlined(model: ModelProto, known: Collection[str]) -> ModelProto:
    """Without local functions, and without operators that only their function body explains."""
    model = onnx.inliner.inline_local_functions(model)
    unknown = {node.op_type for node in model.graph.node if node.domain in _OWN_DOMAINS} - {*known, "Constant"}
    if not unknown:
        return model
    typed = onnx.shape_inference.infer_shapes(model)  # some bodies depend on types, those of weights included
    weights = [helper.make_tensor_value_info(item.name, item.data_type, item.dims) for item in typed.graph.initializer]
    typed.graph.value_info.extend(weights)
    names = [("", name) for name in sorted(unknown)]
    try:
        return onnx.inliner.inline_selected_functions(typed, names, inline_schema_functions=True)
    except RuntimeError:  # it has no word for optional inputs of some bodies: the operator is then refused by name
        return model


def _body(graph: ir.Graph, opset: int) -> Body:
    nodes = [node for node in graph if node.op_type != "Constant" or node.domain]
    held = [*graph.initializers.values(), *(node.outputs[0] for node in graph if node not in nodes)]
    constants = {value.name or "": _constant(value) for value in held}
    return Body(
        tuple(_node(node, opset) for node in nodes),
        tuple(name for value in graph.inputs if (name := value.name or "") not in constants),
        tuple(value.name or "" for value in graph.outputs),
        constants,
        {value.name or "": tensor_dtype_to_np_dtype(value.dtype) for value in _values(graph) if value.dtype},
        opset,
    )


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    yield from (*graph.inputs, *graph.initializers.values())
    for node in graph:
        yield from node.outputs


def _constant(value: ir.Value) -> NumpyArray:
    try:
        tensor = ir.convenience.get_const_tensor(value)
    except ValueError:  # of a Constant without a value
        tensor = None
    if tensor is None:
        raise ModelError(f"constant {value.name!r} is no tensor of numbers; export the model without it")
    return tensor.numpy()


def _node(node: ir.Node, opset: int) -> Node:
    attributes = {name: _attribute(node, attribute, opset) for name, attribute in node.attributes.items()}
    if node.op_type == "QuantizeLinear" and not attributes.get("output_dtype"):
        zero = node.inputs[2] if len(node.inputs) > 2 else None
        attributes["output_dtype"] = int(zero.dtype) if zero is not None and zero.dtype else TensorProto.UINT8
    inputs = tuple("" if value is None else value.name or "" for value in node.inputs)
    outputs = tuple(value.name or "" for value in node.outputs)
    return Node(node.name or "", node.op_type, node.domain, inputs, outputs, attributes)


def _attribute(node: ir.Node, attribute: ir.Attr, opset: int) -> Any:
    if attribute.is_ref():
        raise ModelError(f"node {node.name!r}: attribute {attribute.name} refers to a function's; inline the functions")
    if attribute.type == ir.AttributeType.GRAPH:
        return _body(attribute.as_graph(), opset)
    if attribute.type == ir.AttributeType.TENSOR:
        return attribute.as_tensor().numpy()
    return list(attribute.value) if isinstance(attribute.value, tuple) else attribute.value
