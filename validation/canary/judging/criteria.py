"""The criteria of a canary and their thresholds, each with its verdict in words."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeGuard

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core.text import pluralize
from validation.canary.judging.thresholds import Thresholds, probability
from validation.statistics import rates
from validation.statistics.rates import (
    LEAST_BEYOND,
    POWER,
    CanaryEvidence,
    Effect,
    pair_by_order,
    quantile_effects,
    quantile_of,
    rank_bounds,
    select_answered,
)
from validation.statistics.serial_dependence import (
    LEAST_BLOCKS,
    LEAST_INDEPENDENT,
    MOST_BLOCKS,
    NORMAL,
    memory_of_difference,
    t_quantile,
)

# The margins by which a candidate may be worse; docs/guides/canary.md has the reason of each default.

# An answer after over this many times the baseline's p99 counts as failed; the tail beyond p99 is thus judged too.
LATE = 5.0
# In a PASS, late answers beyond the number of the baseline's add at most this share to the baseline's mean latency.
LATE_TIME = 0.1
# The least and the greatest share of different answers that a margin of 'noise' allows.
NOISE = (0.002, 0.01)

# The criteria of a canary: latency quantiles, shares of failed or different answers, the mean score.
#
# Each is an estimate with an interval, compared with a margin: a test of non-inferiority (Wellek, Testing Statistical
# Hypotheses of Equivalence and Noninferiority, 2010). PASS if the upper bound is within the margin, FAIL if the lower
# bound is beyond it (the other of two one-sided tests, Schuirmann 1987), INSUFFICIENT if the margin is between the
# bounds. "No difference was found" is no PASS.

Verdict = Literal["PASS", "FAIL", "INSUFFICIENT"]
# The number of resamples of the bootstrap.
REPLICATES = 1000
# Levels are multiplied by this (calibration: Loh, JASA 82, 1987). The normal interval of the bootstrap at 5 % misses in
# 5.4 % of 6,000 simulated canaries (lognormal, heavy-tailed and autocorrelated latencies, 5,000 requests, median).
CALIBRATED = 0.9
# The factor for a replay in segments (`CanaryEvidence.design_block`), which has fewer blocks: at 0.9 a candidate at the
# margin of its median passed in 5.3 % of 1,000 simulated canaries of 5,000 requests with 32 in flight.
CALIBRATED_IN_TURNS = 0.8
# The wider of two intervals misses less often than either: ranks shift by this share of one interval's shift.
_RANKS = 0.9
Z_POWER = NORMAL.inv_cdf(POWER)


@dataclass(frozen=True)
class ErrorLevels:
    """One-sided levels of the upper bound, which decides a PASS, and of the lower bound, which decides a FAIL.

    anytime: whether a lower bound must be valid at every number of requests, because looks are not planned.
    """

    passing: float
    failing: float
    anytime: bool = False

    def at(self, requests: int) -> "ErrorLevels":
        """The levels for normal bounds on `requests` requests."""
        failing_level = rates.anytime_level(max(requests, 1), self.failing) if self.anytime else self.failing
        return ErrorLevels(self.passing, failing_level)

    def lower(self, counts: tuple[float, float], halves: bool = False) -> float:
        """The lower bound of a share, given (count, total). halves: whether to use half the level."""
        bound_of = rates.lower_anytime if self.anytime else rates.lower
        return bound_of(*counts, self.failing / 2 if halves else self.failing)


@dataclass(frozen=True)
class Criterion:
    """One test. Its numbers are relative slowdowns (latency), shares of requests, or points of score, by `kind`.

    low: lower bound at the failing level.  high: upper bound at the passing level.
    detectable: the smallest true effect that leads to a FAIL with a probability of 0.8, with this number of requests.
    provable: the smallest margin with which an equal candidate passes with that probability.
    needed: about the number of requests with which an equal candidate passes with a probability of 0.8; if there is a
    note, the least number that allows an estimate.
    note: why there is no estimate; for kind 'fact', the observation that fails a candidate without any statistics.
    assumed: a remark on the interval.
    """

    name: str
    kind: Literal["latency", "share", "score", "fact"]
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
        """The criterion with infinities and NaN, which JSON lacks, replaced by None."""
        figures = (self.estimate, self.low, self.high, self.detectable, self.provable)
        estimate, low, high, detectable, provable = (value if is_finite(value) else None for value in figures)
        return replace(self, estimate=estimate, low=low, high=high, detectable=detectable, provable=provable)


def is_finite(value: float | None) -> TypeGuard[float]:
    """Whether a value is known and is neither infinite nor NaN."""
    return value is not None and math.isfinite(value)


def verdict_of(low: float, high: float, margin: float) -> Verdict:
    """FAIL if the whole interval is above the margin, PASS if none of it is; else, and for NaN, INSUFFICIENT."""
    if low > margin:
        return "FAIL"
    return "PASS" if high <= margin else "INSUFFICIENT"


def latency_criteria(
    evidence: CanaryEvidence, thresholds: Thresholds, levels: ErrorLevels, seed: int, replicates: int = REPLICATES
) -> list[Criterion]:
    """A criterion for each latency quantile of `thresholds`, from the bootstrap of the logarithm of the sides' ratio.

    seed, replicates: of the bootstrap, which draws the same blocks on both sides: common slowdowns cancel. Different
    requests of the same period are paired by their order.
    """
    latencies = pair_by_order(*select_answered(evidence))
    probabilities = [probability(name) for name in thresholds.latency]
    effects = quantile_effects(latencies, probabilities, seed, replicates, evidence.design_block)
    share = CALIBRATED if evidence.design_block == 1 else CALIBRATED_IN_TURNS
    levels = levels.at(len(latencies[0]))
    share_levels = ErrorLevels(share * levels.passing, share * levels.failing)
    rows = zip(thresholds.latency.items(), effects, strict=True)
    return [_latency(name, margin, effect, share_levels, latencies, evidence.paired) for (name, margin), effect in rows]


def _latency(
    name: str, margin: float, effect: Effect, levels: ErrorLevels, sides: tuple[Array, Array], is_paired: bool
) -> Criterion:
    title = f"latency {name}"
    if shortage := _unknown(name, effect, is_paired):
        note, least_count = shortage
        return Criterion(
            title, "latency", margin, "INSUFFICIENT", needed=least_count, requests=effect.requests, note=note
        )
    limit = math.log1p(margin)
    z_pass, z_fail = (t_quantile(1.0 - level, effect.freedom) for level in (levels.passing, levels.failing))
    error = effect.error * math.sqrt(effect.blocks / (effect.blocks - 1))
    lower_ranks, upper_ranks = (_RANKS * z * effect.share_error for z in (z_fail, z_pass))
    lower, upper = rank_bounds(sides, probability(name), lower_ranks, upper_ranks)
    low, high = min(lower, effect.log_ratio - z_fail * error), max(upper, effect.log_ratio + z_pass * error)
    provable = high - effect.log_ratio + Z_POWER * error
    needed_count = math.ceil(effect.requests * (provable / limit) ** 2) if math.isfinite(provable) else None
    assumption = ""
    if not (math.isfinite(lower) and math.isfinite(upper)):  # too many latencies are equal to the quantile
        ties = [np.count_nonzero(values == quantile_of(values, probability(name))) for values in sides]
        count, latencies = max(zip(ties, sides, strict=True), key=lambda pair: int(pair[0]) / len(pair[1]))
        assumption = (
            f"{count} of {len(latencies)} latencies are equal: record them with a finer clock" if count > 1 else ""
        )
    detectable = limit + effect.log_ratio - low + Z_POWER * error
    slowdown, low, high, *effect_sizes = map(math.expm1, (effect.log_ratio, low, high, detectable, provable))
    figures = slowdown, low, high, effect_sizes[0], effect_sizes[1], needed_count, effect.requests
    return Criterion(title, "latency", margin, verdict_of(low, high, margin), *figures, assumed=assumption)


def _unknown(name: str, effect: Effect, is_paired: bool) -> tuple[str, int] | None:
    """The reason why a quantile cannot be compared, and the least number of requests for a comparison; else None."""
    tail = min(probability(name), 1 - probability(name))
    least_count = max(math.ceil(LEAST_BEYOND / tail), 2 * LEAST_BLOCKS)
    if effect.requests >= least_count and math.isinf(effect.share_error):
        note = unsteady("latency", effect.block, effect.requests, is_paired)
        return note, least_requests(effect.block, effect.requests)
    if effect.beyond < LEAST_BEYOND or math.isinf(effect.share_error):
        note = (
            f"{name} cannot be told from {pluralize(effect.requests, 'answered request')}; it takes {least_count}, "
            "and more where slow requests come in bursts"
        )
        burst_size = effect.requests * LEAST_BEYOND / effect.beyond if effect.beyond > 0.0 else 0.0
        return note, max(least_count, math.ceil(burst_size))
    return None


def least_requests(block: int, count: int) -> int:
    """The least number of requests for a series whose values depend on each other over `block` of `count` requests.

    Twice `count` if the dependence spans all requests, because it may last longer than the series.
    """
    return 2 * count if block >= count else LEAST_INDEPENDENT * block


def unsteady(quantity: str, block: int, count: int, is_paired: bool) -> str:
    """The note on a series of `count` values with too long an autocorrelation.

    is_paired: whether the values are differences of pairs.  block: requests per independent observation.
    """
    subject = f"the two sides' difference in {quantity}" if is_paired else quantity
    remedy = "" if is_paired else ", or the same requests sent to both sides"
    if block >= count:
        return f"{subject} moves slowly over all of the {count} requests; it takes a longer run{remedy}"
    return (
        f"{subject} keeps its level for some {block} of {count} requests; it takes at least "
        f"{least_requests(block, count)} such requests{remedy}"
    )


def failures(evidence: CanaryEvidence) -> tuple[Array, Array]:
    """Whether each request of candidate and baseline failed or was late (LATE), bool [requests]; for pairs, without the
    failures that both sides have."""
    late_flags = _late(evidence)
    candidate_flags, baseline_flags = ~evidence.candidate.ok | late_flags[0], ~evidence.baseline.ok | late_flags[1]
    return (
        (candidate_flags & ~baseline_flags, baseline_flags & ~candidate_flags)
        if evidence.paired
        else (candidate_flags, baseline_flags)
    )


def _late(evidence: CanaryEvidence) -> tuple[Array, Array]:
    """Whether each request of candidate and baseline was answered late (LATE), bool [requests]."""
    latencies = evidence.baseline.latency[evidence.baseline.ok]
    late_limit = LATE * quantile_of(latencies, 0.99) if len(latencies) >= LEAST_BEYOND / 0.01 / 2 else math.inf
    candidate_late, baseline_late = (
        side.ok & (side.latency > late_limit) for side in (evidence.candidate, evidence.baseline)
    )
    return candidate_late, baseline_late


def late_time(evidence: CanaryEvidence, passing: float) -> str:
    """The reason why late answers forbid a PASS: the upper bound of their additional number, times their mean latency,
    adds more than LATE_TIME to the mean. '' if it adds less, or if no answer was late."""
    late_flags = _late(evidence)
    if not late_flags[0].any():
        return ""
    if evidence.paired:
        late_flags = late_flags[0] & ~late_flags[1], late_flags[1] & ~late_flags[0]
    growth = 0.0
    for side, flags, bound_of, sign in zip(
        (evidence.candidate, evidence.baseline), late_flags, (rates.upper, rates.lower), (1.0, -1.0), strict=True
    ):
        if flags.any():
            growth += sign * bound_of(*rates.effective(flags), passing / 2) * float(side.latency[flags].mean())
    growth /= float(evidence.baseline.latency[evidence.baseline.ok].mean())
    if growth <= LATE_TIME:
        return ""
    return (
        f"{pluralize(int(late_flags[0].sum()), 'answer')} of {len(late_flags[0])} took more than {LATE:g} times the "
        f"baseline's p99 and {int(late_flags[1].sum())} of the baseline's; such answers may add {100 * growth:.3g} % "
        f"to the mean latency, margin {100 * LATE_TIME:g} %"
    )


def error_criterion(
    evidence: CanaryEvidence, margin: float, levels: ErrorLevels, budget: float | None = None
) -> Criterion:
    """The criterion for failed requests: the difference of both sides' shares, or the candidate's own share if its
    upper bound is within `budget`.  margin: the greatest difference that passes, as a share."""
    flags = failures(evidence)
    candidate_counts, baseline_counts = map(rates.effective, flags)
    count = min(map(len, flags))
    estimate = float(flags[0].mean()) - float(flags[1].mean()) if count else math.nan
    if budget and (high := rates.upper(*candidate_counts, levels.passing)) <= budget:
        interval = (float(flags[0].mean()), 0.0, high)
        return _share(
            "errors", budget, levels, interval, count, len(flags[0]) / candidate_counts[1], "within error_budget"
        )
    high = rates.upper(*candidate_counts, levels.passing / 2) - rates.lower(*baseline_counts, levels.passing / 2)
    # A baseline without failures, or with few, has bursts as long as the candidate's if the two are equal.
    share = min(1.0, candidate_counts[1] * len(flags[1]) / (baseline_counts[1] * len(flags[0]))) if count else 1.0
    upper_bound = rates.upper(share * baseline_counts[0], share * baseline_counts[1], levels.failing / 2)
    low = levels.lower(candidate_counts, halves=True) - upper_bound
    interval, size = (estimate, low, high), count / min(candidate_counts[1], baseline_counts[1]) if count else 1.0
    return _share("errors", margin, levels, interval, count, size, budget=budget)


def share_criterion(name: str, flags: Array, margin: float, levels: ErrorLevels) -> Criterion:
    """The criterion that the share of requests with a flag (bool, [requests]) is at most `margin`."""
    effective_counts = rates.effective(flags)
    low, high = levels.lower(effective_counts), rates.upper(*effective_counts, levels.passing)
    estimate = float(flags.mean()) if len(flags) else math.nan
    return _share(name, margin, levels, (estimate, low, high), len(flags), len(flags) / (effective_counts[1] or 1.0))


def _share(
    name: str,
    margin: float,
    levels: ErrorLevels,
    interval: tuple[float, float, float],
    count: int,
    size: float,
    assumed: str = "",
    budget: float | None = None,
) -> Criterion:
    """The criterion of a share. interval: estimate, lower and upper bound.  count: requests.  size: of bursts of flags.

    budget: share up to which a candidate passes in any case.
    """
    estimate, low, high = interval
    is_difference = name == "errors" and not assumed
    passing_level = levels.passing / 2 if is_difference else levels.passing
    detectable = rates.detectable(math.floor(count / size), margin, levels.at(count).failing, is_difference)
    provable, needed_count = rates.upper(0.0, count / size, passing_level), rates.count_needed(margin, passing_level)
    if budget and (budget_count := rates.count_needed(budget, levels.passing)) is not None:
        needed_count = min(budget_count, needed_count or budget_count)
    needed_requests = None if needed_count is None else math.ceil(needed_count * size)
    bursts_text = f"they come in bursts of some {size:.0f} requests" if size >= 2.0 else ""
    figures = None if math.isnan(estimate) else estimate, low, high, detectable, provable, needed_requests, count
    assumptions = "; ".join(filter(None, (assumed, bursts_text)))
    return Criterion(name, "share", margin, verdict_of(low, high, margin), *figures, assumed=assumptions)


def score_criterion(evidence: CanaryEvidence, margin: float, levels: ErrorLevels) -> Criterion | None:
    """The criterion that the mean score drops by at most `margin`; None if scores were not observed."""
    score_pair = [np.where(side.ok, side.score, np.nan) for side in (evidence.candidate, evidence.baseline)]
    if evidence.paired:
        scored_mask = ~np.isnan(score_pair[0]) & ~np.isnan(score_pair[1])
        score_pair = [values[scored_mask] for values in score_pair]
    else:
        score_pair = list(pair_by_order(*(values[~np.isnan(values)] for values in score_pair)))
    if (count := len(score_pair[0])) == 0:
        return None
    if count < 2 * LEAST_BLOCKS:
        note = f"{pluralize(count, 'score')} of requests; it takes {2 * LEAST_BLOCKS} or more"
        return Criterion("score", "score", margin, "INSUFFICIENT", needed=2 * LEAST_BLOCKS, requests=count, note=note)
    memory = memory_of_difference(score_pair)
    if math.isinf(memory.variance):
        note = unsteady("the score", memory.block, count, evidence.paired)
        least_count = least_requests(memory.block, count)
        return Criterion("score", "score", margin, "INSUFFICIENT", needed=least_count, requests=count, note=note)
    freedom = min(count // memory.block, MOST_BLOCKS) - 1.0
    return _score(score_pair, margin, levels, math.sqrt(memory.variance), freedom)


def _score(score_pair: list[Array], margin: float, levels: ErrorLevels, error: float, freedom: float) -> Criterion:
    """The criterion of the mean scores. error: standard error of their difference.  freedom: its degrees of freedom."""
    count = len(score_pair[0])
    estimate = float(score_pair[1].mean() - score_pair[0].mean())
    # At the uncalibrated level, means of scores passed at their margin in 4.4 to 6.4 % of 500 simulated canaries.
    levels = levels.at(count)
    z_pass, z_fail = (t_quantile(1.0 - CALIBRATED * level, freedom) for level in (levels.passing, levels.failing))
    # Scores that never differed do not prove that they never will.
    score_range = max(float(values.max()) for values in score_pair) - min(float(values.min()) for values in score_pair)
    error_floor = rates.upper(0.0, count, levels.passing) * max(score_range, min(1.0, margin * 100))
    lower_error, upper_error = max(z_fail * error, error_floor), max(z_pass * error, error_floor)
    low, high, provable = estimate - lower_error, estimate + upper_error, upper_error + Z_POWER * error
    needed_count = math.ceil(count * (provable / margin) ** 2)
    figures = estimate, low, high, margin + lower_error + Z_POWER * error, provable, needed_count, count
    return Criterion("score", "score", margin, verdict_of(low, high, margin), *figures)


def describe(criterion: Criterion) -> str:
    """A criterion as text: 'latency p50: +3.1 % (+2.4 % to +3.7 %), margin +2 %'."""
    return f"{criterion.name}: {describe_measured(criterion, of=('INSUFFICIENT',))}"


def describe_measured(criterion: Criterion, of: tuple[str, ...] = ("PASS", "FAIL", "INSUFFICIENT")) -> str:
    """A criterion's note, or its estimate, interval and margin; `describe_power` is added if its verdict is in `of`."""
    if criterion.note:
        return criterion.note
    estimate, margin = (describe_value(value, criterion.kind) for value in (criterion.estimate, criterion.margin))
    estimate_text = f"{estimate} ({describe_interval(criterion)}), margin {margin}"
    return f"{estimate_text}; {describe_power(criterion)}" if criterion.verdict in of else estimate_text


