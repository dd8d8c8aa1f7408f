"""The weights of ONNX graphs that lie in files beside them: read one by one out of mapped files, never all at once.

In memory such a tensor names its file by an absolute path, so that it can be read without knowing where the graph came
from; in files the path is relative (`builders.onnx_graphs.shards`). onnx's own functions read external data into the
tensor, where it stays, and refuse files with several hard links, as the files of a graph out of a registry are.
"""

import secrets
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, TensorProto, helper, numpy_helper

from enginesmith.arrays import Array
from enginesmith.core.errors import ModelError

# Smaller tensors stay in the graph: shape inference reads shapes, and a file for each scale gains nothing.
LEAST_BYTES = 1024
# Begins the names of files with one new weight each, which `shards.save_graph` moves into shards.
LOOSE = "loose-"
_BLOCK_BYTES = 1 << 20
_INDICES = (TensorProto.INT64, TensorProto.INT32)
_LISTS = ("float_data", "int32_data", "int64_data", "double_data", "uint64_data")


def is_external(tensor: TensorProto) -> bool:
    """Whether a tensor's bytes lie in a file of their own."""
    return bool(tensor.data_location == TensorProto.EXTERNAL)


def has_external(model: ModelProto) -> bool:
    """Whether weights of the graph lie in files beside it."""
    return any(is_external(tensor) for tensor in model.graph.initializer)


def size_of(model: ModelProto) -> int:
    """Bytes of a model with its external weights."""
    return int(model.ByteSize()) + sum(place_of(tensor)[2] for tensor in model.graph.initializer if is_external(tensor))


def find_external(graph: GraphProto) -> TensorProto:
    """A weight that lies in a file, as `from_array` takes it; an empty tensor where none does."""
    return next((tensor for tensor in graph.initializer if is_external(tensor)), TensorProto())


def load_graph(path: Path, folder: Path | None = None, content: bytes | None = None) -> ModelProto:
    """The model in a file; weights beside it, or in `folder`, stay there. content: what is parsed instead of the file.

    Raises ModelError where such a file is not there, or is too short, and what `onnx.load` raises.
    """
    model = onnx.load(path, load_external_data=False) if content is None else onnx.load_model_from_string(content)
    for tensor in model.graph.initializer:
        if is_external(tensor):
            name, offset, length = place_of(tensor)
            file = (folder or path.parent) / name
            if Path(name).name != name or name in ("", "..") or file.is_symlink() or not file.is_file():
                raise ModelError(f"{path.name}: weight {tensor.name!r} lies in {name!r}, which is no file beside it")
            if offset + length > file.stat().st_size:
                raise ModelError(f"{path.name}: weight {tensor.name!r} ends behind its file {name!r}; copy both again")
            set_place(tensor, str(file.absolute()), offset, length)
    return model


def place_of(tensor: TensorProto) -> tuple[str, int, int]:
    """File, offset and length in bytes of an external tensor. Raises ModelError for what is no such entry."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    try:
        offset, length = _number(entries, "offset"), _number(entries, "length") or bytes_of(tensor)
    except (ValueError, KeyError) as error:
        raise ModelError(
            f"tensor {tensor.name[:80]!r} has a broken external data entry: {str(error)[:200]}; export it again"
        ) from error
    return entries.get("location", ""), offset, length


def _number(entries: dict[str, str], key: str) -> int:
    """A number of bytes of an external entry; 0 without one. Raises ValueError."""
    found = int(entries.get(key, 0))
    if not 0 <= found < 1 << 62:
        raise ValueError(f"{key} is {entries[key][:80]}, and no number of bytes")
    return found


def set_place(tensor: TensorProto, file: str, offset: int, length: int) -> None:
    """Say, in place, that a tensor's bytes lie there."""
    tensor.ClearField("raw_data")
    del tensor.external_data[:]
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", file), ("offset", str(offset)), ("length", str(length))):
        tensor.external_data.add(key=key, value=value)


def bytes_of(tensor: TensorProto) -> int:
    """The size of a tensor's values in bytes, from its shape; types of 4 and 2 bits are packed. Raises ValueError for
    an impossible shape, KeyError for an unknown type."""
    size = _bits_of(tensor.data_type)
    for dim in tensor.dims:
        size *= dim
        if not 0 <= size < 1 << 63:
            raise ValueError(f"its dims are {str(list(tensor.dims[:8]))[:200]}")
    return (size + 7) // 8


def _bits_of(data_type: int) -> int:
    name = TensorProto.DataType.Name(data_type)
    packed = next((bits for bits in (4, 2) if name in (f"INT{bits}", f"UINT{bits}") or f"FLOAT{bits}" in name), 0)
    return packed or 8 * int(helper.tensor_dtype_to_np_dtype(data_type).itemsize)


