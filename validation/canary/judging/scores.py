"""The mean score: how much it drops."""

import math

import numpy as np

from enginery.arrays.arrays import Array
from enginery.core.text import pluralize
from validation.canary.judging.criteria import (
    CALIBRATED,
    Z_POWER,
    Criterion,
    ErrorLevels,
    least_requests,
    unsteady,
    verdict_of,
)
from validation.statistics import rates
from validation.statistics.blocks import LEAST_BLOCKS, MOST_BLOCKS
from validation.statistics.distributions import t_quantile
from validation.statistics.evidence import CanaryEvidence, Side
from validation.statistics.memory import memories_of


def score_criterion(evidence: CanaryEvidence, margin: float, levels: ErrorLevels) -> Criterion | None:
    """How much the mean score drops; None where scores were not observed."""
    scored = [_read_scores(side) for side in (evidence.candidate, evidence.baseline)]
    if evidence.paired:
        both = ~np.isnan(scored[0]) & ~np.isnan(scored[1])
        scored = [values[both] for values in scored]
    else:
        scored = [values[~np.isnan(values)] for values in scored]
    count = min(map(len, scored))
    if count == 0:
        return None
    if count < 2 * LEAST_BLOCKS:
        note = f"{pluralize(count, 'score')} of requests; it takes {2 * LEAST_BLOCKS} or more"
        return Criterion("score", "score", margin, "INSUFFICIENT", needed=2 * LEAST_BLOCKS, requests=count, note=note)
    memories = memories_of(scored, evidence.paired)
    variance, block = sum(memory.variance for memory in memories), max(memory.block for memory in memories)
    if math.isinf(variance):
        note = unsteady("the score", block, count, evidence.same_requests)
        least = least_requests(block, count)
        return Criterion("score", "score", margin, "INSUFFICIENT", needed=least, requests=count, note=note)
    return _score(scored, margin, levels, math.sqrt(variance), min(count // block, MOST_BLOCKS) - 1.0)


def _score(scored: list[Array], margin: float, levels: ErrorLevels, error: float, freedom: float) -> Criterion:
    count = min(map(len, scored))
    estimate = float(scored[1].mean() - scored[0].mean())
    # At the level itself, means of scores passed at their margin in 4.4 to 6.4 % of 500 simulated canaries.
    z_pass, z_fail = (t_quantile(1.0 - CALIBRATED * level, freedom) for level in (levels.passing, levels.failing))
    # Scores that never differed do not prove that they never will.
    span = max(float(values.max()) for values in scored) - min(float(values.min()) for values in scored)
    floor = rates.upper(0.0, count, levels.passing) * max(span, min(1.0, margin * 100))
    width = max(z_pass * error, floor)
    low, high = estimate - max(z_fail * error, floor), estimate + width
    return Criterion(
        "score",
        "score",
        margin,
        verdict_of(low, high, margin),
        estimate,
        low,
        high,
        margin + max(z_fail * error, floor) + Z_POWER * error,
        width + Z_POWER * error,
        math.ceil(count * ((width + Z_POWER * error) / margin) ** 2),
        count,
    )


def _read_scores(side: Side) -> Array:
    return np.where(side.ok, side.score, np.nan)
