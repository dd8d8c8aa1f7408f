"""The measurement of one engine over several processes: time to load, memory, latencies at each size.

Each process is a fork of this one, which is much faster than starting Python: a fork has its parent's modules. A fork
also has its parent's addresses, which influence speed; therefore it first allocates memory of a random size, which
moves all later libraries and arrays (as Curtsinger & Berger, "STABILIZER: statistically sound performance evaluation",
ASPLOS 2013). A runtime that starts threads must not be imported in the parent, because a fork has none of its threads.
"""

import json
import mmap
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from functools import partial
from statistics import median
from typing import IO, NoReturn

import numpy as np

from enginesmith.core.errors import EnginesmithError, error_from_json, error_to_json
from enginesmith.core.reports.latency import BucketLatency, EngineLatency, SystemLoad
from validation.latency.machine import SystemLoadMonitor
from validation.latency.measurement.loop import (
    LEAST_RUNS,
    BucketInputs,
    Opens,
    ProcessMeasurement,
    SizeMeasurement,
    measure_once,
    measurement_from_json,
    select_inputs,
    streams_per_second,
    time_call,
    warm_up,
)
from validation.latency.measurement.quantiles import curve, quantiles_between

# The most pages and bytes that a fork allocates before its work.
_MOST_PAGES, _MOST_BYTES = 512, 1 << 16
# The number of processes in which an engine is measured; fewer if the first takes this many seconds beyond its runs.
PROCESSES, FEWER_PROCESSES, COSTLY_S = 5, 3, 1.0


def measure_in_fork(work: Callable[[], ProcessMeasurement]) -> ProcessMeasurement:
    """Call `work` in a fork of this process and return its measurement.

    Raises the EnginesmithError that `work` raises, and EnginesmithError if the fork ends without a result.
    """
    forks = multiprocessing.get_context("fork")
    # A file and not a pipe: a pipe stays open while a process that the fork started is alive.
    with tempfile.TemporaryFile() as results, warnings.catch_warnings():
        # Python 3.12 warns of threads in the parent; they are numpy's, which survive a fork.
        warnings.simplefilter("ignore", DeprecationWarning)
        process = forks.Process(target=_work, args=(work, results))
        process.start()
        process.join()
        results.seek(0)
        content = results.read()
        outcome = json.loads(content) if process.exitcode == 0 and content else None
    if outcome is None:
        exit_code = process.exitcode or 0
        ending_text = f"it was ended by {signal.Signals(-exit_code).name}" if exit_code < 0 else "it exited by itself"
        ending_text = "its traceback is above" if exit_code > 0 else ending_text
        raise EnginesmithError(f"the process that timed the engine gave no result: {ending_text}")
    if "sizes" not in outcome:
        raise error_from_json(outcome)
    return measurement_from_json(outcome)


def _work(work: Callable[[], ProcessMeasurement], results: IO[bytes]) -> NoReturn:
    """The work of a fork: write the measurement of `work`, or its EnginesmithError, as JSON.

    The fork ends with `os._exit`, which waits for no thread and removes nothing that the parent still uses.
    """
    exit_code = 1
    try:
        pages, heap = random.randint(1, _MOST_PAGES), random.randint(1, _MOST_BYTES)  # noqa: S311 - not a secret
        ballast = mmap.mmap(-1, mmap.PAGESIZE * pages), bytearray(heap)
        try:
            outcome = asdict(work())
        except EnginesmithError as error:
            outcome = error_to_json(error)
        del ballast
        results.write(json.dumps(outcome, default=lambda array: array.tolist()).encode())
        results.flush()
        exit_code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # the stream may be None, or closed
                stream.flush()
        os._exit(exit_code)


def measure_engine(
    opens: Opens,
    buckets: Sequence[BucketInputs],
    seconds: float,
    imports: Callable[[], None] | None = None,
    streams: int = 1,
    processes: int = PROCESSES,
) -> EngineLatency:
    """Open an engine in each of several processes and measure it at each size.

    seconds: per bucket, over all processes.  imports: imports the runtime, which is timed separately and must not be
    imported here before.  streams: number of concurrent sessions, each in a thread, for the throughput; 1: throughput
    is not measured.  processes: run one after the other; 1: in this process.
    Raises the errors of `imports`, `opens` and the session.
    """
    task = partial(measure_once, opens, buckets, seconds / processes, -(-LEAST_RUNS // processes), imports)
    monitor = SystemLoadMonitor()
    measurements = [task()] if processes == 1 else _run_processes(task, seconds, processes)
    load = monitor.stop()
    rows = [
        _bucket(bucket, [process.sizes[index] for process in measurements], load)
        for index, bucket in enumerate(buckets)
    ]
    if streams > 1:
        rows = [_with_streams(opens, bucket, row, streams, seconds) for bucket, row in zip(buckets, rows, strict=True)]
    return EngineLatency(
        load_s=median(process.load_s for process in measurements),
        loaded_bytes=int(median(process.loaded_bytes for process in measurements)),
        memory_resettable=all(process.memory_resettable for process in measurements),
        buckets=tuple(rows),
        import_s=_median_of([process.import_s for process in measurements]),
        processes=len(measurements),
    )


def _run_processes(work: Callable[[], ProcessMeasurement], seconds: float, count: int) -> list[ProcessMeasurement]:
    measurements: list[ProcessMeasurement] = []
    while len(measurements) < count:
        process_s = time_call(lambda: measurements.append(measure_in_fork(work)))
        if len(measurements) == 1 and process_s > COSTLY_S + seconds:
            count = min(count, FEWER_PROCESSES)
    return measurements


def _bucket(bucket: BucketInputs, processes: Sequence[SizeMeasurement], load: SystemLoad) -> BucketLatency:
    warm_ups = [warm_up(process.session) for process in processes]
    steady_series = [process.session[cut:] for process, (cut, _) in zip(processes, warm_ups, strict=True)]
    runtimes = [process.runtime for process in processes if process.runtime is not None]
    runtime_series = [runs[warm_up(runs)[0] :] for runs in runtimes]
    times = np.concatenate(steady_series)
    return BucketLatency(
        name=bucket.name,
        sizes=dict(bucket.sizes),
        items=bucket.items,
        first_s=median(process.first_s for process in processes),
        runs=sum(len(process.session) for process in processes),
        discarded=sum(warm_count for warm_count, _ in warm_ups),
        steady=all(is_steady for _, is_steady in warm_ups),
        mean_s=float(times.mean()),
        quantiles=quantiles_between(steady_series),
        curve=curve(times),
        memory_bytes=int(median(process.memory_bytes for process in processes)),
        surroundings=load,
        runtime=quantiles_between(runtime_series, (0.5,))[0] if runtime_series else None,
        process_medians_s=tuple(float(np.median(run_times)) for run_times in runtime_series or steady_series),
        device_bytes=processes[-1].device_bytes,
        device_s=_median_of([process.device_s for process in processes]),
    )


def _median_of(values: Sequence[float | None]) -> float | None:
    """The median of the known values; None if there are none."""
    numbers = [value for value in values if value is not None]
    return median(numbers) if numbers else None


def _with_streams(
    opens: Opens, bucket: BucketInputs, row: BucketLatency, streams: int, seconds: float
) -> BucketLatency:
    with ExitStack() as exit_stack:
        sessions = [exit_stack.enter_context(opens()) for _ in range(streams)]
        calls = [partial(session.run, select_inputs(session, bucket.inputs)) for session in sessions]
        for run in calls:
            run()
        rate = streams_per_second(calls, seconds)
    return replace(row, streams=streams, streams_items_per_s=rate * bucket.items)
