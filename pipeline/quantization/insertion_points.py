"""Finds the nodes and the tensors of a graph that int8 can take."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from builders.onnx_graphs.bodies import list_bodies, list_reads, set_items, walk_nodes
from builders.onnx_graphs.weights import find_external, from_array, to_array
from builders.reference import open_interpreter
from enginesmith.arrays import Array
from enginesmith.core.errors import DataError
from enginesmith.core.reports.breakdown import FloatNode
from enginesmith.core.state import State
from enginesmith.core.types import QuantizedState
from pipeline.quantization.graph import attribute_of, constants, consumers, element_types, tidy, tidy_from, unused_name
from pipeline.quantization.ranges import Ranges

# Weights that nodes compute from constants alone become float32 constants if a node that can be quantized reads them.
#
# Quantizers that write no Q/DQ nodes store a weight as int8 and put Cast, Sub and Mul behind it; a normalised weight
# has its norm, a Div and a Mul behind it; converters write Transpose, Reshape, Split or ConstantOfShape. Without this,
# such weights are not found as constants, and their readers stay in float. An embedding's weight does not change: it is
# not quantized, and would be four times larger.

# Operators that are not folded: those with random results, and Q/DQ nodes.
_STAYING = ("Bernoulli", "DequantizeLinear", "Multinomial", "QuantizeLinear", "Random")


def _fold_computed_weights(model: ModelProto) -> None:
    """Replace the computed weights and biases of nodes of `OP_TYPES`, and Identities of constants, by float32
    constants, in place. The nodes that computed them are removed if nothing else reads them. model: tidy."""
    graph = model.graph
    initializers, producers, external_names = constants(graph), _find_computing(graph), find_external(graph)
    outputs = {value.name for value in graph.output}
    names = {node.name for node in producers.values()}
    tensor_names = {name for node in graph.node for name in node.output} | initializers.keys()
    fold_names = [
        name
        for node in graph.node
        for index, name in enumerate(node.input)
        if name in producers and (producers[name].op_type == "Identity" or (node.op_type in OP_TYPES and index > 0))
    ]
    has_folded = False
    for name in dict.fromkeys(fold_names):
        values = None if name in outputs else _compute(model, name, initializers, producers)
        if values is None or values.dtype != np.float32:
            continue
        new_name = unused_name(name, tensor_names)
        node_outputs = producers.pop(name).output
        node_outputs[[*node_outputs].index(name)] = new_name
        initializers[name] = from_array(values, name, external_names)
        graph.initializer.append(initializers[name])
        has_folded = True
    if not has_folded:
        return
    live_nodes, live_names = list[NodeProto](), set(outputs)
    for node in reversed(graph.node):
        if node.name not in names or live_names.intersection(node.output):
            live_nodes.append(node)
            live_names.update(list_reads(node))
    set_items(graph.node, live_nodes[::-1])


def _find_computing(graph: GraphProto) -> dict[str, NodeProto]:
    """The nodes that depend on constants alone, by the names of their results."""
    constant_names, producers = {*constants(graph)}, dict[str, NodeProto]()
    for node in graph.node:
        is_fixed = node.op_type.startswith(_STAYING) or node.domain not in ("", "ai.onnx") or list_bodies(node)
        if not is_fixed and constant_names.issuperset(filter(None, node.input)):
            constant_names.update(node.output)
            producers |= dict.fromkeys(filter(None, node.output), node)
    return producers


def _compute(
    model: ModelProto, name: str, initializers: Mapping[str, TensorProto], makers: Mapping[str, NodeProto]
) -> Array | None:
    """The values of a tensor that nodes compute from constants; None if the nodes do not run."""
    visited_names, pending_names, needed_names = set[str](), {name}, set[str]()
    while pending_names:
        visited_names.add(tensor_name := pending_names.pop())
        if tensor_name in makers:
            needed_names.add(makers[tensor_name].name)
            pending_names |= {*filter(None, makers[tensor_name].input)} - visited_names
    nodes = [node for node in model.graph.node if node.name in needed_names]
    operands = {operand: initializers[operand] for operand in sorted(visited_names & initializers.keys())}
    inputs = [
        helper.make_tensor_value_info(operand, tensor.data_type, tensor.dims) for operand, tensor in operands.items()
    ]
    graph = helper.make_graph(nodes, "weight", inputs, [ValueInfoProto(name=name)])
    submodel = helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)
    try:
        session = open_interpreter(submodel.SerializeToString(), f"weight {name!r}", threads=1)
        return np.asarray(session.run([name], {operand: to_array(tensor) for operand, tensor in operands.items()})[0])
    except Exception:  # the interpreter's errors share no base class; a weight that it cannot compute stays in float
        return None


# The nodes that int8 can take, the other nodes that get Q/DQ beside them, and the tensors to measure.
#
# Conv, ConvTranspose, Gemm and MatMul with a constant weight (`Site`) carry nearly all of the arithmetic of a
# convolutional net or a transformer. A product of two activations (attention scores) stays in float: its inputs follow
# a softmax or feed one, where a uniform step of 1/127 of the range costs most.
#
# Q/DQ pairs elsewhere preserve a backend's fusions. TensorRT runs convolution, bias, residual Add and Relu as one int8
# kernel if the other operand of the Add is quantized too (its developer guide: "quantize the residual input in
# skip-connections"). onnxruntime's x86 path stays in integers from one convolution to the next if the nodes between
# them (Add, pooling, Concat) have Q/DQ on both sides: each detour through float costs two conversions and two changes
# of memory layout.

OP_TYPES = ("Conv", "ConvTranspose", "Gemm", "MatMul")
# Operators that multiply by weights too, and have no Q/DQ form.
RECURRENT = ("GRU", "LSTM", "RNN")
# Per-channel Q/DQ exists from this opset on; older models are lifted before anything is measured or quantized.
LOWEST_OPSET = 13
# Operators whose results are some of their inputs' values: the range does not change.
_SELECTING = ("MaxPool",)
_JOINING = ("Add", "Concat", *_SELECTING, "GlobalAveragePool", "AveragePool")


@dataclass(frozen=True)
class Site:
    """One node that int8 can take.

    activation, weight: names of its two operands.  axis: of the weight's output channels.
    result: the tensor that a fused kernel writes: the node's output or, if its only reader is a Relu or a Clip around
    zero, that node's output.  fused: name of that Relu or Clip, or None.
    """

    node: str
    op_type: str
    activation: str
    weight: str
    axis: int
    result: str
    fused: str | None


@dataclass(frozen=True)
class Residual:
    """An Add that the kernel of a convolution can include. operand, tensor: index and name of the other summand."""

    node: str
    operand: int
    tensor: str


@dataclass(frozen=True)
class JoinNode:
    """A node between integer kernels. result: its output or, if its only reader is the Relu `fused`, the Relu's output.

    same_as: the input whose range the result has; None if the result needs its own range.
    """

    node: str
    result: str
    fused: str | None = None
    same_as: str | None = None


def prepare_model(model: ModelProto) -> ModelProto:
    """A tidy copy in an opset that has int8. Calibration and insertion use the tensor names of this graph."""
    graph = tidy_from(tidy(model), LOWEST_OPSET)
    _fold_computed_weights(graph)
    return graph


def find_sites(model: ModelProto) -> tuple[tuple[Site, ...], tuple[FloatNode, ...]]:
    """The sites of a prepared model, and the other nodes that multiply, each with the reason why it is not a site."""
    graph, types = model.graph, element_types(model)
    initializers, readers = constants(graph), consumers(graph)
    outputs = {value.name for value in graph.output}
    sites = []
    float_nodes = [FloatNode(node.name, node.op_type, reason) for node in graph.node if (reason := _out_of_reach(node))]
    for node in graph.node:
        if node.op_type not in OP_TYPES or node.domain not in ("", "ai.onnx"):
            continue
        if reason := _obstacle(node, initializers, types):
            float_nodes.append(FloatNode(node.name, node.op_type, reason))
            continue
        result, fused_node = node.output[0], None
        users = readers.get(result, [])
        if len(users) == 1 and result not in outputs and _saturates_around_zero(users[0], initializers):
            result, fused_node = users[0].output[0], users[0].name
        sites.append(
            Site(node.name, node.op_type, node.input[0], node.input[1], _channel_axis(node), result, fused_node)
        )
    return tuple(sites), tuple(float_nodes)


def _out_of_reach(node: NodeProto) -> str | None:
    """Why a node of another type than `OP_TYPES` multiplies by weights in float; None if it does not multiply."""
    if node.op_type in RECURRENT:
        return "recurrent nodes have no int8 form here"
    inner_count = sum(_multiplications_in(body) for body in list_bodies(node))
    return f"{inner_count} of the nodes in its bodies multiply; control flow is not entered" if inner_count else None


def _multiplications_in(body: GraphProto) -> int:
    inner_count = sum(_multiplications_in(inner_body) for node in body.node for inner_body in list_bodies(node))
    return inner_count + sum(node.op_type in (*OP_TYPES, *RECURRENT) for node in body.node)


def _obstacle(node: NodeProto, initializers: Mapping[str, TensorProto], types: Mapping[str, int]) -> str | None:
    """Why a node of `OP_TYPES` cannot be quantized, or None."""
    activation, weight = node.input[0], initializers.get(node.input[1])
    if weight is None and activation in initializers:
        return "its weight is the first operand; only a second one is quantized"
    if weight is None:
        return "it multiplies two activations" if node.op_type == "MatMul" else "its weight is not a constant"
    if activation in initializers:
        return "both operands are constants"
    if types.get(activation) != TensorProto.FLOAT or weight.data_type != TensorProto.FLOAT:
        return "it does not compute in float32"
    bias = initializers.get(node.input[2]) if len(node.input) > 2 else None
    if bias is not None and list(bias.dims) != [weight.dims[_channel_axis(node)]]:
        # onnxruntime's Q/DQ insertion expects one value for each scale of the weight, and fails on any other.
        return f"its bias has the shape {list(bias.dims)}; per-channel scales need one value for each output"
    if node.op_type == "MatMul" and len(weight.dims) != 2:
        return f"its weight has {len(weight.dims)} dimensions; per-channel scales need 2"
    if node.op_type == "Gemm" and attribute_of(node, "beta", 1.0) != 1.0:
        # onnxruntime's Q/DQ insertion resets beta to 1 without scaling the bias.
        return "it has a beta other than 1; fold it into the bias"
    if node.op_type == "ConvTranspose" and attribute_of(node, "group", 1) != 1:
        return "its weight's output channels lie in groups; per-channel scales need one axis"
    values = to_array(weight)
    if values.size == 0:
        return "its weight is empty"
    return None if np.isfinite(values).all() else "its weight holds NaN or Inf"


def _channel_axis(node: NodeProto) -> int:
    if node.op_type == "Gemm":
        return 0 if attribute_of(node, "transB", 0) else 1
    return 0 if node.op_type == "Conv" else 1


def _saturates_around_zero(node: NodeProto, initializers: Mapping[str, TensorProto]) -> bool:
    """Whether a node is a Relu, or a Clip with constant bounds around zero.

    Saturation to uint8 behind the node then has the node's effect, so runtimes drop the node. A Clip whose bounds
    exclude zero must stay: a quantized range always includes zero.
    """
    if node.op_type != "Clip":
        return node.op_type == "Relu"
    bounds = [initializers[name] for name in node.input[1:3] if name in initializers]
    if len(bounds) != 2:
        return False
    low, high = (float(to_array(bound)) for bound in bounds)
    return low <= 0 <= high


def residuals(model: ModelProto, convolutions: Iterable[str]) -> tuple[Residual, ...]:
    """The residual Adds behind these convolutions (node names), each with the operand that the kernel does not compute.

    Of two convolutions, the larger one includes the Add: the smaller is the shortcut's projection.
    """
    initializers, readers = constants(model.graph), consumers(model.graph)
    outputs = {value.name for value in model.graph.output}
    convolution_names = set(convolutions)
    producers = {node.output[0]: node for node in model.graph.node if node.name in convolution_names}
    residual_nodes = []
    for node in model.graph.node:
        if node.op_type == "Add" and not any(name in initializers for name in node.input):
            single_uses = [name in producers and len(readers[name]) == 1 and name not in outputs for name in node.input]
            if any(single_uses) and node.input[0] != node.input[1]:
                main_index = single_uses.index(True)
                if all(single_uses):
                    weights = [initializers.get(producers[name].input[1]) for name in node.input]
                    sizes = [prod(weight.dims) if weight else 1 for weight in weights]
                    main_index = sizes.index(max(sizes))
                residual_nodes.append(Residual(node.name, 1 - main_index, node.input[1 - main_index]))
    return tuple(residual_nodes)


def find_joins(model: ModelProto, written: Iterable[str]) -> tuple[JoinNode, ...]:
    """The joining nodes whose inputs are all quantized, in graph order. written: tensors that integer kernels write."""
    readers = consumers(model.graph)
    outputs = {value.name for value in model.graph.output}
    quantized_names, joins = set(written), []
    for node in model.graph.node:
        is_single = node.domain in ("", "ai.onnx") and len([name for name in node.output if name]) == 1
        if node.op_type not in _JOINING or not is_single or not all(name in quantized_names for name in node.input):
            continue
        result = node.output[0]
        users = readers.get(result, [])
        join = JoinNode(node.name, result)
        if node.op_type in _SELECTING:
            join = JoinNode(node.name, result, same_as=node.input[0])
        elif len(users) == 1 and users[0].op_type == "Relu" and result not in outputs:
            join = JoinNode(node.name, users[0].output[0], users[0].name)
        quantized_names.add(join.result)
        joins.append(join)
    return tuple(joins)


def taps(sites: Sequence[Site]) -> tuple[str, ...]:
    """The tensors to measure for these sites: each activation, and the result of each convolution."""
    results = {site.result for site in sites if site.op_type == "Conv"}
    return tuple(sorted({site.activation for site in sites} | results))


def tensors_to_measure(model: ModelProto) -> tuple[str, ...]:
    """Every tensor of a prepared model whose range some backend's scheme needs: sites, residual operands, joins."""
    sites = find_sites(model)[0]
    convolutions = [site for site in sites if site.op_type == "Conv"]
    residual_names = {residual.tensor for residual in residuals(model, [site.node for site in convolutions])}
    joins = find_joins(model, [site.result for site in convolutions])
    return tuple(sorted({*taps(sites), *residual_names, *(join.result for join in joins if join.same_as is None)}))


