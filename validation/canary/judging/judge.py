"""The verdict on a candidate: PASS when every criterion passes, FAIL when one fails, INSUFFICIENT otherwise.

A PASS needs all criteria, so each is tested at the full level (intersection-union test; Berger, Technometrics 24,
1982). Any criterion alone can FAIL the candidate, so for that each has its share of the level (Bonferroni).

Data may be looked at while it grows, and each look is another chance of an error. The error of all looks together is
bounded by alpha spending (Lan & DeMets, Biometrika 70, 1983): the share of the planned data that is there determines
how much of alpha may be used up. The spending function approximates O'Brien & Fleming's (1979) boundaries: almost
nothing early, almost everything at the end. The boundaries follow by recursive integration (Armitage, McPherson & Rowe,
JRSS A 132, 1969; Jennison & Turnbull, 2000, chapters 7 and 19). Growing logs without a plan fail a candidate by
bounds that hold at every number of requests at once (`rates.anytime_level`).

Facts come before statistics (`outages`): a candidate whose process ended, that fails or is slow for a stretch which
the baseline lacks, fails however few such events there are.
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
    late_time,
    latency_criteria,
    score_criterion,
    share_criterion,
)
from validation.canary.judging.outages import SLOW_STRETCH, facts_of
from validation.canary.judging.thresholds import Thresholds
from validation.statistics.rates import CanaryEvidence
from validation.statistics.serial_dependence import NORMAL

SEED = 0
# The least error of a look, above 0 where the spending function gives none; and the least step between looks.
LEAST_LEVEL = 1e-9
LEAST_STEP = 0.005
# A class of sizes has at least so many requests; from USUAL_CLASS on its margin is the widest of the quantiles'.
LEAST_OF_CLASS, USUAL_CLASS, WIDEST = 40, 400, 0.15
# Points of the grids of the integration, and how many standard deviations they reach to either side.
_POINTS, _REACH = 801, 8.0


def spend_error(fraction: float, alpha: float) -> float:
    """The one-sided error that may be used up once the share `fraction` of the planned data is there."""
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
    """`level_of`, by the density of the statistic at each look where no boundary was crossed before."""
    start, level = fractions[0], max(spend_error(fractions[0], alpha), LEAST_LEVEL)
    boundary = NORMAL.inv_cdf(1.0 - level) * math.sqrt(start)
    grid = np.linspace(-_REACH * math.sqrt(start), boundary, _POINTS)
    density = np.exp(-(grid**2) / (2 * start)) / math.sqrt(2 * math.pi * start)
    for previous, fraction in pairwise(fractions):
        # The density one look later, and the point above which it holds what this look may spend.
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
        """The share of the plan at each look, the present one last. Raises InputError when it does not grow."""
        if self.planned is None:
            if self.before:
                raise InputError("there were looks before this one, so the number of planned requests must be given")
            return (1.0,)
        if self.before and self.before[-1] >= self.planned:
            raise InputError(
                f"the last look was at {self.before[-1]} of {self.planned} planned requests: the plan is used up, and "
                "looking again at more data would not be honest; start a new canary"
            )
        return tuple(min(1.0, count / self.planned) for count in (*self.before, requests))


@dataclass(frozen=True)
class CanaryJudgement:
    """A verdict, its reason in a line, and what it follows from. levels, fractions: of the present look."""

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
    """Judge a candidate by observations of both sides (`pairing.evidence_of`).

    looks: None for a single one.  Raises InputError for looks that do not fit the plan.
    """
    limits, looks = thresholds or Thresholds(), looks or Looks()
    # How many criteria may FAIL a candidate: all that the thresholds ask for, whatever was observed.
    share_limits = (limits.quality.disagreement, limits.quality.flips, limits.quality.score) if limits.quality else ()
    count = len(limits.latency) + sum(limit is not None for limit in (limits.error_rate, *share_limits))
    fractions = looks.fractions(evidence.requests)
    # All classes of sizes together count as one.
    count += bool(classes := size_classes(evidence) if limits.latency else [])
    failing_level = level_of(fractions, limits.alpha / max(count, 1))
    levels = ErrorLevels(level_of(fractions, limits.alpha), failing_level, looks.planned is None and evidence.growing)
    criteria: list[Criterion] = []
    if not evidence.unlike:
        criteria = [*facts_of(evidence, limits), *latency_criteria(evidence, limits, levels, seed, replicates)]
        for range_text, class_evidence in classes:
            widening = math.sqrt(max(1.0, USUAL_CLASS / class_evidence.requests))
            margin = max(limits.latency.values())
            wide_limits = replace(limits, latency={"p50": max(margin, min(WIDEST, margin * widening))})
            class_levels = replace(levels, failing=failing_level / len(classes))
            [criterion] = latency_criteria(class_evidence, wide_limits, class_levels, seed, replicates)
            criteria.append(replace(criterion, name=f"{criterion.name} of size {range_text}"))
        if limits.error_rate is not None:
            criteria.append(error_criterion(evidence, limits.error_rate, levels, limits.error_budget))
        criteria += quality_criteria(evidence, limits, levels)
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
    """The requests by their size, in classes of a factor of two that have enough of them; [] where sizes are not
    recorded or alike. Each with its sizes as text."""
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
    """The verdict that follows from those of the criteria; INSUFFICIENT from none."""
    if "FAIL" in verdicts:
        return "FAIL"
    return "PASS" if verdicts and all(verdict == "PASS" for verdict in verdicts) else "INSUFFICIENT"


def quality_criteria(evidence: CanaryEvidence, limits: Thresholds, levels: ErrorLevels) -> list[Criterion]:
    """The criteria of the answers' quality. Where nothing was observed of it, one that is INSUFFICIENT."""
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
    """The verdict's reason in a line, with the criterion that decided.

    Of several it names answers and errors before latency, which a busy machine changes too.
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
