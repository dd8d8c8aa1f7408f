"""ONNX graphs: tidying (unique node names, constants as initializers, sorted nodes), element types, opsets.

Functions that return a model do not change their argument; those that take a `GraphProto` and return None change it.
"""

import itertools
from collections.abc import Iterator, Mapping
from heapq import heappop, heappush
from typing import TypeVar, cast

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from builders.onnx_graphs.bodies import drop_unread, list_bodies, list_reads, set_items
from builders.onnx_graphs.weights import has_external, with_weights, without_weights
from builders.reference import list_signatures
from enginesmith.core.errors import ModelError

T = TypeVar("T")
# Attributes of a Constant node that hold numbers, and the type these have.
_NUMBERS = {"value_float": np.float32, "value_floats": np.float32, "value_int": np.int64, "value_ints": np.int64}


def tidy(model: ModelProto) -> ModelProto:
    """A copy with functions inlined, constants as initializers, unique node names, nodes in topological order."""
    if model.functions:
        from onnx.inliner import inline_local_functions

        copy = inline_local_functions(model)
    else:
        copy = ModelProto()
        copy.CopyFrom(model)
    graph = copy.graph
    _lift_constants(graph)
    # An input to which an initializer gives a default is a constant: a compiled model has no such inputs.
    initializers = constants(graph)
    set_items(graph.input, [value for value in graph.input if value.name not in initializers])
    node_names: set[str] = set()
    for node in graph.node:
        stem = node.name or f"{node.op_type}_{next((name for name in node.output if name), '')}"
        names = itertools.chain([stem], (f"{stem}_{count}" for count in itertools.count(2)))
        node.name = next(name for name in names if name not in node_names)
        node_names.add(node.name)
    sort_nodes(graph)
    return copy


def tidy_from(model: ModelProto, lowest: int) -> ModelProto:
    """A tidy model, itself or lifted to opset `lowest` and tidied again. Raises ModelError when it cannot be lifted."""
    raised_model = raise_opset(model, lowest)
    return model if raised_model is model else tidy(raised_model)


def finish(model: ModelProto) -> ModelProto:
    """Sort the nodes, drop constants that nothing reads, infer types anew and check everything.

    Shapes that only the model's author knew (behind a Reshape by computed sizes) are kept: runtimes fuse nodes by them.
    Raises ModelError when the graph is not valid ONNX.
    """
    graph = model.graph
    sort_nodes(graph)
    drop_unread(graph)
    stated_values = {value.name: value for value in graph.value_info}
    del graph.value_info[:]
    try:
        inferred_model = onnx.shape_inference.infer_shapes(without_weights(model), check_type=True)
        if shape_infos := list(_kept_shapes(stated_values, inferred_model)):
            graph.value_info.extend(shape_infos)
            inferred_model = onnx.shape_inference.infer_shapes(without_weights(model), check_type=True)
        for field in ("node", "output", "value_info"):
            set_items(getattr(graph, field), getattr(inferred_model.graph, field))
        onnx.checker.check_model(without_weights(model))
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise ModelError(f"the converted graph is not valid ONNX: {error}") from error
    return model


def _kept_shapes(
    stated_values: Mapping[str, onnx.ValueInfoProto], inferred_model: ModelProto
) -> Iterator[onnx.ValueInfoProto]:
    """The stated shapes that inference does not find completely, of tensors with the same type and rank as before."""
    for value in inferred_model.graph.value_info:
        info, tensor_type = stated_values.get(value.name), value.type.tensor_type
        if info is None or info.type.tensor_type.elem_type != tensor_type.elem_type:
            continue
        has_rank = tensor_type.HasField("shape")
        is_complete = has_rank and all(dim.HasField("dim_value") for dim in tensor_type.shape.dim)
        if not is_complete and (not has_rank or len(info.type.tensor_type.shape.dim) == len(tensor_type.shape.dim)):
            yield info


def opset_of(model: ModelProto) -> int:
    """Version of the default operator set. Raises ModelError when the model imports none."""
    for opset in model.opset_import:
        if opset.domain in ("", "ai.onnx"):
            return int(opset.version)
    raise ModelError("the model imports no default operator set; add opset_import {'': 20}")


def raise_opset(model: ModelProto, lowest: int) -> ModelProto:
    """The model itself, or a copy lifted to opset `lowest`. Raises ModelError when onnx cannot convert it."""
    if opset_of(model) >= lowest:
        return model
    try:
        if has_external(model):
            return with_weights(onnx.version_converter.convert_version(without_weights(model), lowest), model)
        return onnx.version_converter.convert_version(model, lowest)
    except (RuntimeError, ValueError) as error:
        message = f"opset {opset_of(model)} cannot be lifted to {lowest}: {error}; export with opset {lowest} or newer"
        raise ModelError(message) from error


def constants(graph: GraphProto) -> dict[str, TensorProto]:
    """Initializers by name."""
    return {tensor.name: tensor for tensor in graph.initializer}


def consumers(graph: GraphProto) -> dict[str, list[NodeProto]]:
    """The nodes that read each tensor, in graph order; control flow reads what its bodies capture."""
    readers_by_name: dict[str, list[NodeProto]] = {}
    for node in graph.node:
        for name in list_reads(node):
            readers_by_name.setdefault(name, []).append(node)
    return readers_by_name


