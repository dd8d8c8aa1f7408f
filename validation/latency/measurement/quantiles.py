"""Quantiles of latency with intervals that assume no distribution: two order statistics around each.

The number of values below the quantile p is binomial, so that ranks l < u with P(l <= Bin(n, p) < u) >= 95 % give the
interval [x(l), x(u)] (Hahn & Meeker, Statistical Intervals, 1991, 5.2; David & Nagaraja, Order Statistics, 2003, 7.1).
Where n is too small for an upper rank to exist there is no interval, and then no quantile is claimed either; what is
said is how many runs it takes.

Runs that follow each other resemble each other. The variance of the share of runs beyond the quantile, between blocks
of consecutive runs, over what independent runs would give, is the design effect; n over it is the effective number of
runs, which the ranks are taken from.
"""

import math
from functools import lru_cache

import numpy as np

from enginery.arrays.arrays import Array
from enginery.core.reports.latency import Quantile
from validation.statistics.blocks import LEAST_BLOCKS, block_length
from validation.statistics.rates import estimate_design_effect

LEVEL = 0.95
SHOWN = (0.5, 0.9, 0.99, 0.999)
# Points of the curve that is kept of a distribution.
CURVE = 101


def quantiles(latencies: Array, shown: tuple[float, ...] = SHOWN) -> tuple[Quantile, ...]:
    """Each of the quantiles of a steady series (seconds, in the order in which they were measured)."""
    ordered = np.sort(latencies)
    return tuple(_quantile(latencies, ordered, p) for p in shown)


def _quantile(latencies: Array, ordered: Array, p: float) -> Quantile:
    effect = design_effect(latencies, p)
    needed = math.ceil(runs_needed(p) * effect)
    effective = len(latencies) / effect
    ranks = order_ranks(math.floor(effective), p)
    if ranks is None:
        return Quantile(p, None, None, None, effective, max(needed, len(latencies) + 1))
    low = max(1, math.floor(ranks[0] * effect))
    high = min(len(ordered), math.ceil(ranks[1] * effect))
    middle = min(max(math.ceil(p * len(ordered)), low), high)
    value, below_it, above_it = (float(ordered[rank - 1]) for rank in (middle, low, high))
    return Quantile(p, value, below_it, above_it, effective, needed)


def design_effect(latencies: Array, p: float) -> float:
    """How many runs that follow each other count as one, for being beyond the quantile p; at least 1."""
    if len(latencies) < 2 or float(np.ptp(latencies)) == 0.0:
        return 1.0
    beyond = (latencies > np.quantile(latencies, p)).astype(float)
    length = block_length(np.log(np.maximum(latencies, 1e-12)), beyond)
    longest = max(1, len(latencies) // LEAST_BLOCKS)
    # Blocks that are too short hide what lasts longer than they do.
    return max(estimate_design_effect(beyond, min(length * times, longest)) for times in (1, 2, 4))


@lru_cache(maxsize=4096)
def order_ranks(count: int, p: float) -> tuple[int, int] | None:
    """The ranks (from 1) of the order statistics around the quantile p of `count` independent values, each end wrong in
    at most 2.5 %; None where one of them does not exist."""
    tail = (1.0 - LEVEL) / 2
    k = np.arange(1.0, count + 1.0)
    ratios = np.log((count - k + 1.0) / k) + math.log(p) - math.log1p(-p)  # of P(Bin = k) to P(Bin = k - 1)
    chances = np.exp(count * math.log1p(-p) + np.concatenate([[0.0], np.cumsum(ratios)]))
    up_to = np.cumsum(chances)  # P(Bin <= k) for k from 0
    low, high = int(np.searchsorted(up_to, tail, "right")), int(np.searchsorted(up_to, 1.0 - tail)) + 1
    return (low, high) if low >= 1 and high <= count else None


def runs_needed(p: float) -> int:
    """The least number of independent runs whose extremes enclose the quantile p."""
    tail = (1.0 - LEVEL) / 2
    far = max(p, 1.0 - p)
    return math.ceil(math.log(tail) / math.log(far))


def curve(latencies: Array) -> tuple[float, ...]:
    """The distribution function as CURVE quantiles at equal steps from 0 to 1, in seconds."""
    steps = np.linspace(0.0, 1.0, CURVE)
    return tuple(float(value) for value in np.quantile(latencies, steps, method="inverted_cdf"))