def describe_interval(criterion: Criterion) -> str:
    """A criterion's interval: '+2.4 % to +3.7 %', 'at most +3.7 %' without a lower bound, or 'without bounds'."""
    low, high = (describe_value(end, criterion.kind) for end in (criterion.low, criterion.high))
    is_bounded = is_finite(criterion.low) and (criterion.kind != "latency" or criterion.low > -1.0)
    if is_bounded and is_finite(criterion.high):
        return f"{low} to {high}"
    return f"at least {low}" if is_bounded else f"at most {high}" if is_finite(criterion.high) else "without bounds"


def describe_power(criterion: Criterion) -> str:
    """The power of the test as text: the smallest effect that leads to a FAIL with a probability of 0.8, the smallest
    margin with which an equal candidate passes with that probability, and the criterion's assumptions.

    A share of 100 % is left out.
    """
    effects = {"{} or more": criterion.detectable, "an equal candidate to be within {}": criterion.provable}
    effect_texts = [
        text.format(describe_value(value, criterion.kind))
        for text, value in effects.items()
        if is_finite(value) and (criterion.kind != "share" or round(value, 3) < 1.0)
    ]
    power_text = pluralize(criterion.requests, "request")
    power_text += f" would have shown {', and '.join(effect_texts)}" if effect_texts else " can show no difference"
    return f"{power_text}; {criterion.assumed}" if criterion.assumed else power_text


