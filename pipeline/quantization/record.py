"""What quantizing a model did to it, tensor by tensor, read from the graph that was written.

The Q/DQ pairs of a written graph: which tensor each one rounds, to what, and who reads the result.

Multiplications with weights: how many of them a quantized graph does in integers (or in fp8).

The quantization record of one int8 or fp8 graph: what was quantized how well, what was not and why.

It is made from the graph that was written, and not from what was meant to be written: scales, formats and readers are
those of its Q/DQ nodes.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, numpy_helper

from enginery.arrays import Array
from enginery.core.reports.quantization import (
    QuantizationRecord,
    QuantizedTensor,
    RecordedSearch,
    Span,
    TensorHistogram,
)
from pipeline.quantization.graph import constants, consumers
from pipeline.quantization.insertion_points import OP_TYPES, prepare_model
from pipeline.quantization.notes import QuantizationNotes
from pipeline.quantization.ranges import Ranges
from pipeline.quantization.schemes.insertion import GRIDS
from pipeline.quantization.statistics.levels import NAMES, Levels, decibels, rebin
from pipeline.quantization.statistics.observations import Observations, TensorStatistics
from validation.latency.roofline.costs import per_value

# What moves or converts values and keeps their distribution: a pair behind one is the pair of the tensor before it.
_TRANSPARENT = ("Cast", "SpaceToDepth", "DepthToSpace", "Reshape", "Transpose", "Identity")


@dataclass(frozen=True, eq=False)
class Pair:
    """One DequantizeLinear, with its QuantizeLinear or its stored values.

    names: the tensor's, the likeliest first: insertion may rename what it rounds.  weight: whether it is a constant.
    element_type: ONNX's.  scales, zero_point: of one tensor, or per channel along `axis`.
    readers: names of the nodes that compute with the result.
    """

    names: tuple[str, ...]
    weight: bool
    element_type: int
    scales: NDArray[np.float64]
    zero_point: float
    axis: int
    readers: tuple[str, ...]

    @property
    def format(self) -> str:
        """'int8', 'uint8' or 'fp8'."""
        return NAMES[self.element_type]


def pairs(model: ModelProto) -> tuple[Pair, ...]:
    """Every pair of 8 bits, in the graph's order. Biases, which are stored in 32 bits, are left out."""
    return tuple(_PairReader(model).found())


class _PairReader:
    def __init__(self, model: ModelProto) -> None:
        self.nodes = model.graph.node
        self.given = constants(model.graph)
        self.makers = {name: node for node in self.nodes for name in node.output}
        self.consumers: Mapping[str, list[NodeProto]] = consumers(model.graph)

    def found(self) -> Iterator[Pair]:
        for node in self.nodes:
            if node.op_type == "DequantizeLinear" and (pair := self._pair(node)):
                yield pair

    def _pair(self, node: NodeProto) -> Pair | None:
        kind = self._element_type(node)
        scales = self._constant(node, 1)
        if kind not in NAMES or scales is None:
            return None
        *_, stored = self._before(node.input[0])  # bytes may be moved between the two
        maker = self.makers.get(stored)
        rounded = maker.input[0] if maker is not None else stored
        axis = next((item.i for item in node.attribute if item.name == "axis"), 1)
        zero = self._constant(node, 2)
        return Pair(
            names=tuple(dict.fromkeys([node.output[0], *self._before(rounded)])),
            weight=rounded in self.given,
            element_type=kind,
            scales=scales,
            zero_point=0.0 if zero is None else float(zero.reshape(-1)[0]),
            axis=axis,
            readers=tuple(self._readers(node.output[0])),
        )

    def _element_type(self, node: NodeProto) -> int:
        zero = self.given.get(node.input[2]) if len(node.input) > 2 else None
        stored = self.given.get(node.input[0], zero)
        return TensorProto.UINT8 if stored is None else int(stored.data_type)

    def _constant(self, node: NodeProto, index: int) -> NDArray[np.float64] | None:
        found = self.given.get(node.input[index]) if len(node.input) > index else None
        return None if found is None else numpy_helper.to_array(found).astype(np.float64)

    def _before(self, tensor: str) -> Iterator[str]:
        yield tensor
        while (maker := self.makers.get(tensor)) is not None and maker.op_type in _TRANSPARENT:
            tensor = maker.input[0]
            yield tensor

    def _readers(self, tensor: str) -> Iterator[str]:
        for node in self.consumers.get(tensor, ()):
            if node.op_type in ("Cast", "QuantizeLinear"):
                yield from self._readers(node.output[0])
            else:
                yield node.name


def weighted_macs(model: ModelProto, seen: Observations) -> dict[str, int]:
    """Multiplications by a constant weight over all calibration samples, by node of a prepared model.

    Counted from the values that calibration saw come out of each node (in, for a transposed convolution): every one
    took one multiplication for each weight of its channel. Nodes whose values were not counted are left out.
    """
    given = constants(model.graph)
    found = {}
    for node in model.graph.node:
        weight = given.get(node.input[1]) if node.op_type in OP_TYPES and len(node.input) > 1 else None
        counted = seen.tensors.get(_count(node)) if weight is not None else None
        if weight is not None and counted is not None:
            found[node.name] = counted.elements * _per_value(node, weight)
    return found


def share(macs: Mapping[str, int], nodes: Collection[str]) -> float | None:
    """The share that these nodes do; None where nothing was counted."""
    total = sum(macs.values())
    return sum(macs.get(name, 0) for name in nodes) / total if total else None


def _count(node: NodeProto) -> str:
    return str(node.input[0] if node.op_type == "ConvTranspose" else node.output[0])


