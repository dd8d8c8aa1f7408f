"""Where a series of latencies has come to rest: MSER-5 (White, Simulation 69, 1997; White, Cobb & Spratt, WSC 2000).

The series is averaged in batches of five. Cutting off the first d of m batches leaves a mean whose standard error is
the standard deviation of the rest over the root of their number; the cut that makes it least is taken, among those
that leave half. Latencies have spikes, and one spike in the first half would draw the cut behind it, away from what it
says about the tail; so the rule reads logarithms, drawn in to no further beyond the central 95 % of the second half
than that is wide: a spike counts little more than a slow run, and a slower beginning still stands out.
"""

import numpy as np

from enginery.arrays.npz import Array

BATCH = 5
# Fewer than so many runs say nothing about a trend: only the first run, which is timed apart, is left out.
LEAST = 4 * BATCH
_LEAST_ROOM = 0.05


def warm_up(latencies: Array) -> tuple[int, bool]:
    """How many runs to leave out at the front, and whether what follows looks steady.

    Not steady: the best cut is the last one allowed, so a longer series would perhaps lose more.
    """
    if len(latencies) < LEAST:
        return 0, True
    logs = np.log(np.maximum(latencies, 1e-12))
    low, high = np.quantile(logs[len(logs) // 2 :], [0.025, 0.975])
    batches = len(logs) // BATCH
    room = high - low + _LEAST_ROOM
    means = np.clip(logs, low - room, high + room)[: batches * BATCH].reshape(batches, BATCH).mean(1)
    # Sums over every tail at once: of means d.. for each cut d.
    kept = np.arange(batches, 0, -1)
    sums, squares = (np.cumsum(part[::-1])[::-1] for part in (means, means**2))
    error = np.maximum(squares - sums**2 / kept, 0.0) / kept.astype(float) ** 2
    most = batches // 2
    cut = int(np.argmin(error[: most + 1]))
    return cut * BATCH, cut < most
