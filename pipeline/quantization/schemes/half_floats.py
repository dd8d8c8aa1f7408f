"""fp16 and bf16: rounding to them, the operators that have a form in them, and the tensors that they cannot hold.

The size of a tensor follows from, best first: its measured range; the value of a constant; and, if nothing was
measured, propagation: an additive mask of -1e9 makes each sum with it as large, up to an operator that bounds its
result. A tensor that grows with the square of the inputs needs more headroom than they do.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, defs, numpy_helper

from builders.onnx_graphs.weights import to_array
from enginesmith.arrays import Array
from pipeline.quantization.ranges import Ranges


@dataclass(frozen=True)
class HalfFormat:
    """A 16-bit float type.

    largest: its largest finite value.  tiny: its smallest normal value.
    narrow_range: whether ordinary networks leave its range (fp16: 65504) or only extreme ones (bf16: 3.39e38).
    """

    name: str
    element_type: int
    dtype: np.dtype
    largest: float
    tiny: float
    narrow_range: bool

    def narrow(self, values: Array) -> Array:
        """The values, of any shape, rounded to this type, to nearest even; too large values become infinite."""
        with np.errstate(over="ignore", under="ignore"):
            return values.astype(self.dtype)


HALVES: Mapping[str, HalfFormat] = {
    "fp16": HalfFormat("fp16", TensorProto.FLOAT16, np.dtype(np.float16), 65504.0, 2.0**-14, narrow_range=True),
    "bf16": HalfFormat(
        "bf16",
        TensorProto.BFLOAT16,
        np.dtype(ml_dtypes.bfloat16),
        (2 - 2.0**-7) * 2.0**127,
        2.0**-126,
        narrow_range=False,
    ),
}

FLOAT = TensorProto.FLOAT
# Operators whose result type follows an attribute, or the input in a way that the schema does not state; and
# MeanVarianceNormalization and TreeEnsemble, whose fp16 form exists in onnx, but onnxruntime does not load it.
_DRAWING = {"Bernoulli", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
_UNCASTABLE = {*_DRAWING, "AffineGrid", "EyeLike", "MeanVarianceNormalization", "TreeEnsemble"}
# Calibration has only a sample of the inputs in use: a measured range counts as too large from half the limit on.
HEADROOM = 2.0
# A proof multiplies inputs by up to this (`FACTORS` of `validation/fuzz/cases.py`, which is no part of a graph's key).
LARGEST_FACTOR = 64.0
_REDUCING = {"ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum"}
_ARITHMETIC = {"Abs", "Add", "Max", "Mean", "Min", "Mul", "Neg", "Sub", "Sum", *_REDUCING}
_INDEXING = {"Gather", "GatherElements", "GatherND", "Pad", "Slice", "Split", "Tile", "Where"}
_MOVING = {"Concat", "Expand", "Flatten", "Reshape", "Squeeze", "Transpose", "Unsqueeze"}
# Operators whose results are as large as their inputs, or larger.
_PASSING = _ARITHMETIC | _INDEXING | _MOVING | {"Cast", "Dropout", "Identity"}
# Operators whose results exceed fp16 for ordinary inputs (a square from 256 on, an exponential from 11.1 on).
_EXPLOSIVE = {"CumSum", "Exp", "Pow", "ReduceL2", "ReduceProd", "ReduceSumSquare"}

# Operators whose results grow with each factor, and operators with bounded results.
_MULTIPLYING = {"Einsum", "MatMul", "Mul"}
_BOUNDED = {
    *("Erf", "GroupNormalization", "HardSigmoid", "InstanceNormalization", "LayerNormalization"),
    *("LpNormalization", "MeanVarianceNormalization", "RMSNormalization", "Sigmoid", "Sign", "Softmax", "Softsign"),
    *("Tanh", "Sin", "Cos"),
}
_SQUARE = 1.5
_FLOATS = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE}
_LARGEST_BOUND = 255.0  # of a Clip: the square of its result is below fp16's 65504
# Operators that read positions or angles -> (index of the operand, harmless error): 0 for a grid, whose unit is half an
# image; 1/16 pixel for a box; 1/256 radian.
_PLACES = {
    "Cos": (0, 2.0**-8),
    "GridSample": (1, 0.0),
    "NonMaxSuppression": (0, 2.0**-4),
    "RoiAlign": (1, 2.0**-4),
    "Sin": (0, 2.0**-8),
}


def can_narrow(node: NodeProto, half: HalfFormat, types: Mapping[str, int], opset: int) -> bool:
    """Whether all float outputs of a node can be `half`, or, if it has no such outputs, at least one float input.

    types: name -> ONNX's element type.  opset: of the model."""
    if node.op_type in _UNCASTABLE:
        return False
    if typed_by_attribute(node):
        return True
    input_indices, output_indices = narrowable_positions(node, half, types, opset)
    float_indices = {i for i, name in enumerate(node.output) if types.get(name) == FLOAT}
    return bool(input_indices) and float_indices <= output_indices