def _per_value(node: NodeProto, weight: TensorProto) -> int:
    transposed = any(item.name == "transB" and item.i for item in node.attribute)
    return per_value(node.op_type, [int(size) for size in weight.dims], transposed)


FORMAT = 1
# Histograms are kept for this many activations, those with the lowest SQNR, in so many bins.
PICTURES, BINS = 6, 60


@dataclass(frozen=True)
class Evidence:
    """What a record is made from, beside the written graph.

    model: the float model that was written; weights are compared with its own.  ranges: that the graph was given.
    seen: what calibration saw.  smoothed, choice, weight_db: of a search, if there was one (`Chosen`).
    weight_levels: the largest magnitude of int8 weights (`QuantizationScheme`).
    """

    model: ModelProto
    ranges: Ranges
    seen: Observations
    smoothed: Mapping[str, TensorStatistics] = field(default_factory=dict)
    choice: RecordedSearch | None = None
    weight_db: Mapping[str, float | None] = field(default_factory=dict)
    weight_levels: int = 127


def record(written: ModelProto, notes: QuantizationNotes, evidence: Evidence) -> QuantizationRecord:
    """The record of a graph. notes: what was quantized when it was written."""
    graph = prepare_model(evidence.model)
    found = pairs(written)
    activations = _with_histograms([_activation(pair, evidence) for pair in found if not pair.weight], evidence)
    weights = list(_weights(graph, [pair for pair in found if pair.weight], evidence))
    return QuantizationRecord(
        format=FORMAT,
        precision=notes.precision,
        method=evidence.ranges.method,
        samples=evidence.seen.samples,
        dataset=evidence.ranges.dataset,
        quantized=len(notes.quantized),
        macs_share=share(weighted_macs(graph, evidence.seen), notes.quantized),
        tensors=tuple(worst_first([*activations, *weights])),
        left=notes.kept,
        choice=evidence.choice,
    )


def worst_first(tensors: Sequence[QuantizedTensor]) -> list[QuantizedTensor]:
    """By SQNR; those without loss, and those that were not measured, last."""
    return sorted(tensors, key=lambda item: (item.sqnr_db is None, item.sqnr_db or 0.0, item.name))


def _activation(pair: Pair, evidence: Evidence) -> QuantizedTensor:
    name = next((name for name in pair.names if name in evidence.ranges.tensors), pair.names[-1])
    seen = evidence.smoothed.get(name) or evidence.seen.tensors.get(name)
    levels = Levels.of(pair.element_type, float(pair.scales), pair.zero_point)
    item = QuantizedTensor(name, "activation", pair.format, pair.readers, levels.span, float(pair.scales))
    if seen is None or not seen.finite:
        return item
    extremes = (seen.low, seen.high)
    if seen.histogram is None or not seen.histogram.total:
        return replace(item, seen=extremes)
    return replace(
        item,
        seen=extremes,
        clipped=levels.clipped(seen.histogram, extremes),
        sqnr_db=_finite(levels.sqnr_db(seen.histogram, extremes)),
        measured="rows" if name in evidence.smoothed else "histogram",
    )


def _weights(graph: ModelProto, found: Sequence[Pair], evidence: Evidence) -> Iterator[QuantizedTensor]:
    given = constants(graph.graph)
    by_node = {node.name: node for node in graph.graph.node}
    for pair in found:
        readers = [by_node[name] for name in pair.readers if name in by_node and len(by_node[name].input) > 1]
        float_weight = given.get(readers[0].input[1]) if readers else None
        if float_weight is not None and float_weight.data_type == TensorProto.FLOAT:
            yield _weight(pair, float_weight, evidence)


def _weight(pair: Pair, float_weight: TensorProto, evidence: Evidence) -> QuantizedTensor:
    """A search rounds the weights of the float model itself, and knows what that cost."""
    values = numpy_helper.to_array(float_weight).astype(np.float64)
    scales = np.atleast_1d(pair.scales)
    largest = float(scales.max())
    span: Span = Levels.of(pair.element_type, largest).span
    if pair.format == "int8":
        span = (-evidence.weight_levels * largest, evidence.weight_levels * largest)
    searched = [evidence.weight_db[name] for name in pair.readers if name in evidence.weight_db]
    return QuantizedTensor(
        float_weight.name,
        "weight",
        pair.format,
        pair.readers,
        span,
        largest,
        seen=(float(values.min()), float(values.max())),
        clipped=0.0,
        sqnr_db=searched[0] if searched else _finite(_rounding_db(pair, values, scales)),
        measured="weight",
    )


def _rounding_db(pair: Pair, values: Array, scales: Array) -> float:
    axis = pair.axis % values.ndim
    rounded = GRIDS[pair.format].rounded(values, scales, axis).astype(np.float64)
    spread = scales.reshape([-1 if i == axis else 1 for i in range(values.ndim)])
    return decibels(float(np.square(values).sum()), float(np.square(rounded * spread - values).sum()))


def _with_histograms(activations: Sequence[QuantizedTensor], evidence: Evidence) -> Iterator[QuantizedTensor]:
    """The worst activations have histograms, over all that was seen and all that the format holds."""
    worst = [item.name for item in worst_first(activations) if item.sqnr_db is not None][:PICTURES]
    for item in activations:
        seen = evidence.smoothed.get(item.name) or evidence.seen.tensors.get(item.name)
        if item.name in worst and seen is not None and seen.histogram is not None:
            low, high = min(seen.low, item.range[0]), max(seen.high, item.range[1])
            counts = tuple(rebin(seen.histogram, low, high, BINS))
            yield replace(item, histogram=TensorHistogram((low, high), counts))
        else:
            yield item


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
