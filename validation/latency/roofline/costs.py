"""The roofline of an engine: costs of its graph and limits of the machine."""

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from builders.backends.optional_methods import TensorType, element_name
from builders.onnx_graphs.bodies import chain_of_additions
from enginesmith.arrays import Array
from enginesmith.core.errors import ModelError
from enginesmith.core.reports.breakdown import GraphCost, NodeCost, Roofs, product_dtype
from enginesmith.core.types import Session, Shape, Tensors, TensorSpec
from validation.latency.measurement.loop import latencies

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto

# The cost of a node: multiplications, operations, bytes; from the types and shapes of its inputs and outputs.
#
# Bytes count each tensor that a node reads from memory or writes to it once. Operators that only change a tensor's
# shape move no bytes; operators that select (Gather, Slice) read only the selected elements. Operations are 2 for each
# multiply-add, else a few for each value (`_PER_VALUE`, `_PER_INPUT`); an exponential counts as one.


def _words(text: str) -> list[str]:
    return text.split()


# The index of the weight among a node's inputs, by operator of ONNX or of ONNX Runtime.
CONVOLUTIONS = {"Conv": 1, "FusedConv": 1, "NhwcFusedConv": 1, "ConvInteger": 1, "QLinearConv": 3, "NhwcQLinearConv": 3}
TRANSPOSED_CONVOLUTIONS = {"ConvTranspose": 1, "QLinearConvTranspose": 3}
PRODUCTS = {
    **dict.fromkeys(_words("MatMul Gemm FusedMatMul FusedGemm MatMulInteger MatMulIntegerToFloat"), 1),
    "DynamicQuantizeMatMul": 1,
    "QLinearMatMul": 3,
    "QGemm": 3,
}
RECURRENT = ("LSTM", "GRU", "RNN")


def per_value(op_type: str, weight: Sequence[int], transposed: bool = False) -> int:
    """Multiplications for each output value of a node (for each input value of a ConvTranspose), given its weight.

    weight: shape (out, in / groups, kernel...), or a matrix's.  transposed: whether the matrix is (out, in).
    """
    if op_type in CONVOLUTIONS or op_type in TRANSPOSED_CONVOLUTIONS:
        return math.prod(weight[1:])
    return weight[-1] if transposed or len(weight) == 1 else weight[-2]


def multiplications(
    op_type: str, inputs: Sequence[Shape | None], outputs: Sequence[Shape], equation: str = ""
) -> int | None:
    """Multiply-adds of one execution of a node; None for an operator without products, 0 if a shape is missing.

    inputs: shapes, None for a missing or unknown input.  equation: of an Einsum.  outputs: shapes.
    """
    if op_type in CONVOLUTIONS:
        weight = _at(inputs, CONVOLUTIONS[op_type])
        return math.prod(outputs[0]) * per_value(op_type, weight) if weight and outputs else 0
    if op_type in TRANSPOSED_CONVOLUTIONS:
        weight, input_shape = _at(inputs, TRANSPOSED_CONVOLUTIONS[op_type]), _at(inputs, 0)
        return math.prod(input_shape) * per_value(op_type, weight) if weight and input_shape else 0
    if op_type in PRODUCTS:
        left_shape, right_shape = _at(inputs, 0), _at(inputs, PRODUCTS[op_type])
        if not left_shape or not right_shape or not outputs:
            return 0
        # The matrix is transposed if its last size is not the result's.
        is_transposed = len(right_shape) > 1 and right_shape[-1] != outputs[0][-1]
        return math.prod(outputs[0]) * per_value(op_type, right_shape, is_transposed)
    if op_type in RECURRENT:
        return _recurrent(inputs)
    if op_type == "MatMulNBits":  # a packed weight has other sizes than its matrix
        input_shape = _at(inputs, 0)
        return math.prod(outputs[0]) * input_shape[-1] if input_shape and outputs else 0
    if op_type == "Attention":
        return _attention(inputs)
    if op_type == "Einsum":
        return _einsum(equation, inputs)
    return None


def _at(shapes: Sequence[Shape | None], index: int) -> Shape | None:
    return shapes[index] if index < len(shapes) else None


def _recurrent(inputs: Sequence[Shape | None]) -> int:
    """Multiply-adds of an RNN. inputs: (length, batch, in), two weights (directions, gates * hidden, in or hidden)."""
    input_shape, weight, recurrence_shape = (_at(inputs, index) for index in range(3))
    if not input_shape or not weight or not recurrence_shape:
        return 0
    return input_shape[0] * input_shape[1] * (math.prod(weight) + math.prod(recurrence_shape))


