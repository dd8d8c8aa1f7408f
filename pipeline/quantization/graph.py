"""ONNX graphs as values: reading, tidying, operator schemas, grids of numbers.

Reading and tidying ONNX graphs for a change of precision.

Reading and tidying ONNX graphs: unique node names, constants as initializers, element types, order.

Functions that return a model leave their argument alone; those that take a `GraphProto` and return None change it.
"""

import math
from collections.abc import Iterator, Mapping
from heapq import heappop, heappush
from typing import Any, cast

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from builders.onnx_graphs.bodies import list_bodies, list_reads
from enginery.core.errors import ModelError

# Constants of at most so many elements can be shapes, whose values decide other tensors' types and ranks.
SMALL_CONSTANT = 256
_KINDS = {"value_float": np.float32, "value_floats": np.float32, "value_int": np.int64, "value_ints": np.int64}


def tidy(model: ModelProto) -> ModelProto:
    """A copy with functions inlined, constants as initializers, unique node names, nodes in topological order."""
    if model.functions:
        from onnx.inliner import inline_local_functions

        copy = inline_local_functions(model)
    else:
        copy = ModelProto()
        copy.CopyFrom(model)
    _lift_constants(copy.graph)
    _demote_constant_inputs(copy.graph)
    _name_nodes(copy.graph)
    sort_nodes(copy.graph)
    return copy


def tidy_from(model: ModelProto, lowest: int) -> ModelProto:
    """A tidy model, lifted to opset `lowest` and tidied again where it was older; else the model itself.

    Raises ModelError when it cannot be lifted.
    """
    raised = raise_opset(model, lowest)
    return model if raised is model else tidy(raised)


def finish(model: ModelProto) -> ModelProto:
    """Sort the nodes, drop constants that nothing reads, infer types anew and check everything.

    Shapes that only the model's author knew (behind a Reshape by computed sizes) are kept: runtimes fuse by them.
    Raises ModelError when the graph is not valid ONNX.
    """
    graph = model.graph
    sort_nodes(graph)
    read = {name for node in graph.node for name in list_reads(node)} | {output.name for output in graph.output}
    _replace(graph.initializer, [item for item in graph.initializer if item.name in read])
    told = {value.name: value for value in graph.value_info}
    del graph.value_info[:]
    try:
        inferred = onnx.shape_inference.infer_shapes(model, check_type=True)
        if known := _still_true(told, inferred):
            model.graph.value_info.extend(known)
            inferred = onnx.shape_inference.infer_shapes(model, check_type=True)
        onnx.checker.check_model(inferred)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise ModelError(f"the converted graph is not valid ONNX: {error}") from error
    return inferred


def _still_true(told: Mapping[str, onnx.ValueInfoProto], inferred: ModelProto) -> list[onnx.ValueInfoProto]:
    """The shapes that were told and that inference does not find, of tensors whose type and rank stayed."""
    kept = []
    for value in inferred.graph.value_info:
        before = told.get(value.name)
        now = value.type.tensor_type
        if before is not None and before.type.tensor_type.elem_type == now.elem_type and not _complete(now):
            rank_stayed = not now.HasField("shape") or len(before.type.tensor_type.shape.dim) == len(now.shape.dim)
            kept += [before] if rank_stayed else []
    return kept


def _complete(tensor: onnx.TypeProto.Tensor) -> bool:
    return tensor.HasField("shape") and all(dim.HasField("dim_value") for dim in tensor.shape.dim)


def opset_of(model: ModelProto) -> int:
    """Version of the default operator set. Raises ModelError when the model imports none."""
    for imported in model.opset_import:
        if imported.domain in ("", "ai.onnx"):
            return int(imported.version)
    raise ModelError("the model imports no default operator set; add opset_import {'': 20}")


def raise_opset(model: ModelProto, lowest: int) -> ModelProto:
    """The model itself when its opset is at least `lowest`, else a converted copy.

    Raises ModelError when onnx's version converter cannot lift it.
    """
    if opset_of(model) >= lowest:
        return model
    try:
        return onnx.version_converter.convert_version(model, lowest)
    except (RuntimeError, ValueError) as error:
        message = f"opset {opset_of(model)} cannot be lifted to {lowest}: {error}; export with opset {lowest} or newer"
        raise ModelError(message) from error


def constants(graph: GraphProto) -> dict[str, TensorProto]:
    """Initializers by name."""
    return {item.name: item for item in graph.initializer}


def consumers(graph: GraphProto) -> dict[str, list[NodeProto]]:
    """The nodes that read each tensor, in graph order; control flow reads what its bodies capture."""
    found: dict[str, list[NodeProto]] = {}
    for node in graph.node:
        for name in list_reads(node):
            found.setdefault(name, []).append(node)
    return found


def element_types(model: ModelProto) -> dict[str, int]:
    """`TensorProto.DataType` of every tensor of the main graph whose type can be inferred."""
    graph = onnx.shape_inference.infer_shapes(_weightless(model)).graph
    values = [*graph.value_info, *graph.input, *graph.output]
    types = {v.name: v.type.tensor_type.elem_type for v in values if v.type.HasField("tensor_type")}
    return types | {item.name: item.data_type for item in model.graph.initializer}


