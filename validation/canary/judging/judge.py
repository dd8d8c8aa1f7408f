"""The verdict on a candidate: PASS if every criterion passes, FAIL if one fails, INSUFFICIENT otherwise.

A PASS needs all criteria; therefore each is tested at the full level (intersection-union test; Berger, Technometrics
24, 1982). Any single criterion can FAIL the candidate; therefore a FAIL is tested at a share of the level (Bonferroni).

Data may be judged while it grows, and each look can cause an error. Alpha spending bounds the error of all looks
together (Lan & DeMets, Biometrika 70, 1983): the share of the planned data that has arrived determines the part of
alpha that may be spent. The spending function approximates O'Brien & Fleming's (1979) boundaries: almost nothing
early, almost everything at the end. The boundaries are computed by recursive integration (Armitage, McPherson & Rowe,
JRSS A 132, 1969; Jennison & Turnbull, 2000, chapters 7 and 19). For growing logs without a plan, a FAIL needs bounds
that are valid at every number of requests at once (`rates.anytime_level`).

Facts precede statistics (`facts_of`): a candidate gets a FAIL if its process ended, or if it fails or is slow for a
period in which the baseline does neither, for any number of such events.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np

from enginesmith.core.errors import InputError
from enginesmith.core.text import pluralize
from validation.canary.judging.criteria import (
    NOISE,
    REPLICATES,
    Criterion,
    ErrorLevels,
    Verdict,
    describe,
    describe_needed,
    error_criterion,
    failures,
    late_time,
    latency_criteria,
    score_criterion,
    share_criterion,
)
from validation.canary.judging.thresholds import Thresholds
from validation.statistics.rates import CanaryEvidence, upper
from validation.statistics.serial_dependence import NORMAL

SEED = 0
# The least error of a look, used if the spending function is nearly 0; and the least step between looks.
LEAST_LEVEL = 1e-9
LEAST_STEP = 0.005
# A class of sizes has at least LEAST_OF_CLASS requests. From USUAL_CLASS requests on, its margin is the widest of the
# latency margins; with fewer it is wider, up to WIDEST.
LEAST_OF_CLASS, USUAL_CLASS, WIDEST = 40, 400, 0.15
# Points of the grids of the integration, and how many standard deviations they reach to either side.
_POINTS, _REACH = 801, 8.0


def spend_error(fraction: float, alpha: float) -> float:
    """The one-sided error that may be spent once the share `fraction` of the planned data has arrived."""
    if fraction >= 1.0:
        return alpha
    return 2.0 - 2.0 * NORMAL.cdf(NORMAL.inv_cdf(1.0 - alpha / 2.0) / math.sqrt(fraction))


def level_of(fractions: Sequence[float], alpha: float) -> float:
    """The one-sided level of the test at the last of several looks, each at a share of the planned data in (0, 1].

    One look at everything gives `alpha` itself. Raises InputError for shares that do not rise by 0.005 or more.
    """
    previous = 0.0
    for fraction in fractions:
        if not (previous + LEAST_STEP <= fraction + 1e-12 and fraction <= 1.0):
            raise InputError(
                f"looks at {', '.join(f'{share:.3f}' for share in fractions)} of the plan: each must have at least "
                f"{LEAST_STEP} more than the one before it, and the last at most 1"
            )
        previous = fraction
    return _level(tuple(float(fraction) for fraction in fractions), alpha)


@lru_cache(maxsize=256)
def _level(fractions: tuple[float, ...], alpha: float) -> float:
    """`level_of`, from the statistic's density at each look, over the runs that crossed no earlier boundary."""
    start, level = fractions[0], max(spend_error(fractions[0], alpha), LEAST_LEVEL)
    boundary = NORMAL.inv_cdf(1.0 - level) * math.sqrt(start)
    grid = np.linspace(-_REACH * math.sqrt(start), boundary, _POINTS)
    density = np.exp(-(grid**2) / (2 * start)) / math.sqrt(2 * math.pi * start)
    for previous, fraction in pairwise(fractions):
        # The density one look later, and the boundary: the mass above it is the error that this look may spend.
        wide_grid = np.linspace(-_REACH * math.sqrt(fraction), _REACH * math.sqrt(fraction), 2 * _POINTS)
        step = fraction - previous
        kernel = np.exp(-((wide_grid[:, None] - grid[None, :]) ** 2) / (2 * step)) / math.sqrt(2 * math.pi * step)
        weights = np.full(len(grid), grid[1] - grid[0])
        weights[[0, -1]] /= 2
        next_density = kernel @ (density * weights)
        areas = (next_density[::-1][:-1] + next_density[::-1][1:]) / 2 * (wide_grid[1] - wide_grid[0])
        tail_areas = np.concatenate([np.cumsum(areas)[::-1], [0.0]])
        share = max(spend_error(fraction, alpha) - spend_error(previous, alpha), LEAST_LEVEL)
        boundary = float(np.interp(-share, -tail_areas, wide_grid))
        level = 1.0 - NORMAL.cdf(boundary / math.sqrt(fraction))
        grid = np.linspace(wide_grid[0], boundary, _POINTS)
        density = np.interp(grid, wide_grid, next_density)
    return max(level, LEAST_LEVEL)


