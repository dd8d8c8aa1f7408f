"""Facts that fail a candidate before any statistics: a process that ended, stretches of failures, slow stretches."""

import math
from itertools import pairwise

import numpy as np

from validation.canary.judging.criteria import Criterion, failures
from validation.canary.judging.thresholds import Thresholds
from validation.statistics.rates import CanaryEvidence, upper

# A stretch of failures has at least so many: more than may be in flight when a log ends.
LEAST_STRETCH = 10
# The chance that independent failures make such a stretch in a run, and the largest ratio of the expected time in
# stretches to a candidate's that gives a FAIL. By Markov's inequality an equal candidate has that with a probability of
# at most SPENT, if the baseline's run shows how often outages occur. A short run does not show it: one long outage of a
# candidate is a fact there, of an equal one too (29 to 30 of 200 simulated pairs of short logs FAILed).
CHANCE, SPENT = 1e-3, 0.02
# Parts of a run whose medians show a slow stretch, the consecutive ones that it takes, and the slowdown.
PARTS, SLOW_PARTS, SLOW = 40, 3, 2.0
# Seconds that such a stretch takes at least: an equal candidate's collector of garbage pauses for less.
LEAST_SLOW = 1.0
SLOW_STRETCH = "a slow stretch"
# How many times the range of the ratio in the quieter third of the parts such a stretch stands out.
STANDS_OUT = 2.5


def facts_of(evidence: CanaryEvidence, limits: Thresholds) -> list[Criterion]:
    """What fails a candidate without statistics, each with what was observed and what was expected."""
    margin = limits.error_rate or 0.001
    notes = [evidence.died, _failing_stretch(evidence, margin), _slow_stretch(evidence)]
    pairs = zip(("the process", "failures in a stretch", SLOW_STRETCH), notes, strict=True)
    return [Criterion(name, "fact", 0.0, "FAIL", requests=evidence.requests, note=note) for name, note in pairs if note]


def _failing_stretch(evidence: CanaryEvidence, margin: float) -> str:
    """A sentence on a stretch of failures at the candidate's end that the baseline does not have, or on more time in
    such stretches than the baseline's share of them explains; '' for neither."""
    candidate_flags, baseline_flags = failures(evidence)
    if not len(candidate_flags) or not len(baseline_flags):
        return ""
    # Half of a window of independent failures, as frequent as the baseline's or the margin, is no chance (Chernoff).
    share = min(max(margin, upper(float(baseline_flags.sum()), len(baseline_flags), SPENT)), 0.49)
    count = max(
        LEAST_STRETCH, math.ceil(math.log(len(candidate_flags) / CHANCE) / -math.log(4.0 * share * (1.0 - share)))
    )
    lone_stretches, baseline_stretches = stretches(candidate_flags, count), stretches(baseline_flags, count)
    if evidence.paired:
        lone_stretches &= ~baseline_stretches
    else:  # the baseline's latest request before each of the candidate's
        last_indices = np.searchsorted(evidence.baseline.time, evidence.candidate.time, "right") - 1
        lone_stretches &= ~baseline_stretches[np.maximum(last_indices, 0)] & (last_indices >= 0)
    expected_share, lone_share = float(baseline_stretches.mean()) + margin, float(lone_stretches.mean())
    expected_text = f"expected from the baseline and the margin: {100 * expected_share:.2g} % of the run"
    if lone_stretches[-1]:
        start = max(0, int(np.append(np.flatnonzero(~lone_stretches), 0).max()) + 2 - count)
        return (
            f"the candidate failed {int(candidate_flags[start:].sum())} of its last "
            f"{len(candidate_flags) - start} requests, and the baseline did not; {expected_text}"
        )
    if lone_share * SPENT > expected_share:
        return (
            f"the candidate failed for {100 * lone_share:.3g} % of the run in stretches of {count} requests or more, "
            f"which the baseline answered; {expected_text}"
        )
    return ""


def stretches(flags: np.ndarray, count: int) -> np.ndarray:
    """Whether at least `count` of the last 2 * `count` requests failed, bool [requests]."""
    sums = np.concatenate([np.zeros(2 * count), np.cumsum(flags)])
    stretch_mask: np.ndarray = sums[2 * count :] - sums[: -2 * count] >= count
    return stretch_mask


def _slow_stretch(evidence: CanaryEvidence) -> str:
    """What was observed where the candidate was SLOW times slower for a stretch or for most of the run, and the
    baseline was not; else ''."""
    sides = [evidence.candidate, evidence.baseline]
    answered_mask = evidence.candidate.ok & evidence.baseline.ok if evidence.paired else None
    sides = [side.select(side.ok if answered_mask is None else answered_mask) for side in sides]
    if min(map(len, sides)) < PARTS * LEAST_STRETCH:
        return ""
    edges = [np.linspace(0, len(side), PARTS + 1).astype(int) for side in sides]
    if not evidence.paired:  # the parts are of the same time
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
