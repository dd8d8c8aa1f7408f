"""Judges the gates of a wave: each passes, fails (the rollout is halted), or waits, with the reason in words.

A share of failing nodes or requests fails its gate as soon as it is shown to be over the limit: by the exact lower
bound of Clopper and Pearson (`validation.statistics.rates`), at the level that alpha spending allows for this look of
the wave (`judging.judge.level_of`: Lan & DeMets, with the boundaries of O'Brien & Fleming); and where every node that
reports fails, as soon as so many do not by chance. The first nodes of these are among the later ones, so that one level
holds for all looks. Together a version at its limit is halted in at most 5 % of waves. At the wave's end the share
itself decides, and as long as it is over the limit the gate waits. Requests of
one node fail together, so errors are divided by their design effect between nodes (Korn & Graubard, 1998).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Literal

from enginesmith.core.text import join_first, pluralize
from enginesmith.registry.evidence.canaries import CanaryVerdict
from enginesmith.registry.rollouts.reports import Heard, NodeReport
from enginesmith.registry.rollouts.state import Rollout, parse_time
from validation.canary.judging.judge import level_of
from validation.statistics import rates

# The error of looks, and of waves in which all that report fail: 5 % together.
ALPHA, ALL_ALPHA = 0.045, 0.005
# Fewer nodes have too much in common to be taken for all.
LEAST_ALL = 3
# Looks of a wave that the error is spent on; more looks within one of these parts share its level.
MOST_LOOKS = 10


@dataclass(frozen=True)
class GateResult:
    """What a gate says. name: health, errors, canary or person."""

    name: str
    verdict: Literal["pass", "wait", "fail"]
    why: str


@dataclass(frozen=True)
class Moment:
    """How far a wave is. level: of the test at this look.  is_over: whether it has lasted as long as it must."""

    now: datetime
    level: float
    is_over: bool


def moment_of(rollout: Rollout, now: datetime) -> Moment:
    """How far the open wave is; before all of it is reached, as at its first look."""
    soak_s = rollout.plan.soaks_s[rollout.wave]
    looks = min(MOST_LOOKS, max(1, soak_s // max(1, rollout.plan.look_s)))
    passed_s = (now - parse_time(rollout.soaking)).total_seconds() if rollout.soaking else 0.0
    is_over = rollout.soaking is not None and passed_s >= soak_s
    part = looks if is_over else min(looks, 1 + int(max(0.0, passed_s) / soak_s * looks)) if soak_s else 1
    return Moment(now, level_of([number / looks for number in range(1, part + 1)], ALPHA), is_over)


def judge_gates(
    rollout: Rollout, heard: Heard, verdicts: Sequence[CanaryVerdict], now: datetime
) -> tuple[GateResult, ...]:
    """What each gate of the open wave says. verdicts: all canaries of the version."""
    gates, moment = rollout.plan.gates, moment_of(rollout, now)
    found = list[GateResult]()
    if gates.health_ppm is not None:
        found.append(_health(rollout, heard, moment, gates.health_ppm))
    if gates.errors_ppm is not None:
        found.append(_errors(heard.reports, moment, gates.errors_ppm))
    if gates.canary:
        found.append(_canary(rollout, verdicts))
    if gates.approve:
        done = rollout.approved > rollout.wave
        why = "approved" if done else f"waits for `enginesmith rollout resume {rollout.where}`"
        found.append(GateResult("person", "pass" if done else "wait", why))
    return tuple(map(_waive, found)) if rollout.waived > rollout.wave else tuple(found)


def _waive(gate: GateResult) -> GateResult:
    """The gate, passed if it waits: a person said that the open wave needs no data. What fails still fails."""
    return replace(gate, verdict="pass", why=f"{gate.why} (waived)") if gate.verdict == "wait" else gate


def _health(rollout: Rollout, heard: Heard, moment: Moment, least_ppm: int) -> GateResult:
    failing = [report for report in heard.reports if report.failure]
    silent = sum(report.is_silent(moment.now) for report in heard.reports if not report.failure)
    count, limit = len(heard.reports), 1 - least_ppm / 1e6
    if count == 0:
        return GateResult("health", "wait", "no reports: no node that was reached has said how it is")
    bound, over = rates.lower(len(failing), count, moment.level), f"at most {limit:.4g} may"
    told = f"{len(failing)} of {count} nodes that report fail"
    all_fail = len(failing) == count >= LEAST_ALL and limit**count <= ALL_ALPHA
    too_many = len(failing) > limit * count
    if failing and (bound > limit or all_fail or (moment.is_over and too_many)):
        said = join_first([f"{report.node} {report.failure}: {report.detail}" for report in failing], 3, "; ")
        return GateResult("health", "fail", f"{told}, {over}: {said}")
    if count < rollout.plan.gates.least_reports:
        return GateResult("health", "wait", f"{told}; {rollout.plan.gates.least_reports} must report")
    if too_many:
        return GateResult("health", "wait", f"{told}, {over}: the wave's end decides, or more reports")
    if silent > limit * count:
        return GateResult("health", "wait", f"{told}, and {pluralize(silent, 'node')} went silent; {over}")
    return GateResult("health", "pass", told)


def _errors(reports: Sequence[NodeReport], moment: Moment, most_ppm: int) -> GateResult:
    counted = [(item.errors, item.requests) for item in reports if item.requests and item.errors is not None]
    requests = sum(total for _, total in counted)
    if not requests:
        return GateResult("errors", "wait", "no node says how many requests it answered")
    failed, limit = sum(min(count, total) for count, total in counted), most_ppm / 1e6
    effect = design_effect([(min(count, total), total) for count, total in counted])
    bound = rates.lower(failed / effect, requests / effect, moment.level)
    told = f"{failed} of {requests} requests failed on {pluralize(len(counted), 'node')}; at most {limit:.4g} may"
    too_many = failed > limit * requests
    if failed and (bound > limit or (moment.is_over and too_many)):
        return GateResult("errors", "fail", told)
    return GateResult("errors", "wait" if too_many else "pass", told)


def design_effect(counted: Sequence[tuple[int, int]]) -> float:
    """The variance of failures between nodes over that of independent requests, at least 1. counted: failed, all."""
    failed, total = (sum(item[index] for item in counted) for index in (0, 1))
    share = failed / total if total else 0.0
    if len(counted) < 2 or share in (0.0, 1.0):
        return 1.0
    squares = sum((count - share * size) ** 2 / (size * share * (1 - share)) for count, size in counted)
    return max(1.0, squares / (len(counted) - 1))


def _canary(rollout: Rollout, verdicts: Sequence[CanaryVerdict]) -> GateResult:
    mine = [item for item in verdicts if item.baseline == rollout.base_manifest]
    for item in mine:
        if item.verdict == "FAIL":
            return GateResult("canary", "fail", f"FAIL on {item.target} against {item.against}: {item.reason}")
    passed = [item.target for item in mine if item.verdict == "PASS"]
    if passed:
        return GateResult("canary", "pass", f"PASS on {', '.join(passed)}")
    return GateResult("canary", "wait", f"there is no PASS of {rollout.version} against {rollout.base}")
