"""What two files of observations say together: by the names of their requests, else by time."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from enginery.arrays.arrays import Array
from enginery.core.errors import DataError
from enginery.recording.outputs import EQUAL_DB
from validation.canary.judging.log_ends import CLOSE, describe_kill, end_of_pairs
from validation.canary.judging.matching import match_in_time, silence
from validation.canary.judging.observed_times import hours_apart
from validation.canary.observations import Name, ObservationTable
from validation.statistics.evidence import CanaryEvidence


def evidence_of(
    candidate: ObservationTable, baseline: ObservationTable, sqnr_db: float, *, ignore_missing: bool = False
) -> tuple[CanaryEvidence, tuple[str, ...]]:
    """What two files say together, and remarks on how they were read.

    They are paired when each observation on both sides names its request. A request that only one side observed counts
    as one that the other failed, also at the end, or is left out with `ignore_missing`; so are the few that may have
    been in flight when logs that are still written to were read. Without names they are matched in time.
    sqnr_db: answers nearer to each other than that are the same. Raises DataError without a request in common.
    """
    notes = [f"{one.path.name}: half a line at its end was left out" for one in (candidate, baseline) if one.cut]
    if None in candidate.request or None in baseline.request:
        evidence, more = _match_by_time(candidate, baseline)
    else:
        evidence, more = _pair_by_name(candidate, baseline, sqnr_db, ignore_missing)
    why = [describe_kill("candidate", candidate), describe_kill("baseline", baseline), evidence.stopped]
    replayed = candidate.planned is not None and baseline.planned is not None
    return replace(evidence, stopped="; ".join(filter(None, why)), replayed=replayed), (*notes, *more)


def _match_by_time(candidate: ObservationTable, baseline: ObservationTable) -> tuple[CanaryEvidence, list[str]]:
    """Requests of about the same moment in pairs, where the sides compare."""
    ours, theirs = (one.side(np.arange(len(one))) for one in (candidate, baseline))
    found = match_in_time(CanaryEvidence(ours, theirs, paired=False))
    notes = ["the two sides answered different requests, and are compared within windows of time"]
    if found.unlike:
        return found, notes
    notes += [
        f"{len(one) - len(kept)} of {len(one)} requests of the {role} have no match at the same time, and are left out"
        for role, one, kept in (("candidate", ours, found.candidate), ("baseline", theirs, found.baseline))
        if len(kept) < len(one)
    ]
    silent = silence(candidate, baseline)
    if silent and candidate.ended and baseline.ended:
        return found, [*notes, silent]
    return replace(
        found, stopped=silent and f"{silent}, and not both say that they were stopped in order; {CLOSE}"
    ), notes


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
    lonely = int((pairs < 0).any(1).sum())
    if lonely and ignore_missing:
        pairs = pairs[(pairs >= 0).all(1)]
        notes.append(f"{lonely} requests were observed on one side only, and are left out, as was asked for")
    elif lonely:
        notes.append(
            f"{lonely} requests were observed on one side only, and count as failed on the other; "
            "--missing ignored leaves them out"
        )
    ours, theirs = candidate.side(pairs[:, 0]), baseline.side(pairs[:, 1])
    differs, flipped = _answers(candidate, baseline, pairs[ours.ok & theirs.ok], sqnr_db)
    apart = hours_apart(ours.time, theirs.time)
    block = design_block([candidate.segment[index] for index in pairs[:, 0] if index >= 0])
    return CanaryEvidence(ours, theirs, True, differs, flipped, end.stopped, apart, design_block=block), notes


def design_block(segment: Sequence[int | None]) -> int:
    """Requests of two segments, on average, by the segment of each request; 1 where they were not sent in segments."""
    count = len(set(segment))
    return 1 if count < 2 or None in segment else math.ceil(2 * len(segment) / count)


def _pairs(candidate: ObservationTable, baseline: ObservationTable, without: set[Name | None]) -> Array:
    """Index pairs in the order of arrival at the baseline, -1 where one side is missing; shape (requests, 2)."""
    ours = {name: index for index, name in enumerate(candidate.request)}
    theirs = {name: index for index, name in enumerate(baseline.request)}
    # The two sides may have clocks of their own.
    common = ours.keys() & theirs.keys()
    ahead = float(np.median([baseline.time[theirs[name]] - candidate.time[ours[name]] for name in common]))
    arrivals: dict[Name | None, float] = {name: candidate.time[index] + ahead for name, index in ours.items()}
    arrivals |= {name: baseline.time[index] for name, index in theirs.items()}
    kept = sorted((name for name in arrivals if name not in without), key=lambda name: (arrivals[name], str(name)))
    return np.asarray([(ours.get(name, -1), theirs.get(name, -1)) for name in kept], dtype=np.int64).reshape(-1, 2)


def _answers(
    candidate: ObservationTable, baseline: ObservationTable, pairs: Array, sqnr_db: float
) -> tuple[Array | None, Array | None]:
    """Whether each answer is another one: by the distance that was measured, else by the digests."""
    measured = np.asarray(candidate.sqnr_db)[pairs[:, 0]]
    ours = [candidate.output[index] for index in pairs[:, 0]]
    theirs = [baseline.output[index] for index in pairs[:, 1]]
    same = np.asarray([a == b for a, b in zip(ours, theirs, strict=True)], bool)
    known = np.asarray([a is not None and b is not None for a, b in zip(ours, theirs, strict=True)], bool)
    distance = np.where(np.isnan(measured), np.where(same, EQUAL_DB, -np.inf), measured)
    differs = distance < sqnr_db
    flips = [candidate.flipped[index] for index in pairs[:, 0]]
    flipped = None if None in flips or not flips else np.asarray(flips, bool)
    return (differs if len(pairs) and bool((known | ~np.isnan(measured)).all()) else None), flipped
