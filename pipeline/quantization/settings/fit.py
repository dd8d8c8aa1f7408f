"""The settings of one group: strength of smoothing and clipping of the activation, tried together; then the rounding.

A setting is judged at the outputs of the group's own nodes, from statistics: the activation's error on some rows, the
weight's error from the second moments. Each node's error counts relative to its own output, so that a query with large
values does not drown its value. No inference is run.

Factors and range are made from one half of the rows and judged on the other, both ways: what fits a few rows only, and
clips what comes next, does not win.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from pipeline.quantization.settings.channels import ChannelSums, Statistics
from pipeline.quantization.settings.groups import Floats, SmoothingGroup
from pipeline.quantization.settings.rounding import LEVELS, compensate, nearest
from pipeline.quantization.settings.smooth import SmoothingPlan, factors_of
from pipeline.quantization.statistics.histogram import LogHistogram
from pipeline.quantization.statistics.levels import decibels
from pipeline.quantization.statistics.observations import TensorStatistics

STRENGTHS: tuple[float | None, ...] = (None, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)
CLIPS = (1.0, 0.9, 0.8, 0.7)
# Guess of the share of error that `compensated` leaves of rounding to the nearest: a rough reading on MiniLM, never
# measured properly. It only weighs settings against each other; what is chosen is judged by running the whole model.
COMPENSATION = 0.35
TRIED_ROWS = 512


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

    strengths: of smoothing to try; None is no smoothing.  levels: the last one of the weights.
    """
    weights = {node: matrices[node] for node in group.nodes}
    best = min(_judge(statistics, list(weights.values()), activation, strengths, levels), key=lambda pair: pair[0])[1]
    moments = statistics.moments
    scaled = {node: weight * best.factors[:, None] for node, weight in weights.items()}
    smoothed = None if moments is None else moments / np.outer(best.factors, best.factors)
    rounded = {
        node: nearest(weight, levels) if smoothed is None else compensate(weight, smoothed, levels)
        for node, weight in scaled.items()
    }
    lost = {node: _sqnr_db(scaled[node], rounded[node]) for node in weights}
    if best.strength is None:
        return SmoothingPlan(group, None, best.clip, None, rounded, best.low, best.high, weight_db=lost)
    seen = _seen(statistics, best.factors)
    return SmoothingPlan(
        group, best.strength, best.clip, best.factors, rounded, best.low, best.high, seen=seen, weight_db=lost
    )


def _seen(statistics: Statistics, factors: Floats) -> TensorStatistics:
    """What the activation holds once it is divided by its factors."""
    low, high = float((statistics.low / factors).min()), float((statistics.high / factors).max())
    histogram = LogHistogram.of(np.asarray(statistics.rows / factors, np.float32))
    return TensorStatistics(low, high, statistics.count * len(factors), histogram=histogram)


def _sqnr_db(exact: Floats, rounded: Floats) -> float:
    return decibels(float(np.square(exact, dtype=np.float64).sum()), float(np.square(rounded - exact).sum()))


def _judge(
    statistics: Statistics,
    weights: Sequence[Floats],
    activation: str,
    strengths: Sequence[float | None],
    levels: int,
) -> Iterator[tuple[float, _Setting]]:
    tried = [(seen, _thin(judge.rows)) for seen, judge in statistics.folds]
    energies = [sum(float(np.mean((rows @ weight) ** 2)) for _, rows in tried) or 1.0 for weight in weights]
    for strength in strengths:
        factors = _factors(statistics, weights, strength)
        of_weights = [
            _weight_error(weight * factors[:, None], statistics.moments, factors, levels) for weight in weights
        ]
        for clip in CLIPS:
            of_rows = np.zeros(len(weights))
            for seen, rows in tried:
                lost = _quantization_error(
                    rows, _make_setting(seen, strength, _factors(seen, weights, strength), clip, activation), activation
                )
                of_rows += [float(np.mean((lost @ weight) ** 2)) for weight in weights]
            errors = zip(of_rows.tolist(), of_weights, energies, strict=True)
            setting = _make_setting(statistics, strength, factors, clip, activation)
            yield sum((a + len(tried) * COMPENSATION * w) / energy for a, w, energy in errors), setting


def _thin(rows: Floats) -> Floats:
    return rows[:: max(1, 2 * len(rows) // TRIED_ROWS)]


def _quantization_error(rows: Floats, setting: _Setting, activation: str) -> Floats:
    """What quantizing adds to each row, in its own channels."""
    smoothed = rows / setting.factors
    return (rounded_activation(smoothed, setting.low, setting.high, activation) - smoothed) * setting.factors


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


def rounded_activation(values: Floats, low: float, high: float, activation: str) -> Floats:
    """Values as int8 (symmetric) or uint8 (asymmetric) hold them in the range [low, high]."""
    if activation == "int8":
        step = max(-low, high, 1e-30) / 127
        return np.asarray(np.clip(np.rint(values / step), -128, 127) * step, np.float32)
    low, high = min(low, 0.0), max(high, 0.0)
    step = max(high - low, 1e-30) / 255
    zero = round(-low / step)
    return np.asarray((np.clip(np.rint(values / step) + zero, 0, 255) - zero) * step, np.float32)
