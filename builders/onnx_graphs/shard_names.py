"""The shards that an ONNX graph names (`builders.onnx_graphs.shards`), read without onnx and without its weights."""

import mmap
from collections.abc import Iterator
from pathlib import Path

from builders.onnx_graphs.wire import fields, inner_fields, inner_text
from enginesmith.core.digest import is_digest
from enginesmith.core.errors import ModelError

_GRAPH, _INITIALIZER, _EXTERNAL_DATA = 7, 5, 13  # of ModelProto, GraphProto, TensorProto


def list_shards(path: Path) -> tuple[str, ...]:
    """The digests of the shards that the graph in a file names, sorted; none of a graph in one piece, and none of
    another file, of which its reader says more. Raises ModelError for weights in a file that is no shard."""
    found = list_weight_files(path)
    if wrong := [name for name in found if not is_digest(name)]:
        raise ModelError(f"{path.name} keeps weights in {wrong[0][:80]!r}, which is no shard; build it again")
    return found


def list_weight_files(path: Path) -> tuple[str, ...]:
    """The files that the weights of a graph lie in, as it names them, sorted; () of what is no graph or not there."""
    try:
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return tuple(sorted(set(_locations(data))))
    except (ValueError, OSError):
        return ()


def has_shards(path: Path) -> bool:
    """Whether the weights of the graph in a file lie in shards."""
    return any(map(is_digest, list_weight_files(path)))


def graph_bytes(path: Path) -> int:
    """Bytes of a graph's file and of the files that its weights lie in."""
    files = (path.parent / name for name in list_weight_files(path))
    return path.stat().st_size + sum(file.stat().st_size for file in files if file.is_file())


def _locations(data: mmap.mmap) -> Iterator[str]:
    """The files that the weights of the main graph lie in."""
    for graph in (field for field in fields(data, 0, len(data)) if field.number == _GRAPH):
        for tensor in inner_fields(data, graph, _INITIALIZER):
            for entry in inner_fields(data, tensor, _EXTERNAL_DATA):
                if inner_text(data, entry, 1) == "location":
                    yield inner_text(data, entry, 2)
