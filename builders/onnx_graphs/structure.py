"""The structure of a graph: producers and consumers, constant parts, what depends on what, settled shapes."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from builders.onnx_graphs.bodies import list_reads, set_items
from enginesmith.arrays import Array
from enginesmith.core.types import Rows

# The part of a graph that computes weights from constants. A graph that is run as it is written dequantizes a
# quantized weight in every run, and also quantizes a weight that is stored in float.
#
# The results are the same in every run, so this part can be run once. They become inputs of the rest, not constants:
# a runtime changes the layout of constant factors and then adds in another order, which gives other bits.

CONVERTING = frozenset(("Cast", "DequantizeLinear", "QuantizeLinear"))
# Minimum number of axes of a weight. A smaller constant may be a size, which a runtime needs when it opens the graph.
_LEAST_AXES = 2


def cut_constant_part(model: ModelProto) -> ModelProto | None:
    """The nodes that convert constants of two or more axes, with the float32 tensors that other nodes read as outputs.

    None where a model has no such nodes.
    """
    graph = model.graph
    converters = _list_converting(graph)
    names = {node.output[0] for node in converters}
    operand_names = {name for node in graph.node if not names.intersection(node.output) for name in list_reads(node)}
    output_names = [
        node.output[0] for node in converters if node.output[0] in operand_names and _makes_floats(node, graph, names)
    ]
    if not output_names:
        return None
    outputs = [ValueInfoProto(name=name) for name in output_names]  # the runtime infers type and shape
    return _replace_nodes(model, select_needed(converters, output_names), (), outputs)


def cut_varying_part(model: ModelProto, arrays: Mapping[str, Array]) -> ModelProto:
    """The model with the tensors of `arrays` as further inputs, and without the nodes that only computed these."""
    graph = model.graph
    converters = _list_converting(graph)
    results = {node.output[0] for node in converters}
    operand_names = {name for node in graph.node if not results.intersection(node.output) for name in list_reads(node)}
    needed_names = {node.output[0] for node in select_needed(converters, operand_names - arrays.keys())}
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, array.shape) for name, array in arrays.items()]
    nodes = [node for node in graph.node if needed_names.issuperset(results.intersection(node.output))]
    return _replace_nodes(model, nodes, (*graph.input, *inputs), graph.output)


def _list_converting(graph: GraphProto) -> list[NodeProto]:
    """The nodes that convert constants of at least `_LEAST_AXES` axes, in the graph's order."""
    outputs, input_names = ({value.name for value in values} for values in (graph.output, graph.input))
    constant_ranks = {tensor.name: len(tensor.dims) for tensor in graph.initializer if tensor.name not in input_names}
    converters = []
    for node in graph.node:
        if node.op_type in CONVERTING and all(name in constant_ranks for name in node.input if name):
            axes = constant_ranks[node.input[0]]
            if axes >= _LEAST_AXES and node.output[0] not in outputs:
                constant_ranks[node.output[0]] = axes
                converters.append(node)
    return converters


def _makes_floats(node: NodeProto, graph: GraphProto, result_names: set[str]) -> bool:
    """Whether a converting node's result is float32, as far as the node and the constants it reads show."""
    if node.op_type == "Cast":
        return any(attribute.name == "to" and attribute.i == TensorProto.FLOAT for attribute in node.attribute)
    if node.op_type == "QuantizeLinear" or node.input[1] in result_names:
        return False
    return any(tensor.name == node.input[1] and tensor.data_type == TensorProto.FLOAT for tensor in graph.initializer)


def select_needed(
    nodes: Sequence[NodeProto], tensor_names: Iterable[str], boundary: Collection[str] = ()
) -> list[NodeProto]:
    """The nodes among the sorted `nodes` that the tensors `tensor_names` depend on, in order. boundary: names of
    tensors with given values, so that the nodes before them are not needed."""
    names, dependencies = set(tensor_names), []
    for node in reversed(nodes):
        if names.intersection(node.output):
            names.update(name for name in list_reads(node) if name not in boundary)
            dependencies.append(node)
    return dependencies[::-1]


