"""The settings of a group that multiplies matrices: smoothing, clipping of the activation, rounding of weights.

Strength and clipping are tried together, and then the weights are rounded. A setting is judged at
the outputs of the group's own nodes, from statistics: the activation's error on some rows, the weight's error from the
second moments. Each node's error is relative to its own output, so a query with large values does not outweigh its
value. No inference is run. Factors and range are fitted on one half of the rows and judged on the other, both ways: a
setting that fits only a few rows, and clips others, does not win.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from pipeline.quantization.schemes.block_floats import activation_scale
from pipeline.quantization.settings.groups import (
    LEVELS,
    ChannelSums,
    Floats,
    Levels,
    SmoothingGroup,
    Statistics,
    compensate,
    nearest,
    rounded_activation,
)
from pipeline.quantization.settings.smooth import STRENGTHS, SmoothingPlan, factors_of
from pipeline.quantization.statistics.histogram import LogHistogram, decibels
from pipeline.quantization.statistics.observations import TensorStatistics

# Shares of the activation's range that are tried; 1 clips nothing.
_CLIPS = (1.0, 0.9, 0.8, 0.7)
# Estimated share of the error of rounding to the nearest that `compensate` leaves: a rough reading on MiniLM, never
# measured properly. It only weighs settings against each other; a run of the whole model judges the chosen setting.
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
    levels: Levels = LEVELS,
    biased_nodes: Set[str] = frozenset(),
) -> SmoothingPlan:
    """The best settings for a group that mixes, with its weights rounded for them.

    If all its nodes are in `biased_nodes`, their biases correct the mean error of rounding, and rounding compensates
    only for the error about the mean (bias correction: Nagel et al., "Data-Free Quantization Through Weight
    Equalization and Bias Correction", 2019).

    matrices: node -> weight [in, out].  strengths: of smoothing to try; None is no smoothing.  levels: the last level
    of the weights, or their block format; for a format without activations, only rounding is tried.
    """
    weights, moments = [matrices[node] for node in group.nodes], statistics.moments
    if isinstance(levels, int) or levels.activations:
        setting = min(_judge(statistics, weights, activation, strengths, levels), key=lambda pair: pair[0])[1]
    else:
        setting = _make_setting(statistics, None, np.ones(len(weights[0]), np.float32), 1.0, activation)
    factors = setting.factors
    matrix = np.hstack(weights) * factors[:, None]
    rounded_matrix = nearest(matrix, levels)
    is_fixed = moments is not None and biased_nodes >= {*group.nodes}
    if moments is not None:  # one decomposition serves all nodes: each output channel is rounded by itself
        if is_fixed:
            moments -= np.outer(statistics.mean, statistics.mean)
        rounded_matrix = compensate(matrix, moments / np.outer(factors, factors), levels)
    splits = np.cumsum([weight.shape[1] for weight in weights])[:-1]
    float_weights = dict(zip(group.nodes, np.split(matrix, splits, axis=1), strict=True))
    rounded_weights = dict(zip(group.nodes, np.split(rounded_matrix, splits, axis=1), strict=True))
    bias = np.zeros(rounded_matrix.shape[1], np.float32)
    if is_fixed:
        rows = np.asarray(statistics.rows / factors, np.float32)
        rounded_rows = (
            rounded_activation(rows, setting.low, setting.high, activation) if isinstance(levels, int) else rows
        )
        bias = (statistics.mean / factors) @ (rounded_matrix - matrix) + (rounded_rows - rows).mean(
            axis=0
        ) @ rounded_matrix
    shifts = dict(zip(group.nodes, np.split(-bias, splits), strict=True)) if is_fixed else {}
    weight_db = {
        node: decibels(
            float(np.square(weight, dtype=np.float64).sum()), float(np.square(rounded_weights[node] - weight).sum())
        )
        for node, weight in float_weights.items()
    }
    bounds = (setting.low, setting.high)
    plan = SmoothingPlan(
        group, setting.strength, setting.clip, None, rounded_weights, *bounds, shifts=shifts, weight_db=weight_db
    )
    if setting.strength is None:
        return plan
    low, high = float((statistics.low / factors).min()), float((statistics.high / factors).max())
    histogram = LogHistogram.of(np.asarray(statistics.rows / factors, np.float32))
    new_statistics = TensorStatistics(low, high, statistics.count * len(factors), histogram=histogram)
    return replace(plan, factors=factors, seen=new_statistics)


def _judge(
    statistics: Statistics,
    weights: Sequence[Floats],
    activation: str,
    strengths: Sequence[float | None],
    levels: Levels,
) -> Iterator[tuple[float, _Setting]]:
    """(error, setting) for every strength and clip; the error is summed over nodes and folds, relative to outputs."""
    # A setting is fitted on one half and judged on the other, both ways; a single row is used for both.
    halves = [half for half in statistics.halves if half.sampled_rows]
    pairs = (halves[0], halves[-1]), (halves[-1], halves[0])
    samples = [
        (channel_sums, judge.rows[:: max(1, 2 * len(judge.rows) // _TRIED_ROWS)]) for channel_sums, judge in pairs
    ]
    energies = [sum(float(np.mean((rows @ weight) ** 2)) for _, rows in samples) or 1.0 for weight in weights]
    # Factor from the sum of squared errors of a node's channels to their mean, relative to its output.
    weight_scales = [1 / math.sqrt(energy * weight.shape[1]) for weight, energy in zip(weights, energies, strict=True)]
    scales = np.repeat(np.array(weight_scales, np.float32), [weight.shape[1] for weight in weights])
    weight_matrix, amax = np.hstack(weights), np.max([np.abs(weight).max(axis=1) for weight in weights], axis=0)
    measure = _make_ruler(weight_matrix * scales)
    for strength in strengths:
        factors = _factors(statistics, amax, strength, levels)
        weight_error = _weight_error(weight_matrix, scales, statistics.moments, factors, levels)
        folds = [(channel_sums, rows, _factors(channel_sums, amax, strength, levels)) for channel_sums, rows in samples]
        for clip in _CLIPS if isinstance(levels, int) else (1.0,):
            row_error = 0.0
            for channel_sums, rows, row_factors in folds:
                candidate = _make_setting(channel_sums, strength, row_factors, clip, activation)
                smooth_rows = rows / row_factors
                if isinstance(levels, int):
                    new_rows = rounded_activation(smooth_rows, candidate.low, candidate.high, activation)
                else:
                    new_rows = levels.rounded_activation(
                        smooth_rows, activation_scale(max(-candidate.low, candidate.high))
                    )
                row_error += measure((new_rows - smooth_rows) * row_factors)
            setting = _make_setting(statistics, strength, factors, clip, activation)
            yield row_error + len(samples) * _COMPENSATION * weight_error, setting


def _make_ruler(weights: Floats) -> Callable[[Floats], float]:
    """A function from errors of an activation, [rows, channels], to their sum of squares at the outputs of `weights`
    [channels, out], averaged over rows. With more outputs than channels, weights x weights' is the smaller matrix."""
    is_wide = weights.shape[1] > weights.shape[0]
    matrix = weights @ weights.T if is_wide else weights

    def measure(errors: Floats) -> float:
        product = errors @ matrix
        return float(np.sum(product * (errors if is_wide else product))) / len(errors)

    return measure


def _factors(statistics: ChannelSums | Statistics, reach: Floats, strength: float | None, levels: Levels) -> Floats:
    """Smoothing factors [channels]. For block formats, powers of two: others would move folded weights off the grid."""
    if strength is None:
        return np.ones(len(statistics.low), np.float32)
    factors = factors_of(np.maximum(np.abs(statistics.low), np.abs(statistics.high)), reach, strength)
    return factors if isinstance(levels, int) else np.exp2(np.rint(np.log2(factors)))


def _make_setting(
    statistics: ChannelSums | Statistics, strength: float | None, factors: Floats, clip: float, activation: str
) -> _Setting:
    low = clip * float((statistics.low / factors).min())
    high = clip * float((statistics.high / factors).max())
    if activation == "int8":
        low, high = -max(-low, high), max(-low, high)
    return _Setting(strength, clip, factors, low, high)


def _weight_error(weight: Floats, scales: Floats, moments: Floats | None, factors: Floats, levels: Levels) -> float:
    """The sum of squared errors at the outputs, channels scaled, from rounding a smoothed weight to the nearest."""
    if moments is None:
        return 0.0
    scaled_weight = weight * factors[:, None]
    unscaled_error = (nearest(scaled_weight, levels) - scaled_weight) / factors[:, None] * scales
    return float(np.sum(unscaled_error * (moments @ unscaled_error)))
