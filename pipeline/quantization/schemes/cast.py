"""fp16 and bf16 graphs, and the tensors that a 16-bit type makes zero."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Literal

import numpy as np
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper

from builders.onnx_graphs.bodies import list_bodies, list_captured, list_reads, set_items, walk_graphs
from builders.onnx_graphs.weights import from_array, is_external, to_array
from enginesmith.arrays import Array
from enginesmith.core.errors import ModelError
from enginesmith.core.reports.breakdown import FloatNode
from pipeline.quantization.graph import (
    attribute_of,
    constants,
    consumers,
    element_types,
    finish,
    opset_of,
    raise_opset,
    rename_captured,
    tidy,
    unused_name,
)
from pipeline.quantization.ranges import CastNotes, Ranges
from pipeline.quantization.schemes.half_floats import (
    FLOAT,
    HALVES,
    LARGEST_FACTOR,
    HalfFormat,
    can_narrow,
    find_inexact,
    find_too_large,
    narrowable_positions,
    retype,
    typed_by_attribute,
)

# The tensors that a 16-bit float type makes zero with an effect: x / 0 is NaN or infinite, and a small factor vanishes.
#
# A single small weight among large ones does not change a rounded sum, and is cast with them. Kept in fp32 are
# - a constant that loses more of its norm to underflow than to rounding (2^-11): a factor of 1e-9;
# - a constant with any value that underflows, if a node divides by it, or takes its root or its logarithm: directly, or
#   after an addition or comparison, as with the epsilon of a normalization;
# - a measured tensor that stayed below the type's normal numbers.
# Biases of weighted nodes are cast, because they are added to large sums. Scales of Q/DQ are raised instead.

# The greatest share of a constant's norm that rounding to fp16 loses.
_ROUNDING = 2.0**-11
# Operator -> index of the operand that must not be zero.
_SENSITIVE = {"Div": 1, "Log": 0, "Reciprocal": 0, "Sqrt": 0}
# Operators whose least result can be a small summand or bound.
_ADDING = {"Add", "Clip", "Max", "Sum", "Where"}
_MOVING = {"Cast", "Expand", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"}
_CARRYING = _MOVING | {"Abs", "Clip", "Max"}
_SCALING = _MOVING | {"Mul", "Neg"}
_BIASED = {"Conv", "ConvTranspose", "Gemm"}
_SCALED = {"DequantizeLinear", "QuantizeLinear"}


def find_too_small(model: ModelProto, half: HalfFormat, ranges: Ranges | None) -> dict[str, str]:
    """The tensors of a tidy model that `half` would make zero with an effect, each with the reason."""
    search = _UnderflowSearch(model.graph, half, ranges)
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            search.judge_constant(tensor)
    for name in [
        *(value.name for value in model.graph.input),
        *(name for node in model.graph.node for name in node.output),
    ]:
        search.judge_measured(name)
    search.judge_logarithms(model.graph.node)
    search.spread(model.graph.node)
    return search.found


class _UnderflowSearch:
    """Collects the tensors to keep in fp32. found: tensor -> reason.  faded: tensors that are small throughout."""

    def __init__(self, graph: GraphProto, half: HalfFormat, ranges: Ranges | None) -> None:
        self.half, self.ranges = half, ranges
        self.readers = consumers(graph)
        self.initializers = constants(graph)
        self.found: dict[str, str] = {}
        self.faded: dict[str, str] = {}

    def judge_constant(self, tensor: TensorProto) -> None:
        """Keep a constant that underflows, and the tensors from an epsilon to the node that divides by it."""
        values = to_array(tensor)
        zero_mask = (values != 0) & (self.half.narrow(values) == 0)
        if not zero_mask.any():
            return
        reason = f"{np.count_nonzero(zero_mask)} of {values.size} values of constant {tensor.name!r} underflow to 0"
        least_value = float(np.abs(values[zero_mask]).min())
        for node in self.readers.get(tensor.name, ()):
            float_tensors = self._follow(tensor.name, node, least_value)
            if (
                not float_tensors
                and _is_factor(tensor.name, node)
                and _norm(values[zero_mask]) > _ROUNDING * _norm(values)
            ):
                float_tensors, self.faded[tensor.name] = {tensor.name}, reason
            self.found |= dict.fromkeys(float_tensors, f"{reason} in {self.half.name}")

    def judge_measured(self, name: str) -> None:
        """Keep a tensor whose largest measured magnitude is below the normal numbers."""
        amax = self.ranges.reach(name) if self.ranges else None
        if amax is not None and 0 < amax < self.half.tiny:
            exact_text = f"{self.half.name} is exact from {self.half.tiny:.3g} on"
            self.found[name] = f"tensor {name!r} reached only {amax:.3g} in calibration, {exact_text}"

    def judge_logarithms(self, nodes: Sequence[NodeProto]) -> None:
        """Keep the argument of a logarithm, unless it is always far from zero. Below the normal numbers, a probability
        has few digits or is 0; its logarithm is then inexact, or infinite."""
        if self.half.tiny < 1e-10:  # bfloat16 reaches as far as float32
            return
        for node in nodes:
            if node.op_type == "Log" and not self._stays_large(node.input[0]):
                exact_text = f"{self.half.name} is exact from {self.half.tiny:.3g} on"
                self.found.setdefault(node.input[0], f"a logarithm is taken of {node.input[0]!r}: {exact_text}")

    def spread(self, nodes: Sequence[NodeProto]) -> None:
        """Keep the unmeasured products of factors that underflow."""
        for node in nodes:
            reason = next((self.faded[name] for name in node.input if name in self.faded), None)
            divides_faded = node.op_type == "Div" and node.input[0] in self.faded
            if reason is None or not (node.op_type in _SCALING or divides_faded):
                continue
            for name in node.output:
                if self.ranges is None or self.ranges.reach(name) is None:
                    self.faded[name] = reason
                    self.found.setdefault(name, f"{reason} in {self.half.name}")

    def _follow(self, name: str, node: NodeProto, bound: float, steps_left: int = 12) -> set[str]:
        """The tensors from `name`, which a node reads, to a tensor that must not be zero; empty if there is none.

        bound: the smallest magnitude of the tensor.
        """
        if _SENSITIVE.get(node.op_type, -1) in [i for i, operand in enumerate(node.input) if operand == name]:
            root = math.sqrt(bound)
            if node.op_type == "Sqrt" and self.half.narrow(np.array(root, np.float32)) == 0:
                return {name, node.output[0]} | self._follow_readers(node.output[0], root, steps_left - 1)
            return {name}
        op_types = _ADDING if name in self.initializers else _CARRYING
        if node.op_type not in op_types or steps_left == 0 or self._stays_large(node.output[0]):
            return set()
        later_names = self._follow_readers(node.output[0], bound, steps_left - 1)
        return {name} | later_names if later_names else set()

    def _follow_readers(self, name: str, bound: float, steps_left: int) -> set[str]:
        return {reader for node in self.readers.get(name, ()) for reader in self._follow(name, node, bound, steps_left)}

    def _stays_large(self, name: str) -> bool:
        """Whether a tensor was measured, and was always far from zero."""
        if self.ranges is None or name not in self.ranges.tensors:
            return False
        source = self.ranges.sources.get(name)
        low, high = source.seen if source else self.ranges.tensors[name]
        return low > 2 * self.half.tiny or high < -2 * self.half.tiny


def _is_factor(name: str, node: NodeProto) -> bool:
    """Whether a node multiplies by a constant, or uses it in another way than adding or comparing it."""
    input_index = list(node.input).index(name) if name in node.input else 0
    if node.op_type in _SCALED or (node.op_type in _BIASED and input_index == 2):
        return False
    return node.op_type not in {*_ADDING, "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Sub"}


def _norm(values: Array) -> float:
    finite_values = values[np.isfinite(values)].astype(np.float64)
    return float(np.sqrt(np.square(finite_values).sum()))


# fp16 and bf16 graphs: every node that can compute in the 16-bit type does. The other nodes stay in fp32, with notes.
#
# The operator's own schema decides which inputs may be narrowed: an input whose type variable does not allow the type
# (the scales of Resize, the limits of Range) stays fp32, and casts connect the two types. Inputs and outputs of the
# model stay fp32 by default.
#
# `emulate` writes an fp32 graph with the same arithmetic, for machines without 16-bit kernels. Such a kernel computes
# in fp32 inside and rounds its result once. So an fp32 graph that rounds every 16-bit tensor, by a cast to the type and
# back, computes the same as a GPU with fp32 accumulation, except for the order of sums. onnxruntime's own CPU path does
# less: it keeps fp32 between fp16 nodes (seen in 1.31: the root of the square of 1000 is 1000 there, where fp16 has
# infinity), and it has no bf16 kernels at all.

_HALF_TYPES = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
# Attributes that name the type of a result.
_TYPES = ("to", "dtype", "output_dtype")
# The opset from which on the operators that carry the work (Conv, pooling) have a bf16 form.
_BF16_OPSET = 22
# Operators that carry the work.
_PRODUCTS = {*_BIASED, "Attention", "Einsum", "GRU", "LSTM", "MatMul", "RNN"}
# Operators that compute nothing: a graph in which only these were cast is no fp16 graph.
_PASSING_ON = ("Cast", "Identity")


def cast_float(
    model: ModelProto,
    precision: Literal["fp16", "bf16"],
    keep_io: bool = True,
    keep: Mapping[str, str] = MappingProxyType({}),
    ranges: Ranges | None = None,
) -> tuple[ModelProto, CastNotes]:
    """The model in a 16-bit float type, and notes on the cast.

    keep_io: inputs and outputs stay fp32.  keep: nodes to leave in fp32, with the reason.  ranges: of all activations
    (`insertion_points.activations`); without them overflow is judged by constants and operators.
    Raises ModelError when the result is not valid ONNX.
    """
    half, graph = HALVES[precision], tidy(model)
    if precision == "bf16":
        with suppress(ModelError):  # if onnx cannot convert it, the convolutions stay in fp32
            graph = tidy(raise_opset(graph, _BF16_OPSET))
    types = element_types(graph)
    float_nodes = _find_kept(graph, half, types, keep, ranges, LARGEST_FACTOR)
    if len(float_nodes) == len(graph.graph.node):  # if all are squares, the proof shows whether they fit
        float_nodes = _find_kept(graph, half, types, keep, ranges, 1.0)
    rewrite = _CastRewrite(graph, half, types, {node.node for node in float_nodes}, keep_io)
    rewrite.run()
    notes = CastNotes(half.name, rewrite.cast, tuple(float_nodes), tuple(rewrite.underflowed), tuple(rewrite.floored))
    return finish(graph), notes


def _find_kept(
    model: ModelProto,
    half: HalfFormat,
    types: dict[str, int],
    keep: Mapping[str, str],
    ranges: Ranges | None,
    growth: float,
) -> list[FloatNode]:
    misfits = {**find_inexact(model, half, ranges), **find_too_small(model, half, ranges)}
    misfits |= find_too_large(model, half, types, ranges, growth)
    opset = opset_of(model)
    return [
        FloatNode(node.name, node.op_type, reason)
        for node in model.graph.node
        if any(types.get(name, FLOAT) == FLOAT for name in (*node.input, *node.output) if name)
        and (reason := _obstacle(node, half, types, keep, misfits, opset))
    ]


def _obstacle(
    node: NodeProto, half: HalfFormat, types: dict[str, int], keep: Mapping[str, str], unfit: dict[str, str], opset: int
) -> str | None:
    """Why a node stays in fp32, or None. unfit: the reason for each tensor that `half` cannot hold."""
    if node.name in keep:
        return keep[node.name]
    if list_bodies(node):
        return "control flow"
    if node.op_type in ("ScatterElements", "ScatterND") and attribute_of(node, "reduction", b"none") != b"none":
        return "it reduces values at equal indices, which onnxruntime's CPU kernels cannot do in 16 bits"
    if any(name and name not in types for name in (*node.input, *node.output)):
        return "a tensor's type cannot be inferred"
    if not can_narrow(node, half, types, opset):
        known_text = f"what onnx knows of {node.domain}" if node.domain else f"opset {opset}"
        return f"{node.op_type} has no {half.name} form in {known_text}"
    return next((unfit[name] for name in (*list_reads(node), *node.output) if name in unfit), None)


def find_last_nodes(model: ModelProto) -> dict[str, str]:
    """The nodes between the last products of a model and its float outputs, with the reason to leave them in fp32. In a
    residual stream, these are the nodes behind its last branch with a product.

    A bias that is large compared with the variation uses the digits of a 16-bit sum. A sum in fp32, the type of the
    outputs, keeps them. The products stay in 16 bits, except a product that adds the bias itself.
    """
    tidy_model = tidy(model)
    producers, types = {name: node for node in tidy_model.graph.node for name in node.output}, element_types(tidy_model)
    readers, early_nodes = consumers(tidy_model.graph), set[str]()  # early: products, and what they depend on
    for producer in reversed(tidy_model.graph.node):
        reader_names = {reader.name for name in producer.output for reader in readers.get(name, ())}
        if producer.op_type in _PRODUCTS or reader_names & early_nodes:
            early_nodes.add(producer.name)
    names = [value.name for value in tidy_model.graph.output if types.get(value.name) == FLOAT]
    last_nodes: dict[str, str] = {}
    while names:
        node = producers.get(names.pop())
        if node is None or node.name in last_nodes:
            continue
        is_product = node.op_type in _PRODUCTS
        if not is_product or (node.op_type in _BIASED and len(node.input) == 3):
            last_nodes[node.name] = "in 16 bits an output missed its limits"
        reads = [] if is_product else list_reads(node)
        names += [name for name in reads if not early_nodes & {reader.name for reader in readers[name]} - {node.name}]
    return last_nodes


class _CastRewrite:
    """One pass over the nodes in order, which casts the inputs of each node to the types that it needs.

    types: element types before the pass.  stored: element types now.  available: (original name, type) -> name of the
    tensor with this value in this type.  cast: number of nodes that compute in 16 bits.
    """

    def __init__(
        self, model: ModelProto, half: HalfFormat, types: dict[str, int], float_names: set[str], keep_io: bool
    ) -> None:
        self.graph: GraphProto = model.graph
        self.half, self.types, self.float_names, self.keep_io = half, types, float_names, keep_io
        self.opset = opset_of(model)
        self.initializers = constants(model.graph)
        self.outputs = {value.name for value in model.graph.output}
        self.taken = set(types) | {name for node in model.graph.node for name in node.output}
        self.stored: dict[str, int] = dict(types)
        self.available: dict[tuple[str, int], str] = {}
        self.nodes: list[NodeProto] = []
        self.cast = 0
        self.underflowed: list[tuple[str, int, int]] = []
        self.floored: list[str] = []

    def run(self) -> None:
        """Rewrite the graph in place."""
        if not self.keep_io:
            for value in self.graph.input:
                if self.types[value.name] == FLOAT:
                    value.type.tensor_type.elem_type = self.half.element_type
                    self.stored[value.name] = self.half.element_type
        for node in list(self.graph.node):
            self._rewrite(node)
        set_items(self.graph.node, self.nodes)
        if not self.keep_io:
            for value in self.graph.output:
                if self.types[value.name] == FLOAT:
                    value.type.tensor_type.elem_type = self.stored[value.name]

    def _rewrite(self, node: NodeProto) -> None:
        input_indices, output_indices = self._choose_positions(node)
        scales = {1} if node.op_type in ("QuantizeLinear", "DequantizeLinear") else set()
        for index, name in enumerate(node.input):
            if self.types.get(name) == FLOAT:
                input_type = self.half.element_type if index in input_indices else FLOAT
                node.input[index] = self._cast_input(name, input_type, scale=index in scales)
        rename_captured(
            node, {name: self._cast_input(name, FLOAT) for name in list_captured(node) if self.types.get(name) == FLOAT}
        )
        self.nodes.append(node)
        self.cast += bool(output_indices) and node.op_type not in _PASSING_ON
        for index in sorted(output_indices):
            self._store(node, index)

    def _choose_positions(self, node: NodeProto) -> tuple[set[int], set[int]]:
        """Positions of a node's inputs and outputs that become half; sets the type attribute, if one decides."""
        if node.name in self.float_names:
            return set(), set()
        passes_on = node.op_type in _PASSING_ON and node.input[0] in self.initializers
        if passes_on and self.keep_io and node.output[0] in self.outputs:
            return set(), set()  # a constant, such as anchors, that is an output of the model: rounding would only lose
        if typed_by_attribute(node):
            retype(node, self.half)
            return self._already_half(node), {0}
        input_indices, output_indices = narrowable_positions(node, self.half, self.types, self.opset)
        output_indices = {i for i in output_indices if self.types.get(node.output[i]) == FLOAT}
        if not output_indices and node.op_type != "QuantizeLinear":
            # A comparison or an index reads its inputs in their present types: rounding would only lose digits.
            dynamic_indices = {i for i in input_indices if node.input[i] not in self.initializers}
            return (input_indices if dynamic_indices and dynamic_indices <= self._already_half(node) else set()), set()
        return input_indices, output_indices

    def _already_half(self, node: NodeProto) -> set[int]:
        return {i for i, name in enumerate(node.input) if self.stored.get(name) == self.half.element_type}

    def _store(self, node: NodeProto, index: int) -> None:
        """Record that an output is half now; an output of the model gets a cast back under its own name."""
        name = node.output[index]
        self.stored[name] = self.half.element_type
        if name in self.outputs and self.keep_io:
            half_name = unused_name(f"{name}_{self.half.name}", self.taken)
            self._cast(half_name, name, FLOAT)
            node.output[index] = half_name
            self.available |= {(name, self.half.element_type): half_name, (name, FLOAT): name}

    def _cast_input(self, name: str, element_type: int, scale: bool = False) -> str:
        """The name of the tensor with the value of `name` in type `element_type`, which is added on first use."""
        cast_name = self.available.get((name, element_type), name if self.stored.get(name) == element_type else None)
        if cast_name is None:
            cast_name = unused_name(f"{name}_{'fp32' if element_type == FLOAT else self.half.name}", self.taken)
            if name in self.initializers:
                self._convert_constant(name, cast_name, scale)
            else:
                self._cast(name, cast_name, element_type)
            self.available[name, element_type] = cast_name
        return cast_name

    def _cast(self, source: str, result: str, element_type: int) -> None:
        self.nodes.append(helper.make_node("Cast", [source], [result], name=f"{result}_cast", to=element_type))

    def _convert_constant(self, name: str, converted_name: str, scale: bool) -> None:
        values = to_array(self.initializers[name])
        if scale:
            if (values < self.half.tiny).any():
                self.floored.append(name)
            values = np.maximum(values, np.float32(self.half.tiny))
        narrow_values = self.half.narrow(values)
        zero_count = int(np.count_nonzero(values)) - int(np.count_nonzero(narrow_values))
        if zero_count:
            self.underflowed.append((name, zero_count, values.size))
        self.graph.initializer.append(from_array(narrow_values, converted_name, self.initializers[name]))


