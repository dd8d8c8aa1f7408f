"""Latency has a memory: a queue, a noisy neighbour, a clock that throttles. Resampling single requests would forget it
and claim too much, so blocks of consecutive requests are resampled.

Blocks do not overlap (Carlstein, Annals of Statistics 14, 1986). Their length follows the data by Politis & White
(Econometric Reviews 23, 2004, with the correction of Patton, Politis & White, 28, 2009), doubled: a block that is too
long costs some width of the interval, one that is too short its honesty. There are never more blocks than 400, which
keeps the bootstrap quick and still gives the standard error to 4 %.

How long a series of requests remembers, and what its mean is worth.

A load that changes slowly makes neighbours alike, and a mean of n such requests is worth that of fewer independent
ones. Blocks of consecutive requests are taken so long that their means are nearly independent: a multiple of the
integrated autocorrelation time (Sokal, Monte Carlo Methods in Statistical Mechanics, 1989), which is estimated from the
requests, and again from the means of ever longer blocks. The variance of the mean is that of the blocks' means. A run
that does not hold enough of these blocks, or whose level moves over the whole of it, tells no variance.

Whether a level moves is asked of the slowest cosine waves over the run, as Mueller & Watson do (Econometrica 76, 2008):
where the means of B blocks are independent, the share of their variance in the q slowest of B - 1 waves is Beta(q / 2,
(B - 1 - q) / 2). Of loads that remember 1,000 of 2,000 requests and make up a tenth of the variance this misses 3 % at
a level of 5 %, where the statistic of Kwiatkowski et al. (1992), which gives the slowest wave most weight, misses 11 %.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from validation.statistics.distributions import beta_quantile

MOST_BLOCKS = 400
LEAST_BLOCKS = 20


def block_length(*series: np.ndarray) -> int:
    """How many consecutive requests belong together, for the series that remembers longest."""
    count = min(len(one) for one in series)
    wanted = max(math.ceil(2 * politis_white(one)) for one in series)
    return max(1, math.ceil(count / MOST_BLOCKS), min(wanted, count // LEAST_BLOCKS))


def politis_white(series: np.ndarray) -> float:
    """Optimal length of (circular) blocks for the mean of a stationary series; 1 where nothing is remembered."""
    count = len(series)
    centred = series - series.mean()
    variance = float(centred @ centred) / count if count else 0.0
    if count < 16 or variance <= 0.0:
        return 1.0
    most = math.ceil(math.sqrt(count)) + 5
    covariance = autocovariance(centred, 2 * most - 1)
    quiet = np.abs(covariance[1:] / variance) < 2.0 * math.sqrt(math.log10(count) / count)
    reach = min(2 * _first_quiet(quiet, max(5, math.ceil(math.sqrt(math.log10(count))))), most)
    if reach == 0:
        return 1.0
    lags = np.arange(1, min(reach, len(covariance) - 1) + 1)
    window = np.clip(2.0 * (1.0 - lags / max(reach, 1)), 0.0, 1.0)
    gradient = 2.0 * float(np.sum(window * lags * covariance[lags]))
    power = variance + 2.0 * float(np.sum(window * covariance[lags]))
    if power <= 0.0:
        return 1.0
    return max(1.0, math.pow(1.5 * (gradient / power) ** 2 * count, 1.0 / 3.0))


def autocovariance(centred: np.ndarray, lags: int) -> np.ndarray:
    """Autocovariances of a series less its mean, at lags 0 to `lags`."""
    count = len(centred)
    power = 1 << (count + lags).bit_length()
    # The shortest of these that is long enough: a transform of 2^a 3^b 5^c points is quick.
    size = next(
        part * power // 16 for part in (8, 9, 10, 12, 15, 16) if part * power // 16 >= min(count + lags + 1, power)
    )
    spectrum = np.fft.rfft(centred, size)
    return np.fft.irfft(spectrum * spectrum.conj(), size)[: min(lags + 1, count)] / count


def _first_quiet(quiet: np.ndarray, run: int) -> int:
    """The last lag before `run` quiet ones in a row."""
    streak = 0
    for index, silent in enumerate(quiet):
        streak = streak + 1 if silent else 0
        if streak == run:
            return index + 1 - run
    return int(np.flatnonzero(~quiet)[-1]) + 1 if (~quiet).any() else 0


@lru_cache(maxsize=8)
def draw_block_counts(blocks: int, replicates: int, seed: int, side: int = 0) -> np.ndarray:
    """How often each block comes up in each bootstrap replicate: shape (replicates, blocks), not to be written to.

    All quantiles, of a verdict and of its page, share what is drawn for one side.
    """
    picks = np.random.default_rng((seed, side)).integers(blocks, size=(replicates, blocks))
    picks += np.arange(replicates)[:, None] * blocks
    found = np.bincount(picks.ravel(), minlength=replicates * blocks).reshape(replicates, blocks).astype(np.float32)
    found.setflags(write=False)
    return found


def quantile_replicates(
    values: np.ndarray, probabilities: Sequence[float], block: int, drawn_blocks: np.ndarray
) -> np.ndarray:
    """Bootstrap replicates of quantiles: shape (replicates, probabilities). Requests behind the last whole block do not
    count.

    No replicate is sorted. A block's count of values up to each of some 100 order statistics, dense around the
    quantile, is taken once; a replicate's distribution function there is one row of a matrix product.
    """
    blocks = drawn_blocks.shape[1]
    kept = values[: blocks * block]
    ordered = np.sort(kept)
    found = np.empty((len(drawn_blocks), len(probabilities)))
    for column, probability in enumerate(probabilities):
        grid = ordered[_ranks(len(ordered), probability)]
        cells = np.searchsorted(grid, kept, side="left") + (len(grid) + 1) * np.repeat(np.arange(blocks), block)
        counts = np.bincount(cells, minlength=blocks * (len(grid) + 1)).reshape(blocks, -1)[:, :-1].cumsum(1)
        below = drawn_blocks @ counts.astype(np.float32)
        reached = below >= probability * len(ordered) - 0.5
        reached[:, -1] = True
        found[:, column] = grid[reached.argmax(1)]
    return found


def _ranks(count: int, probability: float) -> np.ndarray:
    """Some 100 ranks of order statistics: every one near the quantile, sparse far from it, both ends included."""
    centre, spread = probability * (count - 1), max(1.0, math.sqrt(probability * (1 - probability) * count))
    steps = np.sinh(np.linspace(-math.asinh(count / spread), math.asinh(count / spread), 241)) * spread
    return np.unique(np.clip(np.round(centre + steps), 0, count - 1).astype(np.int64))


# Blocks so many autocorrelation times long that their means are correlated by some 5 %; fewer than so many of these
# blocks do not tell what their variance is.
BLOCK_TIMES = 5.0
LEAST_INDEPENDENT = 16
# Levels of the test against a level that moves: at the first longer blocks are taken, at the second nothing is known.
LEVELS = (0.05, 0.02)
# Cosine waves that it asks, at most and of so many blocks each.
_WAVES, _BLOCKS_A_WAVE = 8, 4


@dataclass(frozen=True)
class SeriesMemory:
    """What a series' mean is worth. block: requests that make one independent observation of it, about.  variance: of
    the mean; infinite where there are fewer than LEAST_INDEPENDENT such blocks, so that it cannot be known.
    """

    block: int
    variance: float

    def design_effect(self, series: np.ndarray) -> float:
        """How many requests that follow each other count as one; at least 1."""
        variance = float(series.var())
        return max(1.0, self.variance * len(series) / variance) if variance > 0.0 else 1.0


def memory_of(
    series: np.ndarray, least: int = 1, levels: tuple[float, float] = LEVELS, design_block: int = 1
) -> SeriesMemory:
    """The memory of a series, from its autocorrelation, from that of means of ever longer blocks, and from its drift.

    least: the shortest block.  levels: see LEVELS.  design_block: see `CanaryEvidence.design_block`.
    """
    count = len(series)
    block = max(least, _independent(series, design_block))
    if count // block < LEAST_INDEPENDENT:
        return SeriesMemory(block, math.inf)
    if drifts(series, block, levels[1]):
        return SeriesMemory(count, math.inf)
    variance = variance_of_mean(series, block)
    if drifts(series, block, levels[0]):
        block = max(block, count // LEAST_INDEPENDENT)
        variance = max(variance, variance_of_mean(series, block))
    return SeriesMemory(block, variance)


def memories_of(
    sides: Sequence[np.ndarray],
    paired: bool,
    least: Sequence[int] = (1, 1),
    levels: tuple[float, float] = LEVELS,
    design_block: int = 1,
) -> list[SeriesMemory]:
    """The memories of what tells two series apart: of either by itself, or of pairs how they differ.

    What moves both sides of pairs slowly cancels in how they differ. Where it is seen not to, because that remembers as
    well and is as large as both together, each must be known as well as if there were no pairs.
    """
    if not paired:
        return [memory_of(series, block, levels) for series, block in zip(sides, least, strict=True)]
    apart = sides[0] - sides[1]
    memory, block = memory_of(apart, least[0], levels, design_block), len(apart) // LEAST_INDEPENDENT
    remembers = memory.block > max(least[0], design_block, math.ceil(len(apart) / MOST_BLOCKS))
    if remembers and math.isfinite(memory.variance):
        slowest = max(memory_of(series).block for series in sides)
        alone = sum(variance_of_mean(series, block) for series in sides)
        if slowest > block and variance_of_mean(apart, block) > alone / 2:
            return [SeriesMemory(slowest, math.inf)]
    return [memory]


def _independent(series: np.ndarray, design_block: int = 1) -> int:
    """A length of blocks whose means are nearly independent: BLOCK_TIMES integrated autocorrelation times.

    A component that is weak and slow hides in the noise of single requests, and not in that of the means of blocks: so
    these are asked, too. What is independent by design is one block, and only the means of such blocks are asked.
    """
    count, block = len(series), design_block
    for share in (math.inf, 400, 160):
        step = max(block, math.ceil(count / share))
        means = _means(series, step)
        if len(means) < LEAST_INDEPENDENT:
            break
        time, window = autocorrelation_time(means)
        chance = (1.0 + 5.0 * math.sqrt(window / len(means))) / _bias(window, len(means))
        if time > chance:
            block = math.ceil(BLOCK_TIMES * time * step)
    return max(block, math.ceil(count / MOST_BLOCKS))


def autocorrelation_time(series: np.ndarray) -> tuple[float, int]:
    """1 + 2 * the sum of autocorrelations, and over how many lags: up to five such times (Sokal 1989)."""
    centred = series - series.mean()
    covariance = autocovariance(centred, len(series) // 2)
    if not covariance[0] > 0.0:
        return 1.0, 1
    lags = np.arange(1, max(len(series) // 2, 2))
    times = 1.0 + 2.0 * np.cumsum(covariance[lags] / covariance[0])
    times /= _bias(lags, len(series))
    wide = lags >= 5.0 * np.maximum(times, 1.0)
    last = int(wide.argmax()) if wide.any() else len(times) - 1
    return max(1.0, float(times[last])), last + 1


def _bias(lags: Any, count: int) -> Any:
    """What a sum of autocovariances loses around a mean that is estimated from the same series."""
    return 1.0 - (2.0 * lags + 1.0) / (count + 2.0)


def _means(series: np.ndarray, block: int) -> np.ndarray:
    blocks = len(series) // block
    found: np.ndarray = series[: blocks * block].reshape(blocks, block).mean(1)
    return found


def variance_of_mean(series: np.ndarray, block: int) -> float:
    """Variance of the mean of a series, by the means of its blocks."""
    means = _means(series, block)
    return float(means.var(ddof=1)) * block / len(series)


def drifts(series: np.ndarray, block: int, level: float) -> bool:
    """Whether more of the variance of blocks' means is in the slowest waves than chance gives in `level` of series."""
    means = _means(series, block)
    centred = means - means.mean()
    energy = float(centred @ centred)
    waves = _cosines(len(means))
    if not energy > 0.0 or not len(waves):
        return False
    return float(np.sum((waves @ centred) ** 2)) > energy * _chance(len(means), len(waves), level)


@lru_cache(maxsize=64)
def _cosines(blocks: int) -> np.ndarray:
    """The slowest cosine waves over so many blocks, orthonormal: shape (waves, blocks)."""
    orders = np.arange(1, min(_WAVES, (blocks - 1) // _BLOCKS_A_WAVE) + 1)
    return math.sqrt(2.0 / blocks) * np.cos(math.pi * np.outer(orders, (np.arange(blocks) + 0.5) / blocks))


@lru_cache(maxsize=1024)
def _chance(blocks: int, waves: int, level: float) -> float:
    """The share of the variance of independent means in the slowest waves that is exceeded by chance in `level`."""
    return beta_quantile(1.0 - level, waves / 2, (blocks - 1 - waves) / 2)
