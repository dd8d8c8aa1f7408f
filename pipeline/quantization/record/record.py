"""The quantization record of one int8 or fp8 graph: what was quantized how well, what was not and why.

It is made from the graph that was written, and not from what was meant to be written: scales, formats and readers are
those of its Q/DQ nodes.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from onnx import ModelProto, TensorProto, numpy_helper

from enginery.arrays.arrays import Array
from enginery.core.reports.quantization import (
    QuantizationRecord,
    QuantizedTensor,
    RecordedSearch,
    Span,
    TensorHistogram,
)
from pipeline.graphs.graph import constants
from pipeline.graphs.grids import GRIDS
from pipeline.quantization.insertion.insertion_points import prepare_model
from pipeline.quantization.notes import QuantizationNotes
from pipeline.quantization.ranges import Ranges
from pipeline.quantization.record.levels import Levels, decibels, rebin
from pipeline.quantization.record.pairs import Pair, pairs
from pipeline.quantization.record.work import share, weighted_macs
from pipeline.quantization.statistics.observations import Observations, TensorStatistics

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