def _replace_nodes(
    model: ModelProto, nodes: Sequence[NodeProto], inputs: Iterable[ValueInfoProto], outputs: Iterable[ValueInfoProto]
) -> ModelProto:
    """A model of these nodes, with the constants that they or the outputs read."""
    submodel = ModelProto(ir_version=model.ir_version, opset_import=model.opset_import, functions=model.functions)
    graph = submodel.graph
    graph.name = model.graph.name
    graph.node.extend(nodes)
    graph.input.extend(inputs)
    graph.output.extend(outputs)
    operand_names = {name for node in nodes for name in list_reads(node)} | {value.name for value in graph.output}
    graph.initializer.extend(tensor for tensor in model.graph.initializer if tensor.name in operand_names)
    return submodel


# Dependence of an ONNX graph's outputs: on nothing, on one unchanged input, or on computation.

Dependence = Literal["constant", "handed on", "computed"]

# Operators whose result depends on the sizes of their input, and not on its values.
_SIZES = frozenset({"Shape", "Size"})
# Operators that draw numbers, so that their result is no constant.
_DRAWING = ("Random", "Bernoulli", "Multinomial")
# Operators whose result holds the elements of their first input, in another order, shape or type.
_MOVING = frozenset(
    {"Cast", "CastLike", "Dropout", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"}
)

# Operators that select from a table along `axis`: which of their inputs are indices, and which is the table.
_SELECTING = {"Gather": ((1, 0),), "GatherElements": ((1, 0),), "EmbedLayerNormalization": ((0, 2), (1, 4))}


def find_dependences(graph: GraphProto) -> dict[str, Dependence]:
    """Output -> its dependence: 'constant' if it depends on no input's values (it may depend on their sizes), 'handed
    on' if it is an input, moved or cast, else 'computed'."""
    producers = {name: node for node in graph.node for name in node.output if name}
    input_names = {value.name for value in graph.input} - {tensor.name for tensor in graph.initializer}
    return {value.name: _find_dependence(value.name, producers, input_names) for value in graph.output}


def find_source(graph: GraphProto, name: str) -> str:
    """The tensor whose values `name` has, moved or cast: an input of the graph that is handed on, or `name`."""
    return _follow(name, {output: node for node in graph.node for output in node.output if output})


def find_tables(graph: GraphProto) -> dict[str, int]:
    """Source of indices (see `find_source`) -> rows of the smallest constant table that they select from."""
    producers = {name: node for node in graph.node for name in node.output if name}
    dims = {tensor.name: tensor.dims for tensor in graph.initializer}
    tables: dict[str, int] = {}
    for node in graph.node:
        axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 0)
        for indices, table_index in _SELECTING.get(node.op_type, ()):
            name, table_name = (
                node.input[index] if index < len(node.input) else "" for index in (indices, table_index)
            )
            if (producer := producers.get(table_name)) is not None and producer.op_type == "DequantizeLinear":
                table_name = producer.input[0]
            if shape := dims.get(table_name):
                source = _follow(name, producers)
                tables[source] = min(tables.get(source, shape[axis]), shape[axis])
    return tables


# Operators that mix rows: their result has no rows of a selection.
_MIXING = frozenset(("MatMul", "Gemm", "Conv", "ConvTranspose", "Einsum", "Attention", "LSTM", "GRU"))


def find_selected(graph: GraphProto) -> dict[str, Rows]:
    """The outputs that hold rows of a NonMaxSuppression, or of a TopK with its scores: near ties change their order."""
    constants = {
        tensor.name: numpy_helper.to_array(tensor).ravel()
        for tensor in graph.initializer
        if tensor.data_type == TensorProto.INT64 and tensor.data_location != TensorProto.EXTERNAL
    }
    sizes: dict[str, set[int]] = {}  # by tensor that is selected, how many rows; 0 of a NonMaxSuppression
    for node in graph.node:
        node_sizes = set[int]().union(*(sizes.get(name, ()) for name in list_reads(node)))
        if node.op_type == "NonMaxSuppression":
            node_sizes = {0}
        elif node.op_type == "TopK":
            node_sizes |= {*constants.get(node.input[1], np.zeros(0)).tolist()}
        elif node.op_type in _MIXING:
            node_sizes = set()
        sizes |= dict.fromkeys(node.output, node_sizes) if node_sizes else {}
    weights = {tensor.name for tensor in graph.initializer}
    batch = {_dims(value)[0] for value in graph.input if value.name not in weights and _dims(value)} - {None}
    outputs = {value.name: value for value in graph.output if value.name in sizes}
    kinds = {name: kind for name, value in outputs.items() if (kind := _find_rows(value, sizes[name], batch))}
    has_scores = any(kind != "count" and (0 in sizes[name] or _is_float(outputs[name])) for name, kind in kinds.items())
    return kinds if has_scores else {}


