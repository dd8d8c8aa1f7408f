"""Converts two files of observations into the evidence of a canary: paired by request name, else unpaired.

A process that dies logs nothing: if one log stops first, its engine may have died. A log that ends with the number of
its observations (`ObservationLog.close`) was stopped in order. Without such an end on both sides, a log that stops
before the other cannot lead to a PASS. Growing logs may lack the requests that were in flight when they were read:
requests younger than the time of an answer. That time is a quantile of the latencies and not their maximum, because
one slow answer does not show the time in flight of the others.

Latency depends on the hour and on the load. Sides that answered different requests are compared only in the time that
both logs cover, and only if both had the same load throughout: a longer queue raises latency without a slower engine.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core.errors import DataError
from enginesmith.core.text import pluralize
from enginesmith.recording.traffic import EQUAL_DB
from validation.canary.observations import Name, ObservationTable
from validation.statistics.rates import CanaryEvidence
from validation.statistics.serial_dependence import NORMAL

# The most requests in flight at the end of a log that are no sign of a dead process.
MOST_IN_FLIGHT = 8
# The quantile of latency that counts as the longest time in flight.
_IN_FLIGHT = 0.99
# A series of requests that one side did not see is not chance if its probability is below this.
_RARE = 1e-6
# The same requests on both sides are not compared if the median distance of their times is greater than this.
MOST_APART_S = 900.0
# Times below this (1973) count as seconds since an unknown start.
_EPOCH = 1e8
# The greatest number of windows in which the loads of two sides are compared, and the least requests in a window.
LOAD_WINDOWS, PER_WINDOW = 20, 50
# The greatest ratio of the two sides' requests per second, apart from chance.
MOST_LOAD = 1.25
# Deviations up to this many standard deviations of a binomial count are chance.
_CHANCE = 4.0
# The common time must have half of the shorter log's requests, or this many if that is fewer.
LEAST_REQUESTS = 40
# The end of a log is not chance if at least this many more requests were expected.
_SILENCE = 20.0
REMEDY = "send requests to both sides at the same time, as many to one as to the other, or name them so that they pair"
CLOSE = "judge when both were closed (`ObservationLog.close`), or cut both at the same request"


@dataclass(frozen=True)
class PairsEnd:
    """The end of two logs. in_flight: requests to be left out.  stopped: as in `CanaryEvidence`.  notes: remarks."""

    in_flight: tuple[Name | None, ...]
    stopped: str
    notes: tuple[str, ...]


def describe_kill(role: str, side: ObservationTable) -> str:
    """The reason why a side's log ends too early: its engine or its replay was killed; '' if neither was."""
    if side.died:
        return f"the {role}'s engine ended its process: {side.died}; find the cause, fix it, and run the canary again"
    if side.planned and not side.ended:
        return (
            f"the run was killed after {len(side)} of {side.planned} requests ({side.path.name} does not record an "
            "orderly stop); run the canary again"
        )
    return ""


def end_of_pairs(candidate: ObservationTable, baseline: ObservationTable, ignore_missing: bool) -> PairsEnd:
    """The end of two logs of the same requests. ignore_missing: whether a side may see only a part of the requests."""
    is_closed = candidate.ended and baseline.ended
    # The longest time in flight in seconds: a quantile of the latencies; 0 if a side was stopped in order.
    latencies = np.concatenate([np.asarray(side.latency, float) for side in (candidate, baseline)])
    latencies = latencies[~np.isnan(latencies)]
    has_ended = candidate.ended or baseline.ended or not len(latencies)
    longest_s = 0.0 if has_ended else float(np.quantile(latencies, _IN_FLIGHT, method="lower"))
    pending: list[Name | None] = []
    reasons, notes = [], []
    for role, side, peer in (("candidate", candidate, baseline), ("baseline", baseline, candidate)):
        ages, tail_names, share = _unseen(side, peer)
        young_names = [name for name, age in ages.items() if longest_s and age <= longest_s]
        if not tail_names <= set(young_names):  # the side had stopped before the last requests arrived
            young_names = [name for name in young_names if name not in tail_names]
        if is_closed and role == "baseline" and len(tail_names) <= MOST_IN_FLIGHT:  # closed just before the candidate
            young_names = list(tail_names)
        pending += young_names
        if len(young_names) > MOST_IN_FLIGHT:
            tail_names |= set(young_names)
        elif young_names:
            names_text = ", ".join(str(name)[:60] for name in young_names)
            notes.append(f"in flight to the {role} when the logs ended, and left out: request {names_text}")
            tail_names -= set(young_names)
        if not tail_names:
            continue
        text = f"{side.path.name} ({role}) stops {pluralize(len(tail_names), 'request')} before {peer.path.name}"
        is_chance = (1.0 - share) ** len(tail_names) >= _RARE
        if (ignore_missing and (is_closed or is_chance)) or (is_closed and role == "candidate"):
            notes.append(text)
        else:
            reasons.append(f"{text}{'' if is_closed else ', and not both logs record an orderly stop'}; {CLOSE}")
    return PairsEnd(tuple(pending), "; ".join(reasons), tuple(notes))