def narrowable_positions(
    node: NodeProto, half: HalfFormat, types: Mapping[str, int], opset: int
) -> tuple[set[int], set[int]]:
    """Positions of the float inputs that the schema lets be `half`, and of the results that follow them.

    Both are empty for an operator that onnx does not know.

    types: name -> ONNX's element type.  opset: of the model.
    """
    try:
        schema = defs.get_schema(node.op_type, opset, node.domain)
    except defs.SchemaError:
        return set(), set()
    half_type = f"tensor({half.dtype.name})"
    allowed_types = {
        constraint.type_param_str for constraint in schema.type_constraints if half_type in constraint.allowed_type_strs
    }
    formal_types = {i: _formal(schema.inputs, i) for i, name in enumerate(node.input) if types.get(name) == FLOAT}
    input_indices = {i for i, type_str in formal_types.items() if type_str in allowed_types}
    input_types = {formal_types[i] for i in input_indices}
    return input_indices, {i for i in range(len(node.output)) if _formal(schema.outputs, i) in input_types}


def typed_by_attribute(node: NodeProto) -> bool:
    """Whether an attribute of the node says that its result is fp32 (Cast, ConstantOfShape)."""
    if node.op_type == "Cast":
        return any(attribute.name == "to" and attribute.i == FLOAT for attribute in node.attribute)
    fill_types = [attribute.t.data_type for attribute in node.attribute if attribute.name == "value"]
    return node.op_type == "ConstantOfShape" and fill_types == [FLOAT]


def retype(node: NodeProto, half: HalfFormat) -> None:
    """Set the attribute of a node that states the type of its result to `half`, in place."""
    for attribute in node.attribute:
        if attribute.name == "to":
            attribute.i = half.element_type
        if attribute.name == "value":
            attribute.t.CopyFrom(numpy_helper.from_array(half.narrow(to_array(attribute.t))))


def _formal(parameters: Sequence[defs.OpSchema.FormalParameter], index: int) -> str:
    """Type variable of the formal parameter at a position; the last one repeats when it is variadic."""
    return parameters[min(index, len(parameters) - 1)].type_str


def find_too_large(
    model: ModelProto, half: HalfFormat, types: Mapping[str, int], ranges: Ranges | None, growth: float
) -> dict[str, str]:
    """The tensors of a tidy model that `half` cannot hold, each with the reason. types: name -> ONNX's element type.
    growth: factor by which inputs may exceed the measured ones, for tensors that grow with an input's square."""
    reasons = dict[str, str]()
    for tensor in model.graph.initializer:
        if tensor.data_type == FLOAT:
            magnitudes = np.abs(to_array(tensor))
            # Infinities can be represented and do not count.
            amax = float(np.max(magnitudes, initial=0.0, where=np.isfinite(magnitudes)))
            if not np.isfinite(half.narrow(np.array(amax)).astype(np.float32)):
                reasons[tensor.name] = (
                    f"constant {tensor.name!r} reaches {amax:g}, {half.name} ends at {half.largest:g}"
                )
    for value in model.graph.input:
        if reason := _check_measured(value.name, half, ranges, HEADROOM):
            reasons[value.name] = reason
    degrees = _degrees(model.graph, types)
    for node in model.graph.node:
        for name in node.output:
            headroom = max(HEADROOM, growth ** min(degrees[name], 2.0)) if degrees[name] >= _SQUARE else HEADROOM
            measured_names = _check_measured(name, half, ranges, headroom)
            if reason := _find_inherited(node, reasons, half) if measured_names is None else measured_names:
                reasons[name] = reason
    return reasons