def activations(model: ModelProto) -> tuple[str, ...]:
    """Every float activation of a model. If all are measured, the fp16 cast knows all ranges, not only int8's."""
    prepared_model = prepare_model(model)
    types, initializers = element_types(prepared_model), constants(prepared_model.graph)
    names = [value.name for value in prepared_model.graph.input]
    names += [name for node in prepared_model.graph.node for name in node.output]
    return tuple(sorted(name for name in names if types.get(name) == TensorProto.FLOAT and name not in initializers))


# The nodes of a model that compute in int8 because its author quantized it without Q/DQ nodes.
#
# Such nodes do not change in any graph variant: an 'fp32' engine of such a model computes them in int8.

# ONNX's own operators, and ONNX Runtime's.
INTEGER_OPS = frozenset(
    {
        *("ConvInteger", "MatMulInteger", "QLinearConv", "QLinearMatMul"),
        *("DynamicQuantizeLSTM", "DynamicQuantizeMatMul", "MatMulIntegerToFloat", "QAttention", "QGemm"),
    }
)


def count_integer_nodes(model: ModelProto) -> tuple[tuple[str, int], ...]:
    """(operator, count) of the nodes that multiply in int8 in a model, also in inner graphs, by operator."""
    counts = Counter(node.op_type for node in walk_nodes(model.graph))
    return tuple(sorted((name, count) for name, count in counts.items() if name in INTEGER_OPS))


# The largest int8 of a symmetric grid: -128 has no counterpart.
_LEVELS = 127


def scale_states(states: Sequence[State], ranges: Ranges | None) -> tuple[QuantizedState, ...]:
    """The states with scales, from the largest magnitude of their inputs and outputs in calibration. Raises DataError
    for a state that was not measured, or was always zero."""
    return tuple(QuantizedState(state.input, state.output, _scale(state, ranges)) for state in states)


def _scale(state: State, ranges: Ranges | None) -> float:
    magnitudes = [ranges.reach(name) or 0.0 for name in (state.input, state.output)] if ranges else [0.0]
    if not 0.0 < max(magnitudes) < np.inf:
        raise DataError(
            f"state.{state.input}.dtype: calibration samples do not show how large {state.input!r} becomes; give "
            "sequences of several steps, or remove dtype"
        )
    return float(np.float32(max(magnitudes) / _LEVELS))
