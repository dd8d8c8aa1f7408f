"""What a canary's report shows beside the criteria: distributions, the course of time, errors, the worst requests.

None of it decides. Mann & Whitney's U (Annals of Mathematical Statistics 18, 1947) takes requests for independent, and
a canary with enough data finds any difference, however small; so its p is shown and not judged. The common language
effect size (McGraw & Wong, Psychological Bulletin 111, 1992; ties count half: Vargha & Delaney, 2000) is the chance
that a request is slower on the candidate than another on the baseline.
"""

import math
from collections import Counter
from typing import Any

import numpy as np

from validation.canary.judging.criteria import REPLICATES
from validation.canary.observations import Observations
from validation.statistics.distributions import NORMAL
from validation.statistics.evidence import Array, Evidence, Side
from validation.statistics.slowdown import answered, quantile_effects

Json = dict[str, Any]
CURVE_POINTS, WINDOWS, LEAST_IN_WINDOW, MOST_ERRORS, MOST_WORST = 160, 48, 8, 12, 8
PROBABILITIES = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999)
INTERVAL_LEVEL = 0.05


def shown(candidate: Observations, baseline: Observations, evidence: Evidence, seed: int) -> Json:
    """Everything shown, as JSON."""
    sides = answered(evidence)
    return {
        "mann_whitney": mann_whitney(*sides),
        "quantiles": _quantiles(evidence, sides, seed),
        "ecdf": {name: _curve(values) for name, values in zip(("candidate", "baseline"), sides, strict=True)},
        "over_time": {"candidate": _windows(evidence.candidate), "baseline": _windows(evidence.baseline)},
        "errors": _errors(candidate, baseline),
        "worst": _worst(candidate, baseline),
    }


def mann_whitney(candidate: Array, baseline: Array) -> Json | None:
    """U, z with its correction for ties, the two-sided p, and the chance that the candidate is slower."""
    ours, theirs = len(candidate), len(baseline)
    if not ours or not theirs:
        return None
    _, place, counts = np.unique(np.concatenate([candidate, baseline]), return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2.0)[place]
    u = float(ranks[:ours].sum()) - ours * (ours + 1) / 2.0
    total = ours + theirs
    ties = float(np.sum(counts.astype(float) ** 3 - counts)) / (total * (total - 1.0)) if total > 1 else 0.0
    spread = math.sqrt(max(ours * theirs / 12.0 * (total + 1.0 - ties), 0.0))
    z = (u - ours * theirs / 2.0) / spread if spread > 0 else 0.0
    return {"u": u, "z": z, "p": 2.0 * (1.0 - NORMAL.cdf(abs(z))), "cles": u / (ours * theirs)}


def _quantiles(evidence: Evidence, sides: tuple[Array, Array], seed: int) -> list[Json]:
    """Each quantile on both sides, and the slowdown with an interval of 5 % on either side."""
    count = min(map(len, sides))
    known = [p for p in PROBABILITIES if count * min(p, 1 - p) >= 5]
    effects = quantile_effects(sides, known, evidence.paired, seed, REPLICATES, evidence.design_block)
    z = NORMAL.inv_cdf(1.0 - INTERVAL_LEVEL)
    return [
        {
            "p": p,
            "candidate": float(np.quantile(sides[0], p, method="inverted_cdf")),
            "baseline": float(np.quantile(sides[1], p, method="inverted_cdf")),
            "slowdown": math.expm1(effect.log_ratio),
            "low": math.expm1(effect.log_ratio - z * effect.error),
            "high": math.expm1(effect.log_ratio + z * effect.error),
        }
        for p, effect in zip(known, effects, strict=True)
        if math.isfinite(effect.error)
    ]


def _curve(values: Array) -> list[list[float]]:
    """The distribution function: latency and the share of requests up to it, drawn closer towards the tail."""
    if not len(values):
        return []
    shares = 1.0 - np.geomspace(1.0, max(0.5 / len(values), 1e-5), CURVE_POINTS)
    shares = np.unique(np.concatenate([np.linspace(0.0, 1.0, CURVE_POINTS // 2), shares]))
    return [
        [float(x), float(p)] for x, p in zip(np.quantile(values, shares, method="inverted_cdf"), shares, strict=True)
    ]


def _windows(side: Side) -> list[list[float]]:
    """In windows of time: seconds since the first, median and 90th percentile."""
    time, latency = side.time[side.ok], side.latency[side.ok]
    if not len(time) or not np.isfinite(time).all():
        return []
    span = float(time.max() - time.min())
    count = max(1, min(WINDOWS, len(time) // LEAST_IN_WINDOW))
    window = np.minimum(((time - time.min()) / (span or 1.0) * count).astype(int), count - 1)
    found = []
    for index in range(count):
        inside = latency[window == index]
        if len(inside) >= LEAST_IN_WINDOW:
            middle = (index + 0.5) / count * span
            found.append([float(middle), *(float(x) for x in np.quantile(inside, [0.5, 0.9]))])
    return found


def _errors(candidate: Observations, baseline: Observations) -> list[Json]:
    """What went wrong, how often on each side; the most frequent first."""
    counts = [
        Counter(text or "no reason given" for ok, text in zip(one.ok, one.error, strict=True) if not ok)
        for one in (candidate, baseline)
    ]
    texts = sorted(counts[0] | counts[1], key=lambda text: (-counts[0][text] - counts[1][text], text))
    return [{"error": text, "candidate": counts[0][text], "baseline": counts[1][text]} for text in texts[:MOST_ERRORS]]


def _worst(candidate: Observations, baseline: Observations) -> list[Json]:
    """The requests whose answers are farthest apart, by name."""
    theirs = {name: index for index, name in enumerate(baseline.request) if name is not None}
    distance = np.asarray(candidate.sqnr_db)
    order = [index for index in np.argsort(distance, kind="stable") if not np.isnan(distance[index])]
    found = []
    for index in order[:MOST_WORST]:
        other = theirs.get(candidate.request[index])
        if other is not None:
            found.append(
                {
                    "request": str(candidate.request[index]),
                    "sqnr_db": float(distance[index]),
                    "flipped": candidate.flipped[index],
                    "candidate": candidate.latency[index],
                    "baseline": baseline.latency[other],
                }
            )
    return found
