"""The slowdown of a quantile of latency, and its uncertainty.

There are two intervals, and the wider end of the two counts. The bootstrap of the logarithm of the ratio takes any
distributions, but needs latencies near the quantile, and fails where there are hardly any: between two modes, or
between the steps of a clock. So the rank of the quantile is also moved by the uncertainty of the share of requests
below it, and the latencies at those ranks are compared (Woodruff, JASA 47, 1952; for two samples Mathisen, Annals of
Mathematical Statistics 14, 1943). That assumes no density, and a gap gives a wide interval.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from enginesmith.arrays import Array
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

# `serial_dependence.LEVELS` for a single quantile, after all latencies together were tested.
_ALONE = (0.01, 0.01)
# Below this many requests beyond it a quantile is hardly more than the greatest value seen.
LEAST_BEYOND = 10


@dataclass(frozen=True)
class Effect:
    """The logarithm of the ratio of a quantile on both sides. error: its standard error.  blocks: in the bootstrap.

    beyond: requests beyond the quantile, on its thinner side; those that come in one burst count as fewer.
    freedom: degrees of freedom of the standard error.  block: about how many requests make one independent observation.
    share_error: standard error of the difference of the shares of requests below the quantile; infinite where there are
    fewer than LEAST_INDEPENDENT blocks, and then `error` is too small.
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
    """Latencies of both sides' answered requests; of pairs, of those that both answered."""
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
    """The effect on each quantile. sides: latencies of candidate and baseline, [requests] each.

    seed, replicates: of the bootstrap, which draws the same blocks on both sides of pairs, so that what slowed both
    cancels.  design_block: as in `CanaryEvidence`.
    """
    count = min(map(len, sides))
    if count < 2 * LEAST_BLOCKS:
        return [Effect(math.nan, math.nan, 0, count, 0.0) for _ in probabilities]
    # All latencies show a slowly changing load better than the few in a tail.
    # They are ranked, as ranks have no tail that hides small shifts.
    ranks = [mean_ranks(values)[0] / len(values) for values in sides]
    memories = memories_of(ranks, paired, design_block=design_block)
    least = [memory.block for memory in memories]
    return [_effect(sides, p, paired, least, seed, replicates, design_block) for p in probabilities]


def _effect(
    sides: tuple[Array, Array], p: float, paired: bool, least: list[int], seed: int, replicates: int, design_block: int
) -> Effect:
    count = min(map(len, sides))
    quantiles = [quantile_of(values, p) for values in sides]
    # 1 for each latency beyond the quantile, on its thinner side.
    marks: list[Array] = [
        (values >= edge if p >= 0.5 else values <= edge).astype(float)
        for values, edge in zip(sides, quantiles, strict=True)
    ]
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
    effect = max(
        memory.design_effect(one) if math.isfinite(memory.variance) else estimate_design_effect(one, length)
        for memory, one, length in zip(memories, series, lengths, strict=False)
    )
    beyond = count * min(p, 1 - p) / effect
    # Degrees of freedom of the bootstrap's standard error of a difference of two quantiles. The relative variance of
    # that error is 2 / sqrt(pi n p (1 - p)) for each side (Hall & Martin, Probability Theory and Related Fields 80,
    # 1988), as that of chi-squared with twice its inverse degrees of freedom. Two sides have twice as many.
    freedom = max(1.0, 2.0 * math.sqrt(math.pi * beyond * max(p, 1.0 - p)))
    ratio, error = math.log(quantiles[0] / quantiles[1]), float((found[0] - found[1]).std(ddof=1))
    share_error = math.sqrt(sum(memory.variance for memory in memories))
    return Effect(ratio, error, blocks, count, beyond, min(blocks - 1.0, freedom), slowest.block, share_error)


def quantile_of(values: Array, p: float) -> float:
    """The p-quantile: the least value that at least the share p of the values does not exceed."""
    rank = max(math.ceil(p * len(values) - 1e-9) - 1, 0)
    return float(np.partition(values, rank)[rank])


def mean_ranks(values: Array) -> tuple[Array, Array]:
    """Ranks of the values from 1, [n], of which equal values share their mean; and how often each value comes."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2.0)[place], counts


def rank_bounds(sides: tuple[Array, Array], p: float, below: float, above: float) -> tuple[float, float]:
    """The least and the greatest logarithm of the ratio of quantiles, when the rank of either side moves.

    below, above: by which share of the requests it moves for the least and for the greatest.
    """
    ours, theirs = (np.sort(values) for values in sides)
    low = min(_edge(ours, p - below, -1) - _edge(theirs, p, 1), _edge(ours, p, -1) - _edge(theirs, p + below, 1))
    high = max(_edge(ours, p + above, 1) - _edge(theirs, p, -1), _edge(ours, p, 1) - _edge(theirs, p - above, -1))
    return low, high


def _edge(ordered: Array, share: float, step: Literal[-1, 1]) -> float:
    """Logarithm of the order statistic at a share of the requests, as low (step -1) or high (1) as it may be.

    Equal values may be rounded ones, so their edge is halfway to the next value. Beyond all values it is infinite.
    """
    rank = math.ceil(share * len(ordered) - 1e-9) - 1
    if (step < 0 and rank < 0) or (step > 0 and rank >= len(ordered)):
        return step * math.inf
    value = ordered[max(rank, 0)]
    first, behind = np.searchsorted(ordered, value, "left"), np.searchsorted(ordered, value, "right")
    if behind - first == 1:
        return math.log(value)
    beyond = behind if step > 0 else first - 1
    return math.log((value + ordered[beyond]) / 2) if 0 <= beyond < len(ordered) else step * math.inf