@dataclass(frozen=True)
class Looks:
    """The looks at growing data. planned: requests at the last one; None: the present look is the only one.

    before: requests at each earlier look.
    """

    planned: int | None = None
    before: tuple[int, ...] = ()

    def fractions(self, requests: int) -> tuple[float, ...]:
        """The share of the plan at each look, the present one last. Raises InputError for a missing or used-up plan."""
        if self.planned is None:
            if self.before:
                raise InputError("there were earlier looks, so the number of planned requests must be given")
            return (1.0,)
        if self.before and self.before[-1] >= self.planned:
            raise InputError(
                f"the last look was at {self.before[-1]} of {self.planned} planned requests: the plan is used up, and "
                "looking again at more data would not be honest; start a new canary"
            )
        return tuple(min(1.0, count / self.planned) for count in (*self.before, requests))


@dataclass(frozen=True)
class CanaryJudgement:
    """A verdict, its reason in one line, and the criteria behind it. levels, fractions: of the present look."""

    verdict: Verdict
    reason: str
    criteria: tuple[Criterion, ...]
    levels: ErrorLevels
    fractions: tuple[float, ...]


def judge(
    evidence: CanaryEvidence,
    thresholds: Thresholds | None = None,
    looks: Looks | None = None,
    *,
    seed: int = SEED,
    replicates: int = REPLICATES,
) -> CanaryJudgement:
    """Judge a candidate by the observations of both sides (`pairing.evidence_of`).

    looks: None for a single look.  Raises InputError for looks that do not fit the plan.
    """
    limits, looks = thresholds or Thresholds(), looks or Looks()
    # The number of criteria that may FAIL a candidate: all criteria of the thresholds, observed or not.
    share_limits = (limits.quality.disagreement, limits.quality.flips, limits.quality.score) if limits.quality else ()
    count = len(limits.latency) + sum(limit is not None for limit in (limits.error_rate, *share_limits))
    fractions = looks.fractions(evidence.requests)
    # All classes of sizes together count as one.
    count += bool(classes := size_classes(evidence) if limits.latency else [])
    failing_level = level_of(fractions, limits.alpha / max(count, 1))
    levels = ErrorLevels(level_of(fractions, limits.alpha), failing_level, looks.planned is None and evidence.growing)
    criteria: list[Criterion] = []
    errors: list[Criterion] = []
    if limits.error_rate is not None:
        errors = [error_criterion(evidence, limits.error_rate, levels, limits.error_budget)]
    if evidence.lighter:
        criteria = [*(fact for fact in facts_of(evidence, limits) if fact.name != SLOW_STRETCH), *errors]
    elif not evidence.unlike:
        criteria = [*facts_of(evidence, limits), *latency_criteria(evidence, limits, levels, seed, replicates)]
        for range_text, class_evidence in classes:
            widening = math.sqrt(max(1.0, USUAL_CLASS / class_evidence.requests))
            margin = max(limits.latency.values())
            wide_limits = replace(limits, latency={"p50": max(margin, min(WIDEST, margin * widening))})
            class_levels = replace(levels, failing=failing_level / len(classes))
            [criterion] = latency_criteria(class_evidence, wide_limits, class_levels, seed, replicates)
            criteria.append(replace(criterion, name=f"{criterion.name} of size {range_text}"))
        criteria += [*errors, *quality_criteria(evidence, limits, levels)]
    late_note = late_time(evidence, levels.passing) if limits.latency and not evidence.unlike else ""
    notes = {"sides that compare": evidence.unlike, "logs to the end": evidence.stopped, "late answers": late_note}
    for name, note in notes.items():
        if note:
            criteria.append(Criterion(name, "share", 0.0, "INSUFFICIENT", requests=evidence.requests, note=note))
    verdict = overall([criterion.verdict for criterion in criteria])
    reason = reason_of(verdict, criteria)
    if verdict == "INSUFFICIENT" and (needed_text := describe_needed(criteria, evidence.requests, evidence.seconds)):
        reason = f"{reason}; {needed_text}"
    return CanaryJudgement(verdict, reason, tuple(criteria), levels, fractions)


