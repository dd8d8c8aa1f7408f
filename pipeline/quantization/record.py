"""The quantization record of one graph: its quantized tensors with their SQNR, and the nodes in float with the reason.

The record is read from the Q/DQ nodes of the written graph (scales, formats, readers), not from the request.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto

from builders.onnx_graphs.weights import to_array
from enginesmith.core.reports.breakdown import (
    QuantizationRecord,
    QuantizedTensor,
    RecordedSearch,
    Span,
    TensorHistogram,
)
from pipeline.quantization.graph import attribute_of, constants, consumers
from pipeline.quantization.insertion_points import prepare_model
from pipeline.quantization.ranges import QuantizationNotes, Ranges
from pipeline.quantization.schemes.insertion import GRIDS
from pipeline.quantization.statistics.histogram import NAMES, Levels, decibels, rebin
from pipeline.quantization.statistics.observations import Observations, TensorStatistics

FORMAT = 1
# Number of activations (lowest SQNR first) with a stored histogram, and its number of bins.
PICTURES, BINS = 6, 60
# Operators that keep the distribution of values: a Q/DQ pair after such a node belongs to the tensor before it.
_TRANSPARENT = ("Cast", "SpaceToDepth", "DepthToSpace", "Reshape", "Transpose", "Identity")


@dataclass(frozen=True)
class Evidence:
    """The inputs of a record, besides the written graph.

    model: the float model that was quantized; rounded weights are compared with its weights.  ranges: of the graph.
    seen: the observations of calibration.  smoothed, choice, weight_db: of a search, if any: the statistics of its
    smoothed activations, its frontier, and the SQNR of each node's rounded weight.
    weight_levels: the largest magnitude of int8 weights (`QuantizationScheme`).  share: as in `QuantizationRecord`.
    """

    model: ModelProto
    ranges: Ranges
    seen: Observations
    smoothed: Mapping[str, TensorStatistics] = field(default_factory=dict)
    choice: RecordedSearch | None = None
    weight_db: Mapping[str, float | None] = field(default_factory=dict)
    weight_levels: int = 127
    share: float | None = None


def record(written: ModelProto, notes: QuantizationNotes, evidence: Evidence) -> QuantizationRecord:
    """The record of a written graph. notes: on its quantization."""
    graph = prepare_model(evidence.model)
    pairs = list(_PairReader(written).find_pairs())
    activations = [_describe_activation(pair, evidence) for pair in pairs if not pair.weight]
    activations = list(_add_histograms(activations, evidence))
    weights = list(_describe_weights(graph, [pair for pair in pairs if pair.weight], evidence))
    return QuantizationRecord(
        format=FORMAT,
        precision=notes.precision,
        method=evidence.ranges.method,
        samples=evidence.seen.samples,
        dataset=evidence.ranges.dataset,
        quantized=len(notes.quantized),
        macs_share=evidence.share,
        tensors=tuple(_sort_worst_first([*activations, *weights])),
        left=notes.float_nodes,
        choice=evidence.choice,
    )


def _sort_worst_first(tensors: Sequence[QuantizedTensor]) -> list[QuantizedTensor]:
    """The tensors by rising SQNR; tensors without loss or without a measurement are last."""
    return sorted(tensors, key=lambda tensor: (tensor.sqnr_db is None, tensor.sqnr_db or 0.0, tensor.name))


@dataclass(frozen=True, eq=False)
class _QdqPair:
    """A DequantizeLinear of 8 bits, with its QuantizeLinear or its stored values.

    names: of the tensor, the likeliest first: insertion may rename a tensor.  weight: whether the tensor is a constant.
    element_type: ONNX's.  scales, zero_point: of the tensor, or per channel along `axis`.
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


class _PairReader:
    """Finds the Q/DQ pairs of a graph."""

    def __init__(self, model: ModelProto) -> None:
        self.nodes = model.graph.node
        self.initializers = constants(model.graph)
        self.makers = {name: node for node in self.nodes for name in node.output}
        self.consumers = consumers(model.graph)

    def find_pairs(self) -> Iterator[_QdqPair]:
        """Every pair, in the graph's order; biases, which are stored in 32 bits, are left out."""
        for node in self.nodes:
            if node.op_type != "DequantizeLinear":
                continue
            zeros = self.initializers.get(node.input[2]) if len(node.input) > 2 else None
            zero_point = self.initializers.get(node.input[0], zeros)
            element_type = TensorProto.UINT8 if zero_point is None else int(zero_point.data_type)
            scales, zero = self._constant(node, 1), self._constant(node, 2)
            if element_type not in NAMES or scales is None:
                continue
            *_, source = self._before(node.input[0])  # the two nodes of a pair may have moving nodes between them
            producer = self.makers.get(source)
            if producer is not None and producer.domain == "trt":
                continue  # the scales of blocks, which are computed at run time
            source_name = producer.input[0] if producer is not None else source
            yield _QdqPair(
                names=tuple(dict.fromkeys([node.output[0], *self._before(source_name)])),
                weight=source_name in self.initializers,
                element_type=element_type,
                scales=scales,
                zero_point=0.0 if zero is None else float(zero.reshape(-1)[0]),
                axis=attribute_of(node, "axis", 1),
                readers=tuple(self._readers(node.output[0])),
            )

    def _constant(self, node: NodeProto, index: int) -> NDArray[np.float64] | None:
        initializer = self.initializers.get(node.input[index]) if len(node.input) > index else None
        return None if initializer is None else to_array(initializer).astype(np.float64)

    def _before(self, tensor: str) -> Iterator[str]:
        """A tensor, and the tensors of which it is a moved or converted copy."""
        yield tensor
        while (producer := self.makers.get(tensor)) is not None and producer.op_type in _TRANSPARENT:
            tensor = producer.input[0]
            yield tensor

    def _readers(self, tensor: str) -> Iterator[str]:
        for node in self.consumers.get(tensor, ()):
            if node.op_type in ("Cast", "QuantizeLinear"):
                yield from self._readers(node.output[0])
            else:
                yield node.name