def _unseen(side: ObservationTable, peer: ObservationTable) -> tuple[dict[Name | None, float], set[Name | None], float]:
    """The requests that only `peer` saw, with their age in seconds at the end of its log; the requests that arrived
    after the last request that both saw; and the share of the earlier requests that `side` saw."""
    request_names, last_arrival = set(side.request), max(peer.time)
    order = sorted(range(len(peer)), key=lambda index: peer.time[index])
    shared_positions = np.flatnonzero([peer.request[index] in request_names for index in order])
    ages = {peer.request[row]: last_arrival - peer.time[row] for row in order if peer.request[row] not in request_names}
    tail_names = {peer.request[row] for row in order[int(shared_positions[-1]) + 1 :]}
    return ages, tail_names, len(shared_positions) / float(shared_positions[-1] + 1)


def evidence_of(
    candidate: ObservationTable, baseline: ObservationTable, sqnr_db: float, *, ignore_missing: bool = False
) -> tuple[CanaryEvidence, tuple[str, ...]]:
    """The evidence in two files, and remarks on the reading.

    Observations are paired if every observation on both sides names its request. A request that only one side observed
    counts as failed on the other, or is left out with `ignore_missing`. Requests that may have been in flight when
    growing logs were read are always left out.
    sqnr_db: answers with at least this SQNR count as equal.  Raises DataError without a request in common.
    """
    notes = [f"{table.path.name}: half a line at its end was left out" for table in (candidate, baseline) if table.cut]
    if None in candidate.request or None in baseline.request:
        evidence, remarks = _leave_unpaired(candidate, baseline)
    else:
        sides = candidate.merge_attempts(worst=True), baseline.merge_attempts(worst=False)
        notes += [
            f"{table.path.name}: {pluralize(len(table) - len(side), 'request')} observed again; the {word} try counts"
            for table, side, word in zip((candidate, baseline), sides, ("worst", "best"), strict=True)
            if side is not table
        ]
        evidence, remarks = _pair_by_name(*sides, sqnr_db, ignore_missing)
    reasons = [describe_kill("candidate", candidate), describe_kill("baseline", baseline), evidence.stopped]
    death = reasons.pop(0) if candidate.died and not baseline.died else ""
    growing = not (candidate.ended and baseline.ended)
    return replace(evidence, stopped="; ".join(filter(None, reasons)), died=death, growing=growing), (*notes, *remarks)


def _leave_unpaired(candidate: ObservationTable, baseline: ObservationTable) -> tuple[CanaryEvidence, list[str]]:
    """The evidence of different requests on both sides: the requests of the common time, by arrival, and a reason if
    the loads differ; all requests and the reason if the common time is too short. Also remarks."""
    tables = (candidate, baseline)
    times = [np.asarray(table.time) for table in tables]
    start_s, end_s = max(float(table.min()) for table in times), min(float(table.max()) for table in times)
    shared_rows = [np.flatnonzero((table >= start_s) & (table <= end_s)) for table in times]
    shared_times = [table[index] for table, index in zip(times, shared_rows, strict=True)]
    other_hours = _other_hours(times, shared_rows)
    mismatch = other_hours or _other_load(shared_times, start_s, end_s)
    is_lighter = mismatch != other_hours and MOST_LOAD * len(shared_times[0]) < len(shared_times[1])
    row_indices = [np.arange(len(table)) for table in tables] if other_hours else shared_rows
    sides = [
        table.side(index[np.argsort(row_times[index], kind="stable")])
        for table, row_times, index in zip(tables, times, row_indices, strict=True)
    ]
    notes = ["the two sides answered different requests, and are compared in the time that both logs cover"]
    notes += [
        f"{len(table) - len(side)} of {len(table)} requests of the {role} are not of that time, and are left out"
        for role, table, side in zip(("candidate", "baseline"), tables, sides, strict=True)
        if len(side) < len(table)
    ]
    stop_note = "" if mismatch or (candidate.ended and baseline.ended) else _silent_end(candidate, baseline)
    return CanaryEvidence(
        sides[0], sides[1], paired=False, stopped=stop_note, unlike=mismatch, lighter=is_lighter
    ), notes


