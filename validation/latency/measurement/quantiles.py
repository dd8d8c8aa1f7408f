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
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from enginery.arrays.npz import Array
from validation.statistics.blocks import LEAST_BLOCKS, block_length
from validation.statistics.distributions import beta_cdf
from validation.statistics.rates import clustering

LEVEL = 0.95
SHOWN = (0.5, 0.9, 0.99, 0.999)
# Points of the curve that is kept of a distribution.
CURVE = 101


@dataclass(frozen=True)
class Quantile:
    """A quantile p in seconds with its 95 % interval; all None where there are too few runs.

    effective: independent runs that the series is worth here.  needed: runs of this kind that an interval takes.
    """

    p: float
    value: float | None
    low: float | None
    high: float | None
    effective: float
    needed: int

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        return asdict(self)


def quantiles(latencies: Array, shown: tuple[float, ...] = SHOWN) -> list[Quantile]:
    """Each of the quantiles of a steady series (seconds, in the order in which they were measured)."""
    ordered = np.sort(latencies)
    return [_quantile(latencies, ordered, p) for p in shown]


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
    return max(clustering(beyond, min(length * times, longest)) for times in (1, 2, 4))


@lru_cache(maxsize=4096)
def order_ranks(count: int, p: float) -> tuple[int, int] | None:
    """The ranks (from 1) of the order statistics around the quantile p of `count` independent values, each end wrong in
    at most 2.5 %; None where one of them does not exist."""
    tail = (1.0 - LEVEL) / 2
    low, high = _last(count, p, tail), _first(count, p, 1.0 - tail)
    return (low, high) if low >= 1 and high <= count else None


def runs_needed(p: float) -> int:
    """The least number of independent runs whose extremes enclose the quantile p."""
    tail = (1.0 - LEVEL) / 2
    far = max(p, 1.0 - p)
    return math.ceil(math.log(tail) / math.log(far))


def below(count: int, p: float, most: int) -> float:
    """P(Bin(count, p) <= most), by the incomplete beta function."""
    if most < 0:
        return 0.0
    return 1.0 if most >= count else beta_cdf(1.0 - p, count - most, most + 1.0)


def _last(count: int, p: float, tail: float) -> int:
    """The greatest rank l with P(x(l) > quantile) = P(Bin < l) <= tail."""
    low, high = 0, count + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if below(count, p, middle - 1) <= tail else (low, middle)
    return low


def _first(count: int, p: float, level: float) -> int:
    """The least rank u with P(x(u) >= quantile) = P(Bin < u) >= level."""
    low, high = 0, count + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if below(count, p, middle - 1) >= level else (middle, high)
    return high


def curve(latencies: Array) -> list[float]:
    """The distribution function as CURVE quantiles at equal steps from 0 to 1, in seconds."""
    return [float(value) for value in np.quantile(latencies, np.linspace(0.0, 1.0, CURVE), method="inverted_cdf")]