def size_classes(evidence: CanaryEvidence) -> list[tuple[str, CanaryEvidence]]:
    """(range of sizes as text, evidence) of each class of size: octaves, joined until each has enough requests; [] if
    sizes are not recorded, or fit into one class."""
    sides = evidence.candidate, evidence.baseline
    if sides[0].size is None or sides[1].size is None:
        return []
    sizes = [np.asarray(side.size) for side in sides]
    if evidence.paired:
        sizes = [np.where(np.isnan(sizes[1]), sizes[0], sizes[1])] * 2
    if min(map(len, sizes)) == 0 or any(bool((np.isnan(values) | (values <= 0)).any()) for values in sizes):
        return []
    octaves = [np.floor(np.log2(values)).astype(int) for values in sizes]
    class_bounds = [-math.inf]
    for octave in np.unique(np.concatenate(octaves)):
        if min(((values >= class_bounds[-1]) & (values < octave)).sum() for values in octaves) >= LEAST_OF_CLASS:
            class_bounds.append(octave)
    if min((values >= class_bounds[-1]).sum() for values in octaves) < LEAST_OF_CLASS:
        class_bounds.pop()  # the last class joins the one before it
    classes = []
    for start, end in pairwise([*class_bounds, math.inf]) if len(class_bounds) > 1 else ():
        class_masks = [(values >= start) & (values < end) for values in octaves]
        class_sides = [side.select(class_mask) for side, class_mask in zip(sides, class_masks, strict=True)]
        class_sizes = np.concatenate(
            [values[class_mask] for values, class_mask in zip(sizes, class_masks, strict=True)]
        )
        class_evidence = replace(evidence, candidate=class_sides[0], baseline=class_sides[1], design_block=1)
        classes.append((f"{class_sizes.min():.4g} to {class_sizes.max():.4g}", class_evidence))
    return classes


def overall(verdicts: Sequence[Verdict]) -> Verdict:
    """The verdict that follows from the verdicts of the criteria; INSUFFICIENT if there are none."""
    if "FAIL" in verdicts:
        return "FAIL"
    return "PASS" if verdicts and all(verdict == "PASS" for verdict in verdicts) else "INSUFFICIENT"


def quality_criteria(evidence: CanaryEvidence, limits: Thresholds, levels: ErrorLevels) -> list[Criterion]:
    """The criteria of the answers' quality; a single INSUFFICIENT one if no quality was observed."""
    quality = limits.quality
    if quality is None:
        return []
    criteria: list[Criterion] = []
    if quality.disagreement is not None and evidence.differs is not None:
        noise = min(max(evidence.noise, NOISE[0]), NOISE[1])
        tolerance = noise if quality.disagreement == "noise" else quality.disagreement
        criteria.append(share_criterion("answers that differ", evidence.differs, tolerance, levels))
    if quality.flips is not None and evidence.flipped is not None:
        criteria.append(share_criterion("argmax flips", evidence.flipped, quality.flips, levels))
    score = score_criterion(evidence, quality.score, levels) if quality.score is not None else None
    criteria += [score] if score else []
    if not criteria and any(limit is not None for limit in (quality.disagreement, quality.flips, quality.score)):
        note = "nothing was observed of the answers: record scores or output digests, or lift it with quality: null"
        criteria.append(Criterion("quality", "share", 0.0, "INSUFFICIENT", note=note))
    return criteria


