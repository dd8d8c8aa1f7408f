"""Each criterion: an estimate, an interval, and which side of the margin the interval is on.

All are tests of non-inferiority (Wellek, Testing Statistical Hypotheses of Equivalence and Noninferiority, 2010): PASS
when the upper bound is within the margin, FAIL when the lower one is beyond it (the other of two one-sided tests,
Schuirmann 1987), INSUFFICIENT when the margin lies between them. "No difference was found" is no PASS.

Shares of requests that failed, or were answered differently, against their margins.

The mean score: how much it drops.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal, TypeGuard

import numpy as np

from enginery.arrays import Array
from enginery.core.text import pluralize
from validation.canary.judging.thresholds import Thresholds, probability
from validation.statistics import rates
from validation.statistics.distributions import NORMAL, t_quantile
from validation.statistics.evidence import CanaryEvidence, Side
from validation.statistics.rates import POWER
from validation.statistics.serial_dependence import LEAST_BLOCKS, LEAST_INDEPENDENT, MOST_BLOCKS, memories_of
from validation.statistics.slowdown import (
    LEAST_BEYOND,
    Effect,
    quantile_effects,
    quantile_of,
    rank_bounds,
    select_answered,
)

Verdict = Literal["PASS", "FAIL", "INSUFFICIENT"]
VERDICTS: tuple[Verdict, ...] = ("PASS", "FAIL", "INSUFFICIENT")
REPLICATES = 1000
# The normal interval of the bootstrap at 5 % misses in 5.4 % of 6,000 simulated canaries (lognormal, heavy-tailed and
# remembering latencies, 5,000 requests, median, both sides): so the level is calibrated (Loh, JASA 82, 1987).
CALIBRATED = 0.9
# Of a replay in turns (`CanaryEvidence.design_block`), whose blocks are fewer: at 0.9 a candidate at its margin of the
# median passed in 5.3 % of 1,000 simulated canaries of 5,000 requests with 32 in flight.
CALIBRATED_IN_TURNS = 0.8
# The wider of the two intervals misses less often than either: the ranks move by so much of what one alone would take.
_RANKS = 0.9
Z_POWER = NORMAL.inv_cdf(POWER)


@dataclass(frozen=True)
class ErrorLevels:
    """One-sided levels of the bounds that decide: PASS by the upper at `passing`, FAIL by the lower at `failing`."""

    passing: float
    failing: float


@dataclass(frozen=True)
class Criterion:
    """One test. Latency is in relative slowdown, everything else in shares of requests or points of score.

    low: lower bound at the level that fails.  high: upper bound at the level that passes.
    detectable: the smallest true effect that this much data would have failed with a probability of 0.8.
    provable: the smallest margin that an equal candidate would have passed at with that probability.
    needed: requests at which an equal candidate would pass with a probability of 0.8, about; with a note, the least
    that could tell anything.
    assumed: what the interval takes for granted.
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
    assumed: str = ""

    def without_infinities(self) -> "Criterion":
        """With None for what JSON has no number for; what is None means the same as what is infinite."""

        def finite_or_none(value: float | None) -> float | None:
            return value if is_finite(value) else None

        low, high, detectable, provable = map(finite_or_none, (self.low, self.high, self.detectable, self.provable))
        return replace(
            self, estimate=finite_or_none(self.estimate), low=low, high=high, detectable=detectable, provable=provable
        )


def is_finite(value: float | None) -> TypeGuard[float]:
    """Whether it is known, and no infinity or NaN."""
    return value is not None and math.isfinite(value)


def verdict_of(low: float, high: float, margin: float) -> Verdict:
    """FAIL beyond the margin, PASS within it; NaN is neither."""
    if low > margin:
        return "FAIL"
    return "PASS" if high <= margin else "INSUFFICIENT"


def latency_criteria(
    evidence: CanaryEvidence, thresholds: Thresholds, levels: ErrorLevels, seed: int, replicates: int = REPLICATES
) -> list[Criterion]:
    """Non-inferiority of each latency quantile, by the bootstrap of the logarithm of their ratio.

    The same blocks are drawn on both sides when they saw the same requests, so what both suffered cancels.
    """
    sides = select_answered(evidence)
    effects = quantile_effects(
        sides,
        [probability(name) for name in thresholds.latency],
        evidence.paired,
        seed,
        replicates,
        evidence.design_block,
    )
    share = CALIBRATED if evidence.design_block == 1 else CALIBRATED_IN_TURNS
    kept = ErrorLevels(share * levels.passing, share * levels.failing)
    return [
        _latency(name, margin, effect, kept, sides, evidence.same_requests)
        for (name, margin), effect in zip(thresholds.latency.items(), effects, strict=True)
    ]


