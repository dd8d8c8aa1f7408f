"""The settings of each group: strength of smoothing, clipping of the activation, rounding of weights, biases.

For groups that mix, strength and clipping are tried together, and then the weights are rounded. A setting is judged at
the outputs of the group's own nodes, from statistics: the activation's error on some rows, the weight's error from the
second moments. Each node's error counts relative to its own output, so that a query with large values does not
outweigh its value. No inference is run. Factors and range are made from one half of the rows and judged on the other,
both ways: a setting that fits a few rows only, and clips what comes next, does not win.

For convolutions, the mean that quantizing activation and weight adds to each output channel is subtracted from the
bias: bias correction (Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction", 2019) in
its empirical form. What is left to compensate by rounding is then the error about the mean, so the covariance of the
patches takes the place of their second moments; behind a Relu, whose results have large means, the two differ a lot.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, numpy_helper

from pipeline.quantization.graph import constants
from pipeline.quantization.ranges import Ranges
from pipeline.quantization.settings.groups import ChannelSums, Floats, SmoothingGroup, Statistics
from pipeline.quantization.settings.moments import Layer, Moments, as_matrices, as_weight, batches, layers, moments_of
from pipeline.quantization.settings.rounding import LEVELS, compensate, nearest, rounded_activation
from pipeline.quantization.settings.runs import Run
from pipeline.quantization.settings.smooth import SmoothingPlan, factors_of
from pipeline.quantization.statistics.histogram import LogHistogram, decibels
from pipeline.quantization.statistics.observations import TensorStatistics

STRENGTHS: tuple[float | None, ...] = (None, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)
_CLIPS = (1.0, 0.9, 0.8, 0.7)
# Estimate of the share of error that `compensate` leaves of rounding to the nearest: a rough reading on MiniLM, never
# measured properly. It only weighs settings against each other; what is chosen is judged by running the whole model.
_COMPENSATION = 0.35
_TRIED_ROWS = 512


@dataclass(frozen=True)
class _Setting:
    strength: float | None
    clip: float
    factors: Floats
    low: float
    high: float


def fit(
    group: SmoothingGroup,
    statistics: Statistics,
    matrices: Mapping[str, Floats],
    activation: Literal["int8", "uint8"],
    strengths: Sequence[float | None] = STRENGTHS,
    levels: int = LEVELS,
) -> SmoothingPlan:
    """The best settings for a group that mixes, with its weights rounded for them.

    matrices: node -> weight [in, out].  strengths: of smoothing to try; None is no smoothing.  levels: the last one of
    the weights.
    """
    weights = {node: matrices[node] for node in group.nodes}
    best = min(_judge(statistics, list(weights.values()), activation, strengths, levels), key=lambda pair: pair[0])[1]
    moments, factors = statistics.moments, best.factors
    scaled = {node: weight * factors[:, None] for node, weight in weights.items()}
    if moments is None:
        rounded = {node: nearest(weight, levels) for node, weight in scaled.items()}
    else:
        smoothed = moments / np.outer(factors, factors)
        rounded = {node: compensate(weight, smoothed, levels) for node, weight in scaled.items()}
    weight_db = {
        node: decibels(float(np.square(exact, dtype=np.float64).sum()), float(np.square(rounded[node] - exact).sum()))
        for node, exact in scaled.items()
    }
    plan = SmoothingPlan(group, best.strength, best.clip, None, rounded, best.low, best.high, weight_db=weight_db)
    if best.strength is None:
        return plan
    low, high = float((statistics.low / factors).min()), float((statistics.high / factors).max())
    histogram = LogHistogram.of(np.asarray(statistics.rows / factors, np.float32))
    seen = TensorStatistics(low, high, statistics.count * len(factors), histogram=histogram)
    return replace(plan, factors=factors, seen=seen)


def _judge(
    statistics: Statistics, weights: Sequence[Floats], activation: str, strengths: Sequence[float | None], levels: int
) -> Iterator[tuple[float, _Setting]]:
    """(error, setting) for every strength and clip; the error is summed over nodes and folds, relative to outputs."""
    tried = [(seen, judge.rows[:: max(1, 2 * len(judge.rows) // _TRIED_ROWS)]) for seen, judge in statistics.folds]
    energies = [sum(float(np.mean((rows @ weight) ** 2)) for _, rows in tried) or 1.0 for weight in weights]
    for strength in strengths:
        factors = _factors(statistics, weights, strength)
        of_weights = [
            _weight_error(weight * factors[:, None], statistics.moments, factors, levels) for weight in weights
        ]
        for clip in _CLIPS:
            of_rows = np.zeros(len(weights))
            for seen, rows in tried:
                tested = _make_setting(seen, strength, _factors(seen, weights, strength), clip, activation)
                smoothed = rows / tested.factors
                rounded = rounded_activation(smoothed, tested.low, tested.high, activation)
                lost = (rounded - smoothed) * tested.factors
                of_rows += [float(np.mean((lost @ weight) ** 2)) for weight in weights]
            errors = zip(of_rows.tolist(), of_weights, energies, strict=True)
            setting = _make_setting(statistics, strength, factors, clip, activation)
            yield sum((a + len(tried) * _COMPENSATION * w) / energy for a, w, energy in errors), setting


def _factors(seen: ChannelSums | Statistics, weights: Sequence[Floats], strength: float | None) -> Floats:
    if strength is None:
        return np.ones(len(seen.low), np.float32)
    return factors_of(np.maximum(np.abs(seen.low), np.abs(seen.high)), weights, strength)


def _make_setting(
    seen: ChannelSums | Statistics, strength: float | None, factors: Floats, clip: float, activation: str
) -> _Setting:
    low = clip * float((seen.low / factors).min())
    high = clip * float((seen.high / factors).max())
    if activation == "int8":
        low, high = -max(-low, high), max(-low, high)
    return _Setting(strength, clip, factors, low, high)


def _weight_error(scaled: Floats, moments: Floats | None, factors: Floats, levels: int) -> float:
    """Mean squared error at the node's output that rounding its weight to the nearest makes."""
    lost = nearest(scaled, levels) - scaled
    if moments is None:
        return 0.0
    unscaled = lost / factors[:, None]
    return float(np.sum(unscaled * (moments @ unscaled))) / float(lost.shape[1])


