"""A graph without its weights, and the shards that hold them."""

import hashlib
import mmap
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto

from builders.onnx_graphs.bodies import list_reads, set_items
from builders.onnx_graphs.weights import (
    LEAST_BYTES,
    LOOSE,
    blocks,
    embed,
    has_external,
    is_external,
    load_graph,
    may_lie_outside,
    place_of,
    set_place,
)
from builders.onnx_graphs.wire import Field, decode, fields
from enginesmith.core.errors import ModelError, is_digest

# An ONNX graph without the bytes of its large weights, for code that reads only nodes, types and shapes; and without
# long lists in attributes, as tree ensembles have them.
#
# Parsing a file of 90 MB takes 0.1 s and twice its size in memory; its outline takes a millisecond. A parsed list of
# numbers takes six times its size, and each copy of the graph takes as much again.

# Of ModelProto, GraphProto, NodeProto (its domain's number is that of a model's graph) and TensorProto.
_GRAPH, _NODE, _INITIALIZER, _ATTRIBUTE, _DOMAIN, _DATA_TYPE, _RAW_DATA = 7, 1, 5, 5, 7, 2, 9
# Smaller files are parsed in less time than this takes.
OUTLINED_BYTES = 8 << 20
# Types whose values may be shapes or lists of lengths, and texts.
_READ = (TensorProto.INT64, TensorProto.INT32, TensorProto.STRING)
# Attributes of that domain with as many bytes are lists, which nothing here reads.
_LISTS_DOMAIN, _LONG_BYTES = "ai.onnx.ml", 1 << 16
# The prefix of an attribute that names the place of a list in a file. onnx's checker allows names with two underscores;
# each process draws the rest at random, so that no file can have one.
_OUTSIDE = f"__{secrets.token_hex(8)}_"
_Data = mmap.mmap | bytes
_Parts = list[bytes | memoryview]


def load_outline(path: Path, least_bytes: int = OUTLINED_BYTES, lists: bool = False) -> ModelProto:
    """The model in a file. If the file has `least_bytes` or more, large weights stay in it, as external tensors;
    weights in other files stay there. lists: whether long lists stay in the file too, as in `load_without_lists`.

    Only read this model, do not write it: its weights would still lie in `path`, which is no file of weights. Raises
    as `weights.load_graph` does.
    """
    content, spans = _read_outline(path, least_bytes, True, lists)
    model = load_graph(path, content=content)
    _set_places(model, path, spans)
    return model


def load_without_lists(path: Path, least_bytes: int = OUTLINED_BYTES, *, weights: bool = True) -> ModelProto:
    """The model in a file, without reading files beside it. If the file has `least_bytes` or more, long lists of the
    graph's nodes stay in it, and only `save_with_lists` can write the model. weights: False leaves large weights in
    the file too, as `load_outline` does. Raises what `onnx.load` raises."""
    content, spans = _read_outline(path, least_bytes, not weights, True)
    if content is None:
        return onnx.load(path, format="protobuf", load_external_data=False)
    model = onnx.load_model_from_string(content)
    _set_places(model, path, spans)
    return model


def _read_outline(
    path: Path, least_bytes: int, cuts_weights: bool, cuts_lists: bool
) -> tuple[bytes | None, list[Field | None]]:
    """The bytes of a model's file without large weights, without long lists, or both, as `_cut_file` gives them; and
    for each weight where its bytes lie, None where they are not cut."""
    spans = list[Field | None]()

    def cut(data: mmap.mmap, graph: Field) -> _Parts:
        weight_cuts = {_INITIALIZER: _cut_weights(data, spans)} if cuts_weights else {}
        return _cut(data, graph, {**weight_cuts, **(_lists(data, path) if cuts_lists else {})})

    return _cut_file(path, least_bytes, cut), spans


def _set_places(model: ModelProto, path: Path, spans: Sequence[Field | None]) -> None:
    for tensor, field in zip(model.graph.initializer, spans, strict=False):
        if field:
            set_place(tensor, str(path.absolute()), field.begin, field.end - field.begin)


