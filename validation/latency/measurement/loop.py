"""Series of latencies: the loop that times calls, with as little as possible between two readings of the clock, and
the rule for how many runs of a series are its warm-up.
"""

import gc
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from enginesmith.arrays import Array

# A shorter series gives no 95 % interval for its median (0.5^6 * 2 = 3 %).
LEAST_RUNS = 6
MOST_RUNS = 200_000
# How many times the wanted time the least number of runs may take.
PATIENCE = 20
# Runs in a batch of the warm-up rule, and the length of a series below which it leaves out nothing.
BATCH = 5
LEAST = 4 * BATCH
_LEAST_ROOM = 0.05

Run = Callable[[], object]


def latencies(run: Run, seconds: float, least: int = LEAST_RUNS) -> Array:
    """Wall-clock seconds of each call of `run`, float64 [runs], one right after the other, for about `seconds`.

    At least `least` runs, unless those take PATIENCE times as long; at most MOST_RUNS.
    """
    clock = time.perf_counter_ns
    found: list[int] = []
    collecting = gc.isenabled()
    gc.disable()  # pauses of Python's garbage collection are not the engine's, as in `timeit`
    try:
        begun = before = clock()
        soft, hard = begun + int(seconds * 1e9), begun + int(PATIENCE * seconds * 1e9)
        while len(found) < MOST_RUNS:
            run()
            now = clock()
            found.append(now - before)
            if now >= soft and (len(found) >= least or now >= hard):
                break
            before = clock()
    finally:
        if collecting:
            gc.enable()
    return np.array(found) * 1e-9


def time_call(run: Run) -> float:
    """Seconds of one call."""
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def streams_per_second(runs: Sequence[Run], seconds: float) -> float:
    """Calls per second of all `runs` together, each called at least once, and repeatedly
    for about `seconds`, in a thread of its own.

    Raises what a call raises.
    """
    barrier = threading.Barrier(len(runs) + 1)
    until = [0.0]

    def stream(run: Run) -> int:
        barrier.wait()
        count = 0
        while not count or time.perf_counter() < until[0]:
            run()
            count += 1
        return count

    with ThreadPoolExecutor(len(runs)) as pool:
        streams = [pool.submit(stream, run) for run in runs]
        begun = time.perf_counter()
        until[0] = begun + seconds
        barrier.wait()
        count = sum(each.result() for each in streams)
        return count / (time.perf_counter() - begun)


def warm_up(latencies: Array) -> tuple[int, bool]:
    """How many runs at the front of `latencies` ([runs], seconds) to leave out, and whether the rest is steady.

    By MSER-5 (White, Simulation 69, 1997; White, Cobb & Spratt, WSC 2000): the series is averaged in batches of five,
    and cut where the standard error of the mean of the remaining batches is least, within the first half. It is not
    steady where that is the last cut allowed, so that a longer series might lose more.
    One spike in the first half would move the cut behind it. So the rule reads logarithms, clipped to the range of the
    central 95 % of the second half and as much again to either side: a spike counts little more than a slow run, and a
    slower beginning still stands out.
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
