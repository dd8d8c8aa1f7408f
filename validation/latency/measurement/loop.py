"""The timing loop: as little as possible between two readings of the clock, for a time and not for a count.

Where a series of latencies has come to rest: MSER-5 (White, Simulation 69, 1997; White, Cobb & Spratt, WSC 2000).

The series is averaged in batches of five. Cutting off the first d of m batches leaves a mean whose standard error is
the standard deviation of the rest over the root of their number; the cut that makes it least is taken, among those
that leave half. Latencies have spikes, and one spike in the first half would draw the cut behind it, away from what it
says about the tail; so the rule reads logarithms, drawn in to no further beyond the central 95 % of the second half
than that is wide: a spike counts little more than a slow run, and a slower beginning still stands out.
"""

import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from enginery.arrays import Array

# A series shorter than that gives no interval for its median (0.5^6 * 2 = 3 %), unless each run takes very long.
LEAST_RUNS = 6
MOST_RUNS = 200_000
# How many times the budget the least number of runs may take.
PATIENCE = 20

Run = Callable[[], object]


def latencies(run: Run, seconds: float, least: int = LEAST_RUNS) -> Array:
    """Wall-clock seconds of each call of `run`, one right after the other (closed loop), for about `seconds`.

    At least `least`, unless those take PATIENCE times as long; at most MOST_RUNS.
    """
    clock = time.perf_counter_ns
    found: list[int] = []
    with _no_collection():
        begun = before = clock()
        soft, hard = begun + int(seconds * 1e9), begun + int(PATIENCE * seconds * 1e9)
        while len(found) < MOST_RUNS:
            run()
            now = clock()
            found.append(now - before)
            if now >= soft and (len(found) >= least or now >= hard):
                break
            before = clock()
    return np.array(found) * 1e-9


def time_call(run: Run) -> float:
    """Seconds of one call."""
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def streams_per_second(runs: Sequence[Run], seconds: float) -> float:
    """Calls per second of all streams together, each called in a thread of its own for about `seconds`."""
    counts = [0] * len(runs)
    barrier = threading.Barrier(len(runs) + 1)
    until = [0.0]

    def stream(index: int) -> None:
        barrier.wait()
        while time.perf_counter() < until[0]:
            runs[index]()
            counts[index] += 1

    threads = [threading.Thread(target=stream, args=(index,), daemon=True) for index in range(len(runs))]
    for thread in threads:
        thread.start()
    begun = time.perf_counter()
    until[0] = begun + seconds
    barrier.wait()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.perf_counter() - begun)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Python's own pauses are none of the engine's, as in `timeit`."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


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
