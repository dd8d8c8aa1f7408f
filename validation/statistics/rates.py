"""Tests of error rates and slowdowns."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from enginesmith.arrays import Array
from validation.statistics.serial_dependence import (
    LEAST_BLOCKS,
    LEAST_INDEPENDENT,
    NORMAL,
    beta_quantile,
    draw_block_counts,
    memory_of,
    memory_of_difference,
    quantile_replicates,
)

# The evidence of a canary: the requests of two sides as arrays, in the order of their arrival.


@dataclass(frozen=True)
class Side:
    """One engine's requests; every array has an entry for each request.

    time: arrival in seconds.  latency: seconds from arrival to answer, meaningless for failed requests.  ok: bool,
    whether the request was answered.  score: quality as the owner measures it.  size: of the request, in any unit.
    Score and size are NaN if unknown; size is None if it is unknown for all requests.
    """

    time: Array
    latency: Array
    ok: Array
    score: Array
    size: Array | None = None

    def __len__(self) -> int:
        return len(self.ok)

    def select(self, mask: Array) -> "Side":
        """The requests where `mask` (bool [requests]) is true."""
        size = None if self.size is None else self.size[mask]
        return Side(self.time[mask], self.latency[mask], self.ok[mask], self.score[mask], size)


@dataclass(frozen=True)
class CanaryEvidence:
    """Both sides' requests. paired: whether entry i of both sides is the same request.

    differs, flipped: bool [requests that both answered], whether the candidate's answer, or its argmax, differs from
    the baseline's; None if not observed.  noise: the share of answers that would differ if the distances of all answers
    had the distribution of the middle half of the distances.
    died: how the candidate's process ended, if that was observed; else ''.  growing: whether the logs are still
    written to.
    stopped: why the end of a log may hide the death of an engine.  unlike: why the sides cannot be compared. Both rule
    out a PASS, and are sentences with a remedy, or ''.  lighter: whether the reason in `unlike` is less load on the
    candidate, which excuses no failure.
    design_block: the number of successive requests in a block that is independent of all others by design, as regards
    the machine: two segments of a concurrent replay, one in each order of the engines (`validation.canary.replay`;
    randomised blocks: Fisher, The Design of Experiments, 1935). 1 for any other evidence.
    """

    candidate: Side
    baseline: Side
    paired: bool
    differs: Array | None = None
    flipped: Array | None = None
    stopped: str = ""
    unlike: str = ""
    noise: float = 0.0
    died: str = ""
    growing: bool = False
    design_block: int = 1
    lighter: bool = False

    @property
    def requests(self) -> int:
        """The number of requests of the smaller side."""
        return min(len(self.candidate), len(self.baseline))

    @property
    def seconds(self) -> float | None:
        """Seconds from the baseline's first arrival to its last; None if that is 0 or not known."""
        finite_times = self.baseline.time[np.isfinite(self.baseline.time)]
        duration_s = float(np.ptp(finite_times)) if len(finite_times) else 0.0
        return duration_s if duration_s > 0.0 else None


# Exact (not asymptotic) bounds on shares of requests, such as failed requests.
#
# A canary has few failures or none, for which normal approximations are far too narrow. The bound on one share is that
# of Clopper & Pearson (Biometrika 26, 1934), which holds for every share and every count. A difference of two shares is
# bounded by the bounds of both at half the level each (Bonferroni). This holds for any dependence, and loses little if
# failures are rare; the unconditional tests after Barnard (1945) are sharper and cost O(n^2) sums. If each request went
# to both sides, only the requests count that one side answered and the other failed.
#
# Failures and different answers may occur in bursts, and a burst of five is not five independent events. The variance
# between blocks of requests, over that of independent requests, is the design effect. The bounds are computed from the
# count and the number of requests, each divided by the design effect (Korn & Graubard, Survey Methodology 24, 1998).
# `judging.judge` treats long series of failures.

# The usual power of a test (Cohen, Statistical Power Analysis for the Behavioral Sciences, 1988).
POWER = 0.8
# The number of requests for which the anytime-valid normal bounds are tightest.
MIXTURE_AT = 1000.0
# With fewer flags than this, a design effect must be greater to count: two flags may be in one block by chance.
FEW = 10