def reason_of(verdict: Verdict, criteria: Sequence[Criterion]) -> str:
    """The verdict's reason in one line, with the deciding criterion.

    If there are several, answers and errors are named before latency, which a busy machine changes too.
    """
    if verdict == "PASS":
        return f"{pluralize(len(criteria), 'criterion', 'criteria')} passed"
    deciding_criteria = [criterion for criterion in criteria if criterion.verdict == verdict]
    if not deciding_criteria:
        return "there was nothing to judge by: every threshold is lifted"

    def rank(criterion: Criterion) -> tuple[bool, bool, bool]:
        is_latency = criterion.kind == "latency" or criterion.name == SLOW_STRETCH
        return is_latency, criterion.kind != "fact", criterion.name != "logs to the end"

    criterion = min(deciding_criteria, key=rank)
    suffix = f" (and {len(deciding_criteria) - 1} more)" if len(deciding_criteria) > 1 else ""
    return f"{describe(criterion)}{suffix}"


# The least number of failures in a stretch: more than may be in flight when a log ends.
LEAST_STRETCH = 10
# CHANCE: the probability that independent failures form a stretch in a run. SPENT: a FAIL if the expected time in
# stretches is less than this share of the candidate's. By Markov's inequality an equal candidate gets this FAIL with a
# probability of at most SPENT, if the baseline's run shows the frequency of outages. A short run does not: one long
# outage then FAILs an equal candidate too (29 to 30 of 200 simulated pairs of short logs).
CHANCE, SPENT = 1e-3, 0.02
# The number of parts of a run whose medians are compared; consecutive parts of a slow stretch; its least slowdown.
PARTS, SLOW_PARTS, SLOW = 40, 3, 2.0
# The least seconds of a slow stretch: garbage collection of an equal candidate pauses for less.
LEAST_SLOW = 1.0
SLOW_STRETCH = "a slow stretch"
# A slow stretch exceeds the rest by more than this many times the range of the ratio in the quieter third of the parts.
STANDS_OUT = 2.5


def facts_of(evidence: CanaryEvidence, limits: Thresholds) -> list[Criterion]:
    """The facts that FAIL a candidate without statistics or forbid a PASS, with observed and expected values."""
    is_open, stretch_note = _failing_stretch(evidence, limits.error_rate or 0.001)
    notes = {"the process": evidence.died, "failures in a stretch": stretch_note, SLOW_STRETCH: _slow_stretch(evidence)}
    facts = [
        Criterion(name, "fact", 0.0, "FAIL", requests=evidence.requests, note=note) for name, note in notes.items()
    ]
    facts[1] = replace(facts[1], kind="share", verdict="INSUFFICIENT") if is_open else facts[1]
    return [fact for fact in facts if fact.note]


def _failing_stretch(evidence: CanaryEvidence, margin: float) -> tuple[bool, str]:
    """Whether the candidate's log ends in a stretch of failures no longer than the baseline's; and a sentence about a
    stretch at the log's end, or about more time in stretches than the baseline's share explains; '' for neither."""
    candidate_flags, baseline_flags = failures(evidence)
    if not len(candidate_flags) or not len(baseline_flags):
        return False, ""
    # Independent failures, as frequent as the baseline's or the margin, fill half of a window rarely (Chernoff).
    share = min(max(margin, upper(float(baseline_flags.sum()), len(baseline_flags), SPENT)), 0.49)
    least_count = math.log(len(candidate_flags) / CHANCE) / -math.log(4.0 * share * (1.0 - share))
    count = max(LEAST_STRETCH, math.ceil(least_count))
    lone_stretches, baseline_stretches = stretches(candidate_flags, count), stretches(baseline_flags, count)
    if evidence.paired:
        lone_stretches &= ~baseline_stretches
    else:  # the baseline's latest request before each of the candidate's
        last_indices = np.searchsorted(evidence.baseline.time, evidence.candidate.time, "right") - 1
        lone_stretches &= ~baseline_stretches[np.maximum(last_indices, 0)] & (last_indices >= 0)
    expected_share, lone_share = float(baseline_stretches.mean()) + margin, float(lone_stretches.mean())
    expected_text = f"expected from the baseline and the margin: {100 * expected_share:.2g} % of the run"
    # If the baseline recovered from an outage as long, this outage proves neither a dead candidate nor a recovery.
    length, longest = run_lengths(stretches(candidate_flags, count))[-1], max(run_lengths(baseline_stretches))
    lone_length = run_lengths(lone_stretches)[-1]
    # Whether this is the end of an outage of both sides: the side with less traffic has flags for a longer time.
    is_over = lone_length < length and candidate_flags[-lone_length:].sum() < LEAST_STRETCH
    is_longer = not is_over and length * len(baseline_flags) > longest * len(candidate_flags)
    if lone_share * SPENT > expected_share and not (lone_stretches[-1] and is_longer):
        return False, (
            f"the candidate failed for {100 * lone_share:.3g} % of the run in stretches of {count} requests or more "
            f"that the baseline answered; {expected_text}"
        )
    if is_over or not lone_stretches[-1]:
        return False, ""
    last = candidate_flags[max(0, len(candidate_flags) - lone_length + 1 - count) :]
    remedy = expected_text if is_longer else "the baseline recovered from one as long: judge again later"
    end_text = f"the candidate failed {int(last.sum())} of its last {len(last)} requests, and the baseline did not"
    return not is_longer, f"{end_text}; {remedy}"


