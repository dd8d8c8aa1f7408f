"""The inputs and outputs of an ONNX file, without its weights and nodes: a few fields read out of the protobuf.

Parsing a file takes time and memory with its size; here everything between the fields that are wanted is skipped, and
of a mapped file that is never read from the disk. Field numbers: https://github.com/onnx/onnx/blob/main/onnx/onnx.proto
"""

import mmap
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from enginery.core.errors import ModelError
from enginery.core.types import TensorSpec

_GRAPH, _INITIALIZER, _INPUT, _OUTPUT = 7, 5, 11, 12  # of ModelProto, and of GraphProto
_TENSOR_NAME = 8
_DTYPES = {
    1: "float32", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64", 8: "string", 9: "bool",
    10: "float16", 11: "float64", 12: "uint32", 13: "uint64", 14: "complex64", 15: "complex128", 16: "bfloat16",
}  # fmt: skip


@dataclass(frozen=True)
class GraphInput:
    """An input of a graph. dtype: '' where it is no tensor.  shape: a name that says nothing is '?'; None: unknown."""

    name: str
    dtype: str
    shape: tuple[int | str, ...] | None


@dataclass(frozen=True)
class GraphHeader:
    """What a graph takes, without what its initializers give, and the names of what it gives; each in order."""

    inputs: tuple[GraphInput, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class _Field:
    """A field of a message: its number, its value if that is a number, and where its bytes lie if it has a length."""

    number: int
    value: int
    begin: int
    end: int


def read_header(path: Path) -> GraphHeader:
    """The header of an ONNX file. Raises ModelError for a file that is empty, truncated, or no ONNX."""
    try:
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read_graph(data)
    except (ValueError, OSError) as error:  # an empty file cannot be mapped
        raise ModelError(f"{path} is empty, truncated or not an ONNX file; export or download it again") from error


def wrong_inputs(header: GraphHeader, specs: Sequence[TensorSpec]) -> Iterator[tuple[str, str]]:
    """What of a spec's inputs does not fit the model: (name of the input, why). '' is the name of one that is missing.

    The rules are those of `canonical`, which has the last word.
    """
    own = {item.name: item for item in header.inputs}
    wanted = {spec.name for spec in specs}
    for name in own.keys() - wanted:
        yield "", f"the model's input {name!r} is missing; its inputs are {', '.join(own)}: add it"
    for spec in specs:
        found = own.get(spec.name)
        if found is None:
            yield spec.name, f"the model has no such input; its inputs are {', '.join(own) or 'none'}"
            continue
        if found.dtype != spec.dtype:
            kind = found.dtype or "no tensor"
            yield spec.name, f"is {kind} in the model and {spec.dtype} in the spec; correct the spec"
        if found.shape is not None and not _fits(found.shape, spec.shape):
            yield (
                spec.name,
                f"is {format_shape(found.shape)} in the model and {format_shape(spec.shape)} in the spec; correct the "
                "spec, or export the model with that axis dynamic",
            )


def wrong_outputs(own: Collection[str], names: Sequence[str] | None) -> Iterator[tuple[int, str]]:
    """What of a spec's outputs an ONNX model with outputs `own` does not have: (index, why)."""
    for index, name in enumerate(names or ()):
        if name not in own:
            yield index, f"output {name!r} is not in the model; its outputs are {', '.join(own)}"


def _fits(own: Sequence[int | str], wanted: Sequence[int | str]) -> bool:
    same = len(own) == len(wanted)
    return same and all(isinstance(a, str) or a == b for a, b in zip(own, wanted, strict=True))


def format_shape(shape: Sequence[int | str]) -> str:
    """'[batch, 3, 8]', of at most 16 axes."""
    dims = [str(dim)[:80] for dim in shape[:16]]
    return f"[{', '.join([*dims, '...'] if len(shape) > 16 else dims)}]"


def _read_graph(data: mmap.mmap) -> GraphHeader:
    inputs, outputs, given = list[GraphInput](), list[str](), set[str]()
    found = False
    for graph in _fields(data, 0, len(data)):
        if graph.number != _GRAPH:
            continue
        found = True
        for field in _fields(data, graph.begin, graph.end):
            if field.number == _INPUT:
                inputs.append(_read_input(data, field))
            elif field.number == _OUTPUT:
                outputs.append(_text(data, field, 1))
            elif field.number == _INITIALIZER:
                given.add(_text(data, field, _TENSOR_NAME))
    if not found or not outputs:
        raise ValueError("there is no graph")
    return GraphHeader(tuple(item for item in inputs if item.name not in given), tuple(outputs))


def _read_input(data: mmap.mmap, value: _Field) -> GraphInput:
    """A ValueInfoProto: name = 1, type = 2 {tensor_type = 1 {elem_type = 1, shape = 2 {dim = 1}}}."""
    dtype, shape = "", None
    for kind in _inner(data, value, 2):
        for tensor in _inner(data, kind, 1):
            dtype = next((_DTYPES.get(f.value, f"type {f.value}") for f in _inner(data, tensor, 1)), "")
            for dims in _inner(data, tensor, 2):
                shape = tuple(_read_dim(data, dim) for dim in _inner(data, dims, 1))
    return GraphInput(_text(data, value, 1), dtype, shape)


def _read_dim(data: mmap.mmap, dim: _Field) -> int | str:
    """dim_value = 1, dim_param = 2. Unknown are the sizes that `onnx_model.load_onnx` takes for unknown."""
    size: int | str = "?"
    for field in _fields(data, dim.begin, dim.end):
        if field.number == 1:
            size = "?" if field.value >> 63 else field.value  # a negative number has the highest of 64 bits
        elif field.number == 2:
            name = _decode(data, field)
            size = name if name != "None" and any(letter.isalpha() for letter in name) else "?"
    return size


def _inner(data: mmap.mmap, outer: _Field, number: int) -> Iterator[_Field]:
    return (field for field in _fields(data, outer.begin, outer.end) if field.number == number)


def _text(data: mmap.mmap, outer: _Field, number: int) -> str:
    return next((_decode(data, field) for field in _inner(data, outer, number)), "")


def _decode(data: mmap.mmap, field: _Field) -> str:
    return data[field.begin : field.end].decode()


def _fields(data: mmap.mmap, place: int, end: int) -> Iterator[_Field]:
    """The fields of the message in these bytes (https://protobuf.dev/programming-guides/encoding). Raises ValueError
    where a field has no such form or leaves the message."""
    while place < end:
        tag, place = _varint(data, place, end)
        value, begin = 0, place
        match tag & 7:
            case 0:
                value, place = _varint(data, place, end)
            case 1:
                place += 8
            case 2:
                length, begin = _varint(data, place, end)
                place = begin + length
            case 5:
                place += 4
            case _:
                raise ValueError("a wire type that ONNX does not have")
        if place > end or tag < 8:
            raise ValueError("a field that leaves its message")
        yield _Field(tag >> 3, value, begin, place)


def _varint(data: mmap.mmap, place: int, end: int) -> tuple[int, int]:
    """A number of at most 64 bits, and the place behind it."""
    value = 0
    for shift in range(0, 70, 7):
        if place >= end:
            break
        byte = data[place]
        place += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, place
    raise ValueError("a number has no end")
