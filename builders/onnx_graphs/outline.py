"""An ONNX graph without the bytes of its large weights, for what looks at nodes, types and shapes alone.

To parse a file of 90 MB takes 0.1 s and twice its size in memory; its outline takes a millisecond.
"""

import mmap
from collections.abc import Callable
from pathlib import Path

from onnx import ModelProto, TensorProto

from builders.onnx_graphs.weights import LEAST_BYTES, load_graph, set_place
from builders.onnx_graphs.wire import Field, fields

_GRAPH, _INITIALIZER, _DATA_TYPE, _RAW_DATA = 7, 5, 2, 9  # of ModelProto, GraphProto, TensorProto
# Smaller files are parsed in less time than this takes.
OUTLINED_BYTES = 8 << 20
# Types whose values may be shapes or lists of lengths, and texts.
_READ = (TensorProto.INT64, TensorProto.INT32, TensorProto.STRING)


def load_outline(path: Path, least_bytes: int = OUTLINED_BYTES) -> ModelProto:
    """The model in a file; of one of `least_bytes` or more, large weights stay in the file, as external tensors. Those
    in files beside it stay there.

    It is for reading: written, its weights would still lie in that file, which is no file of weights. Raises as
    `weights.load_graph`.
    """
    if path.stat().st_size < least_bytes:
        return load_graph(path)
    places = list[Field | None]()
    try:
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            light = _cut(data, Field(0, 0, 0, len(data)), _GRAPH, lambda graph: _cut_weights(data, graph, places))
    except ValueError:  # no protobuf: parsing all of it gives the reason
        return load_graph(path)
    model = load_graph(path, content=light)
    for tensor, place in zip(model.graph.initializer, places, strict=True):
        if place:
            set_place(tensor, str(path.absolute()), place.begin, place.end - place.begin)
    return model


def _cut_weights(data: mmap.mmap, graph: Field, places: list[Field | None]) -> bytes:
    """A graph's bytes without those of its large weights. places: gets where those of each weight lie; None: inside."""

    def cut(tensor: Field) -> bytes:
        found = list(fields(data, tensor.begin, tensor.end))
        kind = next((field.value for field in found if field.number == _DATA_TYPE), 0)
        raw = [field for field in found if field.number == _RAW_DATA]
        large = len(raw) == 1 and raw[0].end - raw[0].begin >= LEAST_BYTES and kind not in _READ
        places.append(raw[0] if large else None)
        return _cut(data, tensor, _RAW_DATA, lambda _: b"") if large else data[tensor.begin : tensor.end]

    return _cut(data, graph, _INITIALIZER, cut)


def _cut(data: mmap.mmap, outer: Field, number: int, change: Callable[[Field], bytes]) -> bytes:
    """The message that a field holds, each field of that number in it changed."""
    parts, kept, before = list[bytes](), outer.begin, outer.begin
    for field in fields(data, outer.begin, outer.end):
        if field.number == number and data[before] & 7 == 2:  # its tag says that it has a length
            new = change(field)
            parts += data[kept:before], _varint(number << 3 | 2), _varint(len(new)), new
            kept = field.end
        before = field.end
    return b"".join((*parts, data[kept : outer.end]))


def _varint(number: int) -> bytes:
    """A number as protobuf writes it."""
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes((*found, number))