def emulate(model: ModelProto) -> ModelProto:
    """An fp32 graph that rounds wherever the given fp16 or bf16 graph would; 16-bit outputs become fp32.

    Inputs keep their type, so that data still fits. Run it with onnxruntime's optimizations off (ORT_DISABLE_ALL): some
    of them remove casts as no-ops. Control flow is not entered: its bodies stay in fp32 in graphs of `cast_float`.
    """
    copy = tidy(model)
    graph, types = copy.graph, element_types(copy)
    nodes = [
        _widen_outside(tensor)
        for tensor in graph.initializer
        if is_external(tensor) and tensor.data_type in _HALF_TYPES
    ]
    for tensor in graph.initializer:
        if not is_external(tensor):
            _widen(tensor)
    for value in graph.output:
        if value.type.tensor_type.elem_type in _HALF_TYPES:
            value.type.tensor_type.elem_type = FLOAT
    half_names = [value.name for value in graph.input if value.type.tensor_type.elem_type in _HALF_TYPES]
    names = {name: f"{name}/widened" for name in half_names}
    nodes += [
        helper.make_node("Cast", [name], [cast_name], name=cast_name, to=FLOAT) for name, cast_name in names.items()
    ]
    for node in graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = names.get(name, name)
        rename_captured(node, names)
        _widen_attributes(node)
        nodes.append(node)
        for index, name in enumerate(node.output):
            if types.get(name) in _HALF_TYPES:
                node.output[index], half_name = f"{name}/exact", f"{name}/rounded"
                nodes.append(
                    helper.make_node("Cast", [f"{name}/exact"], [half_name], name=f"{half_name}/narrow", to=types[name])
                )
                nodes.append(helper.make_node("Cast", [half_name], [name], name=f"{half_name}/widen", to=FLOAT))
    set_items(graph.node, nodes)
    return finish(copy)


