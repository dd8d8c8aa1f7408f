"""Shares of requests that failed, or were answered differently, against their margins."""

import math

from enginery.arrays.arrays import Array
from validation.canary.judging.criteria import Criterion, ErrorLevels, verdict_of
from validation.statistics import rates
from validation.statistics.evidence import CanaryEvidence


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
