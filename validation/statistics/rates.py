"""Bounds on shares of requests, such as those that failed: exact ones, not asymptotic.

A canary sees few failures or none, where normal approximations are far too narrow. The bound on one share is Clopper &
Pearson's (Biometrika 26, 1934), whose coverage holds for every share and every count. A difference of two shares is
bounded by their bounds at half the level each (Bonferroni), which holds whatever their dependence, and loses little
where failures are rare; the unconditional tests after Barnard (1945) are sharper and cost O(n^2) sums. Where requests
went to both sides, only those count that one side answered and the other failed.

Failures come in bursts, and a burst of five is not five pieces of evidence. The variance between blocks of requests,
over that of independent requests, is the design effect; the bounds are those of the count and the number of requests,
each divided by it (Korn & Graubard, Survey Methodology 24, 1998). Where no failure was seen, the size of bursts is
assumed: n requests without a failure are then n / size pieces of evidence.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from validation.statistics.distributions import NORMAL, beta_quantile

POWER = 0.8
# Of fewer flags two may well fall into one block by chance.
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
    """The design effect of values ([requests]): variance of the mean by blocks of consecutive requests, over that of
    independent ones; at least 1."""
    blocks, variance = len(values) // block, float(values.var()) if len(values) else 0.0
    if blocks < 2 or variance == 0.0:
        return 1.0
    means = values[: blocks * block].reshape(blocks, block).mean(1)
    return max(1.0, float(means.var(ddof=1)) * block / variance)


def burst_size(sides: Sequence[np.ndarray], assumed: int, setting: str) -> tuple[float, str]:
    """The size of the bursts in which flags come, and a remark on how it is known. sides: flags, bool [requests] each.

    assumed: the size where no flag was seen, which `setting` of a spec replaces.
    """
    size = max(_bound_design_effect(flags, assumed) for flags in sides)
    if not any(flags.any() for flags in sides):
        size = float(assumed)
        one = "one by one" if assumed == 1 else f"in bursts of {assumed} requests"
        return size, f"none was seen, so that they come {one} is assumed ({setting})"
    return size, f"they come in bursts of some {size:.0f} requests, as those that were seen" if size >= 2.0 else ""


def _bound_design_effect(flags: np.ndarray, assumed: int) -> float:
    """The greatest design effect of blocks of several lengths, if it is more than chance gives.

    Several lengths, as blocks that are shorter than a burst show only a part of it.
    """
    values, found = flags.astype(float), 1.0
    for blocks in {100, 20, len(flags) // assumed if assumed > 1 else 100}:
        if 20 <= blocks <= len(flags):
            effect = estimate_design_effect(values, len(flags) // blocks)
            # Few flags, or few blocks, vary by chance: chi-squared over its degrees of freedom is beyond this in 1 %.
            chance = 1.0 + NORMAL.inv_cdf(0.99) * math.sqrt(2.0 / (blocks - 1))
            few = float(values.sum()) < FEW
            if effect > (max(chance, 1.6) if few else chance) or (blocks == 100 and not few):
                found = max(found, effect)
    return found


def effective(flags: np.ndarray, size: float) -> tuple[float, float]:
    """The count of flags and their total, each divided by the size of bursts, or by the flags' own if greater."""
    size = max(size, _bound_design_effect(flags, 1))
    return float(flags.sum()) / size, len(flags) / size


@lru_cache(maxsize=1024)
def detectable(total: int, margin: float, level: float, halves: bool) -> float | None:
    """The smallest true share that `total` requests would have shown to be over the margin with power 0.8; None: none.

    halves: whether the bound is that of a difference, whose other side saw no failure.
    """
    own = level / 2 if halves else level
    other = upper(0.0, total, own) if halves else 0.0
    if lower(total, total, own) - other <= margin:
        return None
    low, high = 0, total
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if lower(middle, total, own) - other > margin else (middle, high)
    return beta_quantile(POWER, high, total - high + 1.0)


def count_needed(margin: float, level: float) -> int | None:
    """The number of requests that give a PASS when none of them fails; None: no number does."""
    return math.ceil(math.log(level) / math.log1p(-margin)) if 0 < margin < 1 else None