def _describe_activation(pair: _QdqPair, evidence: Evidence) -> QuantizedTensor:
    name = next((name for name in pair.names if name in evidence.ranges.tensors), pair.names[-1])
    observation = evidence.smoothed.get(name) or evidence.seen.tensors.get(name)
    levels = Levels.of(pair.element_type, float(pair.scales), pair.zero_point)
    tensor = QuantizedTensor(name, "activation", pair.format, pair.readers, levels.span, float(pair.scales))
    if observation is None or not observation.finite:
        return tensor
    extremes = (observation.low, observation.high)
    if observation.histogram is None or not observation.histogram.total:
        return replace(tensor, seen=extremes)
    return replace(
        tensor,
        seen=extremes,
        clipped=levels.clipped(observation.histogram, extremes),
        sqnr_db=_finite(levels.sqnr_db(observation.histogram, extremes)),
        measured="rows" if name in evidence.smoothed else "histogram",
    )


def _add_histograms(activations: Sequence[QuantizedTensor], evidence: Evidence) -> Iterator[QuantizedTensor]:
    """The activations; the worst have histograms over the observed values and the range of the format."""
    worst_names = [tensor.name for tensor in _sort_worst_first(activations) if tensor.sqnr_db is not None][:PICTURES]
    for tensor in activations:
        observation = evidence.smoothed.get(tensor.name) or evidence.seen.tensors.get(tensor.name)
        if tensor.name in worst_names and observation is not None and observation.histogram is not None:
            low, high = min(observation.low, tensor.range[0]), max(observation.high, tensor.range[1])
            counts = tuple(rebin(observation.histogram, low, high, BINS))
            yield replace(tensor, histogram=TensorHistogram((low, high), counts))
        else:
            yield tensor


def _describe_weights(graph: ModelProto, pairs: Sequence[_QdqPair], evidence: Evidence) -> Iterator[QuantizedTensor]:
    initializers = constants(graph.graph)
    nodes = {node.name: node for node in graph.graph.node}
    for pair in pairs:
        if any(name in initializers and initializers[name].data_type in NAMES for name in pair.names):
            continue  # the source model already stores it quantized
        readers = [nodes[name] for name in pair.readers if name in nodes and len(nodes[name].input) > 1]
        float_weight = initializers.get(readers[0].input[1]) if readers else None
        if float_weight is None or float_weight.data_type != TensorProto.FLOAT:
            continue
        values = to_array(float_weight).astype(np.float64)
        scales = np.atleast_1d(pair.scales)
        largest = float(scales.max())
        span: Span = Levels.of(pair.element_type, largest).span
        if pair.format == "int8":
            span = (-evidence.weight_levels * largest, evidence.weight_levels * largest)
        # The float model of a search has rounded weights, whose SQNR the search measured.
        searched_db = [evidence.weight_db[name] for name in pair.readers if name in evidence.weight_db]
        yield QuantizedTensor(
            float_weight.name,
            "weight",
            pair.format,
            pair.readers,
            span,
            largest,
            seen=(float(values.min()), float(values.max())),
            clipped=0.0,
            sqnr_db=searched_db[0] if searched_db else _finite(_rounding_db(pair, values, scales)),
            measured="weight",
        )


def _rounding_db(pair: _QdqPair, values: NDArray[np.float64], scales: NDArray[np.float64]) -> float:
    """SQNR in dB of a weight that is rounded to the pair's grid."""
    axis = pair.axis % values.ndim
    rounded_values = GRIDS[pair.format].rounded(values, scales, axis).astype(np.float64)
    broadcast_scales = np.expand_dims(scales, [dim for dim in range(values.ndim) if dim != axis])
    return decibels(float(np.square(values).sum()), float(np.square(rounded_values * broadcast_scales - values).sum()))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