def _latency(
    name: str, margin: float, effect: Effect, levels: ErrorLevels, sides: tuple[Array, Array], paired: bool
) -> Criterion:
    if unknown := _unknown(name, effect, paired):
        note, needed = unknown
        return Criterion(
            f"latency {name}", "latency", margin, "INSUFFICIENT", needed=needed, requests=effect.requests, note=note
        )
    limit = math.log1p(margin)
    z_pass, z_fail = (t_quantile(1.0 - level, effect.freedom) for level in (levels.passing, levels.failing))
    error = effect.error * math.sqrt(effect.blocks / (effect.blocks - 1))
    least, most = rank_bounds(
        sides, probability(name), _RANKS * z_fail * effect.share_error, _RANKS * z_pass * effect.share_error
    )
    low, high = min(least, effect.log_ratio - z_fail * error), max(most, effect.log_ratio + z_pass * error)
    provable = high - effect.log_ratio + Z_POWER * error
    assumed = "" if math.isfinite(least) and math.isfinite(most) else _coarse(sides, probability(name))
    return Criterion(
        f"latency {name}",
        "latency",
        margin,
        verdict_of(math.expm1(low), math.expm1(high), margin),
        math.expm1(effect.log_ratio),
        math.expm1(low),
        math.expm1(high),
        math.expm1(limit + effect.log_ratio - low + Z_POWER * error),
        math.expm1(provable),
        math.ceil(effect.requests * (provable / limit) ** 2) if math.isfinite(provable) else None,
        effect.requests,
        assumed=assumed,
    )


def _coarse(sides: tuple[Array, Array], p: float) -> str:
    """How many latencies are equal to a quantile, so that it is not known from its neighbours; '' for one."""
    same = [int(np.count_nonzero(values == quantile_of(values, p))) for values in sides]
    count, side = max(zip(same, sides, strict=True), key=lambda item: item[0] / len(item[1]))
    return f"{count} of {len(side)} latencies are equal: record them with a finer clock" if count > 1 else ""


def _unknown(name: str, effect: Effect, paired: bool) -> tuple[str, int] | None:
    """Why nothing is known of a quantile, and how many requests it takes at least; None where something is."""
    share = min(probability(name), 1 - probability(name))
    least = max(math.ceil(LEAST_BEYOND / share), 2 * LEAST_BLOCKS)
    if effect.requests >= least and math.isinf(effect.share_error):
        note = unsteady("latency", effect.block, effect.requests, paired)
        return note, least_requests(effect.block, effect.requests)
    if effect.beyond < LEAST_BEYOND or math.isinf(effect.share_error):
        note = (
            f"{name} cannot be told from {pluralize(effect.requests, 'answered request')}; it takes {least}, "
            "and more where slow requests come in bursts"
        )
        bursts = effect.requests * LEAST_BEYOND / effect.beyond if effect.beyond > 0.0 else 0.0
        return note, max(least, math.ceil(bursts))
    return None


def least_requests(block: int, count: int) -> int:
    """Requests that tell anything of a series that keeps its level for `block` of `count`: twice as many where that is
    all of them, as nothing says how much longer it does."""
    return 2 * count if block >= count else LEAST_INDEPENDENT * block


def unsteady(what: str, block: int, count: int, paired: bool) -> str:
    """What is said of a series that remembers too long for its length. paired: of how two sides of pairs differ."""
    subject = f"the two sides' difference in {what}" if paired else what
    remedy = "" if paired else ", or the same requests sent to both sides"
    if block >= count:
        return f"{subject} moves slowly over all of the {count} requests; it takes a longer run{remedy}"
    return (
        f"{subject} keeps its level for some {block} of {count} requests; it takes at least "
        f"{least_requests(block, count)} such requests{remedy}"
    )


def error_criterion(evidence: CanaryEvidence, margin: float, levels: ErrorLevels, burst: int = 1) -> Criterion:
    """The difference of the shares of failed requests. burst: requests that one outage fails, assumed where no error
    was seen."""
    failed = [~evidence.candidate.ok, ~evidence.baseline.ok]
    seen = [failed[0] | failed[1]] if evidence.paired else failed
    if evidence.paired:
        failed = [failed[0] & ~failed[1], failed[1] & ~failed[0]]
    size, assumed = rates.burst_size(seen, burst, "error_burst")
    ours, theirs = (rates.effective(flags, size) for flags in failed)
    estimate = float(failed[0].mean()) - float(failed[1].mean()) if min(map(len, failed)) else math.nan
    high = rates.upper(*ours, levels.passing / 2) - rates.lower(*theirs, levels.passing / 2)
    low = rates.lower(*ours, levels.failing / 2) - rates.upper(*theirs, levels.failing / 2)
    count = min(map(len, failed))
    return _share("errors", margin, estimate, low, high, count, size, levels, assumed)


def share_criterion(name: str, flags: Array, margin: float, levels: ErrorLevels, burst: int = 1) -> Criterion:
    """A share of requests that must not be above a margin. burst: how many come together, assumed until seen."""
    size, assumed = rates.burst_size([flags], burst, "quality.burst")
    found = rates.effective(flags, size)
    low, high = rates.lower(*found, levels.failing), rates.upper(*found, levels.passing)
    estimate = float(flags.mean()) if len(flags) else math.nan
    return _share(name, margin, estimate, low, high, len(flags), size, levels, assumed)


def _share(
    name: str,
    margin: float,
    estimate: float,
    low: float,
    high: float,
    count: int,
    size: float,
    levels: ErrorLevels,
    assumed: str,
) -> Criterion:
    difference = name == "errors"
    passing = levels.passing / 2 if difference else levels.passing
    needed = rates.count_needed(margin, passing)
    return Criterion(
        name,
        "share",
        margin,
        verdict_of(low, high, margin),
        None if math.isnan(estimate) else estimate,
        low,
        high,
        rates.detectable(math.floor(count / size), margin, levels.failing, difference),
        rates.upper(0.0, count / size, passing),
        None if needed is None else math.ceil(needed * size),
        count,
        assumed=assumed,
    )


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
