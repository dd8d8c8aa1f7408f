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
from validation.canary.blocks import LEAST_BLOCKS, block_length, drawn, quantile_replicates
from validation.canary.distributions import NORMAL, t_quantile
from validation.canary.evidence import Array, Evidence, Side
from validation.canary.thresholds import Thresholds, probability

Verdict = Literal["PASS", "FAIL", "INSUFFICIENT"]
VERDICTS: tuple[Verdict, ...] = ("PASS", "FAIL", "INSUFFICIENT")
REPLICATES = 1000
# The normal interval of the bootstrap at 5 % misses in 5.4 % of 6,000 simulated canaries (lognormal, heavy-tailed and
# remembering latencies, 5,000 requests, median, both sides): so the level is calibrated (Loh, JASA 82, 1987).
_CALIBRATED = 0.9
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
        _latency(name, margin, effect, levels)
        for (name, margin), effect in zip(thresholds.latency.items(), effects, strict=True)
    ]


@dataclass(frozen=True)
class Effect:
    """The logarithm of a ratio of quantiles, its standard error, and how many blocks that rests on.

    beyond: requests beyond the quantile, on its thinner side; those that come in one burst count as fewer.
    freedom: degrees of freedom of the standard error.
    """

    log_ratio: float
    error: float
    blocks: int
    requests: int
    beyond: float
    freedom: float = math.nan


def answered(evidence: Evidence) -> tuple[Array, Array]:
    """Latencies of what was answered: of pairs, where both answered. What was not counts as an error, once."""
    candidate, baseline = evidence.candidate, evidence.baseline
    if evidence.paired:
        both = candidate.ok & baseline.ok
        return candidate.latency[both], baseline.latency[both]
    return candidate.latency[candidate.ok], baseline.latency[baseline.ok]


def quantile_effects(
    sides: tuple[Array, Array], probabilities: list[float], paired: bool, rng: np.random.Generator, replicates: int
) -> list[Effect]:
    """The effect on each quantile."""
    count = min(map(len, sides))
    if count < 2 * LEAST_BLOCKS or not probabilities:
        return [Effect(math.nan, math.nan, 0, count, 0.0) for _ in probabilities]
    lengths = [_memory(values, probabilities) for values in sides]
    lengths = [max(lengths)] * 2 if paired else lengths
    draws = [drawn(len(sides[0]) // lengths[0], replicates, rng)]
    draws.append(draws[0] if paired else drawn(len(sides[1]) // lengths[1], replicates, rng))
    found = [
        np.log(quantile_replicates(values, probabilities, length, draw))
        for values, length, draw in zip(sides, lengths, draws, strict=True)
    ]
    spread = (found[0] - found[1]).std(0, ddof=1)
    blocks = min(draw.shape[1] for draw in draws)
    beyond = _beyond(sides, probabilities, lengths, paired)
    points = [np.log(np.quantile(values, probabilities, method="inverted_cdf")) for values in sides]
    return [
        Effect(float(a - b), float(error), blocks, count, float(far), min(blocks - 1.0, _freedom(p, far)))
        for p, a, b, error, far in zip(probabilities, *points, spread, beyond, strict=True)
    ]


def _memory(values: Array, probabilities: list[float]) -> int:
    """The block that latencies, and being beyond the quantiles, ask for."""
    marks = [(values > np.quantile(values, p)).astype(float) for p in (0.5, max(probabilities))]
    return block_length(np.log(values), *marks)


def _freedom(p: float, beyond: float) -> float:
    """Degrees of freedom of the bootstrap's standard error of a difference of two quantiles.

    It is itself an estimate, and for a quantile a rough one: its relative variance is 2 / sqrt(pi n p (1 - p)) for each
    side (Hall & Martin, Probability Theory and Related Fields 80, 1988), which is that of chi-squared with twice its
    inverse. Two sides of like variance have twice as many.
    """
    return 2.0 * math.sqrt(math.pi * beyond * max(p, 1.0 - p))


def _beyond(sides: tuple[Array, Array], probabilities: list[float], lengths: list[int], paired: bool) -> list[float]:
    """How many requests lie beyond each quantile, on its thinner side; those that come in one burst count as fewer.

    In pairs only those count that are beyond on one side alone: a burst that hits both says nothing about either.
    """
    found = []
    for p in probabilities:
        marks = [_marks(values, p) for values in sides]
        if paired:
            effect = rates.clustering(marks[0] - marks[1], lengths[0])
        else:
            effect = max(rates.clustering(mark, length) for mark, length in zip(marks, lengths, strict=True))
        found.append(min(map(len, sides)) * min(p, 1 - p) / effect)
    return found


def _marks(values: Array, p: float) -> Array:
    edge = float(np.quantile(values, p))
    marks: Array = values >= edge if p >= 0.5 else values <= edge
    return marks.astype(float)


def _latency(name: str, margin: float, effect: Effect, levels: Levels) -> Criterion:
    if effect.blocks < LEAST_BLOCKS or effect.beyond < LEAST_BEYOND:
        share = min(probability(name), 1 - probability(name))
        least = max(math.ceil(LEAST_BEYOND / share), 2 * LEAST_BLOCKS)
        note = (
            f"{effect.requests} answered requests say nothing about {name}; it takes {least}, "
            "and more where slow requests come in bursts"
        )
        return Criterion(f"latency {name}", "latency", margin, "INSUFFICIENT", requests=effect.requests, note=note)
    limit = math.log1p(margin)
    levels_kept = (_CALIBRATED * level for level in (levels.passing, levels.failing))
    z_pass, z_fail = (t_quantile(1.0 - level, effect.freedom) for level in levels_kept)
    error = effect.error * math.sqrt(effect.blocks / (effect.blocks - 1))
    low, high = math.expm1(effect.log_ratio - z_fail * error), math.expm1(effect.log_ratio + z_pass * error)
    provable = (z_pass + _Z_POWER) * error
    return Criterion(
        f"latency {name}",
        "latency",
        margin,
        verdict_of(low, high, margin),
        math.expm1(effect.log_ratio),
        low,
        high,
        math.expm1(limit + (z_fail + _Z_POWER) * error),
        math.expm1(provable),
        math.ceil(effect.requests * (provable / limit) ** 2),
        effect.requests,
    )


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
