"""Whether two ONNX models differ in their weights alone: then an engine of one can be given those of the other.

A weight is a constant of floating point or of a narrow integer type with more than one entry, as a compiler keeps it in
memory. All else is what kernels are chosen by, and must be equal: nodes, attributes, types, shapes, names, single
numbers, int32 and int64 constants (shapes, axes, indices), scales and zero points of quantization, and what Resize,
Pad, Clip and their like read beside their data. It is better to build once too often than to run a kernel that was
made for other constants.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx

# Of other inputs than the first: parameters that are folded into kernels or say shapes.
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
    return _constants(old.graph, new.graph) or _rest(old, new)


def _constants(old: "onnx.GraphProto", new: "onnx.GraphProto") -> str | None:
    ours, theirs = ({tensor.name: tensor for tensor in graph.initializer} for graph in (old, new))
    if lacking := sorted(ours.keys() ^ theirs.keys()):
        return f"constant {lacking[0]!r} is in one of them alone"
    fixed = set(_list_parameters(old))
    for name, tensor in ours.items():
        other = theirs[name]
        if (tensor.data_type, tuple(tensor.dims)) != (other.data_type, tuple(other.dims)):
            return f"constant {name!r} is of another type or shape: {_form(tensor)} and {_form(other)}"
        if (name in fixed or not _is_weight(tensor)) and _content(tensor) != _content(other):
            return f"constant {name!r} has other values, and is no weight: kernels may be made for it"
    return None


def _rest(old: "onnx.ModelProto", new: "onnx.ModelProto") -> str | None:
    for ours, theirs in zip(old.graph.node, new.graph.node, strict=False):
        if ours.SerializeToString(deterministic=True) != theirs.SerializeToString(deterministic=True):
            return f"node {ours.name or ours.output[0]!r} ({ours.op_type}) differs"
    for model in (old, new):
        for tensor in model.graph.initializer:
            for field in ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data"):
                tensor.ClearField(field)
            for field in ("external_data", "data_location"):
                tensor.ClearField(field)
        model.graph.ClearField("name")
    same = old.SerializeToString(deterministic=True) == new.SerializeToString(deterministic=True)
    return None if same else "their inputs, outputs, operators or opsets differ"


def _list_parameters(graph: "onnx.GraphProto") -> Iterator[str]:
    """Names that some node reads as a parameter."""
    for node in graph.node:
        if node.op_type in _PARAMETERS:
            yield from node.input[1:]


def _is_weight(tensor: "onnx.TensorProto") -> bool:
    from onnx import TensorProto

    others = (TensorProto.INT32, TensorProto.INT64, TensorProto.BOOL, TensorProto.STRING, TensorProto.UINT32)
    entries = 1
    for size in tensor.dims:
        entries *= size
    return entries > 1 and tensor.data_type not in (*others, TensorProto.UINT64)


def _content(tensor: "onnx.TensorProto") -> bytes:
    """A constant's values, whichever of a tensor's fields they are in; of one in another file, where it lies there."""
    import onnx

    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        return bytes(tensor.SerializeToString(deterministic=True))
    return bytes(onnx.numpy_helper.to_array(tensor).tobytes())


def _form(tensor: "onnx.TensorProto") -> str:
    import onnx

    return f"{onnx.TensorProto.DataType.Name(tensor.data_type).lower()} {list(tensor.dims)}"