@lru_cache(maxsize=8192)
def upper(count: float, total: float, level: float) -> float:
    """One-sided Clopper-Pearson upper bound of a share, `count` of `total`, that is wrong with probability `level`."""
    if total <= 0 or count >= total:
        return 1.0
    return 1.0 - level ** (1.0 / total) if count <= 0 else beta_quantile(1.0 - level, count + 1.0, total - count)


@lru_cache(maxsize=8192)
def lower(count: float, total: float, level: float) -> float:
    """One-sided Clopper-Pearson lower bound of a share, as `upper`."""
    if total <= 0 or count <= 0:
        return 0.0
    return level ** (1.0 / total) if count >= total else beta_quantile(level, count, total - count + 1.0)


def estimate_design_effect(values: np.ndarray, block: int) -> float:
    """The design effect of values ([requests]): variance of the mean from blocks of consecutive requests, over the
    variance for independent requests; at least 1."""
    block_count, variance = len(values) // block, float(values.var()) if len(values) else 0.0
    if block_count < 2 or variance == 0.0:
        return 1.0
    means = values[: block_count * block].reshape(block_count, block).mean(1)
    return max(1.0, float(means.var(ddof=1)) * block / variance)


def effective(flags: np.ndarray) -> tuple[float, float]:
    """The count of true flags and the number of flags, each divided by the design effect of bursts of true flags."""
    # The greatest design effect of blocks of several lengths, if it is more than chance gives. Blocks that are shorter
    # than a burst show only a part of the effect.
    values, size = flags.astype(float), 1.0
    for block_count in (100, 20):
        if 20 <= block_count <= len(flags):
            effect = estimate_design_effect(values, len(flags) // block_count)
            # Few flags, or few blocks, vary by chance: chi-squared over its degrees of freedom exceeds this in 1 %.
            chance_bound = 1.0 + NORMAL.inv_cdf(0.99) * math.sqrt(2.0 / (block_count - 1))
            is_rare = float(values.sum()) < FEW
            if effect > (max(chance_bound, 1.6) if is_rare else chance_bound) or (block_count == 100 and not is_rare):
                size = max(size, effect)
    return float(flags.sum()) / size, len(flags) / size


@lru_cache(maxsize=8192)
def lower_anytime(count: float, total: float, level: float) -> float:
    """An anytime-valid lower bound of a share: the probability that it is ever wrong, at any number of requests, is at
    most `level`. A beta-binomial mixture (Robbins 1970; Howard & Ramdas, Annals of Statistics 49, 2021)."""
    if count <= 0:
        return 0.0
    # Of Beta(1/2, 1/2), whose normalization is pi.
    mixture = math.lgamma(count + 0.5) + math.lgamma(total - count + 0.5) - math.lgamma(total + 1.0)
    mixture += math.log(level / math.pi)
    low, high = 0.0, count / total
    for _ in range(60):
        midpoint = (low + high) / 2
        log_p = (total - count) * math.log1p(-midpoint) if midpoint < 1.0 else 0.0
        low, high = (midpoint, high) if count * math.log(max(midpoint, 1e-300)) + log_p < mixture else (low, midpoint)
    return low


def anytime_level(total: float, level: float) -> float:
    """The one-sided level of an anytime-valid normal bound at `total` requests; its total error is `level`.

    The normal mixture of Howard, Ramdas, McAuliffe & Sekhon (Annals of Statistics 49, 2021); for quantiles it bounds
    the share of requests below them (Howard & Ramdas, Bernoulli 28, 2022).
    """
    scale = 1.0 + total / MIXTURE_AT
    z = math.sqrt(2.0 * scale / (scale - 1.0) * math.log1p(math.sqrt(scale) / (2.0 * level)))
    return max(1.0 - NORMAL.cdf(z), 1e-12)


@lru_cache(maxsize=1024)
def detectable(total: int, margin: float, level: float, halves: bool) -> float | None:
    """The smallest true share that `total` requests show, with power 0.8, to be over `margin`; None if there is none.

    halves: whether the bound is on the difference from a side without failures.
    level: error of the bound.
    """
    own_level = level / 2 if halves else level
    other_bound = upper(0.0, total, own_level) if halves else 0.0
    if lower(total, total, own_level) - other_bound <= margin:
        return None
    low, high = 0, total
    while high - low > 1:
        midpoint = (low + high) // 2
        low, high = (low, midpoint) if lower(midpoint, total, own_level) - other_bound > margin else (midpoint, high)
    return beta_quantile(POWER, high, total - high + 1.0)


def count_needed(margin: float, level: float) -> int | None:
    """The least number of requests for a PASS if none of the requests fails; None if no number suffices."""
    return math.ceil(math.log(level) / math.log1p(-margin)) if 0 < margin < 1 else None


# The slowdown of a quantile of latency, and its uncertainty.
#
# There are two intervals, and at each end the wider one counts. The bootstrap of the logarithm of the ratio works for
# any distribution, but fails if hardly any latency is near the quantile: between two modes, or between the steps of a
# clock. Therefore the rank of the quantile is also shifted by the uncertainty of the share of requests below it, and
# the latencies at the shifted ranks are compared (Woodruff, JASA 47, 1952; for two samples Mathisen, Annals of
# Mathematical Statistics 14, 1943). This assumes no density, and a gap results in a wide interval.

# `serial_dependence.LEVELS` for a single quantile, after the test of all latencies together.
_ALONE = (0.01, 0.01)
# A quantile needs at least this many requests beyond it; with fewer it is nearly the greatest value.
LEAST_BEYOND = 10


@dataclass(frozen=True)
class Effect:
    """The logarithm of the ratio of a quantile on both sides. error: its standard error.  blocks: in the bootstrap.

    beyond: requests beyond the quantile, on its thinner side, divided by their design effect.
    freedom: degrees of freedom of the standard error.  block: about how many requests make one independent observation.
    share_error: standard error of the difference of the shares of requests below the quantile; infinite with fewer than
    LEAST_INDEPENDENT blocks, when `error` is too small.
    log_ratio: candidate over baseline.
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
    """Latencies of both sides' answered requests; for pairs, only of requests that both sides answered."""
    candidate, baseline = evidence.candidate, evidence.baseline
    if evidence.paired:
        ok_mask = candidate.ok & baseline.ok
        return candidate.latency[ok_mask], baseline.latency[ok_mask]
    return candidate.latency[candidate.ok], baseline.latency[baseline.ok]


def pair_by_order(ours: Array, theirs: Array) -> tuple[Array, Array]:
    """Two series of the same period, cut to equal length: evenly spaced entries of the longer one are left out."""
    count = min(len(ours), len(theirs))
    first_values, second_values = (values[np.arange(count) * len(values) // max(count, 1)] for values in (ours, theirs))
    return first_values, second_values


def quantile_effects(
    sides: tuple[Array, Array], probabilities: list[float], seed: int, replicates: int, design_block: int = 1
) -> list[Effect]:
    """The effect on each quantile. sides: latencies of candidate and baseline, [requests] each, in order, of the same
    requests or the same period: common slowdowns then cancel.

    seed, replicates: of the bootstrap, which draws the same blocks on both sides.  design_block: as in
    `CanaryEvidence`.
    probabilities: of the quantiles, from 0 to 1.
    """
    sides = pair_by_order(*sides)
    if (count := len(sides[0])) < 2 * LEAST_BLOCKS:
        return [Effect(math.nan, math.nan, 0, count, 0.0) for _ in probabilities]
    # All latencies show a slowly changing load better than the few in a tail.
    # Ranks are tested, because they have no tail that hides small shifts.
    ranks = [mean_ranks(values)[0] / count for values in sides]
    least_block = memory_of_difference(ranks, design_block=design_block).block
    return [_effect(sides, p, least_block, seed, replicates, design_block) for p in probabilities]


def _effect(sides: tuple[Array, Array], p: float, floor: int, seed: int, replicates: int, design_block: int) -> Effect:
    count = len(sides[0])
    quantiles = [quantile_of(values, p) for values in sides]
    # 1 for each latency beyond the quantile, on its thinner side.
    tail_flags: list[Array] = [
        (values >= quantile if p >= 0.5 else values <= quantile).astype(float)
        for values, quantile in zip(sides, quantiles, strict=True)
    ]
    memory = memory_of_difference(tail_flags, floor, _ALONE, design_block)
    length = min(memory.block, count // LEAST_INDEPENDENT)
    length = max(length, *(min(memory_of(flags).block, count // LEAST_BLOCKS) for flags in tail_flags))
    block_counts = draw_block_counts(count // length, replicates, seed)
    replicate_quantiles = [np.log(quantile_replicates(values, [p], length, block_counts)[:, 0]) for values in sides]
    block_count, gap = block_counts.shape[1], tail_flags[0] - tail_flags[1]
    has_variance = math.isfinite(memory.variance)
    effect = memory.design_effect(gap) if has_variance else estimate_design_effect(gap, length)
    tail_count = count * min(p, 1 - p) / effect
    # Degrees of freedom of the bootstrap's standard error of a difference of two quantiles. The relative variance of
    # that error is 2 / sqrt(pi n p (1 - p)) for each side (Hall & Martin, Probability Theory and Related Fields 80,
    # 1988), as that of chi-squared with twice its inverse degrees of freedom. Two sides have twice as many.
    freedom = max(1.0, 2.0 * math.sqrt(math.pi * tail_count * max(p, 1.0 - p)))
    ratio = math.log(quantiles[0] / quantiles[1])
    error = float((replicate_quantiles[0] - replicate_quantiles[1]).std(ddof=1))
    share_error = math.sqrt(memory.variance)
    return Effect(
        ratio, error, block_count, count, tail_count, min(block_count - 1.0, freedom), memory.block, share_error
    )


def quantile_of(values: Array, p: float) -> float:
    """The p-quantile: the least value such that at least a share p of the values is not greater."""
    rank = max(math.ceil(p * len(values) - 1e-9) - 1, 0)
    return float(np.partition(values, rank)[rank])


def mean_ranks(values: Array) -> tuple[Array, Array]:
    """The ranks of the values from 1, [n], with mean ranks for equal values; and the count of each distinct value."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2.0)[inverse], counts


def rank_bounds(sides: tuple[Array, Array], p: float, lower_share: float, upper_share: float) -> tuple[float, float]:
    """The least and the greatest log ratio of the two sides' p-quantiles if the rank on one side is shifted.

    lower_share, upper_share: shift of the rank for the least and the greatest, as a share of the requests.
    sides: as of `quantile_effects`.
    """
    candidate_values, baseline_values = (np.sort(values) for values in sides)
    low = min(
        _edge(candidate_values, p - lower_share, -1) - _edge(baseline_values, p, 1),
        _edge(candidate_values, p, -1) - _edge(baseline_values, p + lower_share, 1),
    )
    high = max(
        _edge(candidate_values, p + upper_share, 1) - _edge(baseline_values, p, -1),
        _edge(candidate_values, p, 1) - _edge(baseline_values, p - upper_share, -1),
    )
    return low, high


def _edge(sorted_values: Array, share: float, step: Literal[-1, 1]) -> float:
    """The lower (step -1) or upper (step 1) bound of the logarithm of the order statistic at a share of the requests.

    Equal values may be rounded: their bound is halfway to the next value. Beyond all values the bound is infinite.
    """
    rank = math.ceil(share * len(sorted_values) - 1e-9) - 1
    if (step < 0 and rank < 0) or (step > 0 and rank >= len(sorted_values)):
        return step * math.inf
    value = sorted_values[max(rank, 0)]
    start, end = np.searchsorted(sorted_values, value, "left"), np.searchsorted(sorted_values, value, "right")
    if end - start == 1:
        return math.log(value)
    index = end if step > 0 else start - 1
    return math.log((value + sorted_values[index]) / 2) if 0 <= index < len(sorted_values) else step * math.inf
