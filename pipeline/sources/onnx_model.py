"""ONNX models on disk: read with suspicion, written with equal bytes for equal models.

`canonical` (its own module) is what lies between the two. Models of 2 GB and more are refused: protobuf cannot hold
them in one piece.
"""

from functools import cache
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError, EncodeError  # type: ignore[import-untyped]

from enginery.core.digest import digest_of_bytes
from enginery.core.errors import ModelError
from enginery.core.types import TensorSpec
from pipeline.sources.canonical import canonical
from pipeline.sources.external import LARGEST_BYTES, checked_files, embed, inside
from pipeline.sources.walk import all_nodes, has_sparse, texts

__all__ = ["canonical", "external_files", "load_onnx", "newest_opset", "save_onnx", "specs_of"]

# Operator sets that onnxruntime's CPU kernels implement; anything else needs a custom library.
DOMAINS = ("", "ai.onnx", "ai.onnx.ml", "com.microsoft")


def load_onnx(path: Path, root: Path) -> onnx.ModelProto:
    """Read a model and its external data into memory.

    root: the spec's folder, which the model must be in; external data must be in the model's folder or below.
    Raises ModelError, with the remedy, for a file that is missing, empty, truncated or no ONNX; for external data that
    is missing, too short or elsewhere (through a link too); for an opset or operator domain that nothing here knows.
    """
    model = _parse(inside(path, root, "the spec's folder"))
    _check_operators(model, path)
    checked_files(model, path)
    embed(model, path)
    return model


def external_files(path: Path, root: Path) -> tuple[Path, ...]:
    """The files that hold a model's external data, sorted; none of them is read. Raises like `load_onnx`."""
    return tuple(sorted(checked_files(_parse(inside(path, root, "the spec's folder")), path)))


def save_onnx(model: onnx.ModelProto, path: Path) -> str:
    """Write a model, equal bytes for equal models, and return the digest of the file. Raises ModelError above 2 GB."""
    try:
        data = model.SerializeToString(deterministic=True)
    except (ValueError, EncodeError) as error:
        raise ModelError(f"{path.name}: the model is over 2 GB, which one ONNX file cannot hold") from error
    path.write_bytes(data)
    return digest_of_bytes(data)


def specs_of(model: onnx.ModelProto) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """The model's inputs and outputs, initializers left out. An axis without size and name becomes '?'.

    Raises ModelError for inputs and outputs that are not tensors of numbers, or whose rank is unknown.
    """
    constants = {tensor.name for tensor in model.graph.initializer}
    inputs = tuple(_spec(value, "input") for value in model.graph.input if value.name not in constants)
    return inputs, tuple(_spec(value, "output") for value in model.graph.output)


def _spec(value: onnx.ValueInfoProto, role: str) -> TensorSpec:
    tensor = value.type.tensor_type
    if not value.type.HasField("tensor_type") or not tensor.HasField("shape"):
        raise ModelError(
            f"{role} {value.name!r} is not a tensor of known rank; state its shape when you export the model"
        )
    if tensor.elem_type == onnx.TensorProto.STRING:
        raise ModelError(
            f"{role} {value.name!r} holds strings, which no engine takes or gives; keep text out of the model"
        )
    shape = tuple(dim.dim_param or (dim.dim_value if dim.HasField("dim_value") else "?") for dim in tensor.shape.dim)
    return TensorSpec(value.name, onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type).name, shape)


def _parse(path: Path) -> onnx.ModelProto:
    if path.stat().st_size == 0:
        raise ModelError(f"{path} is empty; export the model again")
    if path.stat().st_size > LARGEST_BYTES:
        raise ModelError(f"{path} is over 2 GB; models that large cannot be built yet")
    try:
        model = onnx.load(path, format="protobuf", load_external_data=False)
    except DecodeError as error:
        raise ModelError(f"{path} is truncated or not an ONNX file ({error}); export or download it again") from error
    if not model.opset_import or not model.graph.output:
        raise ModelError(f"{path} holds no ONNX graph; export or download it again")
    if damaged := next((text for text in texts(model) if isinstance(text, bytes)), None):
        raise ModelError(f"{path} is damaged: the name {damaged[:80]!r} in it is no UTF-8; export or copy it again")
    if has_sparse(model):
        raise ModelError(f"{path} holds sparse tensors, which nothing here reads; export the model with dense ones")
    del model.training_info[:]
    return model


def _check_operators(model: onnx.ModelProto, path: Path) -> None:
    opset = max((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), default=1)
    if opset > newest_opset():
        raise ModelError(
            f"{path} uses opset {opset}, and onnxruntime here knows {newest_opset()} at most; "
            f"export with opset {min(newest_opset(), 20)} or use onnx.version_converter"
        )
    local = {(function.domain, function.name) for function in model.functions}
    for node in all_nodes(model):
        if node.domain not in DOMAINS and (node.domain, node.op_type) not in local:
            raise ModelError(
                f"{path}: node {node.name[:80]!r} is operator {node.domain[:80]}::{node.op_type[:80]}, which no "
                "backend knows; export the model without custom operators"
            )


@cache
def newest_opset() -> int:
    """The newest ONNX opset that the installed onnxruntime accepts, found by offering it empty models."""
    for opset in range(onnx.defs.onnx_opset_version(), 1, -1):
        if _accept(opset):
            return opset
    return 1


def _accept(opset: int) -> bool:
    from builders.reference import accepts

    value = onnx.helper.make_tensor_value_info
    node = onnx.helper.make_node("Identity", ["x"], ["y"])
    graph = onnx.helper.make_graph([node], "probe", [value("x", 1, [1])], [value("y", 1, [1])])
    opsets = [onnx.helper.make_opsetid("", opset)]
    oldest = onnx.helper.find_min_ir_version_for(opsets)
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=oldest)
    return accepts(model.SerializeToString())
