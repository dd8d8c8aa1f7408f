"""How much slower a quantile of latency is, and how well that is known.

Two intervals, and the wider end of the two counts. The bootstrap of the logarithm of the ratio takes in whatever the
two distributions are, but expects a quantile that moves a little, which it does not where hardly any latency lies:
between two modes, or between the steps of a clock. So the rank of the quantile is moved as well, by what the share of
requests below it is uncertain by, and the latencies at those ranks are compared (Woodruff, JASA 47, 1952; for two
samples Mathisen, Annals of Mathematical Statistics 14, 1943). That takes no density, and a gap is a wide interval.
"""

import math
from dataclasses import dataclass

import numpy as np

from enginery.arrays import Array
from validation.statistics.evidence import CanaryEvidence
from validation.statistics.rates import estimate_design_effect
from validation.statistics.serial_dependence import (
    LEAST_BLOCKS,
    LEAST_INDEPENDENT,
    draw_block_counts,
    memories_of,
    memory_of,
    quantile_replicates,
)

# Levels of the test against a level that moves (`memory.LEVELS`) of one quantile, where that of all was tested.
_ALONE = (0.01, 0.01)
# Below this many requests beyond it a quantile is hardly more than the greatest value seen.
LEAST_BEYOND = 10


@dataclass(frozen=True)
class Effect:
    """The logarithm of a ratio of quantiles, its standard error, and how many blocks that rests on.

    beyond: requests beyond the quantile, on its thinner side; those that come in one burst count as fewer.
    freedom: degrees of freedom of the standard error.
    block: requests that make one independent observation, about.
    share_error: standard error of the difference of the shares of requests below the quantile; infinite where fewer
    than LEAST_INDEPENDENT blocks leave it unknown, and then the standard error is too small.
    """

    log_ratio: float
    error: float
    blocks: int
    requests: int
    beyond: float
    freedom: float = math.nan
    block: int = 1
    share_error: float = math.inf


def select_answered(evidence: CanaryEvidence) -> tuple[Array, Array]:
    """Latencies of what was answered: of pairs, where both answered. What was not counts as an error, once."""
    candidate, baseline = evidence.candidate, evidence.baseline
    if evidence.paired:
        both = candidate.ok & baseline.ok
        return candidate.latency[both], baseline.latency[both]
    return candidate.latency[candidate.ok], baseline.latency[baseline.ok]


def quantile_effects(
    sides: tuple[Array, Array],
    probabilities: list[float],
    paired: bool,
    seed: int,
    replicates: int,
    design_block: int = 1,
) -> list[Effect]:
    """The effect on each quantile. The same blocks are drawn on both sides of pairs, so what both suffered cancels.

    design_block: see `CanaryEvidence`.
    """
    count = min(map(len, sides))
    if count < 2 * LEAST_BLOCKS:
        return [Effect(math.nan, math.nan, 0, count, 0.0) for _ in probabilities]
    # A tail has few requests to show in what all of them show better: that the load changes slowly.
    steady = [
        memory.block for memory in memories_of([_ranks(values) for values in sides], paired, design_block=design_block)
    ]
    return [_effect(sides, p, paired, steady, seed, replicates, design_block) for p in probabilities]


