"""The timing loop: as little as possible between two readings of the clock, for a time and not for a count."""

import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from enginery.arrays.arrays import Array

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