def describe_needed(criteria: Sequence[Criterion], requests: int, seconds: float | None) -> str:
    """A text on the number of requests, and seconds of traffic, with which an equal candidate passes; '' if none does.

    requests, seconds: number of requests so far, and their duration; None: the duration is unknown.
    """
    undecided_criteria = [criterion for criterion in criteria if criterion.verdict == "INSUFFICIENT"]
    if not undecided_criteria or any(criterion.needed is None for criterion in undecided_criteria):
        return ""
    count = max(criterion.needed or 0 for criterion in undecided_criteria)
    if count <= requests:
        return "an equal candidate would likely have passed with as many: it may be slower, by about the margin"
    request_text = f"some {_round_up(count)} requests"
    if seconds is not None:
        request_text += f" ({_round_up(math.ceil(seconds * count / requests))} s of such traffic)"
    if any(criterion.note for criterion in undecided_criteria):
        return f"{request_text} or more are needed for a verdict"
    return f"{request_text} would likely suffice for an equal candidate"


def _round_up(count: int) -> int:
    """A count to two digits, rounded up."""
    step = int(10 ** max(len(str(count)) - 2, 0))
    return math.ceil(count / step) * step


def describe_value(value: float | None, kind: str) -> str:
    """A criterion's number with its unit: points of score, or percent."""
    if value is None:
        return "unknown"
    return f"{value:+.3g}" if kind == "score" else f"{100 * value:+.3g} %"