def fit_convolutions(
    model: ModelProto,
    groups: Sequence[SmoothingGroup],
    ranges: Ranges,
    activation: Literal["int8", "uint8"],
    runs: Sequence[Run],
    levels: int = LEVELS,
) -> dict[str, SmoothingPlan]:
    """Plans by activation for the groups of convolutions of a prepared model; their activations keep their ranges.

    runs: from which the moments of the patches are taken.  levels: the last one of the weights.
    """
    given, nodes = constants(model.graph), {node.name: node for node in model.graph.node}
    weights, biases = dict[str, Floats](), dict[str, Floats]()
    convolving = [group for group in groups if all(site.op_type == "Conv" for site in group.sites)]
    for batch in batches(layers(model, (site for group in convolving for site in group.sites), ranges)):
        found = moments_of(model, batch, runs, activation)
        for layer in batch:
            weight, bias = _fit_convolution(layer, nodes[layer.site.node], given, found.pop(layer.site.node), levels)
            weights[layer.site.node] = weight
            if bias is not None:
                biases[layer.site.node] = bias
    return {
        group.activation: SmoothingPlan(
            group,
            None,
            1.0,
            None,
            {node: weights[node] for node in group.nodes},
            *ranges.tensors[group.activation],
            biases={node: biases[node] for node in group.nodes if node in biases},
        )
        for group in convolving
    }


def _fit_convolution(
    layer: Layer, node: NodeProto, given: dict[str, TensorProto], moments: Moments, levels: int
) -> tuple[Floats, Floats | None]:
    """Weight and bias of one convolution; no bias where it is not a constant."""
    stored = numpy_helper.to_array(given[layer.site.weight])
    matrix = as_matrices(stored, layer.window.groups)
    name = node.input[2] if len(node.input) > 2 else ""
    if name and name not in given:
        return as_weight(compensate(matrix, moments.about_zero, levels), stored.shape), None
    rounded = compensate(matrix, moments.covariance, levels)
    bias = numpy_helper.to_array(given[name]) if name else np.zeros(stored.shape[0], np.float32)
    # What quantization adds to each output channel on average, groups one after the other.
    added = np.einsum("gk,gkn->gn", moments.mean, rounded.astype(np.float64) - matrix)
    added += np.einsum("gk,gkn->gn", moments.mean_lost, rounded.astype(np.float64))
    return as_weight(rounded, stored.shape), np.asarray(bias - added.reshape(-1).astype(np.float32), np.float32)
