"""Latency has a memory: a queue, a noisy neighbour, a clock that throttles. Resampling single requests would forget it
and claim too much, so blocks of consecutive requests are resampled.

Blocks do not overlap (Carlstein, Annals of Statistics 14, 1986). Their length follows the data by Politis & White
(Econometric Reviews 23, 2004, with the correction of Patton, Politis & White, 28, 2009), doubled: a block that is too
long costs some width of the interval, one that is too short its honesty. There are never more blocks than 400, which
keeps the bootstrap quick and still gives the standard error to 4 %.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

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