def lacks_lists(model: ModelProto) -> bool:
    """Whether long lists of a graph's nodes lie in the file that it was read from."""
    return any(attribute.name.startswith(_OUTSIDE) for node in model.graph.node for attribute in node.attribute)


def save_with_lists(model: ModelProto, path: Path) -> None:
    """Write a graph to `path`, with the lists that `load_without_lists` left in the file that it read, copied from
    there. Raises ModelError if that file has changed."""
    proto_bytes, mapped_files = model.SerializeToString(deterministic=True), dict[str, mmap.mmap]()

    def restore(attribute: Field) -> _Parts:
        attribute_proto = AttributeProto.FromString(proto_bytes[attribute.begin : attribute.end])
        if not attribute_proto.name.startswith(_OUTSIDE):
            return [proto_bytes[attribute.begin : attribute.end]]
        file, begin, end = attribute_proto.s.decode().rsplit("\n", 2)
        source = mapped_files.setdefault(file, _map(Path(file)))
        field = Field(_ATTRIBUTE, 0, int(begin), int(end))
        if field.end > len(source) or _first_text(source, field) != attribute_proto.name.removeprefix(_OUTSIDE):
            raise ModelError(f"{file} was changed while it was read; run again")
        return [memoryview(source)[field.begin : field.end]]

    def in_graph(graph: Field) -> _Parts:
        return _cut(proto_bytes, graph, {_NODE: lambda node: _cut(proto_bytes, node, {_ATTRIBUTE: restore})})

    with path.open("wb") as stream:
        stream.writelines(_cut(proto_bytes, Field(0, 0, 0, len(proto_bytes)), {_GRAPH: in_graph}))


def _map(path: Path) -> mmap.mmap:
    """The bytes of a file; they are unmapped with the last view of them."""
    with path.open("rb") as stream:
        return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)


def _cut_file(path: Path, least_bytes: int, cut: Callable[[mmap.mmap, Field], _Parts]) -> bytes | None:
    """The bytes of a model's file with its graph changed; None for a smaller file, and for what is no protobuf, of
    which parsing all of it gives the reason."""
    if path.stat().st_size < least_bytes:
        return None
    try:
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as buffer:
            return b"".join(_cut(buffer, Field(0, 0, 0, len(buffer)), {_GRAPH: lambda graph: cut(buffer, graph)}))
    except ValueError:
        return None


def _cut_weights(data: mmap.mmap, places: list[Field | None]) -> Callable[[Field], _Parts]:
    """A function that returns a weight's bytes, without the values of a large one. places: receives where each weight's
    values lie; None: inside."""

    def cut(tensor: Field) -> _Parts:
        tensor_fields = list(fields(data, tensor.begin, tensor.end))
        kind = next((field.value for field in tensor_fields if field.number == _DATA_TYPE), 0)
        raw_fields = [field for field in tensor_fields if field.number == _RAW_DATA]
        is_large = len(raw_fields) == 1 and raw_fields[0].end - raw_fields[0].begin >= LEAST_BYTES and kind not in _READ
        places.append(raw_fields[0] if is_large else None)
        return _cut(data, tensor, {_RAW_DATA: lambda _: []}) if is_large else [data[tensor.begin : tensor.end]]

    return cut


def _lists(data: mmap.mmap, path: Path) -> Mapping[int, Callable[[Field], _Parts]]:
    """By field number, functions that replace each long list in a node's attributes by the place where it lies."""

    def cut(attribute: Field) -> _Parts:
        attribute_name = _first_text(data, attribute)
        if attribute.end - attribute.begin < _LONG_BYTES or not attribute_name:
            return [data[attribute.begin : attribute.end]]
        reference = f"{path.absolute()}\n{attribute.begin}\n{attribute.end}"
        name = f"{_OUTSIDE}{attribute_name}"
        return [AttributeProto(name=name, type=AttributeProto.STRING, s=reference.encode()).SerializeToString()]

    def in_node(node: Field) -> _Parts:
        domain_fields = [field for field in fields(data, node.begin, node.end) if field.number == _DOMAIN]
        has_lists = [decode(data, field) for field in domain_fields] == [_LISTS_DOMAIN]
        return _cut(data, node, {_ATTRIBUTE: cut}) if has_lists else [data[node.begin : node.end]]

    return {_NODE: in_node}