def wrong_length(tensor: TensorProto) -> str:
    """What is wrong with a tensor whose bytes are not as many as its shape says."""
    length = place_of(tensor)[2] if is_external(tensor) else len(tensor.raw_data)
    return f"tensor {tensor.name[:80]!r} has {length} bytes, its shape {bytes_of(tensor)}; export it again"


def blocks(tensor: TensorProto) -> Iterator[bytes]:
    """A tensor's bytes, of an external one in blocks. Raises ModelError where its file ends before."""
    if not is_external(tensor):
        yield tensor.raw_data
        return
    file, offset, left = place_of(tensor)
    with Path(file).open("rb") as stream:
        stream.seek(offset)
        while left:
            block = stream.read(min(left, _BLOCK_BYTES))
            if not block:
                raise ModelError(f"{file} ends in the middle of weight {tensor.name!r}; copy it again")
            left -= len(block)
            yield block


def embed(tensor: TensorProto) -> None:
    """Take the bytes of an external tensor into it, in place."""
    tensor.raw_data = b"".join(blocks(tensor))
    tensor.ClearField("data_location")
    del tensor.external_data[:]


def may_lie_outside(tensor: TensorProto) -> bool:
    """Whether a tensor is moved to a file beside its graph: a large one that is no shape, list of lengths or text."""
    if tensor.data_type == TensorProto.STRING or (tensor.data_type in _INDICES and len(tensor.dims) <= 1):
        return False
    return is_external(tensor) or len(tensor.raw_data) >= LEAST_BYTES


def to_array(tensor: TensorProto) -> Array:
    """A tensor's values; of an external one mapped and read-only, except for packed types, which are read.

    Raises ModelError for an external tensor whose bytes are not as many as its shape says.
    """
    if not is_external(tensor):
        return numpy_helper.to_array(tensor)
    file, offset, length = place_of(tensor)
    if length != bytes_of(tensor):
        raise ModelError(wrong_length(tensor))
    if _bits_of(tensor.data_type) < 8:
        whole = TensorProto()
        whole.CopyFrom(tensor)
        embed(whole)
        return numpy_helper.to_array(whole)
    kind = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    return np.asarray(np.memmap(file, kind, "r", offset, tuple(tensor.dims)))


def from_array(values: Array, name: str, source: TensorProto) -> TensorProto:
    """A constant made out of `source`. A large one lies in a file beside that of `source`, where that is external."""
    made = numpy_helper.from_array(values, name)
    if is_external(source) and may_lie_outside(made):
        file = Path(place_of(source)[0]).with_name(f"{LOOSE}{secrets.token_hex(8)}")
        file.write_bytes(made.raw_data)
        set_place(made, str(file), 0, len(made.raw_data))
    return made


def without_weights(model: ModelProto) -> ModelProto:
    """A copy in which large weights are inputs, for what needs no values: shape inference, and onnx's checker, both of
    which copy their argument several times, and look for external files. The weights themselves are not copied."""
    whole, given = model.graph, {value.name for value in model.graph.input}
    graph = GraphProto(**{field.name: value for field, value in whole.ListFields() if field.name != "initializer"})
    graph.initializer.extend(item for item in whole.initializer if not _is_large(item))
    graph.input.extend(
        helper.make_tensor_value_info(item.name, item.data_type, item.dims)
        for item in whole.initializer
        if _is_large(item) and item.name not in given
    )
    rest = {field.name: value for field, value in model.ListFields() if field.name != "graph"}
    return ModelProto(graph=graph, **rest)


def with_weights(light: ModelProto, model: ModelProto) -> ModelProto:
    """A copy that `without_weights` made of `model`, in place, with the weights again."""
    outside = {item.name: item for item in model.graph.initializer if _is_large(item)}
    given = {value.name for value in model.graph.input}
    inputs = [value for value in light.graph.input if value.name not in outside or value.name in given]
    del light.graph.input[:]
    light.graph.input.extend(inputs)
    light.graph.initializer.extend(outside.values())
    return light


def check_lengths(model: ModelProto) -> None:
    """Raise ModelError for a large weight whose bytes are not as many as its shape says."""
    for tensor in filter(_is_large, model.graph.initializer):
        if not is_external(tensor) and len(tensor.raw_data) != bytes_of(tensor):
            raise ModelError(wrong_length(tensor))


def _is_large(tensor: TensorProto) -> bool:
    """Whether a tensor is external, or of LEAST_BYTES or more, and no shape, list of indices or text."""
    if is_external(tensor):
        return True
    if not tensor.HasField("raw_data") or tensor.data_type in (*_INDICES, TensorProto.STRING):
        return False
    try:
        return bytes_of(tensor) >= LEAST_BYTES and not any(len(getattr(tensor, name)) for name in _LISTS)
    except (ValueError, KeyError):  # the checker says what is wrong with it
        return False