def element_types(model: ModelProto) -> dict[str, int]:
    """`TensorProto.DataType` of every tensor of the main graph whose type can be inferred."""
    inferred_graph = onnx.shape_inference.infer_shapes(without_weights(model)).graph
    values = (*inferred_graph.value_info, *inferred_graph.input, *inferred_graph.output)
    types = {value.name: value.type.tensor_type.elem_type for value in values if value.type.HasField("tensor_type")}
    types |= {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    if any(name and name not in types for node in model.graph.node for name in node.output):
        _add_types(model.graph, types)
    return types


def _add_types(graph: GraphProto, types: dict[str, int]) -> None:
    """Add, in place, the types of the results of onnxruntime's own operators, where onnx's inference stops. Operators
    with bodies are omitted: their signatures do not determine the types of their results.

    graph: tidy."""
    signatures = list_signatures()
    for node in (node for node in graph.node if not list_bodies(node)):
        inputs, outputs = signatures.get((node.domain, node.op_type), ((), ()))
        bound_types = {text: types[name] for text, name in zip(inputs, node.input, strict=False) if name in types}
        # The last output repeats if their number is variable.
        for text, name in itertools.zip_longest(outputs, node.output, fillvalue=outputs[-1] if outputs else ""):
            fixed_name = text.removeprefix("tensor(").removesuffix(")").upper()
            element_type = bound_types.get(text, dict(TensorProto.DataType.items()).get(fixed_name))
            if name and name in node.output and element_type:
                types.setdefault(name, element_type)


def static_shapes(model: ModelProto) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of the main graph whose rank can be inferred; 0 where a size is open."""
    return shapes_of(onnx.shape_inference.infer_shapes(without_weights(model)).graph)


def shapes_of(graph: GraphProto) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of an inferred graph whose rank is known; 0 where a size is open."""
    values = (*graph.value_info, *graph.input, *graph.output)
    tensor_shapes = [
        (value.name, value.type.tensor_type.shape) for value in values if value.type.tensor_type.HasField("shape")
    ]
    return {name: tuple(dim.dim_value for dim in shape.dim) for name, shape in tensor_shapes}


def infer_at(model: ModelProto, inputs: Mapping[str, tuple[int, ...]]) -> ModelProto:
    """The model without large weights, with the shapes that follow from these input shapes, also in bodies; sizes that
    the model itself states are ignored."""
    light_model = without_weights(model)
    del light_model.graph.value_info[:]
    for value in light_model.graph.output:
        value.type.tensor_type.ClearField("shape")
    for value in light_model.graph.input:
        if value.name in inputs:
            dtype = value.type.tensor_type.elem_type
            value.CopyFrom(helper.make_tensor_value_info(value.name, dtype, inputs[value.name]))
    return onnx.shape_inference.infer_shapes(light_model, data_prop=True)


def attribute_of(node: NodeProto, name: str, default: T) -> T:
    """Value of a node's attribute, of the type of `default`; `default` if the node has none of that name."""
    attribute = next((attribute_proto for attribute_proto in node.attribute if attribute_proto.name == name), None)
    return default if attribute is None else cast("T", helper.get_attribute_value(attribute))


def unused_name(name: str, used_names: set[str]) -> str:
    """The name, with underscores appended until it is not in `used_names`; it is then added to `used_names`."""
    while name in used_names:
        name += "_"
    used_names.add(name)
    return name


def rename_captured(node: NodeProto, names: Mapping[str, str]) -> None:
    """Rename the tensors that the bodies of a node read. ONNX forbids shadowing, so a name means one value."""
    for body in list_bodies(node):
        for inner_node in body.node:
            for index, name in enumerate(inner_node.input):
                inner_node.input[index] = names.get(name, name)
            rename_captured(inner_node, names)


def sort_nodes(graph: GraphProto) -> None:
    """Sort the nodes topologically; among ready nodes, the old order decides. Raises ModelError on a cycle."""
    nodes = list(graph.node)
    producer_index = {name: index for index, node in enumerate(nodes) for name in node.output if name}
    predecessors = [{producer_index[name] for name in list_reads(node) if name in producer_index} for node in nodes]
    successors: dict[int, list[int]] = {}
    for index, node_predecessors in enumerate(predecessors):
        for predecessor in node_predecessors:
            successors.setdefault(predecessor, []).append(index)
    pending_counts = [len(node_predecessors) for node_predecessors in predecessors]
    ready_indices, order = [index for index, count in enumerate(pending_counts) if count == 0], []
    while ready_indices:
        order.append(heappop(ready_indices))
        for successor in successors.get(order[-1], ()):
            pending_counts[successor] -= 1
            if pending_counts[successor] == 0:
                heappush(ready_indices, successor)
    if len(order) < len(nodes):
        raise ModelError("the graph has a cycle; export the model again")
    if order != list(range(len(nodes))):
        set_items(graph.node, [nodes[index] for index in order])


def _lift_constants(graph: GraphProto) -> None:
    """Turn Constant nodes with numbers into initializers, where weights are searched."""
    other_nodes = []
    for node in graph.node:
        attribute = node.attribute[0] if node.op_type == "Constant" else None
        if attribute is not None and attribute.name == "value":
            graph.initializer.add().CopyFrom(attribute.t)
        elif attribute is not None and (kind := _NUMBERS.get(attribute.name)):
            values = np.asarray(helper.get_attribute_value(attribute), kind)
            graph.initializer.append(numpy_helper.from_array(values))
        else:
            other_nodes.append(node)
            continue
        graph.initializer[-1].name = node.output[0]
    if len(other_nodes) < len(graph.node):
        set_items(graph.node, other_nodes)
