"""Reads an ONNX file into plain values: nodes with decoded attributes, and constants as torch tensors."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, numpy_helper
from torch import Tensor

from builders.onnx_ops.torch_arrays import to_tensor
from enginery.core.errors import ModelError

OLDEST_OPSET, NEWEST_OPSET = 13, 28
DTYPES: dict[int, torch.dtype] = {
    TensorProto.FLOAT: torch.float32,
    TensorProto.DOUBLE: torch.float64,
    TensorProto.FLOAT16: torch.float16,
    TensorProto.BFLOAT16: torch.bfloat16,
    TensorProto.INT8: torch.int8,
    TensorProto.UINT8: torch.uint8,
    TensorProto.INT16: torch.int16,
    TensorProto.INT32: torch.int32,
    TensorProto.INT64: torch.int64,
    TensorProto.BOOL: torch.bool,
    TensorProto.FLOAT8E4M3FN: torch.float8_e4m3fn,
    TensorProto.FLOAT8E4M3FNUZ: torch.float8_e4m3fnuz,
    TensorProto.FLOAT8E5M2: torch.float8_e5m2,
    TensorProto.FLOAT8E5M2FNUZ: torch.float8_e5m2fnuz,
}
# Constants only: torch has no such tensors, and a byte for each does the same.
NARROW: dict[int, torch.dtype] = {
    TensorProto.INT4: torch.int8,
    TensorProto.UINT4: torch.uint8,
}


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

    def reads(self) -> set[str]:
        """Every name that it needs, those that its graphs take from around them included."""
        inner = (value.free() for value in self.attributes.values() if isinstance(value, Body))
        return {name for name in self.inputs if name}.union(*inner)


@dataclass(frozen=True)
class Body:
    """A graph: of the model, or of a branch, which reads names from around it."""

    nodes: tuple[Node, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    constants: Mapping[str, Tensor]

    def free(self) -> set[str]:
        """The names that it reads from around it."""
        made = {name for node in self.nodes for name in node.outputs} | set(self.inputs) | set(self.constants)
        return set(self.outputs).union(*(node.reads() for node in self.nodes)) - made


@dataclass(frozen=True)
class Graph:
    """A model. opset: of ONNX's own operators."""

    body: Body
    opset: int


def read(path: Path) -> Graph:
    """Read a model, with its external data. Raises ModelError for what is no model, or has what torch cannot hold."""
    try:
        model = onnx.load(path)
    except Exception as error:  # protobuf's, onnx's and the file system's classes alike
        raise ModelError(f"{path.name} cannot be read: {error}; export it again") from error
    return read_model(model)


def read_model(model: ModelProto) -> Graph:
    """The same of a model in memory."""
    opset = max((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), default=0)
    if not OLDEST_OPSET <= opset <= NEWEST_OPSET:
        raise ModelError(
            f"opset {opset} is not in {OLDEST_OPSET}..{NEWEST_OPSET}, which the conversion to torch knows; "
            "use onnx.version_converter"
        )
    if model.functions:
        raise ModelError("the model has local functions; inline them with onnx.inliner.inline_local_functions")
    for value in (*model.graph.input, *model.graph.output):
        if value.type.WhichOneof("value") != "tensor_type":
            raise ModelError(f"{value.name!r} is no tensor; only tensors can be inputs and outputs")
    given = {tensor.name for tensor in model.graph.initializer}
    for value in model.graph.input:
        if value.name not in given:
            dtype_of(value.type.tensor_type.elem_type, f"input {value.name!r}")
    return Graph(_body(model.graph, _element_types(model.graph)), opset)


def dtype_of(element: int, what: str) -> torch.dtype:
    """Torch's dtype of an ONNX element type. Raises ModelError for one that torch has not, or has no operators for."""
    if element not in DTYPES:
        name = TensorProto.DataType.Name(element) if element in TensorProto.DataType.values() else str(element)
        raise ModelError(f"{what} is {name}, for which torch has no operators; cast it to int64 or float32")
    return DTYPES[element]