def _other_hours(times: Sequence[Array], shared_rows: Sequence[Array]) -> str:
    """The reason why the sides cannot be compared: too few requests in a common time; '' if there are enough."""
    if 2 * min(map(len, shared_rows)) >= min(*map(len, times), 2 * LEAST_REQUESTS):
        return ""
    candidate_span, baseline_span = map(span_text, times)
    return (
        f"the logs cover different times (candidate: {candidate_span}, baseline: {baseline_span}), and latency also "
        f"depends on the time of day; {REMEDY}"
    )


def _other_load(shared_times: Sequence[Array], first: float, last: float) -> str:
    """The reason why the sides cannot be compared: their loads differed in some window; '' if they never did."""
    edges = np.linspace(first, last, max(1, min(LOAD_WINDOWS, min(map(len, shared_times)) // PER_WINDOW)) + 1)
    counts, baseline_counts = (np.histogram(times, edges)[0] for times in shared_times)
    share = 1.0 / (1.0 + MOST_LOAD)
    window = (counts.sum(), baseline_counts.sum(), first, last)
    for a, b, start, end in (window, *zip(counts, baseline_counts, edges[:-1], edges[1:], strict=True)):
        total = int(a) + int(b)
        if min(int(a), int(b)) < total * share - _CHANCE * math.sqrt(total * share * (1.0 - share)):
            return (
                f"the sides had different load: {a} requests of the candidate and {b} of the baseline from "
                f"{span_text(np.asarray([start, end]))}, and load changes latency; {REMEDY}; or cut both logs to a "
                "time of equal load, or to one instance each"
            )
    return ""


def _silent_end(candidate: ObservationTable, baseline: ObservationTable) -> str:
    """A text if an engine may have died at its log's end: the other log continues longer than by chance; else ''."""
    for role, side, peer in (("candidate", candidate, baseline), ("baseline", baseline, candidate)):
        later_count = int(np.count_nonzero(np.asarray(peer.time) > max(side.time)))
        if later_count * len(side) >= _SILENCE * len(peer):
            return (
                f"{side.path.name} ({role}) stops {later_count} requests of {peer.path.name} earlier, and not both "
                f"logs record an orderly stop; {CLOSE}"
            )
    return ""


def hours_apart(candidate: Array, baseline: Array) -> str:
    """The reason why paired requests cannot be compared: they arrived at different hours; '' if they did not.

    candidate, baseline: arrivals of the same requests in seconds, [requests], NaN for a request that was not seen.
    """
    distance_s = float(np.nanmedian(np.abs(candidate - baseline)))
    if distance_s <= MOST_APART_S:
        return ""
    return (
        f"the same requests arrived {distance_s / 60:.0f} minutes apart: the candidate's {span_text(candidate)}, the "
        f"baseline's {span_text(baseline)}; latency also depends on the time of day; send each request to both "
        "sides at the same time"
    )


def span_text(times: Array) -> str:
    """The range of times: '2026-01-31 08:00:00 to 2026-01-31 17:00:00 UTC', or '0 s to 3600 s' if they are no dates."""
    start_s, end_s = float(np.nanmin(times)), float(np.nanmax(times))
    if start_s < _EPOCH or end_s > 1e11:
        return f"{start_s:.6g} s to {end_s:.6g} s"
    return " to ".join(f"{datetime.fromtimestamp(end, UTC):%Y-%m-%d %H:%M:%S}" for end in (start_s, end_s)) + " UTC"


def _pair_by_name(
    candidate: ObservationTable, baseline: ObservationTable, sqnr_db: float, ignore_missing: bool
) -> tuple[CanaryEvidence, list[str]]:
    if not set(candidate.request) & set(baseline.request):
        raise DataError(
            f"{candidate.path.name} and {baseline.path.name} have no request in common; send the same ones to both, or "
            "log without `request` to compare different ones of the same time"
        )
    end = end_of_pairs(candidate, baseline, ignore_missing)
    pairs, notes = _pairs(candidate, baseline, set(end.in_flight)), [*end.notes]
    unpaired_count = int((pairs < 0).any(1).sum())
    if unpaired_count and ignore_missing:
        pairs = pairs[(pairs >= 0).all(1)]
        notes.append(f"{unpaired_count} requests were observed on one side only, and are left out, as was asked for")
    elif unpaired_count:
        notes.append(
            f"{unpaired_count} requests were observed on one side only, and count as failed on the other; "
            "--missing ignored leaves them out"
        )
    candidate_side, baseline_side = candidate.side(pairs[:, 0]), baseline.side(pairs[:, 1])
    differs, flip_mask, noise = _answers(candidate, baseline, pairs[candidate_side.ok & baseline_side.ok], sqnr_db)
    hours_text = hours_apart(candidate_side.time, baseline_side.time)
    block = design_block([candidate.segment[index] for index in pairs[:, 0] if index >= 0])
    return CanaryEvidence(
        candidate_side, baseline_side, True, differs, flip_mask, end.stopped, hours_text, noise, design_block=block
    ), notes


def design_block(segment: Sequence[int | None]) -> int:
    """The mean number of requests in two segments; 1 without segments. segment: of each request, or None."""
    count = len(set(segment))
    return 1 if count < 2 or None in segment else math.ceil(2 * len(segment) / count)


def _pairs(candidate: ObservationTable, baseline: ObservationTable, without: set[Name | None]) -> Array:
    """Indices of each request on both sides, int64 [requests, 2], by arrival at the baseline; -1 for a missing side."""
    rows = {name: index for index, name in enumerate(candidate.request)}
    baseline_rows = {name: index for index, name in enumerate(baseline.request)}
    # The two sides may have different clocks.
    names = rows.keys() & baseline_rows.keys()
    offset = float(np.median([baseline.time[baseline_rows[name]] - candidate.time[rows[name]] for name in names]))
    arrivals: dict[Name | None, float] = {name: candidate.time[index] + offset for name, index in rows.items()}
    arrivals |= {name: baseline.time[index] for name, index in baseline_rows.items()}
    pair_names = sorted(
        (name for name in arrivals if name not in without), key=lambda name: (arrivals[name], str(name))
    )
    return np.asarray(
        [(rows.get(name, -1), baseline_rows.get(name, -1)) for name in pair_names], dtype=np.int64
    ).reshape(-1, 2)


def _answers(
    candidate: ObservationTable, baseline: ObservationTable, pairs: Array, sqnr_db: float
) -> tuple[Array | None, Array | None, float]:
    """Whether the answers of each pair differ, by measured SQNR or else by digest, and whether their argmax differs:
    bool [pairs] each, None if it was not observed; and `CanaryEvidence.noise`.

    pairs: int64 [pairs, 2], as of `_pairs`.
    """
    measured_db = np.asarray(candidate.sqnr_db)[pairs[:, 0]]
    outputs = [(candidate.output[row], baseline.output[baseline_row]) for row, baseline_row in pairs]
    same_digests = np.asarray([a == b for a, b in outputs], bool)
    output_mask = np.asarray([a is not None and b is not None for a, b in outputs], bool)
    distance = np.where(np.isnan(measured_db), np.where(same_digests, EQUAL_DB, -np.inf), measured_db)
    differs = distance < sqnr_db
    flips = [candidate.flipped[index] for index in pairs[:, 0]]
    flip_mask = None if None in flips or not flips else np.asarray(flips, bool)
    # A few wrong answers do not change the middle half of the distances, from which the noise is estimated.
    low, median_db, high = np.quantile(np.maximum(distance, -EQUAL_DB), [0.25, 0.5, 0.75]) if len(pairs) else (0.0,) * 3
    std = (high - low) / (NORMAL.inv_cdf(0.75) - NORMAL.inv_cdf(0.25))
    noise = NORMAL.cdf((sqnr_db - median_db) / std) if std > 0.0 else float(median_db < sqnr_db)
    return (differs if len(pairs) and bool((output_mask | ~np.isnan(measured_db)).all()) else None), flip_mask, noise
