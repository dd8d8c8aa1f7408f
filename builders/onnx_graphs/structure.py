"""Whether two ONNX models differ in their weights alone: then an engine of one can be given those of the other.

A weight is a constant of floating point or of a narrow integer type with more than one entry, as a compiler keeps it in
memory. Kernels are chosen by all the rest, which must be equal: nodes, attributes, types, shapes, names, single
numbers, int32 and int64 constants (shapes, axes, indices), scales and zero points of quantization, and the inputs of
Resize, Pad, Clip and the like other than their data. In doubt the answer is a difference, and the engine is built.
"""

import math
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx

# Operators whose inputs, all but the first, are parameters that are folded into kernels or give shapes.
_PARAMETERS = {
    *("QuantizeLinear", "DequantizeLinear", "Resize", "Upsample", "Pad", "Clip", "Range", "OneHot", "TopK", "Slice"),
    *("Reshape", "Expand", "Tile", "NonMaxSuppression", "ConstantOfShape", "RoiAlign"),
}


def differs(before: Path, after: Path) -> str | None:
    """The first thing besides weights in which two models differ, in words; None when there is none.

    Of what lies in files beside a model only the weights' shapes are read. Raises what `onnx.load` raises.
    """
    import onnx

    old, new = (onnx.load(str(path), load_external_data=False) for path in (before, after))
    return _compare_constants(old.graph, new.graph) or _compare_rest(old, new)


def _compare_constants(old: "onnx.GraphProto", new: "onnx.GraphProto") -> str | None:
    ours, theirs = ({tensor.name: tensor for tensor in graph.initializer} for graph in (old, new))
    if lacking := sorted(ours.keys() ^ theirs.keys()):
        return f"constant {lacking[0]!r} is in one of them alone"
    fixed = {name for node in old.node if node.op_type in _PARAMETERS for name in node.input[1:]}
    for name, tensor in ours.items():
        other = theirs[name]
        if (tensor.data_type, tuple(tensor.dims)) != (other.data_type, tuple(other.dims)):
            return f"constant {name!r} is of another type or shape: {_form(tensor)} and {_form(other)}"
        if (name in fixed or not _is_weight(tensor)) and _content(tensor) != _content(other):
            return f"constant {name!r} has other values, and is no weight: kernels may be made for it"
    return None


def _compare_rest(old: "onnx.ModelProto", new: "onnx.ModelProto") -> str | None:
    """As `differs`, of all but the values of constants, which are removed from both models."""
    for ours, theirs in zip(old.graph.node, new.graph.node, strict=False):
        if ours.SerializeToString(deterministic=True) != theirs.SerializeToString(deterministic=True):
            return f"node {ours.name or ours.output[0]!r} ({ours.op_type}) differs"
    for model in (old, new):
        for tensor in model.graph.initializer:
            for field in ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data"):
                tensor.ClearField(field)
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")
        model.graph.ClearField("name")
    same = old.SerializeToString(deterministic=True) == new.SerializeToString(deterministic=True)
    return None if same else "their inputs, outputs, operators or opsets differ"


def _is_weight(tensor: "onnx.TensorProto") -> bool:
    from onnx import TensorProto

    others = (TensorProto.INT32, TensorProto.INT64, TensorProto.BOOL, TensorProto.STRING, TensorProto.UINT32)
    return math.prod(tensor.dims) > 1 and tensor.data_type not in (*others, TensorProto.UINT64)


def _content(tensor: "onnx.TensorProto") -> bytes:
    """The bytes of a constant's values; for one in another file its place there."""
    import onnx

    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        return bytes(tensor.SerializeToString(deterministic=True))
    return bytes(onnx.numpy_helper.to_array(tensor).tobytes())


def _form(tensor: "onnx.TensorProto") -> str:
    import onnx

    return f"{onnx.TensorProto.DataType.Name(tensor.data_type).lower()} {list(tensor.dims)}"
