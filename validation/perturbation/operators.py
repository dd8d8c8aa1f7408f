"""Which ONNX operators round their results, and the types and ranks of a model's tensors."""

import math
from typing import TYPE_CHECKING

from builders.onnx_graphs.bodies import list_bodies

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto

# Operators whose results are copied or exact: they do not round.
COPIES = frozenset(
    (
        *("Abs", "ArgMax", "ArgMin", "BitShift", "Cast", "CastLike", "Ceil", "CenterCropPad", "Clip", "Compress"),
        *("Concat", "ConcatFromSequence", "Constant", "ConstantOfShape", "DepthToSpace", "DequantizeLinear"),
        *("DynamicQuantizeLinear", "Dropout", "Expand", "EyeLike", "Flatten", "Floor", "Gather", "GatherElements"),
        *("GatherND", "GlobalMaxPool", "Identity", "If", "Loop", "Max", "MaxPool", "MaxUnpool", "Min", "Neg"),
        *("NonMaxSuppression", "OneHot", "Optional", "OptionalGetElement", "Pad", "QuantizeLinear", "ReduceMax"),
        *("ReduceMin", "Relu", "Reshape", "ReverseSequence", "Round", "Scan", "Scatter", "ScatterElements"),
        *("ScatterND", "SequenceAt", "Shape", "Sign", "Size", "Slice", "SpaceToDepth", "Split", "SplitToSequence"),
        *("Squeeze", "Tile", "TopK", "Transpose", "Trilu", "Unique", "Unsqueeze", "Where"),
    )
)
# Operators that round each result once (IEEE 754-2019, 5.4.1), or not at all where they are fused.
CORRECT = frozenset(("Add", "Div", "Mul", "Sqrt", "Sub"))
# Operators that kernels compute from parts of the size of 1, so that their results are off by as much wherever they are
# near zero, and by how many units of fp32's rounding (2^-24). ONNX Runtime's Sigmoid is a rational function plus 0.5:
# 2.8 from float64's over -100 .. 30, 2.3 where the result is below 0.001; its Elu is exp(x) - 1. LSTM and GRU multiply
# by sigmoids.
OF_ONE = {"Sigmoid": 4, "LSTM": 4, "GRU": 4, "Elu": 1, "Selu": 1, "Celu": 1}
# Operators whose float constants determine sizes.
SIZES = frozenset(("Range", "Resize"))
RANDOM = frozenset(
    ["Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"]
)
# Constants of at most so many elements may be shapes, which inference needs for the ranks of other tensors.
_SMALL = 256


def inline_functions(model: "ModelProto") -> "ModelProto":
    """A copy of the model in which functions are inlined."""
    from onnx import ModelProto
    from onnx.inliner import inline_local_functions

    if model.functions:
        return inline_local_functions(model)
    copy = ModelProto()
    copy.CopyFrom(model)
    return copy


def types_of(model: "ModelProto") -> tuple[dict[str, int], dict[str, int]]:
    """ONNX's element type of each tensor, including graphs within nodes, and the ranks that are known, by name.

    Raises ValueError where inference does not find the type of a node's output.
    """
    from onnx import ModelProto, helper, shape_inference

    light = ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    light.graph.CopyFrom(model.graph)
    del light.graph.initializer[:]
    for item in model.graph.initializer:
        if math.prod(item.dims) <= _SMALL:
            light.graph.initializer.append(item)
        else:
            light.graph.input.append(helper.make_tensor_value_info(item.name, item.data_type, item.dims))
    try:
        inferred = shape_inference.infer_shapes(light)
    except shape_inference.InferenceError as error:
        raise ValueError(f"its types cannot be inferred: {str(error).splitlines()[0]}") from error
    types: dict[str, int] = {}
    ranks: dict[str, int] = {}
    _collect(inferred.graph, types, ranks)
    return types, ranks


def _collect(graph: "GraphProto", types: dict[str, int], ranks: dict[str, int]) -> None:
    types |= {item.name: item.data_type for item in graph.initializer}
    for value in (*graph.input, *graph.value_info, *graph.output):
        if value.type.HasField("tensor_type"):
            types[value.name] = value.type.tensor_type.elem_type
            if value.type.tensor_type.HasField("shape"):
                ranks[value.name] = len(value.type.tensor_type.shape.dim)
    for node in graph.node:
        for inner in list_bodies(node):
            _collect(inner, types, ranks)
        for name in node.output:
            if name and name not in types and node.op_type != "Constant":
                raise ValueError(f"the type of {name!r}, which {node.op_type} makes, is not known")