def _attention(inputs: Sequence[Shape | None]) -> int:
    """Multiply-adds of ONNX Runtime's fused attention. inputs: (batch, length, in), weight (in, 3 * hidden)."""
    input_shape, weight = _at(inputs, 0), _at(inputs, 1)
    if not input_shape or not weight or len(input_shape) != 3 or len(weight) != 2:
        return 0
    batch, length, _ = input_shape
    return batch * length * math.prod(weight) + 2 * batch * length * length * (weight[1] // 3)


def _einsum(equation: str, inputs: Sequence[Shape | None]) -> int:
    """Multiply-adds of an Einsum: the product of all index sizes, once for each product of operands."""
    terms = equation.replace(" ", "").partition("->")[0].split(",")
    if len(terms) != len(inputs) or "." in equation:
        return 0
    sizes: dict[str, int] = {}
    for term, shape in zip(terms, inputs, strict=True):
        if shape is None or len(shape) != len(term):
            return 0
        sizes |= dict(zip(term, shape, strict=True))
    return math.prod(sizes.values()) * max(1, len(terms) - 1)


# The bits of types whose names do not end in the number of bits.
_BITS = {"bfloat16": 16, "bool": 8, "string": 0, "int4": 4, "uint4": 4, "int2": 2, "uint2": 2, "float4e2m1": 4}
VIEWS = frozenset(_words("Reshape Squeeze Unsqueeze Flatten Identity Dropout"))
_SHAPES = frozenset(_words("Shape Size Constant ConstantOfShape Range EyeLike"))
_PICKS = frozenset(_words("Gather GatherElements GatherND Slice"))
_MOVES = frozenset(
    _words(
        "Cast CastLike Concat Split Transpose Expand Tile Pad Gather GatherElements GatherND Slice Where ScatterND "
        "ScatterElements ReorderInput ReorderOutput DepthToSpace SpaceToDepth QLinearConcat Resize Trilu OneHot NonZero"
    )
)
_ONE_EACH = (
    "Add Sub Mul Div Neg Abs Relu Clip Max Min Pow Sqrt Exp Log Reciprocal Floor Ceil Round Sign Not And Or Xor Equal "
    "Greater Less GreaterOrEqual LessOrEqual Mod LeakyRelu PRelu Erf Tanh Sigmoid Sin Cos IsNaN IsInf Sum Softplus "
    "QLinearAdd QLinearMul QLinearLeakyRelu QLinearSigmoid"
)
_ONE_READ = (
    "MaxPool AveragePool GlobalAveragePool GlobalMaxPool ReduceMean ReduceSum ReduceMax ReduceMin ArgMax ArgMin CumSum "
    "TopK QLinearAveragePool QLinearGlobalAveragePool QLinearReduceMean"
)
_NORMALIZE = (
    "LayerNormalization SimplifiedLayerNormalization RMSNormalization InstanceNormalization SkipLayerNormalization "
    "GroupNormalization DynamicQuantizeLinear"
)
# Operations for each output value.
_PER_VALUE = {
    **dict.fromkeys(_words(_ONE_EACH), 1),
    **dict.fromkeys(_words("BatchNormalization DequantizeLinear HardSwish Swish Mish Silu QuickGelu"), 2),
    **dict.fromkeys(_words("QuantizeLinear HardSigmoid Elu Selu Celu ThresholdedRelu Softsign"), 3),
    **dict.fromkeys(_words("Gelu FastGelu BiasGelu FusedGelu Softmax LogSoftmax QLinearSoftmax"), 5),
}
# Operations for each input value.
_PER_INPUT = {
    **dict.fromkeys(_words(_ONE_READ), 1),
    **dict.fromkeys(_words("LpPool ReduceProd ReduceL1 ReduceL2 ReduceSumSquare ReduceLogSumExp LRN"), 2),
    **dict.fromkeys(_words(_NORMALIZE), 8),
}
# Operators whose output values depend only on input values at the same position; they can be fused with their input.
_ROWS = frozenset(_words("Softmax LogSoftmax QLinearSoftmax"))
ELEMENTWISE = frozenset(_PER_VALUE) - _ROWS | VIEWS | {"Cast", "CastLike"}
# Operators without products whose costs are known.
_COUNTED = VIEWS | _SHAPES | _MOVES | _PER_VALUE.keys() | _PER_INPUT.keys()


def size_bytes(tensor: TensorType) -> int:
    """Bytes of a tensor; types under a byte are packed."""
    dtype, shape = tensor
    return math.ceil(math.prod(shape) * _bits(dtype) / 8)


def _bits(dtype: str) -> int:
    if dtype in _BITS:
        return _BITS[dtype]
    if dtype.startswith("float8"):
        return 8
    digits = "".join(character for character in dtype if character.isdigit())
    return int(digits) if digits else 32


def cost_of(
    name: str,
    op_type: str,
    inputs: Sequence[TensorType | None],
    outputs: Sequence[TensorType],
    dtype: str | None = None,
    equation: str = "",
) -> NodeCost:
    """The cost of a node. inputs, outputs: (dtype, shape) of each, None for a missing input.

    dtype: of the computation; None: the first input's.  equation: of an Einsum.
    """
    present_inputs = [spec for spec in inputs if spec is not None]
    shapes = [None if spec is None else spec[1] for spec in inputs]
    macs = multiplications(op_type, shapes, [shape for _, shape in outputs], equation)
    input_count = math.prod(present_inputs[0][1]) if present_inputs else 0
    output_count = math.prod(outputs[0][1]) if outputs else 0
    value_ops = _PER_VALUE.get(op_type, 0) * output_count + _PER_INPUT.get(op_type, 0) * input_count
    is_countable = macs is not None or op_type in _COUNTED
    output_bytes = 0 if op_type in VIEWS else sum(map(size_bytes, outputs))
    input_bytes = [0] if op_type in VIEWS | _SHAPES else list(map(size_bytes, present_inputs))
    if op_type in _PICKS and input_bytes:
        input_bytes[0] = min(input_bytes[0], output_bytes)
    cost_dtype = dtype or (present_inputs[0][0] if present_inputs else outputs[0][0] if outputs else "float32")
    operations, read_bytes = 2 * (macs or 0) + value_ops, sum(input_bytes)
    return NodeCost(name, op_type, cost_dtype, macs or 0, operations, read_bytes, output_bytes, is_countable)


def graph_cost(costs: Sequence[NodeCost], working_bytes: int, unsized_nodes: Sequence[str]) -> GraphCost:
    """The cost of a graph from the costs of its nodes; its dtype is the dtype of most operations."""
    operation_counts = operations_by_dtype(costs)
    return GraphCost(
        name="all",
        op_type="",
        dtype=max(operation_counts, key=operation_counts.__getitem__, default="float32"),
        macs=sum(cost.macs for cost in costs),
        operations=sum(cost.operations for cost in costs),
        read_bytes=sum(cost.read_bytes for cost in costs),
        written_bytes=sum(cost.written_bytes for cost in costs),
        known=all(cost.known for cost in costs),
        nodes=len(costs),
        working_bytes=working_bytes,
        by_dtype=operation_counts,
        uncounted=list_uncounted(costs),
        unsized=tuple(unsized_nodes),
    )


def operations_by_dtype(costs: Iterable[NodeCost]) -> Mapping[str, int]:
    """Operations by dtype."""
    operation_counts: dict[str, int] = {}
    for cost in costs:
        operation_counts[cost.dtype] = operation_counts.get(cost.dtype, 0) + cost.operations
    return operation_counts


def list_uncounted(costs: Iterable[NodeCost]) -> tuple[str, ...]:
    """The operators whose operations are not known, each once, in order."""
    return tuple(dict.fromkeys(cost.op_type for cost in costs if not cost.known))


# The costs of an ONNX graph at given sizes of its dims, by ONNX's own shape inference.
#
# A product of dequantized tensors has the operands' stored type, because an engine computes in that type.

_WEIGHTED = {*CONVOLUTIONS, *PRODUCTS, *TRANSPOSED_CONVOLUTIONS}


@dataclass(frozen=True)
class GraphNode:
    """A node with its cost, and the bytes of the tensors that it reads and writes, by name."""

    cost: NodeCost
    reads: Mapping[str, int]
    makes: Mapping[str, int]


@dataclass(frozen=True)
class GraphCosts:
    """The nodes of a graph. unsized: names of nodes with a tensor of unknown shape, which counts 0 bytes."""

    nodes: Sequence[GraphNode]
    outputs: Sequence[str]
    unsized: Sequence[str] = field(default=())

    @property
    def working_bytes(self) -> int:
        """The working set of a run: inputs and constants, and the greatest sum of other tensors alive at once."""
        produced_sizes = {name: size for node in self.nodes for name, size in node.makes.items()}
        read_sizes = {name: size for node in self.nodes for name, size in node.reads.items()}
        last_readers = {name: index for index, node in enumerate(self.nodes) for name in node.reads}
        last_readers |= dict.fromkeys(self.outputs, len(self.nodes))
        live_bytes = peak = 0
        for index, node in enumerate(self.nodes):
            live_bytes += sum(node.makes.values())
            peak = max(peak, live_bytes)
            names = produced_sizes.keys() & {*node.reads, *node.makes}
            live_bytes -= sum(produced_sizes[name] for name in names if last_readers.get(name, index) == index)
        return sum(size for name, size in read_sizes.items() if name not in produced_sizes) + peak

    @property
    def costs(self) -> list[NodeCost]:
        """The cost of each node."""
        return [node.cost for node in self.nodes]


def graph_costs(path: Path, inputs: Sequence[TensorSpec], sizes: Mapping[str, int]) -> GraphCosts:
    """The costs of the ONNX model at `path`. inputs: with named dims.  sizes: of each named dim.

    Raises ModelError when its shapes contradict each other.
    """
    import onnx

    from builders.onnx_graphs.outline import load_outline

    model = load_outline(path)
    # Shapes of other tensors follow from those of the inputs.
    shapes = {spec.name: spec.at(sizes) for spec in inputs}
    del model.graph.value_info[:]
    for value in model.graph.input:
        for dim, size in zip(value.type.tensor_type.shape.dim, shapes.get(value.name, ()), strict=False):
            dim.dim_value = size
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")
    try:
        typed_model = onnx.shape_inference.infer_shapes(model, data_prop=True)
    except (onnx.shape_inference.InferenceError, ValueError) as error:
        raise ModelError(f"shapes of {path.name} at {dict(sizes)} cannot be inferred: {error}") from error
    return count(typed_model.graph)


def count(graph: "GraphProto") -> GraphCosts:
    """The costs of a graph with known shapes. A control-flow operator counts as one node with its tensors."""
    tensor_types: dict[str, TensorType] = {}
    for value in (*graph.input, *graph.value_info, *graph.output):
        tensor = value.type.tensor_type
        if tensor.HasField("shape") and all(dim.HasField("dim_value") for dim in tensor.shape.dim):
            tensor_types[value.name] = element_name(tensor.elem_type), tuple(dim.dim_value for dim in tensor.shape.dim)
    for initializer in graph.initializer:
        tensor_types[initializer.name] = (element_name(initializer.data_type), tuple(initializer.dims))
    dequantizers = [node for node in graph.node if node.op_type == "DequantizeLinear"]
    quantized_types = {node.output[0]: tensor_types.get(node.input[0]) for node in dequantizers}
    nodes, unsized_nodes = [], []
    for node in graph.node:
        operands = [None if not name else tensor_types.get(name) for name in node.input]
        results = [tensor_types.get(name) for name in node.output if name]
        name = node.name or f"{node.op_type}_{next(iter(node.output), '')}"
        if None in results or any(
            spec is None and input_name for spec, input_name in zip(operands, node.input, strict=True)
        ):
            unsized_nodes.append(name)
        output_types = [spec for spec in results if spec is not None]
        equation = next((attribute.s.decode() for attribute in node.attribute if attribute.name == "equation"), "")
        cost = cost_of(name, node.op_type, operands, output_types, _dtype(node, quantized_types), equation)
        nodes.append(_with_edges(node, cost, operands, dict(zip(node.output, results, strict=False))))
    return GraphCosts(nodes, [value.name for value in graph.output], unsized_nodes)


def _with_edges(
    node: "NodeProto", cost: NodeCost, ins: Sequence[TensorType | None], outs: Mapping[str, TensorType | None]
) -> GraphNode:
    moves = cost.moved_bytes > 0
    sizes = {name: size_bytes(spec) if spec else 0 for name, spec in zip(node.input, ins, strict=True) if name}
    first_input = next(iter(sizes), None)
    if first_input is not None:  # only the selected elements count
        others = sum(size for name, size in sizes.items() if name != first_input)
        sizes[first_input] = max(0, min(sizes[first_input], cost.read_bytes - others)) if moves else sizes[first_input]
    return GraphNode(cost, sizes, {name: size_bytes(spec) if spec else 0 for name, spec in outs.items() if name})


def _dtype(node: "NodeProto", behind: Mapping[str, TensorType | None]) -> str | None:
    """The stored type of the operands, if both come from a DequantizeLinear; else None."""
    if node.op_type not in _WEIGHTED or len(node.input) < 2:
        return None
    operands = [behind.get(name) for name in node.input[:2]]
    return operands[0][0] if operands[0] and operands[1] else None


# The limits of this machine (roofs), measured with the engine's own runtime, threads and process (Williams, Waterman &
# Patterson, "Roofline", CACM 52, 2009).
#
# Operations per second: a product of square matrices for each dtype. Bytes per second: the addition of a number to an
# array (as STREAM's Scale, McCalpin 1995: one array is read and one written), for arrays larger than every cache and
# for arrays that fit into a cache. Overhead: the time of a nearly empty run, and of one more node in a run.
#
# A roof is the best of several tries; overheads are medians, like the run times that they are compared with.

Opener = Callable[[Path], AbstractContextManager[Session]]

# Rows of the square matrices; nodes of the chain that measures the overhead of a node; bytes of arrays that fit into a
# cache; and the number of consecutive additions.
SIDE = 512
NODES = 64
CACHED_BYTES = 256 << 10
CHAIN = 16
# The assumed size of the last-level cache if it is unknown, and the most bytes of the array for memory bandwidth.
_CACHE_BYTES, _MOST_BYTES = 32 << 20, 64 << 20
_LEAST = 3


def measure_roofs(opener: Opener, workdir: Path, dtypes: Collection[str], seconds: float = 0.02) -> Roofs:
    """Measure each limit for about `seconds`. opener: opens an ONNX file as the engine's runtime does.

    workdir: for the ONNX files.  dtypes: of the engine's computations; float32 is always measured.
    Raises the errors of `opener`.
    """
    rates = {}
    for kind in sorted({"float32", *map(product_dtype, dtypes)}):
        model, inputs = _product_roofs(kind)
        rates[kind] = 2.0 * SIDE**3 / _best(opener, model, inputs, workdir, seconds)
    cache_sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        scale = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:], 1)
        if text.rstrip("KM").isdecimal():
            cache_sizes.append(int(text.rstrip("KM")) * scale)
    cache = max(cache_sizes, default=_CACHE_BYTES)
    large_array, small_array = np.ones(min(cache, _MOST_BYTES) // 4, np.float32), np.ones(CACHED_BYTES // 4, np.float32)
    unit = np.ones(1, np.float32)
    memory = (
        2 * large_array.nbytes / _best(opener, chain_of_additions(1), {"x": large_array, "c": unit}, workdir, seconds)
    )
    chain_times = (
        _times(opener, chain_of_additions(count), {"x": unit, "c": unit}, workdir, seconds / 2) for count in (1, NODES)
    )
    run_1, run_n = (float(statistics.median(times)) for times in chain_times)
    node_s = max((run_n - run_1) / (NODES - 1), 1e-9)
    chain_s = _best(opener, chain_of_additions(CHAIN), {"x": small_array, "c": unit}, workdir, seconds)
    moved_bytes = 2 * small_array.nbytes * CHAIN
    busy_s = max(chain_s - max(run_1 - node_s, 0.0) - CHAIN * node_s, 0.25 * chain_s)
    cached_rate = float(max(moved_bytes / busy_s, memory))
    return Roofs(rates, memory, cached_rate, cache // 2, max(run_1 - node_s, 0.0), node_s)


def _best(opener: Opener, model: "ModelProto", inputs: Tensors, workdir: Path, seconds: float) -> float:
    return float(_times(opener, model, inputs, workdir, seconds).min())


def _times(opener: Opener, model: "ModelProto", inputs: Tensors, workdir: Path, seconds: float) -> Array:
    path = workdir / "roof.onnx"
    path.write_bytes(model.SerializeToString())
    with opener(path) as session:
        session.run(inputs)
        call = session.prepare_call(inputs) or partial(session.run, inputs)
        return latencies(call, seconds, _LEAST)


def _product_roofs(kind: str) -> tuple["ModelProto", Tensors]:
    """A model of one product with a constant square matrix, as in a layer, and its inputs."""
    from onnx import numpy_helper, parser

    rng = np.random.default_rng(0)
    if kind == "int8":
        left, right = rng.integers(0, 255, (SIDE, SIDE), np.uint8), rng.integers(-127, 127, (SIDE, SIDE), np.int8)
        text = "(uint8[n, k] x) => (int32[n, m] y) { y = MatMulInteger (x, w) }"
    else:
        left, right = (rng.standard_normal((SIDE, SIDE), np.float32) for _ in range(2))
        text = "(float[n, k] x) => (float[n, m] y) { y = MatMul (x, w) }"
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["": 20]> roof {text}')
    model.graph.initializer.append(numpy_helper.from_array(right, "w"))
    return model, {"x": left}