def _first_text(data: _Data, message: Field) -> str:
    """The name at the start of an attribute; '' if it starts with another field."""
    first_field = next(fields(data, message.begin, message.end), None)
    return decode(data, first_field) if first_field and first_field.number == 1 else ""


def _cut(data: _Data, message: Field, changes: Mapping[int, Callable[[Field], _Parts]]) -> _Parts:
    """The message in a field, with the fields in `changes` replaced. changes: field number -> function that
    makes the new content."""
    chunks, cursor, field_start = _Parts(), message.begin, message.begin
    for field in fields(data, message.begin, message.end):
        if field.number in changes and data[field_start] & 7 == 2:  # its tag says that it has a length
            new_chunks = changes[field.number](field)
            chunks += (
                data[cursor:field_start],
                _varint(field.number << 3 | 2),
                _varint(sum(map(len, new_chunks))),
                *new_chunks,
            )
            cursor = field.end
        field_start = field.end
    return [*chunks, data[cursor : message.end]]


def _varint(number: int) -> bytes:
    """A number as protobuf writes it."""
    buffer = bytearray()
    while number > 127:
        buffer.append(number & 127 | 128)
        number >>= 7
    return bytes((*buffer, number))


# ONNX graphs over what one file holds: the graph without its large weights, and these in shards beside it.
#
# A shard is a file named by the SHA-256 of its bytes, and the graph names shards as its external data. So the graph's
# own digest stands for all of it, ONNX Runtime opens and maps it as it lies there, and a registry keeps, shares and
# sends each shard by itself: graphs that have weights in common have their shards in common. Weights are put into
# shards in the order of their names, so that a changed weight changes one shard, and of a quantized graph that of its
# vectors. docs/decisions/0016-shards.md says why.

# A larger weight has a shard to itself.
SHARD_BYTES = 256 << 20
# Weights begin at page boundaries, because memory-mapped files are read fastest from there.
_ALIGNED = 4096


