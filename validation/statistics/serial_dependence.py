"""Distributions, and serial dependence of measurements."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

# Quantiles of the normal, Student's t and beta distributions without SciPy, which a bare serving node does not have.

NORMAL = NormalDist()


def t_quantile(p: float, df: float) -> float:
    """A quantile of Student's t. Abramowitz & Stegun 26.7.5: within 0.3 % for df >= 10, p in 0.001..0.999.

    For two degrees of freedom it is exact.
    """
    if df == 2:
        return (2 * p - 1) / math.sqrt(2 * p * (1 - p))
    z = NORMAL.inv_cdf(p)
    terms = (z**3 + z, 5 * z**5 + 16 * z**3 + 3 * z, 3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z)
    return z + terms[0] / (4 * df) + terms[1] / (96 * df**2) + terms[2] / (384 * df**3)


def beta_cdf(x: float, a: float, b: float) -> float:
    """The regularized incomplete beta function I_x(a, b), by its continued fraction (DLMF 8.17.22, Lentz)."""
    if x <= 0.0 or x >= 1.0:
        return 0.0 if x <= 0.0 else 1.0
    if x > (a + 1) / (a + b + 2):
        return 1.0 - beta_cdf(1.0 - x, b, a)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    # 1 + d1/(1 + d2/(1 + ...)), whose inverse belongs to the front factor; no denominator is below 2 / (a + b + 2).
    value, c, d = 1.0, 1.0, 0.0
    for step in range(1, 20_000):
        half_step = step // 2
        if step % 2:
            term = -(a + half_step) * (a + b + half_step) * x / ((a + 2 * half_step) * (a + 2 * half_step + 1))
        else:
            term = half_step * (b - half_step) * x / ((a + 2 * half_step - 1) * (a + 2 * half_step))
        d = 1.0 / (1.0 + term * d)
        c = 1.0 + term / c
        value *= c * d
        if abs(c * d - 1.0) < 1e-14:
            break
    return math.exp(log_front) / a / value


@lru_cache(maxsize=1024)
def beta_quantile(p: float, a: float, b: float) -> float:
    """The x with I_x(a, b) = p, by bisection."""
    low, high = 0.0, 1.0
    while high - low > 1e-12 * max(high, 1e-300) and high > 1e-15:
        midpoint = (low + high) / 2
        low, high = (midpoint, high) if beta_cdf(midpoint, a, b) < p else (low, midpoint)
    return (low + high) / 2


# Serial dependence of requests: the block bootstrap of quantiles, and the variance of the mean of a dependent series.
#
# Latencies of neighbouring requests depend on each other (a queue, other load on the machine, a throttled clock).
# Resampling single requests would therefore give too narrow intervals, and blocks of consecutive requests are resampled
# instead. Blocks do not overlap (Carlstein, Annals of Statistics 14, 1986). Their length follows from the data by
# Politis & White (Econometric Reviews 23, 2004, with the correction of Patton, Politis & White, 28, 2009), doubled: too
# long blocks widen the interval a little, too short blocks make it wrong. There are at most 400 blocks, which keeps the
# bootstrap quick and still estimates the standard error to 4 %.
#
# The memory of a series is the distance over which its values depend on each other. The mean of n dependent requests
# has the variance of a mean of fewer independent ones. This variance is estimated from block means. Blocks must be so
# long that their means are nearly independent: a multiple of the integrated autocorrelation time (Sokal, Monte Carlo
# Methods in Statistical Mechanics, 1989), which is estimated from the requests, and again from the means of ever longer
# blocks. The variance is unknown for a run with too few such blocks, or with a changing level.
#
# A changing level is tested by the slowest cosine waves over the run (Mueller & Watson, Econometrica 76, 2008): if the
# means of B blocks are independent, the share of their variance in the q slowest of B - 1 waves is Beta(q / 2,
# (B - 1 - q) / 2). For loads with a memory of 1,000 of 2,000 requests and a tenth of the variance, this test misses 3 %
# at a level of 5 %; the statistic of Kwiatkowski et al. (1992), which weights the slowest wave most, misses 11 %.

MOST_BLOCKS = 400
LEAST_BLOCKS = 20
# Means of blocks of this many autocorrelation times are correlated by some 5 %; the variance of their means needs at
# least the second number of blocks.
BLOCK_TIMES = 5.0
LEAST_INDEPENDENT = 16
# Significance of the test for a changing level: at the first, blocks get longer; at the second, no variance is known.
LEVELS = (0.05, 0.02)
# The test uses at most _WAVES cosine waves, and at most one for each _BLOCKS_A_WAVE blocks.
_WAVES, _BLOCKS_A_WAVE = 8, 4


def block_length(*series: np.ndarray) -> int:
    """The length of bootstrap blocks that suits the series with the longest memory. series: float [requests] each."""
    count = min(len(values) for values in series)
    dependence_length = max(math.ceil(2 * politis_white(values)) for values in series)
    return max(1, math.ceil(count / MOST_BLOCKS), min(dependence_length, count // LEAST_BLOCKS))


def politis_white(series: np.ndarray) -> float:
    """Optimal length of (circular) blocks for the mean of a stationary series; 1 for an uncorrelated one."""
    count = len(series)
    deviations = series - series.mean()
    variance = float(deviations @ deviations) / count if count else 0.0
    if count < 16 or variance <= 0.0:
        return 1.0
    max_lag = math.ceil(math.sqrt(count)) + 5
    covariance = autocovariance(deviations, 2 * max_lag - 1)
    quiet_mask = np.abs(covariance[1:] / variance) < 2.0 * math.sqrt(math.log10(count) / count)
    # The last lag before the first long row of uncorrelated lags; without such a row, the last correlated lag.
    quiet_runs = sliding_window_view(quiet_mask, max(5, math.ceil(math.sqrt(math.log10(count))))).all(1)
    last_lag = int(quiet_runs.argmax()) if quiet_runs.any() else int((~quiet_mask).nonzero()[0].max(initial=-1)) + 1
    bandwidth = min(2 * last_lag, max_lag)
    if bandwidth == 0:
        return 1.0
    lags = np.arange(1, min(bandwidth, len(covariance) - 1) + 1)
    window = np.clip(2.0 * (1.0 - lags / max(bandwidth, 1)), 0.0, 1.0)
    gradient = 2.0 * float(np.sum(window * lags * covariance[lags]))
    power = variance + 2.0 * float(np.sum(window * covariance[lags]))
    if power <= 0.0:
        return 1.0
    return max(1.0, math.pow(1.5 * (gradient / power) ** 2 * count, 1.0 / 3.0))


def autocovariance(deviations: np.ndarray, lags: int) -> np.ndarray:
    """Autocovariances at lags 0 to `lags`, float64 [lags + 1]. deviations: the series less its mean."""
    count = len(deviations)
    power = 1 << (count + lags).bit_length()
    # The shortest sufficient size of the form 2^a 3^b 5^c, for which the transform is quick.
    sizes = (factor * power // 16 for factor in (8, 9, 10, 12, 15, 16))
    size = next(points for points in sizes if points >= min(count + lags + 1, power))
    spectrum = np.fft.rfft(deviations, size)
    return np.fft.irfft(spectrum * spectrum.conj(), size)[: min(lags + 1, count)] / count


@lru_cache(maxsize=8)
def draw_block_counts(blocks: int, replicates: int, seed: int) -> np.ndarray:
    """The number of draws of each block in each bootstrap replicate: float32 [replicates, blocks], read-only."""
    block_indices = np.random.default_rng((seed, 0)).integers(blocks, size=(replicates, blocks))
    block_indices += np.arange(replicates)[:, None] * blocks
    block_counts = np.bincount(block_indices.ravel(), minlength=replicates * blocks).reshape(replicates, blocks)
    block_counts = block_counts.astype(np.float32)
    block_counts.setflags(write=False)
    return block_counts


def quantile_replicates(
    values: np.ndarray, probabilities: Sequence[float], block: int, drawn_blocks: np.ndarray
) -> np.ndarray:
    """Bootstrap replicates of quantiles of `values` ([requests]): float64 [replicates, probabilities].

    drawn_blocks: from `draw_block_counts`. Requests after the last whole block do not count. No replicate is sorted:
    the values of each block up to each of some 100 order statistics, dense around the quantile, are counted once. A
    replicate's distribution function at these order statistics is one row of a matrix product.
    """
    block_count = drawn_blocks.shape[1]
    whole_blocks = values[: block_count * block]
    sorted_values = np.sort(whole_blocks)
    replicates = np.empty((len(drawn_blocks), len(probabilities)))
    for column, probability in enumerate(probabilities):
        # Every value near the quantile, few far from it, both ends included.
        count = len(sorted_values)
        centre, std = probability * (count - 1), max(1.0, math.sqrt(probability * (1 - probability) * count))
        steps = np.sinh(np.linspace(-math.asinh(count / std), math.asinh(count / std), 241)) * std
        grid = sorted_values[np.unique(np.clip(np.round(centre + steps), 0, count - 1).astype(np.int64))]
        cells = np.searchsorted(grid, whole_blocks, side="left") + (len(grid) + 1) * np.repeat(
            np.arange(block_count), block
        )
        counts = np.bincount(cells, minlength=block_count * (len(grid) + 1)).reshape(block_count, -1)[:, :-1].cumsum(1)
        counts_below = drawn_blocks @ counts.astype(np.float32)
        reach_mask = counts_below >= probability * len(sorted_values) - 0.5
        reach_mask[:, -1] = True
        replicates[:, column] = grid[reach_mask.argmax(1)]
    return replicates


@dataclass(frozen=True)
class SeriesMemory:
    """The memory of a series. block: about the number of requests per independent observation.

    variance: of the mean; infinite (unknown) with fewer than LEAST_INDEPENDENT blocks or a changing level.
    """

    block: int
    variance: float

    def design_effect(self, series: np.ndarray) -> float:
        """The number of consecutive requests that count as one independent request; at least 1."""
        variance = float(series.var())
        return max(1.0, self.variance * len(series) / variance) if variance > 0.0 else 1.0


def memory_of(
    series: np.ndarray, least_block: int = 1, levels: tuple[float, float] = LEVELS, design_block: int = 1
) -> SeriesMemory:
    """The memory of a series, from its autocorrelation, that of ever longer blocks' means, and a test for drift.

    least_block: the shortest block.  levels: as LEVELS.  design_block: as in `CanaryEvidence`.
    """
    count = len(series)
    block = max(least_block, _independent(series, design_block))
    if count // block < LEAST_INDEPENDENT:
        return SeriesMemory(block, math.inf)
    if drifts(series, block, levels[1]):
        return SeriesMemory(count, math.inf)
    variance = variance_of_mean(series, block)
    if drifts(series, block, levels[0]):
        block = max(block, count // LEAST_INDEPENDENT)
        variance = max(variance, variance_of_mean(series, block))
    return SeriesMemory(block, variance)


def memory_of_difference(
    sides: Sequence[np.ndarray], least_block: int = 1, levels: tuple[float, float] = LEVELS, design_block: int = 1
) -> SeriesMemory:
    """The memory of the difference of two series of equal length, for comparing them.

    Slow changes of both sides cancel in the difference. If they do not (the difference also has a long memory, and over
    half of the variance of both sides together), the longer memory of the two sides counts.

    sides: series of equal length.  least_block: the shortest block.  levels: as LEVELS.  design_block: as in
    `CanaryEvidence`.
    """
    gaps = sides[0] - sides[1]
    memory, block = memory_of(gaps, least_block, levels, design_block), len(gaps) // LEAST_INDEPENDENT
    has_memory = memory.block > max(least_block, design_block, math.ceil(len(gaps) / MOST_BLOCKS))
    if has_memory and math.isfinite(memory.variance):
        slowest = max(memory_of(series).block for series in sides)
        own_variance = sum(variance_of_mean(series, block) for series in sides)
        if slowest > block and variance_of_mean(gaps, block) > own_variance / 2:
            return SeriesMemory(slowest, math.inf)
    return memory


def _independent(series: np.ndarray, design_block: int = 1) -> int:
    """A length of blocks whose means are nearly independent: BLOCK_TIMES integrated autocorrelation times.

    The noise of single requests hides a weak, slow component. The noise of block means does not; therefore means are
    tested too. For blocks that are independent by design (`design_block`) only the means are tested.
    """
    count, block = len(series), design_block
    for mean_count in (math.inf, 400, 160):
        step = max(block, math.ceil(count / mean_count))
        means = _means(series, step)
        if len(means) < LEAST_INDEPENDENT:
            break
        time, window = autocorrelation_time(means)
        chance_bound = (1.0 + 5.0 * math.sqrt(window / len(means))) / _bias(window, len(means))
        if time > chance_bound:
            block = math.ceil(BLOCK_TIMES * time * step)
    return max(block, math.ceil(count / MOST_BLOCKS))


def autocorrelation_time(series: np.ndarray) -> tuple[float, int]:
    """1 + 2 * the sum of autocorrelations, and the number of lags in it: about five times the result (Sokal 1989)."""
    deviations = series - series.mean()
    covariance = autocovariance(deviations, len(series) // 2)
    if not covariance[0] > 0.0:
        return 1.0, 1
    lags = np.arange(1, max(len(series) // 2, 2))
    times = 1.0 + 2.0 * np.cumsum(covariance[lags] / covariance[0])
    times /= _bias(lags, len(series))
    wide_mask = lags >= 5.0 * np.maximum(times, 1.0)
    last_lag = int(wide_mask.argmax()) if wide_mask.any() else len(times) - 1
    return max(1.0, float(times[last_lag])), last_lag + 1


def _bias(lags: Any, count: int) -> Any:
    """The factor by which subtracting the series' own mean reduces a sum of autocovariances."""
    return 1.0 - (2.0 * lags + 1.0) / (count + 2.0)


