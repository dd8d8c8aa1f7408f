"""Each criterion: an estimate, an interval, and which side of the margin the interval is on.

All are tests of non-inferiority (Wellek, Testing Statistical Hypotheses of Equivalence and Noninferiority, 2010): PASS
when the upper bound is within the margin, FAIL when the lower one is beyond it (the other of two one-sided tests,
Schuirmann 1987), INSUFFICIENT when the margin lies between them. "No difference was found" is no PASS.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from validation.canary import rates
from validation.canary.blocks import LEAST_BLOCKS, LEAST_INDEPENDENT, block_length
from validation.canary.distributions import NORMAL, t_quantile
from validation.canary.evidence import Array, Evidence, Side
from validation.canary.slowdown import Effect, answered, quantile_effects, rank_bounds
from validation.canary.thresholds import Thresholds, probability

Verdict = Literal["PASS", "FAIL", "INSUFFICIENT"]
VERDICTS: tuple[Verdict, ...] = ("PASS", "FAIL", "INSUFFICIENT")
REPLICATES = 1000
# The normal interval of the bootstrap at 5 % misses in 5.4 % of 6,000 simulated canaries (lognormal, heavy-tailed and
# remembering latencies, 5,000 requests, median, both sides): so the level is calibrated (Loh, JASA 82, 1987).
_CALIBRATED = 0.9
import os
_RANKF=float(os.environ.get('RANKF','1'))
# Below this many requests beyond it a quantile is hardly more than the greatest value seen.
LEAST_BEYOND = 10
_Z_POWER = NORMAL.inv_cdf(rates.POWER)


@dataclass(frozen=True)
class Levels:
    """One-sided levels of the bounds that decide: PASS by the upper at `passing`, FAIL by the lower at `failing`."""

    passing: float
    failing: float


@dataclass(frozen=True)
class Criterion:
    """One test. Latency is in relative slowdown, everything else in shares of requests or points of score.

    low: lower bound at the level that fails.  high: upper bound at the level that passes.
    detectable: the smallest true effect that this much data would have failed with a probability of 0.8.
    provable: the smallest margin that an equal candidate would have passed at with that probability.
    needed: requests at which an equal candidate would pass, about.
    """

    name: str
    kind: Literal["latency", "share", "score"]
    margin: float
    verdict: Verdict
    estimate: float | None = None
    low: float | None = None
    high: float | None = None
    detectable: float | None = None
    provable: float | None = None
    needed: int | None = None
    requests: int = 0
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        return asdict(self)


def verdict_of(low: float, high: float, margin: float) -> Verdict:
    """FAIL beyond the margin, PASS within it; NaN is neither."""
    if low > margin:
        return "FAIL"
    return "PASS" if high <= margin else "INSUFFICIENT"


def latency_criteria(
    evidence: Evidence, thresholds: Thresholds, levels: Levels, rng: np.random.Generator, replicates: int = REPLICATES
) -> list[Criterion]:
    """Non-inferiority of each latency quantile, by the bootstrap of the logarithm of their ratio.

    The same blocks are drawn on both sides when they saw the same requests, so what both suffered cancels.
    """
    sides = answered(evidence)
    effects = quantile_effects(
        sides, [probability(name) for name in thresholds.latency], evidence.paired, rng, replicates
    )
    return [
        _latency(name, margin, effect, levels, sides)
        for (name, margin), effect in zip(thresholds.latency.items(), effects, strict=True)
    ]


def _latency(name: str, margin: float, effect: Effect, levels: Levels, sides: tuple[Array, Array]) -> Criterion:
    if note := _unknown(name, effect):
        return Criterion(f"latency {name}", "latency", margin, "INSUFFICIENT", requests=effect.requests, note=note)
    limit = math.log1p(margin)
    levels_kept = (_CALIBRATED * level for level in (levels.passing, levels.failing))
    z_pass, z_fail = (t_quantile(1.0 - level, effect.freedom) for level in levels_kept)
    error = effect.error * math.sqrt(effect.blocks / (effect.blocks - 1))
    least, most = rank_bounds(sides, probability(name), _RANKF*z_fail * effect.share_error, _RANKF*z_pass * effect.share_error)
    low, high = min(least, effect.log_ratio - z_fail * error), max(most, effect.log_ratio + z_pass * error)
    provable = high - effect.log_ratio + _Z_POWER * error
    return Criterion(
        f"latency {name}",
        "latency",
        margin,
        verdict_of(math.expm1(low), math.expm1(high), margin),
        math.expm1(effect.log_ratio),
        math.expm1(low),
        math.expm1(high),
        math.expm1(limit + effect.log_ratio - low + _Z_POWER * error),
        math.expm1(provable),
        math.ceil(effect.requests * (provable / limit) ** 2) if math.isfinite(provable) else None,
        effect.requests,
    )


def _unknown(name: str, effect: Effect) -> str:
    """Why nothing is known of a quantile; empty where something is."""
    share = min(probability(name), 1 - probability(name))
    least = max(math.ceil(LEAST_BEYOND / share), 2 * LEAST_BLOCKS)
    if effect.requests >= least and math.isinf(effect.share_error):
        return (
            f"latency stays high or low for some {effect.block} of {effect.requests} requests at a time; it takes "
            f"{LEAST_INDEPENDENT} such stretches, {LEAST_INDEPENDENT * effect.block} requests, or requests that go to both sides"
        )
    if effect.beyond < LEAST_BEYOND or math.isinf(effect.share_error):
        return (
            f"{effect.requests} answered requests say nothing about {name}; it takes {least}, "
            "and more where slow requests come in bursts"
        )
    return ""


def error_criterion(evidence: Evidence, margin: float, levels: Levels) -> Criterion:
    """The difference of the shares of failed requests."""
    failed = [~evidence.candidate.ok, ~evidence.baseline.ok]
    if evidence.paired:
        failed = [failed[0] & ~failed[1], failed[1] & ~failed[0]]
    ours, theirs = (rates.effective(flags, _burst(flags)) for flags in failed)
    estimate = float(failed[0].mean()) - float(failed[1].mean()) if min(map(len, failed)) else math.nan
    high = rates.upper(*ours, levels.passing / 2) - rates.lower(*theirs, levels.passing / 2)
    low = rates.lower(*ours, levels.failing / 2) - rates.upper(*theirs, levels.failing / 2)
    count = min(map(len, failed))
    return Criterion(
        "errors",
        "share",
        margin,
        verdict_of(low, high, margin),
        _known(estimate),
        low,
        high,
        rates.detectable(count, margin, levels.failing, True),
        rates.upper(0.0, count, levels.passing / 2),
        rates.needed(margin, levels.passing / 2),
        count,
    )


def share_criterion(name: str, flags: Array, margin: float, levels: Levels) -> Criterion:
    """A share of requests that must not be above a margin."""
    count, total = rates.effective(flags, _burst(flags))
    low, high = rates.lower(count, total, levels.failing), rates.upper(count, total, levels.passing)
    return Criterion(
        name,
        "share",
        margin,
        verdict_of(low, high, margin),
        _known(float(flags.mean()) if len(flags) else math.nan),
        low,
        high,
        rates.detectable(len(flags), margin, levels.failing, False),
        rates.upper(0.0, len(flags), levels.passing),
        rates.needed(margin, levels.passing),
        len(flags),
    )


def score_criterion(evidence: Evidence, margin: float, levels: Levels) -> Criterion | None:
    """How much the mean score drops; None where scores were not observed."""
    scored = [_scored(side) for side in (evidence.candidate, evidence.baseline)]
    if evidence.paired:
        both = ~np.isnan(scored[0]) & ~np.isnan(scored[1])
        scored = [values[both] for values in scored]
    else:
        scored = [values[~np.isnan(values)] for values in scored]
    count = min(map(len, scored))
    if count == 0:
        return None
    if count < 2 * LEAST_BLOCKS:
        note = f"{count} requests have a score; {2 * LEAST_BLOCKS} are the least"
        return Criterion("score", "score", margin, "INSUFFICIENT", requests=count, note=note)
    estimate = float(scored[1].mean() - scored[0].mean())
    error, freedom = _mean_error([scored[1] - scored[0]] if evidence.paired else scored)
    z_pass, z_fail = (t_quantile(1.0 - level, freedom) for level in (levels.passing, levels.failing))
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
        margin + max(z_fail * error, floor) + _Z_POWER * error,
        width + _Z_POWER * error,
        math.ceil(count * ((width + _Z_POWER * error) / margin) ** 2),
        count,
    )


def _scored(side: Side) -> Array:
    return np.where(side.ok, side.score, np.nan)


def _mean_error(series: list[Array]) -> tuple[float, float]:
    """Standard error of the mean (or of a difference of two) from the means of blocks, and its degrees of freedom."""
    total, freedom = 0.0, math.inf
    for values in series:
        length = block_length(values)
        blocks = len(values) // length
        means = values[: blocks * length].reshape(blocks, length).mean(1)
        total += float(means.var(ddof=1)) / blocks
        freedom = min(freedom, blocks - 1.0)
    return math.sqrt(total), freedom


def _burst(flags: Array) -> int:
    """Blocks for the design effect of rare events: as many as there is data for, up to 100."""
    return max(1, math.ceil(len(flags) / 100))


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