def static_shapes(model: ModelProto) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of the main graph whose rank can be inferred; 0 where a size is open."""
    graph = onnx.shape_inference.infer_shapes(_weightless(model)).graph
    values = [*graph.value_info, *graph.input, *graph.output]
    known = [(v.name, v.type.tensor_type.shape) for v in values if v.type.tensor_type.HasField("shape")]
    return {name: tuple(dim.dim_value for dim in shape.dim) for name, shape in known}


def _weightless(model: ModelProto) -> ModelProto:
    """The model with its large constants as inputs: inference copies its argument several times, weights included."""
    light = ModelProto(ir_version=model.ir_version, opset_import=model.opset_import, functions=model.functions)
    graph, whole = light.graph, model.graph
    graph.name = whole.name
    graph.node.extend(whole.node)
    graph.input.extend(whole.input)
    graph.output.extend(whole.output)
    graph.value_info.extend(whole.value_info)
    for item in whole.initializer:
        if math.prod(item.dims) <= SMALL_CONSTANT:
            graph.initializer.add().CopyFrom(item)
        else:
            graph.input.append(helper.make_tensor_value_info(item.name, item.data_type, item.dims))
    return light


def rename_captured(node: NodeProto, names: Mapping[str, str]) -> None:
    """Rename what the bodies of a node read. ONNX forbids shadowing, so a name means one value throughout."""
    for body in list_bodies(node):
        for inner in body.node:
            for index, name in enumerate(inner.input):
                inner.input[index] = names.get(name, name)
            rename_captured(inner, names)


def sort_nodes(graph: GraphProto) -> None:
    """Order the nodes topologically; those that are free to go keep their order. Raises ModelError on a cycle."""
    nodes = list(graph.node)
    maker = {name: i for i, node in enumerate(nodes) for name in node.output if name}
    waits = [{maker[name] for name in list_reads(node) if name in maker} for node in nodes]
    order = list(_topological(waits))
    if len(order) < len(nodes):
        raise ModelError("the graph has a cycle; export the model again")
    if order != list(range(len(nodes))):
        ordered = [nodes[i] for i in order]
        del graph.node[:]
        graph.node.extend(ordered)


def fold_constant_moves(graph: GraphProto) -> None:
    """Apply each Transpose and Identity of a constant, so that the weight behind it is seen as one."""
    given, outputs = constants(graph), {value.name for value in graph.output}
    left = []
    for node in graph.node:
        source = given.get(node.input[0]) if node.op_type in ("Identity", "Transpose") else None
        if source is None or node.output[0] in outputs:
            left.append(node)
        else:
            values = numpy_helper.to_array(source)
            if node.op_type == "Transpose":
                values = values.transpose(next((list(a.ints) for a in node.attribute if a.name == "perm"), None))
            folded = numpy_helper.from_array(np.ascontiguousarray(values), node.output[0])
            graph.initializer.append(folded)
            given[folded.name] = folded
    _replace(graph.node, left)


def _topological(waits: list[set[int]]) -> Iterator[int]:
    followers: dict[int, list[int]] = {}
    for i, before in enumerate(waits):
        for j in before:
            followers.setdefault(j, []).append(i)
    left = [len(before) for before in waits]
    ready = [i for i, count in enumerate(left) if count == 0]
    while ready:
        i = heappop(ready)
        yield i
        for j in followers.get(i, ()):
            left[j] -= 1
            if left[j] == 0:
                heappush(ready, j)


def _lift_constants(graph: GraphProto) -> None:
    """Turn Constant nodes with numbers into initializers, where weights are looked for."""
    left = []
    for node in graph.node:
        value = _constant_value(node) if node.op_type == "Constant" else None
        if value is None:
            left.append(node)
        else:
            lifted = graph.initializer.add()
            lifted.CopyFrom(value)
            lifted.name = node.output[0]
    _replace(graph.node, left)


def _constant_value(node: NodeProto) -> TensorProto | None:
    attribute = node.attribute[0]
    if attribute.name == "value":
        return cast("TensorProto", attribute.t)
    kind = _KINDS.get(attribute.name)
    return numpy_helper.from_array(np.asarray(helper.get_attribute_value(attribute), kind)) if kind else None


def _replace(field: Any, items: list[Any]) -> None:
    """Make these what a repeated field holds: removing them one by one takes time that grows with their square."""
    if len(items) < len(field):
        del field[:]
        field.extend(items)


def _demote_constant_inputs(graph: GraphProto) -> None:
    """Drop graph inputs that an initializer gives a default to: a compiled model has no such inputs."""
    given = constants(graph)
    _replace(graph.input, [value for value in graph.input if value.name not in given])


def _name_nodes(graph: GraphProto) -> None:
    taken: set[str] = set()
    for node in graph.node:
        stem = name = node.name or f"{node.op_type}_{next((o for o in node.output if o), '')}"
        count = 1
        while name in taken:
            count += 1
            name = f"{stem}_{count}"
        node.name = name
        taken.add(name)
