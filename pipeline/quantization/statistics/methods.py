"""Calibration methods: from the values of a tensor to the range of its quantized form.

A method is a small value with its parameter; `ranges` applies it to every tensor. All of them read the same
observations, so that trying another one costs no inference. `int8` activations are symmetric (TensorRT), `uint8` ones
have a zero point (CPUs); a method that weighs rounding against clipping must know which.

Sources: `entropy` is S. Migacz, 8-bit Inference with TensorRT, GTC 2017; `percentile` is in H. Wu et al., Integer
Quantization for Deep Learning Inference, 2020 (arXiv:2004.09602); `mse` minimises the expected squared error, as
W. Sung et al., Resiliency of Deep Neural Networks under Quantization, 2015 (arXiv:1511.06488), do; `moving-average` is
B. Jacob et al., 2018 (arXiv:1712.05877), with equal weights for all samples in place of decaying ones, so that their
order does not matter.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from enginesmith.core.errors import DataError, InputError
from pipeline.quantization.ranges import Pair, Ranges, RangeSource
from pipeline.quantization.statistics.histogram import LogHistogram
from pipeline.quantization.statistics.observations import Observations, TensorStatistics

Activation = Literal["int8", "uint8"]

# `mse` tries the extreme and smaller bounds, this many in total, each a tenth of an octave below the last.
MSE_STEPS, MSE_RATIO = 60, 2.0**-0.1
# `mse` then tries this many bounds between the neighbours of the best bound.
MSE_FINE = 16
# `entropy`: the bins of its histogram, the fewest bins that are kept, and the step between trials, as in the source.
ENTROPY_BINS, ENTROPY_LEAST, ENTROPY_STRIDE = 2048, 128, 16
# Replaces a share of 0 in a divergence.
SMALLEST_SHARE = 1e-12

Floats = NDArray[np.float64]
Bins = tuple[Floats, Floats, Floats]


@dataclass(frozen=True)
class Method:
    """A way to choose a range. name: as in a spec, with the parameter.  choose: returns the range of one tensor.
    needs_histogram: whether it reads the histogram; if not, only extremes."""

    name: str
    choose: Callable[[TensorStatistics, Activation], Pair]
    needs_histogram: bool = True


def percentile(percent: float = 99.99) -> Method:
    """The range that holds `percent` of the values: of their magnitudes for int8, and with equal tails for uint8."""

    def choose(statistics: TensorStatistics, activation: Activation) -> Pair:
        histogram, share = _histogram(statistics), percent / 100
        if activation == "int8":
            bound = histogram.magnitudes().quantile(share)
            return -bound, bound
        if statistics.low >= 0 or statistics.high <= 0:  # only one end to clip
            return histogram.quantile(1 - share), histogram.quantile(share)
        return histogram.quantile((1 - share) / 2), histogram.quantile((1 + share) / 2)

    return Method(f"percentile {percent:g}", choose)


def _choose_by_entropy(statistics: TensorStatistics, activation: Activation) -> Pair:
    is_one_sided = statistics.low >= 0 or statistics.high <= 0
    levels = 255 if activation == "uint8" and is_one_sided else 128  # of magnitudes
    bound = _least_divergent(
        _histogram(statistics).magnitudes(), max(abs(statistics.low), abs(statistics.high)), levels
    )
    return -bound, bound


def _choose_by_mse(statistics: TensorStatistics, activation: Activation) -> Pair:
    """A symmetric bound for int8; for uint8 each end in turn, with the other end fixed."""
    bins = _histogram(statistics).bins
    amax = max(abs(statistics.low), abs(statistics.high))
    if activation == "int8":
        bound = _search(lambda t: expected_error(bins, -t, t, t / 127), amax)
        return -bound, bound
    low_end, high_end = max(-statistics.low, 0.0), max(statistics.high, 0.0)
    low, high = -low_end, high_end

    def cost(lower: float, upper: float) -> float:
        return expected_error(bins, -lower, upper, (lower + upper) / 255)

    for _ in range(2 if low < 0 < high else 1):
        high = _search(partial(cost, -low), high_end)
        low = -_search(partial(cost, upper=high), low_end)
    return low, high


# The observed extremes: nothing is clipped.
MINMAX = Method("minmax", lambda statistics, _: (statistics.low, statistics.high), needs_histogram=False)
# The mean of the extremes of all samples: one odd sample changes little.
MOVING_AVERAGE = Method("moving-average", lambda statistics, _: statistics.averages, needs_histogram=False)
# The range that loses least information: the Kullback-Leibler divergence of the quantized distribution.
ENTROPY = Method("entropy", _choose_by_entropy)
# The range with the least expected squared error, of rounding and clipping together.
MSE = Method("mse", _choose_by_mse)


def method(name: str, percent: float | None = None) -> Method:
    """The method that a spec names. Raises InputError for an unknown one, and for a percentile of another method."""
    if name == "percentile":
        return percentile() if percent is None else percentile(percent)
    plain_methods = {kind.name: kind for kind in (MINMAX, MOVING_AVERAGE, ENTROPY, MSE)}
    if name not in plain_methods:
        raise InputError(f"no calibration method {name!r}; known: percentile, {', '.join(sorted(plain_methods))}")
    if percent is not None:
        raise InputError(f"method {name!r} accepts no percentile; remove it, or use method percentile")
    return plain_methods[name]


def ranges(observations: Observations, chosen_method: Method, activation: Activation) -> Ranges:
    """The range of every tensor by a method, within its extremes.

    If the method needs a histogram, a tensor without one keeps its extremes: only its reach was measured. A tensor that
    was infinite, or empty in every run, has no range.
    """
    tensors, sources = dict[str, Pair](), dict[str, RangeSource]()
    for name, tensor_statistics in observations.tensors.items():
        if not tensor_statistics.finite:
            continue
        low, high = extremes = tensor_statistics.low, tensor_statistics.high
        if tensor_statistics.histogram is not None or not chosen_method.needs_histogram:
            low, high = chosen_method.choose(tensor_statistics, activation)
            low, high = max(low, tensor_statistics.low), min(high, tensor_statistics.high)
        tensors[name] = pair = (low, high) if low <= high else extremes
        sources[name] = RangeSource(extremes)
        if tensor_statistics.histogram is not None:
            clipped_share = 0.0 if pair == extremes else tensor_statistics.histogram.share_outside(*pair)
            sources[name] = RangeSource(extremes, tensor_statistics.histogram.digest, clipped_share)
    label = chosen_method.name if chosen_method.name == "minmax" else f"{chosen_method.name} {activation}"
    return Ranges(tensors, label, observations.dataset, observations.samples, sources)


def expected_error(bins: Bins, low: float, high: float, step: float) -> float:
    """Sum over a histogram of the squared error of quantizing to multiples of `step` in [low, high].

    Values are assumed to be spread evenly within a bin. For values in range, the integral of the squared distance to
    the nearest multiple is exact; for values outside, the distance to the nearer end counts.
    """
    lower, upper, counts = bins
    centres, width = (lower + upper) / 2, upper - lower
    clipped_values = np.clip(centres, low, high)
    inside_mask = clipped_values == centres
    errors = np.where(
        inside_mask, _rounding_error(lower, upper, step), np.square(centres - clipped_values) + np.square(width) / 12
    )
    return float((counts * errors).sum())


def _rounding_error(lower: Floats, upper: Floats, step: float) -> Floats:
    """Mean squared distance to the nearest multiple of `step`, over each interval."""
    width = (upper - lower) / step
    thin_mask = width < 1e-4  # the difference of two integrals would be rounding noise
    centre = (lower + upper) / (2 * step)
    point_error = np.square(centre - np.rint(centre))
    mean = (_integral(upper / step) - _integral(lower / step)) / np.where(thin_mask, 1.0, width)
    return np.where(thin_mask, point_error, mean) * step * step


def _integral(u: Floats) -> Floats:
    """The integral of (v - rint(v))**2 over v from 0 to u: each whole step gives 1/12, the rest a cube."""
    nearest = np.rint(u)
    remainder = u - nearest
    return nearest / 12 + remainder * remainder * remainder / 3


def _search(cost: Callable[[float], float], reach: float) -> float:
    """The bound in (0, reach] with the least cost; the larger one in a tie."""
    if reach < np.finfo(np.float32).tiny:
        return reach
    coarse_bounds = [reach * MSE_RATIO**step for step in range(MSE_STEPS)]
    best_candidate = min(coarse_bounds, key=cost)
    fine_bounds = np.linspace(
        min(best_candidate / MSE_RATIO, reach), best_candidate * MSE_RATIO, MSE_FINE, endpoint=False
    ).tolist()
    return float(min([best_candidate, *fine_bounds], key=cost))


def _least_divergent(magnitudes: LogHistogram, reach: float, levels: int) -> float:
    """The bound on magnitudes, up to `reach`, whose quantized distribution diverges least from the clipped one."""
    if reach < np.finfo(np.float32).tiny:
        return reach
    # Counts in bins of equal width over [0, reach]; values are assumed to be spread evenly within a bin.
    low, high, bin_counts = magnitudes.bins
    edges, totals = np.concatenate((low[:1], high)), np.concatenate(([0.0], bin_counts.cumsum()))
    counts = np.diff(np.interp(np.linspace(0, reach, ENTROPY_BINS + 1), edges, totals))
    tails = counts[::-1].cumsum()[::-1]
    candidates = range(max(levels, ENTROPY_LEAST), ENTROPY_BINS + 1, ENTROPY_STRIDE)
    best_count = min(reversed(candidates), key=lambda bin_count: _divergence(counts, tails, bin_count, levels))
    return reach * best_count / ENTROPY_BINS


def _divergence(counts: Floats, tails: Floats, bin_count: int, levels: int) -> float:
    """Kullback-Leibler divergence of the distribution clipped after `bin_count` bins from itself in `levels` levels.

    counts: by bin.  tails: for each bin, the sum of the counts from it on.
    """
    reference = counts[:bin_count].copy()
    nonzero_mask = reference > 0
    starts = np.arange(levels) * bin_count // levels
    filled_counts = np.add.reduceat(nonzero_mask.astype(np.float64), starts)
    mean = np.add.reduceat(reference, starts) / np.maximum(filled_counts, 1)
    quantized_counts = np.where(nonzero_mask, np.repeat(mean, np.diff(np.append(starts, bin_count))), 0.0)
    reference[-1] += tails[bin_count] if bin_count < len(tails) else 0.0
    p, q = reference / max(reference.sum(), 1.0), quantized_counts / max(quantized_counts.sum(), 1.0)
    positive_mask = p > 0
    return float((p[positive_mask] * np.log(p[positive_mask] / np.maximum(q[positive_mask], SMALLEST_SHARE))).sum())


def _histogram(statistics: TensorStatistics) -> LogHistogram:
    if statistics.histogram is None:
        raise DataError("this method needs histograms, and there are none; observe with histograms")
    return statistics.histogram