def needs_emulation(model: ModelProto) -> bool:
    """Whether a graph has 16-bit floats or Constant nodes; otherwise `emulate` changes only the order of nodes."""
    graphs = [*walk_graphs(model.graph)]
    tensors = [tensor.data_type for graph in graphs for tensor in graph.initializer]
    tensors += [value.type.tensor_type.elem_type for graph in graphs for value in (*graph.input, *graph.output)]
    nodes = [node for graph in graphs for node in graph.node]
    tensors += [attribute.i for node in nodes for attribute in node.attribute if attribute.name in _TYPES]
    return any(dtype in _HALF_TYPES for dtype in tensors) or any(node.op_type == "Constant" for node in nodes)


def _widen_attributes(node: NodeProto) -> None:
    for attribute in node.attribute:
        if attribute.type == AttributeProto.TENSOR:
            _widen(attribute.t)
        if attribute.name in _TYPES and attribute.i in _HALF_TYPES:
            attribute.i = FLOAT


def _widen_outside(tensor: TensorProto) -> NodeProto:
    """The node that widens a 16-bit weight in a file. The weight gets another name, in place: a copy takes memory."""
    name, tensor.name = tensor.name, f"{tensor.name}/stored"
    return helper.make_node("Cast", [tensor.name], [name], name=f"{name}/widen", to=FLOAT)


def _widen(tensor: TensorProto) -> None:
    """Convert a 16-bit tensor to float32 in place."""
    if tensor.data_type in _HALF_TYPES:
        tensor.CopyFrom(from_array(to_array(tensor).astype("float32"), tensor.name, tensor))
