"""The end of two logs: a process that dies logs nothing, so the side that stops first may have died there.

A log whose every observation is accounted for by a line of its writer (`ObservationLog.close`) was stopped in order.
Without such lines on both sides a log that stops before the other one is no ground for a PASS. Logs that are still
written to may lack the requests that were in flight when they were read: those younger than what an answer may take,
which a quantile of the latencies says, because one slow answer says nothing of how long the others are in flight.
"""

from dataclasses import dataclass

import numpy as np

from enginery.core.text import pluralize
from validation.canary.observations import Name, ObservationTable

# So many requests in flight are not taken for the sign of a death.
MOST_IN_FLIGHT = 8
# Share of the answers that took no longer than a request may be in flight.
_IN_FLIGHT = 0.99
# A run of requests that a side did not see is no chance where it is rarer than this.
_RARE = 1e-6
CLOSE = "judge when both were closed (`ObservationLog.close`), or cut both at the same request"


@dataclass(frozen=True)
class PairsEnd:
    """in_flight: requests to be left out.  stopped: see `CanaryEvidence`."""

    in_flight: tuple[Name | None, ...]
    stopped: str
    notes: tuple[str, ...]


def describe_kill(role: str, side: ObservationTable) -> str:
    """Why a side's log ends too early, whatever the other one holds: its engine or its replay was ended; else ''."""
    if side.died:
        return f"the {role}'s engine ended its process: {side.died}; find out why, mend it, run the canary again"
    if side.planned and not side.ended:
        return (
            f"the run was killed after {len(side)} of {side.planned} requests ({side.path.name} does not say that it "
            "was stopped in order); run the canary again"
        )
    return ""


def end_of_pairs(candidate: ObservationTable, baseline: ObservationTable, ignore_missing: bool) -> PairsEnd:
    """What the end of two logs of the same requests says. ignore_missing: a side may see a part of the requests."""
    closed = candidate.ended and baseline.ended
    longest = 0.0 if candidate.ended or baseline.ended else _longest_in_flight(candidate, baseline)
    in_flight: list[Name | None] = []
    stopped, notes = [], []
    for role, side, other in (("candidate", candidate, baseline), ("baseline", baseline, candidate)):
        unseen, tail, share = _unseen(side, other)
        young = [name for name, age in unseen.items() if longest and age <= longest]
        if not tail <= set(young):  # it had stopped before the last ones arrived
            young = [name for name in young if name not in tail]
        if closed and role == "baseline" and len(tail) <= MOST_IN_FLIGHT:  # it was closed a moment before the candidate
            young = list(tail)
        in_flight += young
        if len(young) > MOST_IN_FLIGHT:
            tail |= set(young)
        elif young:
            notes.append(f"in flight to the {role} when the logs ended, and left out: request {_list_names(young)}")
            tail -= set(young)
        if not tail:
            continue
        text = f"{side.path.name} ({role}) stops {pluralize(len(tail), 'request')} before {other.path.name}"
        by_chance = (1.0 - share) ** len(tail) >= _RARE
        if (ignore_missing and (closed or by_chance)) or (closed and role == "candidate"):
            notes.append(text)
        else:
            stopped.append(f"{text}{'' if closed else ', and not both say that they were stopped in order'}; {CLOSE}")
    return PairsEnd(tuple(in_flight), "; ".join(stopped), tuple(notes))


def _unseen(
    side: ObservationTable, other: ObservationTable
) -> tuple[dict[Name | None, float], set[Name | None], float]:
    """Requests that only the other side saw, with their age in seconds when its log ends; which of them are behind the
    last one that both saw; the share of the others that this side saw."""
    seen, last = set(side.request), max(other.time)
    order = sorted(range(len(other)), key=lambda index: other.time[index])
    both = np.flatnonzero([other.request[index] in seen for index in order])
    unseen = {other.request[at]: last - other.time[at] for at in order if other.request[at] not in seen}
    tail = {other.request[at] for at in order[int(both[-1]) + 1 :]}
    return unseen, tail, len(both) / float(both[-1] + 1)


def _longest_in_flight(*sides: ObservationTable) -> float:
    """Seconds; the greatest latency counts for nothing unless it is the only one."""
    known = np.concatenate([np.asarray(side.latency, float) for side in sides])
    known = known[~np.isnan(known)]
    return float(np.quantile(known, _IN_FLIGHT, method="lower")) if len(known) else 0.0


def _list_names(names: list[Name | None]) -> str:
    return ", ".join(str(name)[:60] for name in names)
