"""Weights of a graph: as arrays, dequantized, replaced."""

import secrets
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from builders.onnx_graphs.bodies import copied, list_reads, opset_of, set_items
from enginesmith.arrays import Array
from enginesmith.core.errors import ModelError

# Weights of ONNX graphs in files beside them: read one by one from mapped files, never all at once.
#
# In memory such a tensor names its file by an absolute path, so that its reader need not know the graph's folder; in
# files the path is relative (`builders.onnx_graphs.outline`). onnx's own functions load external data into the tensor
# permanently. They also refuse files with several hard links, which the files of a graph from a registry have.

# Smaller tensors stay in the graph: shape inference reads shapes, and a file for each scale gains nothing.
LEAST_BYTES = 1024
# Begins the names of files with one new weight each, which `outline.save_graph` moves into shards.
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
    """An external weight, as `from_array` expects it; an empty tensor if there is none."""
    return next((tensor for tensor in graph.initializer if is_external(tensor)), TensorProto())


def load_graph(path: Path, folder: Path | None = None, content: bytes | None = None) -> ModelProto:
    """The model in a file; weights beside it, or in `folder`, stay there. content: bytes to parse instead of the file.

    Raises ModelError where such a file is not there, or is too short, and what `onnx.load` raises.
    """
    model = onnx.load(path, load_external_data=False) if content is None else onnx.load_model_from_string(content)
    for tensor in model.graph.initializer:
        if is_external(tensor):
            name, offset, length = place_of(tensor)
            file = (folder or path.parent) / name
            if Path(name).name != name or name in ("", "..") or file.is_symlink() or not file.is_file():
                reason = f"is in {name!r}, which is not a plain file beside the model"
                raise ModelError(f"{path.name}: weight {tensor.name!r} {reason}")
            if offset + length > file.stat().st_size:
                raise ModelError(
                    f"{path.name}: file {name!r} ends before the end of weight {tensor.name!r}; copy both files again"
                )
            set_place(tensor, str(file.absolute()), offset, length)
    return model


def place_of(tensor: TensorProto) -> tuple[str, int, int]:
    """File, offset and length in bytes of an external tensor. Raises ModelError for an invalid entry."""
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
    number = int(entries.get(key, 0))
    if not 0 <= number < 1 << 62:
        raise ValueError(f"{key} is {entries[key][:80]}, which is not a number of bytes")
    return number


def set_place(tensor: TensorProto, file: str, offset: int, length: int) -> None:
    """Record, in place, that a tensor's bytes are in `file` beside the model. offset, length: in bytes."""
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
    packed_bits = next((bits for bits in (4, 2) if name in (f"INT{bits}", f"UINT{bits}") or f"FLOAT{bits}" in name), 0)
    return packed_bits or 8 * int(helper.tensor_dtype_to_np_dtype(data_type).itemsize)


def wrong_length(tensor: TensorProto) -> str:
    """The error message for a tensor whose number of bytes does not match its shape."""
    length = place_of(tensor)[2] if is_external(tensor) else len(tensor.raw_data)
    return f"tensor {tensor.name[:80]!r} has {length} bytes, but its shape needs {bytes_of(tensor)}; export it again"


def blocks(tensor: TensorProto) -> Iterator[bytes]:
    """A tensor's bytes; those of an external one in blocks. Raises ModelError if its file is too short."""
    if not is_external(tensor):
        yield tensor.raw_data
        return
    file, offset, remaining_bytes = place_of(tensor)
    with Path(file).open("rb") as stream:
        stream.seek(offset)
        while remaining_bytes:
            block = stream.read(min(remaining_bytes, _BLOCK_BYTES))
            if not block:
                raise ModelError(f"{file} ends in the middle of weight {tensor.name!r}; copy it again")
            remaining_bytes -= len(block)
            yield block


def embed(tensor: TensorProto) -> None:
    """Load the bytes of an external tensor into it, in place."""
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
        whole_tensor = copied(tensor)
        embed(whole_tensor)
        return numpy_helper.to_array(whole_tensor)
    kind = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    return np.asarray(np.memmap(file, kind, "r", offset, tuple(tensor.dims)))


def from_array(values: Array, name: str, source: TensorProto) -> TensorProto:
    """A constant of these values, made from the weight `source`. If `source` is external, a large constant lies in a
    new file beside its file."""
    tensor = numpy_helper.from_array(values, name)
    if is_external(source) and may_lie_outside(tensor):
        file = Path(place_of(source)[0]).with_name(f"{LOOSE}{secrets.token_hex(8)}")
        file.write_bytes(tensor.raw_data)
        set_place(tensor, str(file), 0, len(tensor.raw_data))
    return tensor


def without_weights(model: ModelProto) -> ModelProto:
    """A copy in which large weights are inputs, for what needs no values: shape inference, and onnx's checker, both of
    which copy their argument several times, and look for external files. The weights themselves are not copied."""
    source, input_names = model.graph, {value.name for value in model.graph.input}
    graph = GraphProto(**{field.name: value for field, value in source.ListFields() if field.name != "initializer"})
    graph.initializer.extend(tensor for tensor in source.initializer if not _is_large(tensor))
    graph.input.extend(
        helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        for tensor in source.initializer
        if _is_large(tensor) and tensor.name not in input_names
    )
    other_fields = {field.name: value for field, value in model.ListFields() if field.name != "graph"}
    return ModelProto(graph=graph, **other_fields)