def tensor_of(proto: TensorProto) -> Tensor:
    """A constant as a torch tensor. Raises ModelError for strings, complex numbers and wide unsigned integers."""
    if proto.data_type not in NARROW:
        dtype_of(proto.data_type, f"constant {proto.name!r}")
    array = numpy_helper.to_array(proto)
    if proto.data_type in NARROW:
        array = array.astype(np.int8 if proto.data_type == TensorProto.INT4 else np.uint8)
    return to_tensor(array)


def safe_names(names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(name, a Python identifier for it), each of the latter once."""
    used: set[str] = set()
    for name in names:
        plain = base = "w_" + re.sub(r"\W", "_", name)
        count = 0
        while plain in used:
            count += 1
            plain = f"{base}_{count}"
        used.add(plain)
        yield name, plain


def _body(graph: GraphProto, elements: Mapping[str, int]) -> Body:
    if graph.sparse_initializer:
        raise ModelError("the model has sparse tensors; export it with dense ones")
    constants = {tensor.name: tensor_of(tensor) for tensor in graph.initializer}
    nodes = []
    for proto in graph.node:
        if proto.op_type == "Constant" and proto.domain in ("", "ai.onnx"):
            constants[proto.output[0]] = _constant(proto)
        else:
            nodes.append(_node(proto, elements))
    inputs = tuple(value.name for value in graph.input if value.name not in constants)
    return Body(tuple(nodes), inputs, tuple(value.name for value in graph.output), constants)


def _node(proto: NodeProto, elements: Mapping[str, int]) -> Node:
    if proto.op_type not in ("QuantizeLinear", "DequantizeLinear"):
        for name in proto.input:
            if elements.get(name) in NARROW:
                raise ModelError(f"node {proto.name!r} ({proto.op_type}) reads {name!r} of 4 bits; dequantize it first")
    attributes = {attribute.name: _attribute(proto, attribute, elements) for attribute in proto.attribute}
    if proto.op_type == "QuantizeLinear" and not attributes.get("output_dtype"):
        zero = proto.input[2] if len(proto.input) > 2 else ""
        attributes["output_dtype"] = elements.get(zero, TensorProto.UINT8)
    domain = "" if proto.domain == "ai.onnx" else proto.domain
    return Node(proto.name, proto.op_type, domain, tuple(proto.input), tuple(proto.output), attributes)


def _constant(proto: NodeProto) -> Tensor:
    (given,) = proto.attribute
    if given.name == "value":
        return tensor_of(given.t)
    kinds = {"value_float": torch.float32, "value_floats": torch.float32}
    kinds |= {"value_int": torch.int64, "value_ints": torch.int64}
    if given.name not in kinds:
        raise ModelError(f"constant {proto.output[0]!r} has {given.name}, which torch has no tensor for")
    return torch.tensor(onnx.helper.get_attribute_value(given), dtype=kinds[given.name])


def _attribute(node: NodeProto, attribute: AttributeProto, elements: Mapping[str, int]) -> Any:
    if attribute.ref_attr_name:
        raise ModelError(f"node {node.name!r}: attribute {attribute.name} refers to a function's; inline the functions")
    value = onnx.helper.get_attribute_value(attribute)
    if attribute.type == AttributeProto.GRAPH:
        return _body(value, {**elements, **_element_types(value)})
    if attribute.type == AttributeProto.TENSOR:
        return tensor_of(value)
    if attribute.type == AttributeProto.STRING:
        return value.decode()
    return list(value) if attribute.type in (AttributeProto.INTS, AttributeProto.FLOATS) else value


def _element_types(graph: GraphProto) -> dict[str, int]:
    """ONNX's element type of what states one: 4-bit types are bytes in torch, and only this tells them apart."""
    stated = {value.name: value.type.tensor_type.elem_type for value in (*graph.input, *graph.value_info)}
    stated |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value":
            stated[node.output[0]] = node.attribute[0].t.data_type
    return stated
