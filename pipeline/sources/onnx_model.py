"""ONNX models on disk: read with every check that a hostile file needs, written with equal bytes for equal models.

External data, which are tensors' bytes in other files, must lie in the model's folder. Weights with NaN or infinities
are refused by name, because otherwise the first sample that shows them is blamed. Models of 2 GB and more are refused,
which protobuf cannot hold in one piece.
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import onnx
from google.protobuf.message import DecodeError, EncodeError  # type: ignore[import-untyped]

from enginery.arrays import Array, check_finite
from enginery.core.digest import digest_of_bytes
from enginery.core.errors import ModelError
from enginery.core.types import TensorSpec
from pipeline.sources.walk import all_graphs, all_nodes, all_tensors, has_sparse, texts

# The greatest size that protobuf can hold, in bytes.
LARGEST_BYTES = (1 << 31) - 1
# Operator domains of onnxruntime's CPU kernels; any other one needs a custom library.
DOMAINS = ("", "ai.onnx", "ai.onnx.ml", "com.microsoft")
# Operators that multiply with their constants, which should not be infinite. Elsewhere one may be a mask or a bound.
_WEIGHTED = frozenset(
    {
        "BatchNormalization", "Conv", "ConvTranspose", "Div", "GRU", "Gemm", "GroupNormalization",
        "InstanceNormalization", "LSTM", "LayerNormalization", "MatMul", "Mul", "PRelu", "RNN", "RMSNormalization",
    }
)  # fmt: skip


def check_weights(model: onnx.ModelProto) -> None:
    """Raise ModelError for a constant with NaN, and for one with an infinity that nodes multiply with. A NaN scalar,
    which may mark a missing value, is refused only where nodes multiply with it."""
    weights = {name for node in all_nodes(model) if node.op_type in _WEIGHTED for name in node.input}
    found = nonfinite_constants(model)
    check_finite((name, array if name in weights else _drop_infinities(array)) for name, array in found)


def nonfinite_constants(model: onnx.ModelProto) -> Iterator[tuple[str, Array]]:
    """The floating-point constants of a model that hold NaN or infinities, by name."""
    constants = [(tensor.name, tensor) for graph in all_graphs(model) for tensor in graph.initializer]
    nodes = [node for node in all_nodes(model) if node.op_type == "Constant"]
    constants += [(node.output[0], item.t) for node in nodes for item in node.attribute if item.HasField("t")]
    for name, tensor in constants:
        if onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).kind not in "iubOSU":
            array = onnx.numpy_helper.to_array(tensor)
            if not np.isfinite(array).all():
                yield name, array


def _drop_infinities(array: Array) -> Array:
    return np.where(np.isinf(array), 0, array) if array.size > 1 else np.zeros_like(array)


def inside(path: Path, folder: Path, what: str) -> Path:
    """The path, if it is a file in `folder` with links followed; else ModelError. what: names the folder."""
    try:
        within, there = path.resolve().is_relative_to(folder.resolve()), path.is_file()
    except (OSError, ValueError, RuntimeError) as error:  # too long, a NUL inside, links in a circle
        raise ModelError(f"{str(path)[:300]!r} cannot be the path of a file ({error}); correct it") from error
    if not within:
        raise ModelError(f"{path} leads outside {what} {folder}; put the file itself inside")
    if not there:
        raise ModelError(f"{path} does not exist or is not a file; correct the path or restore the file")
    return path


def _list_external(model: onnx.ModelProto, path: Path) -> list[tuple[onnx.TensorProto, Path, int, int]]:
    """Each external tensor of the model in `path`, with file, offset and length in bytes; no file is read.

    Raises ModelError for a file outside of the model's folder, one that is too short, and over 2 GB in all.
    """
    found = []
    for tensor in all_tensors(model):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            file, offset, length = _place(tensor, path.parent)
            what = f"the folder of {path.name}, which its external data must stay in:"
            size = inside(file, path.parent, what).stat().st_size
            if offset + length > size:
                raise ModelError(
                    f"{path}: tensor {tensor.name[:80]!r} ends at byte {offset + length} of {file.name}, which has "
                    f"{size}; the file is truncated or belongs to another model: copy both again"
                )
            found.append((tensor, file, offset, length))
    # Many tensors may name the same bytes: what counts is what the model will hold.
    held = path.stat().st_size + sum(length for *_, length in found)
    if max(held, sum(file.stat().st_size for file in {path, *(file for _, file, *_ in found)})) > LARGEST_BYTES:
        raise ModelError(
            f"{path}: the model and its external data are over 2 GB; models that large cannot be built yet"
        )
    return found


def _place(tensor: onnx.TensorProto, folder: Path) -> tuple[Path, int, int]:
    """The file of an external tensor, and offset and length in it, in bytes."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    try:
        offset, length = _number(entries, "offset"), _number(entries, "length") or _bytes_of(tensor)
        return folder / entries.get("location", ""), offset, length
    except (ValueError, KeyError) as error:
        raise ModelError(
            f"tensor {tensor.name[:80]!r} has a broken external data entry: {str(error)[:200]}; export it again"
        ) from error


