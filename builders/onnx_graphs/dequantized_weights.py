"""Weights that came stored as int8 with a Cast behind them, and a Mul by their scale: written with a DequantizeLinear.

TensorRT takes constants of int8 in front of that operator alone ("Quantized constant is only allowed before DQ"), and
keeps them as they are there. A Cast is a DequantizeLinear with the scale 1; it takes over the scale of a Mul behind it
that nothing else reads. Both compute the same numbers to the bit: an int8 times a scale is exact in float32, or rounded
once, as in the Mul.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from builders.onnx_graphs.bodies import list_reads
from builders.onnx_graphs.weights import has_external
from enginesmith.arrays import Array

# The first opset whose DequantizeLinear has an axis.
_PER_AXIS = 13
_HALVES = (TensorProto.FLOAT16, TensorProto.BFLOAT16)


def with_dequantized_weights(model: Path, workdir: Path) -> Path:
    """The model, or where it has such weights WORKDIR/dequantized.onnx. model: one that onnx's checker has passed."""
    loaded = onnx.load(model, load_external_data=False)
    if has_external(loaded) or not dequantize_stored_weights(loaded):
        return model
    path = workdir / "dequantized.onnx"
    path.write_bytes(loaded.SerializeToString())
    return path


def dequantize_stored_weights(model: ModelProto) -> int:
    """Rewrite a model in place; the number of its weights that were."""
    graph = model.graph
    if max((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), default=0) < _PER_AXIS:
        return 0
    given = {item.name: item for item in graph.initializer}
    written = dict[str, list[NodeProto]]()
    taken = set[str]()
    for cast, scaling in _find_stored(graph, given):
        weight, last = given[cast.input[0]], scaling or cast
        scale = numpy_helper.to_array(given[_scale_of(scaling, cast)]) if scaling else np.ones((), np.float32)
        values = numpy_helper.from_array(_flat(scale), f"{last.output[0]}/scale")
        graph.initializer.append(values)
        written[last.output[0]] = [*_nodes(weight.name, values.name, last.output[0], _axis(scale), _kind(cast))]
        taken |= {cast.output[0]} if scaling else set()
    nodes = [node for node in graph.node if not taken.intersection(node.output)]
    del graph.node[:]
    for node in nodes:
        graph.node.extend(written.get(node.output[0], [node]))
    return len(written)


def _find_stored(graph: GraphProto, given: dict[str, TensorProto]) -> Iterator[tuple[NodeProto, NodeProto | None]]:
    """Casts of int8 constants to a floating type, each with the Mul by a scale that alone reads it."""
    uses = Counter(name for node in graph.node for name in list_reads(node))
    uses.update(value.name for value in graph.output)
    readers = {name: node for node in graph.node for name in node.input}
    for node in graph.node:
        weight = given.get(node.input[0]) if node.op_type == "Cast" else None
        if weight is None or weight.data_type != TensorProto.INT8 or _kind(node) not in (TensorProto.FLOAT, *_HALVES):
            continue
        scaling = readers.get(node.output[0]) if uses[node.output[0]] == 1 else None
        if scaling is not None and not (scaling.op_type == "Mul" and _is_scale(given, scaling, node)):
            scaling = None
        yield node, scaling


def _is_scale(given: dict[str, TensorProto], scaling: NodeProto, cast: NodeProto) -> bool:
    """Whether a Mul's constant is one number, or one for each index of one axis of the weight."""
    scale, weight = given.get(_scale_of(scaling, cast)), given[cast.input[0]]
    if scale is None:
        return False
    dims, sizes = [*scale.dims], [*weight.dims]
    along = [axis for axis, size in enumerate(dims) if size != 1]
    if not along:
        return len(dims) <= len(sizes)
    return len(dims) == len(sizes) and len(along) == 1 and dims[along[0]] == sizes[along[0]]


def _scale_of(scaling: NodeProto, cast: NodeProto) -> str:
    return str(next((name for name in scaling.input if name != cast.output[0]), ""))


def _kind(cast: NodeProto) -> int:
    return next((int(attribute.i) for attribute in cast.attribute if attribute.name == "to"), TensorProto.UNDEFINED)


def _axis(scale: Array) -> int:
    return next((axis for axis, size in enumerate(scale.shape) if size != 1), 0)


def _flat(scale: Array) -> Array:
    """One number, or a vector of them, in float32."""
    values = scale.astype(np.float32).reshape(-1)
    return values.reshape(()) if values.size == 1 else values


def _nodes(weight: str, scale: str, output: str, axis: int, kind: int) -> Iterator[NodeProto]:
    wide = output if kind == TensorProto.FLOAT else f"{output}/float32"
    yield helper.make_node("DequantizeLinear", [weight, scale], [wide], f"{output}/dequantized", axis=axis)
    if kind != TensorProto.FLOAT:
        yield helper.make_node("Cast", [wide], [output], f"{output}/narrowed", to=kind)