def _find_rows(value: ValueInfoProto, sizes: set[int], batch: set[int | str | None]) -> Rows | None:
    leading_dim, *other_dims = _dims(value) or [None]
    if leading_dim in batch and other_dims in ([], [1]):
        return None if _is_float(value) else "count"
    if leading_dim in batch:
        return "each" if 0 in sizes or other_dims[0] in sizes else None
    return "all" if 0 in sizes or leading_dim in sizes else None


def _dims(value: ValueInfoProto) -> list[int | str | None]:
    dims = value.type.tensor_type.shape.dim
    return [dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None for dim in dims]


def _is_float(value: ValueInfoProto) -> bool:
    return value.type.tensor_type.elem_type in (TensorProto.FLOAT, TensorProto.FLOAT16)


def _find_dependence(name: str, makers: Mapping[str, NodeProto], input_names: set[str]) -> Dependence:
    if _follow(name, makers) in input_names:
        return "handed on"
    visited_names, pending_names = set[str](), {name}
    while pending_names:
        current_name = pending_names.pop()
        visited_names.add(current_name)
        node = makers.get(current_name)
        if current_name in input_names or (node is not None and node.op_type.startswith(_DRAWING)):
            return "computed"
        if node is not None and node.op_type not in _SIZES:
            pending_names |= {*list_reads(node)} - visited_names
    return "constant"


def _follow(name: str, makers: Mapping[str, NodeProto]) -> str:
    while (node := makers.get(name)) is not None and node.op_type in _MOVING and node.output[0] == name:
        name = node.input[0]
    return name


# Replaces a Reshape's computed shape by a constant.
#
# Exporters write `Reshape(x, Concat(Gather(Shape(x), 0), [-1]))`. The sizes of the tensors determine this shape.
# Compilers refuse the node if its shape is a computed tensor.

# A size; the name of a dynamic dim; None for one of which nothing is known.
Dims = Sequence[int | str | None]


def settle_shapes(model: "onnx.ModelProto") -> None:
    """Write each Reshape's shape as a constant if shape inference knows all of its sizes but one, in place.

    A dynamic size equal to the input's at the same axis is copied (0). Nodes that nothing reads then are removed.
    """
    _lift_constants(model.graph)
    sizes = _infer_sizes(model)
    constant_names = {tensor.name for tensor in model.graph.initializer}
    is_changed = False
    for node in model.graph.node:
        if node.op_type != "Reshape" or node.domain or len(node.input) < 2 or node.input[1] in constant_names:
            continue
        shape = _shape(sizes.get(node.input[0]), sizes.get(node.output[0]))
        if shape is not None:
            name = f"{node.output[0]}_sizes"
            model.graph.initializer.append(numpy_helper.from_array(np.array(shape, np.int64), name))
            node.input[1], is_changed = name, True
            del node.attribute[:]  # allowzero: 0 would not copy
    if is_changed:
        output_names = [value.name for value in model.graph.output]
        set_items(model.graph.node, select_needed(model.graph.node, output_names))


def _lift_constants(graph: "onnx.GraphProto") -> None:
    """Replace Constant nodes by initializers, in place: inference reads values only from initializers."""
    other_nodes = []
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute[0].name == "value":
            graph.initializer.append(node.attribute[0].t)
            graph.initializer[-1].name = node.output[0]
        else:
            other_nodes.append(node)
    set_items(graph.node, other_nodes)


def _infer_sizes(model: "onnx.ModelProto") -> dict[str, Dims]:
    """Name -> dims, only from the inputs and weights, because stated shapes of outputs may be wrong."""
    stated_types = [(value, onnx.TypeProto.FromString(value.type.SerializeToString())) for value in model.graph.output]
    for value, _ in stated_types:
        value.type.tensor_type.ClearField("shape")
    graph = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    for value, kind in stated_types:
        value.type.CopyFrom(kind)
    dims_by_name: dict[str, Dims] = {tensor.name: list(tensor.dims) for tensor in graph.initializer}
    for value in (*graph.value_info, *graph.input, *graph.output):
        if value.type.tensor_type.HasField("shape"):
            dims_by_name[value.name] = _dims(value)
    return dims_by_name


