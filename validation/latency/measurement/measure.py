"""One engine over several fresh processes: how long it takes to load, what it holds in memory, how fast it answers."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

from enginery.core.reports.latency import BucketLatency, EngineLatency, SystemLoad
from enginery.core.types import Session, Tensors
from validation.latency.measurement.between import quantiles_between
from validation.latency.measurement.buckets import BucketInputs
from validation.latency.measurement.fork import measured_apart
from validation.latency.measurement.loop import LEAST_RUNS, streams_per_second, timed
from validation.latency.measurement.once import Opens, ProcessMeasurement, Series, SizeFigures, measure_once, taken
from validation.latency.measurement.quantiles import curve
from validation.latency.measurement.system_load import SystemLoadMonitor
from validation.latency.measurement.warmup import warm_up

# Processes that an engine is measured in; fewer where one takes longer than so many seconds.
PROCESSES, FEWER_PROCESSES, COSTLY_S = 5, 3, 1.0


@dataclass(frozen=True)
class MeasureOptions:
    """seconds: for each bucket, over all processes.  streams: as many sessions at once, each in a thread, for the
    throughput; 1: none.  processes: one after the other; 1: in this process."""

    seconds: float
    streams: int = 1
    processes: int = PROCESSES


def measure_engine(
    opens: Opens,
    buckets: Sequence[BucketInputs],
    options: MeasureOptions,
    workdir: Path,
    imports: Callable[[], None] | None = None,
) -> EngineLatency:
    """Open an engine in each of several processes and measure it at each of its sizes.

    workdir: for what the processes leave.  imports: imports the runtime, which is then timed apart and must not have
    been imported here. Raises what `imports`, `opens` and the session raise.
    """
    seconds, least = options.seconds / options.processes, -(-LEAST_RUNS // options.processes)
    work = partial(measure_once, opens, buckets, seconds, least, imports)
    monitor = SystemLoadMonitor()
    found = [work()] if options.processes == 1 else _several(work, options, workdir)
    load = monitor.stop()
    rows = [
        _bucket(bucket, [(each.figures.sizes[index], each.series[index]) for each in found], load)
        for index, bucket in enumerate(buckets)
    ]
    if options.streams > 1:
        rows = [_with_streams(opens, bucket, row, options) for bucket, row in zip(buckets, rows, strict=True)]
    processes = [each.figures for each in found]
    imported = [each.import_s for each in processes if each.import_s is not None]
    return EngineLatency(
        load_s=median(each.load_s for each in processes),
        loaded_bytes=int(median(each.loaded_bytes for each in processes)),
        memory_resettable=all(each.memory_resettable for each in processes),
        buckets=tuple(rows),
        import_s=median(imported) if imported else None,
        processes=len(found),
    )


def _several(
    work: Callable[[], ProcessMeasurement], options: MeasureOptions, workdir: Path
) -> list[ProcessMeasurement]:
    found: list[ProcessMeasurement] = []
    wanted = options.processes
    while len(found) < wanted:
        folder = workdir / f"process-{len(found)}"
        folder.mkdir()
        took = timed(lambda place=folder: found.append(measured_apart(work, place)))  # type: ignore[misc]
        if len(found) == 1 and took > COSTLY_S + options.seconds:
            wanted = min(wanted, FEWER_PROCESSES)
    return found


def _bucket(bucket: BucketInputs, processes: Sequence[tuple[SizeFigures, Series]], load: SystemLoad) -> BucketLatency:
    figures, series = zip(*processes, strict=True)
    warm = [warm_up(each.session) for each in series]
    kept = [each.session[discarded:] for each, (discarded, _) in zip(series, warm, strict=True)]
    own = [each.runtime[warm_up(each.runtime)[0] :] for each in series if each.runtime is not None]
    together = np.concatenate(kept)
    return BucketLatency(
        name=bucket.name,
        sizes=dict(bucket.sizes),
        items=bucket.items,
        first_s=median(each.first_s for each in figures),
        runs=sum(len(each.session) for each in series),
        discarded=sum(discarded for discarded, _ in warm),
        steady=all(steady for _, steady in warm),
        mean_s=float(together.mean()),
        quantiles=quantiles_between(kept),
        curve=curve(together),
        memory_bytes=int(median(each.memory_bytes for each in figures)),
        surroundings=load,
        runtime=quantiles_between(own, (0.5,))[0] if own else None,
        process_medians_s=tuple(float(np.median(each)) for each in own or kept),
        device_bytes=figures[-1].device_bytes,
        device_s=_median_of([each.device_s for each in figures if each.device_s is not None]),
    )


def _median_of(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def _with_streams(opens: Opens, bucket: BucketInputs, one: BucketLatency, options: MeasureOptions) -> BucketLatency:
    with ExitStack() as stack:
        sessions = [stack.enter_context(opens()) for _ in range(options.streams)]
        runs = [_runner(session, taken(session, bucket.inputs)) for session in sessions]
        for run in runs:
            run()
        rate = streams_per_second(runs, options.seconds)
    return replace(one, streams=options.streams, streams_items_per_s=rate * bucket.items)


def _runner(session: Session, inputs: Tensors) -> Callable[[], object]:
    return lambda: session.run(inputs)
