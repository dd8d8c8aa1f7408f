"""ONNX graphs over what one file holds: the graph without its large weights, and these in shards beside it.

A shard is a file named by the SHA-256 of its bytes, and the graph names shards as its external data. So the graph's
own digest stands for all of it, ONNX Runtime opens and maps it as it lies there, and a registry keeps, shares and sends
each shard by itself: graphs that have weights in common have their shards in common. Weights are put into shards in the
order of their names, so that a changed weight changes one shard, and of a quantized graph that of its vectors.
docs/decisions/0016-shards.md says why.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from onnx import GraphProto, ModelProto, NodeProto, TensorProto

from builders.onnx_graphs.bodies import list_reads
from builders.onnx_graphs.weights import (
    LOOSE,
    blocks,
    embed,
    has_external,
    is_external,
    may_lie_outside,
    place_of,
    set_place,
)
from enginesmith.core.digest import is_digest

# A larger weight has a shard to itself.
SHARD_BYTES = 256 << 20
# Weights begin at multiples of a page, as mapped files are read best.
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
    outside = [tensor for tensor in model.graph.initializer if may_lie_outside(tensor)]
    same = dict[object, list[TensorProto]]()  # tensors of the same bytes, which are written once
    for tensor in outside:
        same.setdefault(place_of(tensor) if is_external(tensor) else id(tensor), []).append(tensor)
    kept = _find_kept([tensors[0] for tensors in same.values() if _is_shard(tensors[0], folder)])
    fresh = [first for first, *_ in same.values() if not (is_external(first) and place_of(first)[0] in kept)]
    for group in _groups(fresh, shard_bytes):
        _write_shard(group, folder)
    for first, *others in same.values():
        for tensor in (first, *others):
            file, *rest = place_of(first)
            set_place(tensor, Path(file).name, *rest)
    path.write_bytes(model.SerializeToString(deterministic=True))
    for tensor in outside:
        name, *rest = place_of(tensor)
        set_place(tensor, str(folder / name), *rest)


def put_constants_first(graph: GraphProto) -> None:
    """Put the nodes that read constants alone before all others, in place.

    ONNX Runtime orders nodes from the outputs back, and of a node's inputs it leaves for last those that stand first in
    the file. So weights are dequantized or widened one at a time, each just before the node that multiplies with it.
    Where these nodes stand beside that node, ONNX Runtime 1.31 widens all weights before it does anything else: an int8
    graph of 2.6 GB in float32 took 3.9 GB to run, and takes 0.3 so.
    """
    constant = {tensor.name for tensor in graph.initializer}
    first, others = list[NodeProto](), list[NodeProto]()
    for node in graph.node:
        reads = list_reads(node)
        if reads and constant.issuperset(reads):
            constant.update(node.output)
            first.append(node)
        else:
            others.append(node)
    del graph.node[:]
    graph.node.extend([*first, *others])


def write_graph(model: ModelProto, path: Path) -> None:
    """Write a model in one piece, or with shards beside it where weights of it lie in files."""
    if has_external(model):
        save_graph(model, path)
    else:
        path.write_bytes(model.SerializeToString())


def in_shards(model: ModelProto) -> bool:
    """Whether weights of the graph lie in shards."""
    places = (place_of(tensor)[0] for tensor in model.graph.initializer if is_external(tensor))
    return any(is_digest(Path(file).name) for file in places)


def link_shards(model: ModelProto, folder: Path) -> None:
    """Put the shards of a graph into a folder of the same file system, as links; the model names them as files of that
    folder do, in place."""
    for tensor in (tensor for tensor in model.graph.initializer if is_external(tensor)):
        file, *rest = place_of(tensor)
        shard = folder / Path(file).name
        if not shard.exists():
            shard.hardlink_to(file)
        set_place(tensor, shard.name, *rest)


def _find_kept(tensors: Sequence[TensorProto]) -> set[str]:
    """The shards of which these tensors take half or more."""
    used = Counter[str]()
    for file, _, length in map(place_of, tensors):
        used[file] += length
    return {file for file, size in used.items() if 2 * size >= Path(file).stat().st_size}


def _is_shard(tensor: TensorProto, folder: Path) -> bool:
    if not is_external(tensor):
        return False
    file = Path(place_of(tensor)[0])
    return file.parent == folder and is_digest(file.name)


def _groups(tensors: Sequence[TensorProto], most_bytes: int) -> Iterator[list[TensorProto]]:
    """The tensors by name, as many together as fit a shard, and vectors apart from others: those of an int8 graph
    (biases in steps of its activations) change with any weight before them."""
    group, size = list[TensorProto](), 0
    for tensor in sorted(tensors, key=lambda item: (len(item.dims) > 1, item.name)):
        own = place_of(tensor)[2] if is_external(tensor) else len(tensor.raw_data)
        if group and (size + own > most_bytes or len(group[-1].dims) <= 1 < len(tensor.dims)):
            yield group
            group, size = [], 0
        group.append(tensor)
        size += own
    if group:
        yield group


def _write_shard(tensors: Sequence[TensorProto], folder: Path) -> None:
    """Write tensors into one shard and say so in them; files with one loose weight are removed."""
    hasher, places, size = hashlib.sha256(), list[tuple[int, int]](), 0
    partial = folder / "shard.partial"
    with partial.open("wb") as sink:
        for tensor in tensors:
            padding = bytes(-size % _ALIGNED)
            hasher.update(padding)
            size += sink.write(padding)
            places.append((size, 0))
            for block in blocks(tensor):
                hasher.update(block)
                size += sink.write(block)
            places[-1] = (places[-1][0], size - places[-1][0])
    shard = partial.rename(folder / hasher.hexdigest())
    for tensor, (offset, length) in zip(tensors, places, strict=True):
        loose = Path(place_of(tensor)[0]) if is_external(tensor) else None
        set_place(tensor, str(shard), offset, length)
        if loose and loose.name.startswith(LOOSE) and loose.parent == folder:
            loose.unlink()