def _degrees(graph: GraphProto, types: Mapping[str, int]) -> dict[str, float]:
    """By tensor, the power of the inputs' scale with which it grows: 2 for a product of two activations, 1 for its
    root, 0 for a ratio of two products, a bounded tensor and a tensor that is no float, -1 for a reciprocal. A norm
    exceeds fp16 long before its quotient does."""
    constants = {tensor.name: tensor for tensor in graph.initializer}
    degrees = {value.name: float(types.get(value.name) == FLOAT) for value in graph.input}
    for node in graph.node:
        powers = [degrees.get(name, 0.0) for name in node.input if name] or [0.0]
        exponent = constants.get(node.input[1]) if node.op_type == "Pow" else None
        if node.op_type in _BOUNDED or _is_clipped(node, constants):
            degree = 0.0
        elif node.op_type in _MULTIPLYING:
            degree = sum(powers)
        elif node.op_type == "Div":
            degree = powers[0] - powers[1]
        elif node.op_type == "Reciprocal":
            degree = -powers[0]
        elif node.op_type == "Sqrt":
            degree = powers[0] / 2
        elif node.op_type == "ReduceSumSquare" or exponent is not None:
            degree = powers[0] * (2.0 if exponent is None else max(to_array(exponent).ravel().tolist(), default=1.0))
        else:
            degree = max(powers)
        degrees |= {name: degree if types.get(name, FLOAT) in _FLOATS else 0.0 for name in node.output}
    return degrees


def _is_clipped(node: NodeProto, constants: Mapping[str, TensorProto]) -> bool:
    """Whether a node is a Clip with two small constant bounds."""
    bounds = [to_array(constants[name]) for name in node.input[1:] if node.op_type == "Clip" and name in constants]
    return len(bounds) == 2 and all(np.all(np.abs(bound) <= _LARGEST_BOUND) for bound in bounds)


def find_inexact(model: ModelProto, half: HalfFormat, ranges: Ranges | None) -> dict[str, str]:
    """The tensors of a tidy model whose absolute error matters and is too large in `half`, with the reason: positions
    at which images are sampled, boxes, angles; and the tensors before them, up to layers with weights."""
    reasons = dict[str, str]()
    rounding = float(ml_dtypes.finfo(half.dtype).eps) / 2
    constants = {tensor.name for tensor in model.graph.initializer}
    makers = {name: node for node in model.graph.node for name in node.output}
    computed_names = {name for name, node in makers.items() if node.op_type in _PASSING | {"Div", "MatMul"}}
    layers = (node for node in model.graph.node if node.op_type == "MatMul" and node.input[1] in constants)
    computed_names -= {node.output[0] for node in layers}
    for node in reversed(model.graph.node):
        index, allowed_error = _PLACES.get(node.op_type, (0, math.inf))
        amax = ranges.reach(node.input[index]) if ranges and node.op_type in _PLACES else None
        if node.op_type in _PLACES and (amax is None or amax * rounding > allowed_error):
            name = node.input[index]
            if name in computed_names or name not in makers:
                reasons.setdefault(name, f"{node.op_type} reads {name!r}, which {half.name} rounds too far")
        if reason := next((reasons[name] for name in node.output if name in reasons), ""):
            sources = node.input[:1] if node.op_type in _MOVING | _INDEXING - {"Where"} else node.input
            reasons |= dict.fromkeys(computed_names.intersection(sources).difference(reasons), reason)
    return reasons


def _check_measured(name: str, half: HalfFormat, ranges: Ranges | None, headroom: float) -> str | None:
    """The reason why a measured tensor is too large; '' if it is not, None if it was not measured."""
    amax = ranges.reach(name) if ranges else None
    if amax is None:
        return None
    if amax * headroom <= half.largest:
        return ""
    growth_text = "" if headroom == HEADROOM else " and grows with the square of the inputs"
    return f"tensor {name!r} reached {amax:g} in calibration{growth_text}; {half.name} ends at {half.largest:g}"


def _find_inherited(node: NodeProto, reasons: Mapping[str, str], half: HalfFormat) -> str | None:
    """Why the unmeasured results of a node may be too large."""
    if half.narrow_range and (node.op_type in _EXPLOSIVE or (node.op_type == "Mul" and len({*node.input}) == 1)):
        return f"{node.op_type} {node.name!r} may leave {half.name}, and its range was not measured"
    if node.op_type not in _PASSING:
        return None
    return next((reasons[name] for name in node.input if name in reasons), None)
