"""Observations of two sides compared in time: matched where they are of different requests, refused where they differ.

Latency depends on the hour and on the load. So only what both sides answered at the same time is compared: the time
that both logs cover is cut into windows, and of each window as many requests of one side as of the other are kept,
drawn at random, so that each hour weighs the same on both sides (matching; Cochran, Biometrics 24, 1968). What happens
to both sides in one window then cancels, as it does for pairs. A side with markedly more requests per second waits
longer in its queue, which matching cannot correct: such sides are not compared.
"""

import math
from dataclasses import replace
from datetime import UTC, datetime
from typing import NamedTuple

import numpy as np

from enginesmith.arrays import Array
from validation.canary.observations import ObservationTable
from validation.statistics.evidence import CanaryEvidence

# Median distance in time at which the same requests on both sides are no longer compared.
MOST_APART_S = 900.0
# Times below this (1973) count as seconds since some start.
_EPOCH = 1e8
# Requests of the thinner side in a window: the fewer, the closer in time; the more, the fewer are left without a match.
PER_WINDOW = 50
# Windows in which load is compared, each of which has PER_WINDOW requests or more.
LOAD_WINDOWS = 20
# How many times the requests per second of the other side a side may have had, chance aside.
MOST_LOAD = 1.25
# What counts as chance: so many standard deviations of a binomial share.
_CHANCE = 4.0
LEAST_REQUESTS = 40
# A gap in a log is not chance where so many requests were to be expected in it.
_SILENCE = 20.0
REMEDY = "send requests to both sides at the same time, as many to one as to the other, or name them so that they pair"


def hours_apart(candidate: Array, baseline: Array) -> str:
    """Why requests that both sides saw are not compared: they arrived at different hours; '' if they did not.

    candidate, baseline: arrivals of the same requests in seconds, [requests], NaN where a request was not seen.
    """
    apart = float(np.nanmedian(np.abs(candidate - baseline)))
    if apart <= MOST_APART_S:
        return ""
    return (
        f"the same requests arrived {apart / 60:.0f} minutes apart: the candidate's {span_text(candidate)}, the "
        f"baseline's {span_text(baseline)}; what the hour does to latency is not the engine; send each request to both "
        "sides at the same time"
    )


def span_text(times: Array) -> str:
    """First and last of the times: '2026-01-31 08:00:00 to 2026-01-31 17:00:00 UTC', or '0 s to 3600 s' if no dates."""
    first, last = float(np.nanmin(times)), float(np.nanmax(times))
    if first < _EPOCH or last > 1e11:
        return f"{first:.6g} s to {last:.6g} s"
    return " to ".join(f"{datetime.fromtimestamp(one, UTC):%Y-%m-%d %H:%M:%S}" for one in (first, last)) + " UTC"


class CommonSpan(NamedTuple):
    """Sorted arrivals of both sides in seconds, and the time that both logs cover."""

    times: tuple[Array, Array]
    first: float
    last: float

    @property
    def inside(self) -> list[Array]:
        """The arrivals of each side in the common time."""
        return [times[(times >= self.first) & (times <= self.last)] for times in self.times]


def match_in_time(evidence: CanaryEvidence) -> CanaryEvidence:
    """Different requests of both sides, paired by time; where the sides do not compare, all of them with the reason."""
    found = [side.take(np.argsort(side.time, kind="stable")) for side in (evidence.candidate, evidence.baseline)]
    spans = spans_of(found[0].time, found[1].time)
    if unlike := _other_hours(spans) or _other_load(spans):
        return replace(evidence, candidate=found[0], baseline=found[1], unlike=unlike)
    ours, theirs = (side.take(kept) for side, kept in zip(found, match(spans), strict=True))
    return replace(evidence, candidate=ours, baseline=theirs, paired=True, matched=True)


def spans_of(candidate: Array, baseline: Array) -> CommonSpan:
    """The common time of two sides. candidate, baseline: arrivals in seconds, in any order."""
    times = np.sort(candidate), np.sort(baseline)
    return CommonSpan(times, max(float(one[0]) for one in times), min(float(one[-1]) for one in times))