def with_weights(light: ModelProto, model: ModelProto) -> ModelProto:
    """A copy that `without_weights` made of `model`, in place, with the weights again."""
    large_tensors = {tensor.name: tensor for tensor in model.graph.initializer if _is_large(tensor)}
    input_names = {value.name for value in model.graph.input}
    inputs = [value for value in light.graph.input if value.name not in large_tensors or value.name in input_names]
    set_items(light.graph.input, inputs)
    light.graph.initializer.extend(large_tensors.values())
    return light


def check_lengths(model: ModelProto) -> None:
    """Raise ModelError for a large weight whose number of bytes does not match its shape."""
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
    except (ValueError, KeyError):  # the checker reports the error
        return False


# Replaces a Cast of stored int8 weights, and a Mul by their scale, by a DequantizeLinear.
#
# TensorRT allows int8 constants only in front of that operator ("Quantized constant is only allowed before DQ"), and
# keeps them as int8 there. A Cast becomes a DequantizeLinear with scale 1, or with the scale of a Mul that alone reads
# the Cast. The results are equal to the bit: an int8 times a scale is exact in float32, or rounded once, as in the
# Mul.

# The first opset whose DequantizeLinear has an axis.
_PER_AXIS = 13
_HALVES = (TensorProto.FLOAT16, TensorProto.BFLOAT16)


def with_dequantized_weights(model: Path, workdir: Path) -> Path:
    """The path `model`, or WORKDIR/dequantized.onnx if `dequantize_stored_weights` replaced something; a model with
    external tensors stays. model: passed by onnx's checker."""
    proto = onnx.load(model, load_external_data=False)
    if has_external(proto) or not dequantize_stored_weights(proto):
        return model
    path = workdir / "dequantized.onnx"
    path.write_bytes(proto.SerializeToString())
    return path


def dequantize_stored_weights(model: ModelProto) -> int:
    """Replace Cast (and Mul) of int8 weights by DequantizeLinear, in place; returns how many, 0 before opset 13."""
    graph = model.graph
    if opset_of(model) < _PER_AXIS:
        return 0
    constants = {tensor.name: tensor for tensor in graph.initializer}
    dequantize_nodes = dict[str, list[NodeProto]]()
    absorbed_names = set[str]()
    for cast, scale_node in _find_stored(graph, constants):
        weight, last_node = constants[cast.input[0]], scale_node or cast
        scale = numpy_helper.to_array(constants[_scale_of(scale_node, cast)]) if scale_node else np.ones((), np.float32)
        flat_scale = scale.astype(np.float32).reshape(() if scale.size == 1 else -1)
        values = numpy_helper.from_array(flat_scale, f"{last_node.output[0]}/scale")
        graph.initializer.append(values)
        axis = next((axis for axis, size in enumerate(scale.shape) if size != 1), 0)
        output, kind = last_node.output[0], _kind(cast)
        float_name, inputs = output if kind == TensorProto.FLOAT else f"{output}/float32", [weight.name, values.name]
        new_nodes = [helper.make_node("DequantizeLinear", inputs, [float_name], f"{output}/dequantized", axis=axis)]
        if kind != TensorProto.FLOAT:
            new_nodes.append(helper.make_node("Cast", [float_name], [output], f"{output}/narrowed", to=kind))
        dequantize_nodes[output] = new_nodes
        absorbed_names |= {cast.output[0]} if scale_node else set()
    nodes = [node for node in graph.node if not absorbed_names.intersection(node.output)]
    set_items(graph.node, (new_node for node in nodes for new_node in dequantize_nodes.get(node.output[0], [node])))
    return len(dequantize_nodes)


def _find_stored(
    graph: GraphProto, initializers: dict[str, TensorProto]
) -> Iterator[tuple[NodeProto, NodeProto | None]]:
    """Casts of int8 constants to a floating type, each with the Mul by a scale that alone reads it."""
    use_counts = Counter(name for node in graph.node for name in list_reads(node))
    use_counts.update(value.name for value in graph.output)
    readers = {name: node for node in graph.node for name in node.input}
    for node in graph.node:
        weight = initializers.get(node.input[0]) if node.op_type == "Cast" else None
        if weight is None or weight.data_type != TensorProto.INT8 or _kind(node) not in (TensorProto.FLOAT, *_HALVES):
            continue
        scale_node = readers.get(node.output[0]) if use_counts[node.output[0]] == 1 else None
        if scale_node is not None and not (scale_node.op_type == "Mul" and _is_scale(initializers, scale_node, node)):
            scale_node = None
        yield node, scale_node


def _is_scale(initializers: dict[str, TensorProto], scaling: NodeProto, cast: NodeProto) -> bool:
    """Whether a Mul's constant is one number, or one for each index of one axis of the weight."""
    scale, weight = initializers.get(_scale_of(scaling, cast)), initializers[cast.input[0]]
    if scale is None:
        return False
    dims, sizes = [*scale.dims], [*weight.dims]
    long_axes = [axis for axis, size in enumerate(dims) if size != 1]
    if not long_axes:
        return len(dims) <= len(sizes)
    return len(dims) == len(sizes) and len(long_axes) == 1 and dims[long_axes[0]] == sizes[long_axes[0]]


def _scale_of(scaling: NodeProto, cast: NodeProto) -> str:
    return str(next((name for name in scaling.input if name != cast.output[0]), ""))


def _kind(cast: NodeProto) -> int:
    return next((int(attribute.i) for attribute in cast.attribute if attribute.name == "to"), TensorProto.UNDEFINED)
