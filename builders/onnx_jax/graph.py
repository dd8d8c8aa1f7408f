"""Reads a model on disk into a `Graph`: nodes in order, attributes as Python values, constants as numpy arrays.

An operator that the table lacks and that ONNX itself defines by simpler ones (its function body) is replaced by that.
"""

from pathlib import Path
from typing import Any

import onnx
import onnx.inliner
from onnx import AttributeProto, GraphProto, ModelProto, helper, numpy_helper

from builders.onnx_jax import table  # noqa: F401 - fills OPERATORS
from builders.onnx_jax.nodes import OPERATORS, Graph, Node
from enginery.core.errors import ModelError

_DEFAULT_DOMAINS = ("", "ai.onnx")


def read_graph(model: Path) -> Graph:
    """The graph of a model, external data included. Raises ModelError when it is invalid or has an operator that
    cannot be compiled, which it names."""
    try:
        onnx.checker.check_model(str(model))
        proto = onnx.load(model)
    except (onnx.checker.ValidationError, OSError) as error:
        raise ModelError(f"{model.name} is no valid ONNX model: {error}; export it again") from error
    opset = next((item.version for item in proto.opset_import if item.domain in _DEFAULT_DOMAINS), 1)
    graph = _graph(_inlined(proto).graph, opset)
    _check_operators(graph)
    return graph


def _inlined(proto: ModelProto) -> ModelProto:
    """Without local functions, and without operators that only their function body explains."""
    proto = onnx.inliner.inline_local_functions(proto)
    unknown = {node.op_type for node in proto.graph.node if node.domain in _DEFAULT_DOMAINS} - OPERATORS.keys()
    if not unknown:
        return proto
    typed = onnx.shape_inference.infer_shapes(proto)  # some bodies depend on types, those of weights included
    weights = [helper.make_tensor_value_info(item.name, item.data_type, item.dims) for item in typed.graph.initializer]
    typed.graph.value_info.extend(weights)
    names = [("", name) for name in sorted(unknown)]
    try:
        return onnx.inliner.inline_selected_functions(typed, names, inline_schema_functions=True)
    except RuntimeError:  # it has no word for optional inputs of some bodies: the operator is then refused by name
        return proto


def _graph(proto: GraphProto, opset: int) -> Graph:
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.initializer}
    nodes = []
    for item in proto.node:
        attributes = {attribute.name: _attribute(attribute, opset) for attribute in item.attribute}
        nodes.append(
            Node(item.name, item.op_type, item.domain, tuple(item.input), tuple(item.output), attributes, opset)
        )
    inputs = tuple(value.name for value in proto.input if value.name not in constants)
    return Graph(tuple(nodes), constants, inputs, tuple(value.name for value in proto.output))


def _attribute(attribute: AttributeProto, opset: int) -> Any:
    if attribute.type == AttributeProto.TENSOR:
        return numpy_helper.to_array(attribute.t)
    if attribute.type == AttributeProto.GRAPH:
        return _graph(attribute.g, opset)
    found = helper.get_attribute_value(attribute)
    if isinstance(found, bytes):
        return found.decode(errors="replace")
    return (
        [item.decode(errors="replace") if isinstance(item, bytes) else item for item in found]
        if isinstance(found, list)
        else found
    )


def _check_operators(graph: Graph) -> None:
    for node in graph.nodes:
        if node.domain not in _DEFAULT_DOMAINS:
            raise node.refused(f"domain {node.domain!r} is not ONNX's own")
        if node.op not in OPERATORS:
            raise node.refused("the operator is not in its table")
        for value in node.attributes.values():
            if isinstance(value, Graph):
                _check_operators(value)