def _effect(
    sides: tuple[Array, Array], p: float, paired: bool, least: list[int], seed: int, replicates: int, design_block: int
) -> Effect:
    count = min(map(len, sides))
    quantiles = [quantile_of(values, p) for values in sides]
    marks = [_marks(values, p, edge) for values, edge in zip(sides, quantiles, strict=True)]
    series = [marks[0] - marks[1]] if paired else marks
    memories = memories_of(marks, paired, least, _ALONE, design_block)
    slowest = max(memories, key=lambda memory: memory.block)
    lengths = [min(memory.block, count // LEAST_INDEPENDENT) for memory in memories]
    if paired:
        lengths = [max(lengths[0], *(min(memory_of(mark).block, count // LEAST_BLOCKS) for mark in marks))] * 2
    drawn_blocks = [
        draw_block_counts(len(values) // length, replicates, seed, 0 if paired else side)
        for side, (values, length) in enumerate(zip(sides, lengths, strict=True))
    ]
    found = [
        np.log(quantile_replicates(values, [p], length, draw)[:, 0])
        for values, length, draw in zip(sides, lengths, drawn_blocks, strict=True)
    ]
    blocks = min(draw.shape[1] for draw in drawn_blocks)
    worth = max(
        memory.design_effect(one) if math.isfinite(memory.variance) else estimate_design_effect(one, length)
        for memory, one, length in zip(memories, series, lengths, strict=False)
    )
    beyond = count * min(p, 1 - p) / worth
    return Effect(
        math.log(quantiles[0] / quantiles[1]),
        float((found[0] - found[1]).std(ddof=1)),
        blocks,
        count,
        beyond,
        min(blocks - 1.0, _freedom(p, beyond)),
        slowest.block,
        math.sqrt(sum(memory.variance for memory in memories)),
    )


def quantile_of(values: Array, p: float) -> float:
    """The least of the values that a share p of them does not exceed."""
    rank = max(math.ceil(p * len(values) - 1e-9) - 1, 0)
    return float(np.partition(values, rank)[rank])


def _ranks(values: Array) -> Array:
    """Mean ranks, as shares of the requests: what moves most latencies a little moves these, whatever their tail."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    found: Array = ((np.cumsum(counts) - (counts - 1) / 2.0) / len(values))[place]
    return found


def _marks(values: Array, p: float, edge: float) -> Array:
    """1 for each latency beyond the quantile, `edge`, on its thinner side."""
    marks: Array = values >= edge if p >= 0.5 else values <= edge
    return marks.astype(float)


def _freedom(p: float, beyond: float) -> float:
    """Degrees of freedom of the bootstrap's standard error of a difference of two quantiles.

    It is itself an estimate, and for a quantile a rough one: its relative variance is 2 / sqrt(pi n p (1 - p)) for each
    side (Hall & Martin, Probability Theory and Related Fields 80, 1988), which is that of chi-squared with twice its
    inverse. Two sides of like variance have twice as many.
    """
    return max(1.0, 2.0 * math.sqrt(math.pi * beyond * max(p, 1.0 - p)))


def rank_bounds(sides: tuple[Array, Array], p: float, below: float, above: float) -> tuple[float, float]:
    """The logarithm of the ratio of quantiles at least and at most, when either side's rank moves.

    below, above: the share of requests that it moves by for the one and for the other.
    """
    ours, theirs = (np.sort(values) for values in sides)
    low = min(
        _low(ours, p - below) - _high(theirs, p),
        _low(ours, p) - _high(theirs, p + below),
    )
    high = max(
        _high(ours, p + above) - _low(theirs, p),
        _high(ours, p) - _low(theirs, p - above),
    )
    return low, high


def _low(ordered: Array, share: float) -> float:
    """Logarithm of the order statistic at a share of the requests, rounded down; of equal ones the recorded value may
    be rounded, and is halfway down to the next."""
    rank = math.ceil(share * len(ordered) - 1e-9) - 1
    if rank < 0:
        return -math.inf
    value = ordered[rank]
    first, behind = np.searchsorted(ordered, value, "left"), np.searchsorted(ordered, value, "right")
    if behind - first == 1:
        return math.log(value)
    return math.log((value + ordered[first - 1]) / 2) if first else -math.inf


def _high(ordered: Array, share: float) -> float:
    """As `_low`, the other way."""
    rank = math.ceil(share * len(ordered) - 1e-9) - 1
    if rank >= len(ordered):
        return math.inf
    value = ordered[max(rank, 0)]
    first, behind = np.searchsorted(ordered, value, "left"), np.searchsorted(ordered, value, "right")
    if behind - first == 1:
        return math.log(value)
    return math.log((value + ordered[behind]) / 2) if behind < len(ordered) else math.inf