def _shape(before: Dims | None, after: Dims | None) -> list[int] | None:
    """The shape to write: sizes, 0 for one of the input's, -1 once; None if more sizes are unknown, or -1 would be
    ambiguous (sizes of 0)."""
    if before is None or after is None or 0 in before or 0 in after:
        return None
    copies = [isinstance(size, str) and i < len(before) and before[i] == size for i, size in enumerate(after)]
    shape = [0 if copy else size if isinstance(size, int) else -1 for copy, size in zip(copies, after, strict=True)]
    return shape if Counter(shape)[-1] <= 1 else None


# Whether two ONNX models differ only in their weights: if so, an engine of one can be refitted with the other's.
#
# A weight is a constant of floating point or of a narrow integer type with more than one entry, as a compiler keeps it
# in memory. All else selects kernels and must be equal: nodes, attributes, types, shapes, names, single numbers, int32
# and int64 constants (shapes, axes, indices), scales and zero points of quantization, and the inputs of Resize, Pad,
# Clip and the like other than their data. In doubt the answer is a difference, and the engine is built.

# Operators whose inputs after the first are parameters that are folded into kernels or determine shapes.
_PARAMETERS = {
    *("QuantizeLinear", "DequantizeLinear", "Resize", "Upsample", "Pad", "Clip", "Range", "OneHot", "TopK", "Slice"),
    *("Reshape", "Expand", "Tile", "NonMaxSuppression", "ConstantOfShape", "RoiAlign"),
}


def differs(before: Path, after: Path) -> str | None:
    """The first difference between two models other than their weights' values, in words; None for none.

    Files beside a model are not read. Raises what `onnx.load` raises.
    """
    old_model, new_model = (onnx.load(str(path), load_external_data=False) for path in (before, after))
    return _compare_constants(old_model.graph, new_model.graph) or _compare_rest(old_model, new_model)


def _compare_constants(old: "onnx.GraphProto", new: "onnx.GraphProto") -> str | None:
    old_constants, new_constants = ({tensor.name: tensor for tensor in graph.initializer} for graph in (old, new))
    if lone_names := sorted(old_constants.keys() ^ new_constants.keys()):
        return f"only one of the two models has constant {lone_names[0]!r}"
    parameter_names = {name for node in old.node if node.op_type in _PARAMETERS for name in node.input[1:]}
    for name, tensor in old_constants.items():
        new_tensor = new_constants[name]
        if (tensor.data_type, tuple(tensor.dims)) != (new_tensor.data_type, tuple(new_tensor.dims)):
            return f"constant {name!r} is of another type or shape: {_form(tensor)} and {_form(new_tensor)}"
        if (name in parameter_names or not _is_weight(tensor)) and _content(tensor) != _content(new_tensor):
            return f"constant {name!r} has other values, and is not a weight: kernels may depend on it"
    return None


def _compare_rest(old: "onnx.ModelProto", new: "onnx.ModelProto") -> str | None:
    """As `differs`, of all but the values of constants, which are removed from both models."""
    for old_node, new_node in zip(old.graph.node, new.graph.node, strict=False):
        if old_node.SerializeToString(deterministic=True) != new_node.SerializeToString(deterministic=True):
            return f"node {old_node.name or old_node.output[0]!r} ({old_node.op_type}) differs"
    for model in (old, new):
        for tensor in model.graph.initializer:
            for field in ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data"):
                tensor.ClearField(field)
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")
        model.graph.ClearField("name")
    is_equal = old.SerializeToString(deterministic=True) == new.SerializeToString(deterministic=True)
    return None if is_equal else "their inputs, outputs, operators or opsets differ"


def _is_weight(tensor: "onnx.TensorProto") -> bool:
    index_types = (TensorProto.INT32, TensorProto.INT64, TensorProto.BOOL, TensorProto.STRING, TensorProto.UINT32)
    return math.prod(tensor.dims) > 1 and tensor.data_type not in (*index_types, TensorProto.UINT64)


def _content(tensor: "onnx.TensorProto") -> bytes:
    """The bytes of a constant's values; for an external one, its serialized reference."""
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        return bytes(tensor.SerializeToString(deterministic=True))
    return bytes(onnx.numpy_helper.to_array(tensor).tobytes())


def _form(tensor: "onnx.TensorProto") -> str:
    return f"{onnx.TensorProto.DataType.Name(tensor.data_type).lower()} {list(tensor.dims)}"