def _means(series: np.ndarray, block: int) -> np.ndarray:
    """The means of the whole blocks of a series, [blocks]."""
    block_count = len(series) // block
    block_means: np.ndarray = series[: block_count * block].reshape(block_count, block).mean(1)
    return block_means


def variance_of_mean(series: np.ndarray, block: int) -> float:
    """Variance of the mean of a series, from the means of its blocks."""
    return float(_means(series, block).var(ddof=1)) * block / len(series)


def drifts(series: np.ndarray, block: int, level: float) -> bool:
    """Whether the slowest waves' share of the block means' variance exceeds that of 1 - `level` of steady series."""
    means = _means(series, block)
    deviations = means - means.mean()
    energy = float(deviations @ deviations)
    waves = _cosines(len(means))
    if not energy > 0.0 or not len(waves):
        return False
    chance_share = beta_quantile(1.0 - level, len(waves) / 2, (len(means) - 1 - len(waves)) / 2)
    return float(np.sum((waves @ deviations) ** 2)) > energy * chance_share


@lru_cache(maxsize=64)
def _cosines(blocks: int) -> np.ndarray:
    """The slowest cosine waves over `blocks` blocks, orthonormal: float64 [waves, blocks]."""
    orders = np.arange(1, min(_WAVES, (blocks - 1) // _BLOCKS_A_WAVE) + 1)
    return math.sqrt(2.0 / blocks) * np.cos(math.pi * np.outer(orders, (np.arange(blocks) + 0.5) / blocks))
