"""What became of the requests of a load test: latencies in bursts and outside, delays of sending, memory."""

from collections.abc import Sequence
from statistics import median

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core.reports.load import LoadPhase, SendDelay, ServerMemory
from enginesmith.core.text import format_plain
from validation.latency.measurement.quantiles import quantiles
from validation.load.arrivals import PlannedArrivals

LATE_S = 0.001
# The generator is behind where its p99 of lateness is more than this share of the p99 of latency, and over LATE_S.
_BEHIND = 0.1
# Seconds of a run from which its growth of memory is told.
LEAST_S = 9.0


def phases_of(plan: PlannedArrivals, done: Array, failed: Array) -> tuple[LoadPhase, ...]:
    """Latencies outside of bursts and, where there are some, within.

    done: seconds from the start of the plan, float64 [requests that were sent], NaN where no answer came.  failed: bool
    [requests that were sent].
    """
    found = []
    for name, inside, seconds in (("quiet", False, plan.shares_s[0]), ("burst", True, plan.shares_s[1])):
        mine = np.flatnonzero(plan.burst[: len(done)] == inside)
        if not len(mine):
            continue
        latencies = (done - plan.at[: len(done)])[mine]
        answered = latencies[np.isfinite(latencies) & ~failed[mine]]
        offered = int(np.count_nonzero(plan.burst == inside)) / seconds if seconds > 0.0 else 0.0
        found.append(
            LoadPhase(
                name,
                len(mine),
                offered,
                int(np.count_nonzero(~np.isfinite(latencies))),
                int(np.count_nonzero(failed[mine])),
                quantiles(answered) if len(answered) else (),
                float(answered.max()) if len(answered) else None,
            )
        )
    return tuple(found)


def delay_of(planned: Array, sent: Array, done: Array) -> SendDelay:
    """How much later than planned the requests were sent. All: seconds, float64 [requests that were sent]."""
    if not len(sent):
        return SendDelay(0.0, 0.0, 0.0, 0.0, "nothing was sent")
    late = np.maximum(sent - planned[: len(sent)], 0.0)
    middle, slow = (float(np.quantile(late, p)) for p in (0.5, 0.99))
    latencies = (done - planned[: len(done)])[np.isfinite(done)]
    shown = float(np.quantile(latencies, 0.99)) if len(latencies) else np.inf
    behind = ""
    if slow > LATE_S and slow > _BEHIND * shown:
        behind = (
            f"the generator could not keep up: 1 in 100 requests was sent {format_plain(1e3 * slow)} ms late or more, "
            "which is part of the latencies; give a lower rate, or a machine with cores to spare"
        )
    return SendDelay(middle, slow, float(late.max()), float(np.mean(late > LATE_S)), behind)


def memory_of(samples: Sequence[tuple[float, int]]) -> ServerMemory:
    """Memory over a run. samples: (seconds from its start, resident bytes), rising, at least one."""
    values = [size for _, size in samples]
    minutes: dict[int, int] = {}
    for at, size in samples:
        minutes[int(at // 60)] = max(size, minutes.get(int(at // 60), 0))
    return ServerMemory(values[0], max(values), tuple(minutes.values()), _growth(samples))


def _growth(samples: Sequence[tuple[float, int]]) -> float | None:
    lasted = samples[-1][0]
    if lasted < LEAST_S:
        return None
    first = [size for at, size in samples if at <= lasted / 3]
    last = [size for at, size in samples if at >= 2 * lasted / 3]
    return (median(last) - median(first)) / (2 / 3 * lasted) * 60.0
