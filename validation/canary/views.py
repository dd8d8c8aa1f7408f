"""What a canary's report shows beside the criteria: distributions, latency over time, errors, the worst requests.

None of it decides. Mann & Whitney's U (Annals of Mathematical Statistics 18, 1947) takes requests for independent, and
a canary with enough data finds any difference, however small; so its p is shown and not judged. The common language
effect size (McGraw & Wong, Psychological Bulletin 111, 1992; ties count half: Vargha & Delaney, 2000) is the chance
that a request is slower on the candidate than another on the baseline.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from enginesmith.arrays import Array
from validation.canary.judging.criteria import REPLICATES, is_finite
from validation.canary.observations import ObservationTable
from validation.statistics.distributions import NORMAL
from validation.statistics.evidence import CanaryEvidence, Side
from validation.statistics.slowdown import mean_ranks, quantile_effects, select_answered

CURVE_POINTS, WINDOWS, LEAST_IN_WINDOW, MOST_ERRORS, MOST_WORST = 160, 48, 8, 12, 8
PROBABILITIES = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999)
INTERVAL_LEVEL = 0.05


@dataclass(frozen=True)
class MannWhitney:
    """The test of latencies: U, z corrected for ties, two-sided p. cles: the chance that the candidate is slower."""

    u: float
    z: float
    p: float
    cles: float


@dataclass(frozen=True)
class QuantileSlowdown:
    """A quantile of latency in seconds on both sides, and the slowdown with an interval of 5 % on either side."""

    p: float
    candidate: float
    baseline: float
    slowdown: float
    low: float
    high: float


@dataclass(frozen=True)
class LatencyCurves:
    """Distribution functions: points (latency in seconds, share of requests up to it), denser towards the tail."""

    candidate: tuple[tuple[float, float], ...]
    baseline: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class LatencyCourses:
    """Latency over time, by windows: (seconds since the first request, median, 90th percentile)."""

    candidate: tuple[tuple[float, float, float], ...]
    baseline: tuple[tuple[float, float, float], ...]


@dataclass(frozen=True)
class ErrorCount:
    """An error's text, and how often it came on each side."""

    error: str
    candidate: int
    baseline: int


@dataclass(frozen=True)
class UnlikeAnswers:
    """A request that was answered differently. candidate, baseline: latencies in seconds; None where one failed."""

    request: str
    sqnr_db: float
    flipped: bool | None
    candidate: float | None
    baseline: float | None


@dataclass(frozen=True)
class CanaryView:
    """All that is shown and not judged. errors: the most frequent first.  worst: the lowest SQNR first."""

    mann_whitney: MannWhitney | None
    quantiles: tuple[QuantileSlowdown, ...]
    ecdf: LatencyCurves
    over_time: LatencyCourses
    errors: tuple[ErrorCount, ...]
    worst: tuple[UnlikeAnswers, ...]


def view_of(candidate: ObservationTable, baseline: ObservationTable, evidence: CanaryEvidence, seed: int) -> CanaryView:
    """All that a report shows beside the criteria. seed: of the bootstrap."""
    sides = select_answered(evidence)
    return CanaryView(
        mann_whitney=mann_whitney(*sides),
        quantiles=tuple(_quantiles(evidence, sides, seed)),
        ecdf=LatencyCurves(*map(_curve, sides)),
        over_time=LatencyCourses(tuple(_windows(evidence.candidate)), tuple(_windows(evidence.baseline))),
        errors=_count_errors(candidate, baseline),
        worst=tuple(_worst(candidate, baseline)),
    )


def mann_whitney(candidate: Array, baseline: Array) -> MannWhitney | None:
    """Mann & Whitney's test of two sides' latencies (seconds, [requests]); None where a side has none."""
    ours, theirs = len(candidate), len(baseline)
    if not ours or not theirs:
        return None
    ranks, counts = mean_ranks(np.concatenate([candidate, baseline]))
    u = float(ranks[:ours].sum()) - ours * (ours + 1) / 2.0
    total = ours + theirs
    ties = float(np.sum(counts.astype(float) ** 3 - counts)) / (total * (total - 1.0)) if total > 1 else 0.0
    spread = math.sqrt(max(ours * theirs / 12.0 * (total + 1.0 - ties), 0.0))
    z = (u - ours * theirs / 2.0) / spread if spread > 0 else 0.0
    return MannWhitney(u, z, 2.0 * (1.0 - NORMAL.cdf(abs(z))), u / (ours * theirs))


def _quantiles(evidence: CanaryEvidence, sides: tuple[Array, Array], seed: int) -> Iterator[QuantileSlowdown]:
    count = min(map(len, sides))
    known = [p for p in PROBABILITIES if count * min(p, 1 - p) >= 5]
    effects = quantile_effects(sides, known, evidence.paired, seed, REPLICATES, evidence.design_block)
    z = NORMAL.inv_cdf(1.0 - INTERVAL_LEVEL)
    for p, effect in zip(known, effects, strict=True):
        if math.isfinite(effect.error):
            ours, theirs = (float(np.quantile(side, p, method="inverted_cdf")) for side in sides)
            ratios = (effect.log_ratio, effect.log_ratio - z * effect.error, effect.log_ratio + z * effect.error)
            yield QuantileSlowdown(p, ours, theirs, *map(math.expm1, ratios))


def _curve(values: Array) -> tuple[tuple[float, float], ...]:
    if not len(values):
        return ()
    shares = 1.0 - np.geomspace(1.0, max(0.5 / len(values), 1e-5), CURVE_POINTS)
    shares = np.unique(np.concatenate([np.linspace(0.0, 1.0, CURVE_POINTS // 2), shares]))
    found = np.quantile(values, shares, method="inverted_cdf")
    return tuple((float(x), float(p)) for x, p in zip(found, shares, strict=True))


def _windows(side: Side) -> Iterator[tuple[float, float, float]]:
    time, latency = side.time[side.ok], side.latency[side.ok]
    if not len(time) or not np.isfinite(time).all():
        return
    span = float(time.max() - time.min())
    count = max(1, min(WINDOWS, len(time) // LEAST_IN_WINDOW))
    window = np.minimum(((time - time.min()) / (span or 1.0) * count).astype(int), count - 1)
    for index in range(count):
        inside = latency[window == index]
        if len(inside) >= LEAST_IN_WINDOW:
            median, tail = np.quantile(inside, [0.5, 0.9])
            yield (index + 0.5) / count * span, float(median), float(tail)


def _count_errors(candidate: ObservationTable, baseline: ObservationTable) -> tuple[ErrorCount, ...]:
    counts = [
        Counter(text or "no reason given" for ok, text in zip(one.ok, one.error, strict=True) if not ok)
        for one in (candidate, baseline)
    ]
    texts = sorted(counts[0] | counts[1], key=lambda text: (-counts[0][text] - counts[1][text], text))
    return tuple(ErrorCount(text, counts[0][text], counts[1][text]) for text in texts[:MOST_ERRORS])


def _worst(candidate: ObservationTable, baseline: ObservationTable) -> Iterator[UnlikeAnswers]:
    theirs = {name: index for index, name in enumerate(baseline.request) if name is not None}
    distance = np.asarray(candidate.sqnr_db)
    order = [index for index in np.argsort(distance, kind="stable") if not np.isnan(distance[index])]
    for index in order[:MOST_WORST]:
        name, flipped = candidate.request[index], candidate.flipped[index]
        if (other := theirs.get(name)) is not None:
            took = (candidate.latency[index], baseline.latency[other])
            yield UnlikeAnswers(
                str(name), float(distance[index]), flipped, *(value if is_finite(value) else None for value in took)
            )