def _number(entries: dict[str, str], key: str) -> int:
    """A number of bytes of an external entry; 0 without one. Raises ValueError."""
    found = int(entries.get(key, 0))
    if not 0 <= found < 1 << 63:
        raise ValueError(f"{key} is {entries[key][:80]}, and no number of bytes")
    return found


def _bytes_of(tensor: onnx.TensorProto) -> int:
    """The bytes of a tensor's shape. Raises ValueError for an impossible one, KeyError for an unknown type."""
    count = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    for size in tensor.dims:
        count *= size
        if not 0 <= count < 1 << 63:
            raise ValueError(f"its dims are {str(list(tensor.dims[:8]))[:200]}")
    return count


def load_onnx(path: Path, root: Path) -> onnx.ModelProto:
    """Read a model and its external data into memory. root: the spec's folder, which the model must be in.

    Raises ModelError, with the remedy, for a file that is missing, empty, truncated or no ONNX; for external data that
    is missing, too short or outside of the model's folder (through a link too); for an unknown opset or domain.
    """
    model = _parse(inside(path, root, "the spec's folder"))
    _check_operators(model, path)
    for tensor, file, offset, length in _list_external(model, path):
        with file.open("rb") as stream:
            stream.seek(offset)
            tensor.raw_data = stream.read(length)
        tensor.ClearField("data_location")
        del tensor.external_data[:]
    _forget_unknown_sizes(model)
    return model


def _forget_unknown_sizes(model: onnx.ModelProto) -> None:
    """In place: leave an axis without a size where its size says that it is unknown.

    Paddle writes -1, and "?" as a name, which would make all such axes one dim; others write "None" or "-1".
    """
    for graph in all_graphs(model):
        for value in (*graph.input, *graph.output, *graph.value_info):
            for dim in value.type.tensor_type.shape.dim if value.type.HasField("tensor_type") else ():
                name = dim.dim_param
                unknown = name and (name == "None" or not any(letter.isalpha() for letter in name))
                if dim.dim_value < 0 or unknown:
                    dim.Clear()


def external_files(path: Path, root: Path) -> tuple[Path, ...]:
    """The files of a model's external data, sorted; none is read. Raises ModelError as `load_onnx`."""
    model = _parse(inside(path, root, "the spec's folder"))
    return tuple(sorted({file for _, file, *_ in _list_external(model, path)}))


def save_onnx(model: onnx.ModelProto, path: Path) -> str:
    """Write a model, with equal bytes for equal models; the file's digest. Raises ModelError above 2 GB."""
    try:
        data = model.SerializeToString(deterministic=True)
    except (ValueError, EncodeError) as error:
        raise ModelError(f"{path.name}: the model is over 2 GB, which one ONNX file cannot hold") from error
    path.write_bytes(data)
    return digest_of_bytes(data)


def specs_of(model: onnx.ModelProto) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """The model's inputs without initializers, and its outputs. An axis without size and name is '?'.

    Raises ModelError for one that is not a tensor of numbers of known rank.
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
    """A model without its external data. Raises ModelError for a damaged file and for what no backend reads."""
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
    """The newest ONNX opset that the installed onnxruntime accepts, found by opening a one-node model of each."""
    from builders.reference import accepts

    value = onnx.helper.make_tensor_value_info
    node = onnx.helper.make_node("Identity", ["x"], ["y"])
    graph = onnx.helper.make_graph([node], "probe", [value("x", 1, [1])], [value("y", 1, [1])])
    for opset in range(onnx.defs.onnx_opset_version(), 1, -1):
        opsets = [onnx.helper.make_opsetid("", opset)]
        oldest = onnx.helper.find_min_ir_version_for(opsets)
        model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=oldest)
        if accepts(model.SerializeToString()):
            return opset
    return 1