def save_graph(model: ModelProto, path: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Write a model with weights in files, with all its large weights in shards beside `path`; equal models give equal
    bytes. A shard that lies there already stays where the model has half of it or more: a few small weights that a
    quantized graph has left in float are no reason to keep all float weights. The model then names the shards by their
    absolute paths, and its nodes stand as `put_constants_first` says.

    Raises ModelError for one that is over 2 GB without its large weights, or `EncodeError` of protobuf.
    """
    folder = path.parent.absolute()
    put_constants_first(model.graph)
    for tensor in model.graph.initializer:
        if is_external(tensor) and not may_lie_outside(tensor):
            embed(tensor)
    outside_tensors = [tensor for tensor in model.graph.initializer if may_lie_outside(tensor)]
    groups = dict[object, list[TensorProto]]()  # tensors of the same bytes, which are written once
    for tensor in outside_tensors:
        groups.setdefault(place_of(tensor) if is_external(tensor) else id(tensor), []).append(tensor)
    used_bytes = Counter[str]()
    for file, _, length in map(place_of, [tensors[0] for tensors in groups.values() if _is_shard(tensors[0], folder)]):
        used_bytes[file] += length
    shard_files = {file for file, size in used_bytes.items() if 2 * size >= Path(file).stat().st_size}
    new_heads = [head for head, *_ in groups.values() if not (is_external(head) and place_of(head)[0] in shard_files)]
    for group in _groups(new_heads, shard_bytes):
        _write_shard(group, folder)
    for head, *copies in groups.values():
        for tensor in (head, *copies):
            file, *span = place_of(head)
            set_place(tensor, Path(file).name, *span)
    path.write_bytes(model.SerializeToString(deterministic=True))
    for tensor in outside_tensors:
        name, *span = place_of(tensor)
        set_place(tensor, str(folder / name), *span)


def put_constants_first(graph: GraphProto) -> None:
    """Put the nodes that read constants alone before all others, in place.

    ONNX Runtime orders nodes from the outputs back, and of a node's inputs it leaves for last those that stand first in
    the file. So weights are dequantized or widened one at a time, each just before the node that multiplies with it.
    Where these nodes stand beside that node, ONNX Runtime 1.31 widens all weights before it does anything else: an int8
    graph of 2.6 GB in float32 took 3.9 GB to run, and takes 0.3 GB in this order.
    """
    constant_names = {tensor.name for tensor in graph.initializer}
    constant_nodes, other_nodes = list[NodeProto](), list[NodeProto]()
    for node in graph.node:
        input_names = list_reads(node)
        if input_names and constant_names.issuperset(input_names):
            constant_names.update(node.output)
            constant_nodes.append(node)
        else:
            other_nodes.append(node)
    set_items(graph.node, [*constant_nodes, *other_nodes])


def write_graph(model: ModelProto, path: Path) -> None:
    """Write a model in one piece, or with shards beside it where weights of it lie in files."""
    if has_external(model):
        save_graph(model, path)
    else:
        path.write_bytes(model.SerializeToString())


def in_shards(model: ModelProto) -> bool:
    """Whether weights of the graph are in shards."""
    files = (place_of(tensor)[0] for tensor in model.graph.initializer if is_external(tensor))
    return any(is_digest(Path(file).name) for file in files)


def link_shards(model: ModelProto, folder: Path) -> None:
    """Link the shards of a graph into a folder of the same file system; the model, in place, names them there."""
    for tensor in (tensor for tensor in model.graph.initializer if is_external(tensor)):
        file, *span = place_of(tensor)
        shard = folder / Path(file).name
        if not shard.exists():
            shard.hardlink_to(file)
        set_place(tensor, shard.name, *span)


def _is_shard(tensor: TensorProto, folder: Path) -> bool:
    if not is_external(tensor):
        return False
    file = Path(place_of(tensor)[0])
    return file.parent == folder and is_digest(file.name)


def _groups(tensors: Sequence[TensorProto], most_bytes: int) -> Iterator[list[TensorProto]]:
    """The tensors by name, as many together as fit a shard, and vectors apart from others: those of an int8 graph
    (biases in steps of its activations) change with any weight before them."""
    group, size = list[TensorProto](), 0
    for tensor in sorted(tensors, key=lambda tensor: (len(tensor.dims) > 1, tensor.name)):
        tensor_bytes = place_of(tensor)[2] if is_external(tensor) else len(tensor.raw_data)
        if group and (size + tensor_bytes > most_bytes or len(group[-1].dims) <= 1 < len(tensor.dims)):
            yield group
            group, size = [], 0
        group.append(tensor)
        size += tensor_bytes
    if group:
        yield group


def _write_shard(tensors: Sequence[TensorProto], folder: Path) -> None:
    """Write tensors into one shard, and set their places; files with one loose weight are removed."""
    hasher, spans, size = hashlib.sha256(), list[tuple[int, int]](), 0
    partial_path = folder / "shard.partial"
    with partial_path.open("wb") as stream:
        for tensor in tensors:
            padding = bytes(-size % _ALIGNED)
            hasher.update(padding)
            size += stream.write(padding)
            spans.append((size, 0))
            for block in blocks(tensor):
                hasher.update(block)
                size += stream.write(block)
            spans[-1] = (spans[-1][0], size - spans[-1][0])
    shard = partial_path.rename(folder / hasher.hexdigest())
    for tensor, (offset, length) in zip(tensors, spans, strict=True):
        loose_path = Path(place_of(tensor)[0]) if is_external(tensor) else None
        set_place(tensor, str(shard), offset, length)
        if loose_path and loose_path.name.startswith(LOOSE) and loose_path.parent == folder:
            loose_path.unlink()