def run_lengths(flags: np.ndarray) -> list[int]:
    """The lengths of the runs of true values, in order; [0] for none."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], flags.astype(int), [0]])))
    return [int(length) for length in edges[1::2] - edges[::2]] or [0]


def stretches(flags: np.ndarray, count: int) -> np.ndarray:
    """Whether at least `count` of the last 2 * `count` requests failed, bool [requests]."""
    sums = np.concatenate([np.zeros(2 * count), np.cumsum(flags)])
    stretch_mask: np.ndarray = sums[2 * count :] - sums[: -2 * count] >= count
    return stretch_mask


def _slow_stretch(evidence: CanaryEvidence) -> str:
    """A sentence if the candidate became SLOW times slower for a stretch, or was SLOW times slower than the baseline
    for most of the run; else ''."""
    sides = [evidence.candidate, evidence.baseline]
    answered_mask = evidence.candidate.ok & evidence.baseline.ok if evidence.paired else None
    sides = [side.select(side.ok if answered_mask is None else answered_mask) for side in sides]
    if min(map(len, sides)) < PARTS * LEAST_STRETCH:
        return ""
    edges = [np.linspace(0, len(side), PARTS + 1).astype(int) for side in sides]
    if not evidence.paired:  # both sides' parts cover the same time
        edges[0] = np.append(np.searchsorted(sides[0].time, sides[1].time[edges[1][:-1]]), len(sides[0]))
        if int(np.diff(edges[0]).min()) < LEAST_STRETCH // 2:
            return ""
    medians = [
        [np.median(side.latency[start:stop]) for start, stop in pairwise(bounds)]
        for side, bounds in zip(sides, edges, strict=True)
    ]
    ratio = np.log(medians[0]) - np.log(medians[1])
    sorted_ratios, minima = np.sort(ratio), np.lib.stride_tricks.sliding_window_view(ratio, SLOW_PARTS).min(1)
    spread, log_slowdown = sorted_ratios[int(0.35 * PARTS)] - sorted_ratios[0], float(sorted_ratios[int(0.4 * PARTS)])
    gap, start = float(minima.max() - sorted_ratios[PARTS // 4]), int(minima.argmax())
    start_s, end_s = (sides[0].time[edges[0][index] - shift] for index, shift in ((start, 0), (start + SLOW_PARTS, 1)))
    if log_slowdown > math.log(SLOW):
        return f"the candidate was {math.exp(log_slowdown):.2g} times slower or more for most of the run"
    if gap <= max(math.log(SLOW), STANDS_OUT * spread) or end_s - start_s < LEAST_SLOW:
        return ""
    return (
        f"the candidate became {math.exp(gap):.2g} times slower {100 * start / PARTS:.0f} % into "
        f"the run, and the baseline did not; the ratio of the two varies by {100 * math.expm1(spread):.2g} % otherwise"
    )
