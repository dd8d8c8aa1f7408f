"""The cost of a node: multiplications, operations, bytes; from the types and shapes of its inputs and outputs.

Bytes are those that a node reads and writes when every tensor comes from memory and goes back to it once. Operators
that only change a tensor's shape move none; those that select (Gather, Slice) read what they select. Operations are 2
for each multiply-add, else a few for each value (`_PER_VALUE`, `_PER_INPUT`); an exponential counts as one.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

from builders.backends.optional_methods import TensorType
from enginesmith.core.reports.breakdown import GraphCost, NodeCost
from enginesmith.core.types import Shape


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
    """Multiplications for each output value of a node with such a weight (for each input value of a ConvTranspose).

    weight: (out, in / groups, kernel...), or that of the matrix.  transposed: whether the matrix is (out, in).
    """
    if op_type in CONVOLUTIONS or op_type in TRANSPOSED_CONVOLUTIONS:
        return math.prod(weight[1:])
    return weight[-1] if transposed or len(weight) == 1 else weight[-2]


def multiplications(
    op_type: str, inputs: Sequence[Shape | None], outputs: Sequence[Shape], equation: str = ""
) -> int | None:
    """Multiply-adds of one execution of a node; None for an operator without products, 0 where a shape is missing.

    inputs: None for one that is left out or unknown.  equation: of an Einsum.
    """
    if op_type in CONVOLUTIONS:
        weight = _at(inputs, CONVOLUTIONS[op_type])
        return math.prod(outputs[0]) * per_value(op_type, weight) if weight and outputs else 0
    if op_type in TRANSPOSED_CONVOLUTIONS:
        weight, given = _at(inputs, TRANSPOSED_CONVOLUTIONS[op_type]), _at(inputs, 0)
        return math.prod(given) * per_value(op_type, weight) if weight and given else 0
    if op_type in PRODUCTS:
        return _product(op_type, inputs, outputs)
    if op_type in RECURRENT:
        return _recurrent(inputs)
    if op_type == "MatMulNBits":  # the weight is packed: its sizes are not the matrix's
        given = _at(inputs, 0)
        return math.prod(outputs[0]) * given[-1] if given and outputs else 0
    if op_type == "Attention":
        return _attention(inputs)
    if op_type == "Einsum":
        return _einsum(equation, inputs)
    return None


def _at(shapes: Sequence[Shape | None], index: int) -> Shape | None:
    return shapes[index] if index < len(shapes) else None


def _product(op_type: str, inputs: Sequence[Shape | None], outputs: Sequence[Shape]) -> int:
    left, right = _at(inputs, 0), _at(inputs, PRODUCTS[op_type])
    if not left or not right or not outputs:
        return 0
    # Whether the matrix is transposed follows from which of its sizes is the last one of the result.
    transposed = len(right) > 1 and right[-1] != outputs[0][-1]
    return math.prod(outputs[0]) * per_value(op_type, right, transposed)


def _recurrent(inputs: Sequence[Shape | None]) -> int:
    """inputs: (length, batch, in) and two weights (directions, gates * hidden, in or hidden), applied at each step."""
    given, weight, again = (_at(inputs, index) for index in range(3))
    if not given or not weight or not again:
        return 0
    return given[0] * given[1] * (math.prod(weight) + math.prod(again))


def _attention(inputs: Sequence[Shape | None]) -> int:
    """ONNX Runtime's fused attention: input (batch, length, in), weight (in, 3 * hidden)."""
    given, weight = _at(inputs, 0), _at(inputs, 1)
    if not given or not weight or len(given) != 3 or len(weight) != 2:
        return 0
    batch, length, _ = given
    return batch * length * math.prod(weight) + 2 * batch * length * length * (weight[1] // 3)


def _einsum(equation: str, inputs: Sequence[Shape | None]) -> int:
    """The product of the sizes of all indices, once for each product of operands."""
    terms = equation.replace(" ", "").partition("->")[0].split(",")
    if len(terms) != len(inputs) or "." in equation:
        return 0
    sizes: dict[str, int] = {}
    for term, shape in zip(terms, inputs, strict=True):
        if shape is None or len(shape) != len(term):
            return 0
        sizes |= dict(zip(term, shape, strict=True))
    return math.prod(sizes.values()) * max(1, len(terms) - 1)


# Bits of types whose names do not end in them.
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
# Operations for each value that comes out.
_PER_VALUE = {
    **dict.fromkeys(_words(_ONE_EACH), 1),
    **dict.fromkeys(_words("BatchNormalization DequantizeLinear HardSwish Swish Mish Silu QuickGelu"), 2),
    **dict.fromkeys(_words("QuantizeLinear HardSigmoid Elu Selu Celu ThresholdedRelu Softsign"), 3),
    **dict.fromkeys(_words("Gelu FastGelu BiasGelu FusedGelu Softmax LogSoftmax QLinearSoftmax"), 5),
}
# Operations for each value that goes in.
_PER_INPUT = {
    **dict.fromkeys(_words(_ONE_READ), 1),
    **dict.fromkeys(_words("LpPool ReduceProd ReduceL1 ReduceL2 ReduceSumSquare ReduceLogSumExp LRN"), 2),
    **dict.fromkeys(_words(_NORMALIZE), 8),
}
# Operators whose output values depend on input values at the same place alone; they can be fused with their input.
_ROWS = frozenset(_words("Softmax LogSoftmax QLinearSoftmax"))
ELEMENTWISE = frozenset(_PER_VALUE) - _ROWS | VIEWS | {"Cast", "CastLike"}


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
    """The cost of a node. inputs, outputs: (dtype, shape) of each, None for an input that is left out.

    dtype: that it computes in; None: that of the first input.  equation: of an Einsum.
    """
    given = [item for item in inputs if item is not None]
    shapes = [None if item is None else item[1] for item in inputs]
    macs = multiplications(op_type, shapes, [shape for _, shape in outputs], equation)
    values_in = math.prod(given[0][1]) if given else 0
    values_out = math.prod(outputs[0][1]) if outputs else 0
    each = _PER_VALUE.get(op_type, 0) * values_out + _PER_INPUT.get(op_type, 0) * values_in
    known = macs is not None or op_type in _PER_VALUE or op_type in _PER_INPUT or op_type in VIEWS | _SHAPES | _MOVES
    written = 0 if op_type in VIEWS else sum(map(size_bytes, outputs))
    read = [0] if op_type in VIEWS | _SHAPES else list(map(size_bytes, given))
    if op_type in _PICKS and read:
        read[0] = min(read[0], written)
    chosen = dtype or (given[0][0] if given else outputs[0][0] if outputs else "float32")
    return NodeCost(name, op_type, chosen, macs or 0, 2 * (macs or 0) + each, sum(read), written, known)


def graph_cost(costs: Sequence[NodeCost], working_bytes: int, unsized: Sequence[str]) -> GraphCost:
    """The cost of a graph from those of its nodes; its dtype is that of most operations.

    working_bytes, unsized: as in `GraphCosts`.
    """
    by_type = operations_by_dtype(costs)
    return GraphCost(
        name="all",
        op_type="",
        dtype=max(by_type, key=by_type.__getitem__, default="float32"),
        macs=sum(item.macs for item in costs),
        operations=sum(item.operations for item in costs),
        read_bytes=sum(item.read_bytes for item in costs),
        written_bytes=sum(item.written_bytes for item in costs),
        known=all(item.known for item in costs),
        nodes=len(costs),
        working_bytes=working_bytes,
        by_dtype=by_type,
        uncounted=list_uncounted(costs),
        unsized=tuple(unsized),
    )


def operations_by_dtype(costs: Iterable[NodeCost]) -> Mapping[str, int]:
    """Operations by dtype."""
    found: dict[str, int] = {}
    for item in costs:
        found[item.dtype] = found.get(item.dtype, 0) + item.operations
    return found


def list_uncounted(costs: Iterable[NodeCost]) -> tuple[str, ...]:
    """The operators whose operations are not known, each once, in order."""
    return tuple(dict.fromkeys(item.op_type for item in costs if not item.known))
