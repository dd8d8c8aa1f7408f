"""The quantization record of one int8 or fp8 graph: what was quantized how well, what was not and why, as JSON.

It is made from the graph that was written, and not from what was meant to be written: scales, formats and readers are
those of its Q/DQ nodes.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, numpy_helper

from pipeline.graphs.graph import constants
from pipeline.graphs.grids import GRIDS
from pipeline.quantization.insertion.insertion_points import prepared
from pipeline.quantization.notes import QuantizationNotes
from pipeline.quantization.ranges import Ranges
from pipeline.quantization.record.levels import Levels, decibels, rebinned
from pipeline.quantization.record.pairs import Pair, pairs
from pipeline.quantization.record.work import share, weighted_macs
from pipeline.quantization.statistics.observations import Observations, Seen

FORMAT = 1
# Histograms are kept for this many activations, those with the lowest SQNR, in so many bins.
PICTURES, BINS = 6, 60

Json = dict[str, Any]


@dataclass(frozen=True)
class Evidence:
    """What a record is made from, beside the written graph.

    model: the float model that was written; weights are compared with its own.  ranges: that the graph was given.
    seen: what calibration saw.  smoothed, choice: of a search, if there was one (`Chosen`, and the choice's JSON).
    weight_levels: the largest magnitude of int8 weights (`QuantizationScheme`).
    """

    model: ModelProto
    ranges: Ranges
    seen: Observations
    smoothed: Mapping[str, Seen] = field(default_factory=dict)
    choice: Json | None = None
    weight_levels: int = 127

    @property
    def weight_db(self) -> Mapping[str, float | None]:
        """Node -> SQNR of the weight that a search rounded."""
        return self.choice["weight_db"] if self.choice else {}


def record(written: ModelProto, notes: QuantizationNotes, evidence: Evidence) -> Json:
    """The record of a graph. SQNR is in decibels, of quantizing one tensor alone; null without loss, or not measured.

    Per tensor: 'name', 'role' (activation, weight), 'format', 'readers' (nodes), 'range' (what the format holds; of an
    int8 weight, what its scheme uses), 'seen' (extremes), 'clipped' (share of the values that saturate), 'scale' (of a
    weight the largest channel's), 'sqnr_db', 'measured' (how: 'histogram' and 'rows' as in `levels`, over all samples
    or over some rows of a smoothed activation; 'weight' against the float weight, value by value; or null), and
    'histogram' of the worst activations.
    """
    graph = prepared(evidence.model)
    found = pairs(written)
    activations = [_activation(pair, evidence) for pair in found if not pair.weight]
    weights = list(_weights(graph, [pair for pair in found if pair.weight], evidence))
    _draw(activations, evidence)
    return {
        "format": FORMAT,
        "precision": notes.precision,
        "method": evidence.ranges.method,
        "samples": evidence.seen.samples,
        "dataset": evidence.ranges.dataset,
        "quantized": len(notes.quantized),
        "macs_share": share(weighted_macs(graph, evidence.seen), notes.quantized),
        "tensors": worst_first([*activations, *weights]),
        "left": [{"node": item.node, "op_type": item.op_type, "reason": item.reason} for item in notes.kept],
        "choice": _choice(evidence),
    }


def worst_first(tensors: Sequence[Json]) -> list[Json]:
    """By SQNR; those without loss, and those that were not measured, last."""
    return sorted(tensors, key=lambda item: (item["sqnr_db"] is None, item["sqnr_db"] or 0.0, item["name"]))


def _activation(pair: Pair, evidence: Evidence) -> Json:
    name = next((name for name in pair.names if name in evidence.ranges.tensors), pair.names[-1])
    smoothed = name in evidence.smoothed
    seen = evidence.smoothed.get(name) or evidence.seen.tensors.get(name)
    levels = Levels.of(pair.element_type, float(pair.scales), pair.zero_point)
    item = _described(name, "activation", pair, levels.span, float(pair.scales))
    if seen is None or not seen.finite:
        return item
    extremes = (seen.low, seen.high)
    item["seen"] = list(extremes)
    if seen.histogram is None or not seen.histogram.total:
        return item
    item |= {"clipped": levels.clipped(seen.histogram, extremes), "measured": "rows" if smoothed else "histogram"}
    return item | {"sqnr_db": _finite(levels.sqnr_db(seen.histogram, extremes))}


def _weights(graph: ModelProto, found: Sequence[Pair], evidence: Evidence) -> Iterator[Json]:
    given = constants(graph.graph)
    by_node = {node.name: node for node in graph.graph.node}
    for pair in found:
        readers = [by_node[name] for name in pair.readers if name in by_node and len(by_node[name].input) > 1]
        float_weight = given.get(readers[0].input[1]) if readers else None
        if float_weight is not None and float_weight.data_type == TensorProto.FLOAT:
            yield _weight(pair, float_weight, evidence)


def _weight(pair: Pair, float_weight: TensorProto, evidence: Evidence) -> Json:
    """A search rounds the weights of the float model itself, and knows what that cost."""
    values = numpy_helper.to_array(float_weight).astype(np.float64)
    scales = np.atleast_1d(pair.scales)
    largest = float(scales.max())
    low, high = Levels.of(pair.element_type, largest).span
    if pair.format == "int8":
        low, high = -evidence.weight_levels * largest, evidence.weight_levels * largest
    item = _described(float_weight.name, "weight", pair, (low, high), largest)
    item |= {"seen": [float(values.min()), float(values.max())], "clipped": 0.0, "measured": "weight"}
    searched = [evidence.weight_db[name] for name in pair.readers if name in evidence.weight_db]
    return item | {"sqnr_db": searched[0] if searched else _finite(_rounding_db(pair, values, scales))}


def _rounding_db(pair: Pair, values: Any, scales: Any) -> float:
    axis = pair.axis % values.ndim
    rounded = GRIDS[pair.format].rounded(values, scales, axis).astype(np.float64)
    spread = scales.reshape([-1 if i == axis else 1 for i in range(values.ndim)])
    return decibels(float(np.square(values).sum()), float(np.square(rounded * spread - values).sum()))


def _described(name: str, role: str, pair: Pair, span: tuple[float, float], scale: float) -> Json:
    return {
        "name": name,
        "role": role,
        "format": pair.format,
        "readers": list(pair.readers),
        "range": list(span),
        "scale": scale,
        "seen": None,
        "clipped": None,
        "sqnr_db": None,
        "measured": None,
    }


def _draw(activations: Sequence[Json], evidence: Evidence) -> None:
    """Give the worst activations their histograms, over all that was seen and all that the format holds."""
    for item in [item for item in worst_first(activations) if item["sqnr_db"] is not None][:PICTURES]:
        seen = evidence.smoothed.get(item["name"]) or evidence.seen.tensors[item["name"]]
        low, high = min(seen.low, item["range"][0]), max(seen.high, item["range"][1])
        if seen.histogram is not None:
            item["histogram"] = {"span": [low, high], "counts": rebinned(seen.histogram, low, high, BINS)}


def _choice(evidence: Evidence) -> Json | None:
    """The frontier of a search; the groups themselves are in `enginery sensitivity`."""
    if evidence.choice is None:
        return None
    points = [_point(point) for point in evidence.choice["frontier"]]
    floor = evidence.choice["floor"] or {}
    chosen = _point(evidence.choice["chosen"])
    return {"floor_db": floor.get("sqnr_db"), "frontier": points, "chosen": chosen}


def _point(point: Json) -> Json:
    kept = {name: point[name] for name in ("share", "predicted_db", "sqnr_db", "cosine")}
    return {**kept, "left": len(point["left"])}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