def match(spans: CommonSpan, seed: int = 0) -> tuple[Array, Array]:
    """Indices of the requests that are kept of each side: as many of one as of the other in each window, in order."""
    count = max(1, min(map(len, spans.inside)) // PER_WINDOW)
    edges = np.linspace(spans.first, spans.last, count + 1)[1:-1]
    windows = [  # -1 outside of the common time
        np.where((times < spans.first) | (times > spans.last), -1, np.searchsorted(edges, times, side="right"))
        for times in spans.times
    ]
    least = np.minimum(*(np.bincount(one[one >= 0], minlength=count) for one in windows))
    rng = np.random.default_rng(seed)
    return _draw(windows[0], least, rng), _draw(windows[1], least, rng)


def _draw(windows: Array, least: Array, rng: np.random.Generator) -> Array:
    """Indices of `least[w]` random requests of each window w, ascending. windows: that of each request, or -1."""
    inside = np.flatnonzero(windows >= 0)
    shuffled = inside[np.lexsort((rng.random(len(inside)), windows[inside]))]
    of = windows[shuffled]
    rank = np.arange(len(of)) - np.searchsorted(of, of)
    found: Array = np.sort(shuffled[rank < least[of]])
    return found


def _other_hours(spans: CommonSpan) -> str:
    """Why the sides do not compare: they were observed at different times; '' where they share enough of it."""
    common, least = min(map(len, spans.inside)), min(map(len, spans.times))
    if spans.first <= spans.last and 2 * common >= min(least, 2 * LEAST_REQUESTS):
        matched = len(match(spans)[0])
        if 2 * matched >= common:
            return ""
    ours, theirs = map(span_text, spans.times)
    return (
        f"the logs are of different times (candidate: {ours}, baseline: {theirs}), and what the hour does to latency "
        f"is not the engine; {REMEDY}"
    )


def _other_load(spans: CommonSpan) -> str:
    """Why the sides do not compare: in some window their loads differed; '' where they were alike throughout."""
    inside = spans.inside
    count = max(1, min(LOAD_WINDOWS, min(map(len, inside)) // PER_WINDOW))
    edges = np.linspace(spans.first, spans.last, count + 1)
    ours, theirs = (np.histogram(times, edges)[0] for times in inside)
    whole = ours.sum(), theirs.sum(), edges[0], edges[-1]
    share = 1.0 / (1.0 + MOST_LOAD)
    for a, b, start, end in [whole, *zip(ours, theirs, edges[:-1], edges[1:], strict=True)]:
        total = int(a) + int(b)
        if min(int(a), int(b)) < total * share - _CHANCE * math.sqrt(total * share * (1.0 - share)):
            return (
                f"the sides had an unlike load: {a} requests of the candidate and {b} of the baseline from "
                f"{span_text(np.asarray([start, end]))}, and load changes latency; {REMEDY}; or cut both logs to a "
                "time of like load, or to one instance each"
            )
    return ""


def silence(candidate: ObservationTable, baseline: ObservationTable) -> str:
    """A remark on a gap in one log that is so long that its engine may have died; '' where there is none."""
    spans = spans_of(np.asarray(candidate.time), np.asarray(baseline.time))
    inside = [max(1, len(times)) for times in spans.inside]
    for role, side, at in (("candidate", candidate, 0), ("baseline", baseline, 1)):
        mine, other = (times[times >= spans.first] for times in (spans.times[at], spans.times[1 - at]))
        places = np.searchsorted(other, mine, side="right")
        missed = np.diff(places, append=len(other))
        if len(mine) and missed.max() * inside[at] >= _SILENCE * inside[1 - at]:
            worst = int(missed.argmax())
            when = span_text(np.asarray([mine[worst], other[places[worst] + missed[worst] - 1]]))
            name = f"{side.path.name} ({role})"
            return f"{name} has nothing from {when}, where the other log has {missed[worst]} requests"
    return ""
