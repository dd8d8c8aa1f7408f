"""One engine over several fresh processes: how long it takes to load, what it holds in memory, how fast it answers."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from enginery.core.types import Session, Tensors
from validation.latency.measurement.between import quantiles_between
from validation.latency.measurement.buckets import Bucket
from validation.latency.measurement.fork import measured_apart
from validation.latency.measurement.loop import LEAST_RUNS, streams_per_second, timed
from validation.latency.measurement.once import Once, Opens, Runs, measure_once, taken
from validation.latency.measurement.quantiles import Quantile, curve
from validation.latency.measurement.system_load import Watch
from validation.latency.measurement.warmup import warm_up

FORMAT = 2
# Processes that an engine is measured in; fewer where one takes longer than so many seconds.
PROCESSES, FEWER_PROCESSES, COSTLY_S = 5, 3, 1.0


@dataclass(frozen=True)
class Asked:
    """seconds: for each bucket, over all processes.  streams: as many sessions at once, each in a thread, for the
    throughput; 1: none.  processes: one after the other; 1: in this process."""

    seconds: float
    streams: int = 1
    processes: int = PROCESSES


@dataclass(frozen=True)
class BucketLatency:
    """What was measured at one size. Times in seconds; quantiles, mean_s and curve are those of `Session.run`.

    runtime: the median of the runtime's own call, without what `Session.run` does in Python; None where the session
    does not give it.  process_medians_s: of each process, of the runtime where it is known.
    first_s: the first run at this size, which is not among `runs`; median over processes.  discarded: of the runs, as
    warm-up.  steady: whether what followed looked steady in every process.  items_per_s: of one stream, by the median.
    streams_items_per_s: of several at once, together.  memory_bytes: peak over the process before it loaded the engine;
    of all buckets so far, in rising order.  device_bytes: in use on the engine's own device, by everybody; None where
    it has none.  device_s: median of what the device itself is busy with a run, by its own events; None where it tells
    nothing.
    """

    name: str
    sizes: dict[str, int]
    items: int
    first_s: float
    runs: int
    discarded: int
    steady: bool
    mean_s: float
    quantiles: Sequence[Quantile]
    curve: Sequence[float]
    memory_bytes: int
    surroundings: dict[str, Any]
    runtime: Quantile | None = None
    process_medians_s: Sequence[float] = ()
    device_bytes: int | None = None
    streams: int = 1
    streams_items_per_s: float | None = None
    device_s: float | None = None

    @property
    def median_s(self) -> float:
        """Of `Session.run`: the median of the table, or of a few runs, where it has no interval."""
        return self.quantiles[0].value or self.curve[len(self.curve) // 2]

    @property
    def runtime_s(self) -> float:
        """The runtime's own median, or that of `Session.run` where it is not known."""
        return (self.runtime and self.runtime.value) or self.median_s

    @property
    def items_per_s(self) -> float:
        """As many as a run holds, over its median: runs that the machine holds up belong to the tail."""
        return self.items / self.median_s

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        return {**asdict(self), "median_s": self.median_s, "items_per_s": self.items_per_s}


@dataclass(frozen=True)
class Speed:
    """load_s: from the engine's file, which lies in the page cache, to a session; the runtime was imported before, in
    `import_s`, where that can be told apart. Medians over `processes`.

    loaded_bytes: resident memory that this took.  resettable: whether the peak could be counted from there on.
    """

    load_s: float
    loaded_bytes: int
    resettable: bool
    buckets: Sequence[BucketLatency]
    import_s: float | None = None
    processes: int = 1

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        return {
            "import_s": self.import_s,
            "load_s": self.load_s,
            "loaded_bytes": self.loaded_bytes,
            "memory_resettable": self.resettable,
            "processes": self.processes,
            "buckets": [bucket.to_json() for bucket in self.buckets],
        }


def measure_speed(
    opens: Opens,
    buckets: Sequence[Bucket],
    asked: Asked,
    workdir: Path,
    imports: Callable[[], None] | None = None,
) -> Speed:
    """Open an engine in each of several processes and measure it at each of its sizes.

    workdir: for what the processes leave.  imports: imports the runtime, which is then timed apart and must not have
    been imported here. Raises what `imports`, `opens` and the session raise.
    """
    seconds, least = asked.seconds / asked.processes, -(-LEAST_RUNS // asked.processes)
    work = partial(measure_once, opens, buckets, seconds, least, imports)
    watch = Watch()
    found = [work()] if asked.processes == 1 else _several(work, asked, workdir)
    surroundings = watch.stop().to_json()
    rows = [_bucket(bucket, [once.runs[index] for once in found], surroundings) for index, bucket in enumerate(buckets)]
    if asked.streams > 1:
        rows = [_with_streams(opens, bucket, row, asked) for bucket, row in zip(buckets, rows, strict=True)]
    imported = [once.import_s for once in found if once.import_s is not None]
    return Speed(
        load_s=median(once.load_s for once in found),
        loaded_bytes=int(median(once.loaded_bytes for once in found)),
        resettable=all(once.resettable for once in found),
        buckets=rows,
        import_s=median(imported) if imported else None,
        processes=len(found),
    )


def _several(work: Callable[[], Once], asked: Asked, workdir: Path) -> list[Once]:
    found: list[Once] = []
    wanted = asked.processes
    while len(found) < wanted:
        folder = workdir / f"process-{len(found)}"
        folder.mkdir()
        took = timed(lambda place=folder: found.append(measured_apart(work, place)))  # type: ignore[misc]
        if len(found) == 1 and took > COSTLY_S + asked.seconds:
            wanted = min(wanted, FEWER_PROCESSES)
    return found


def _bucket(bucket: Bucket, runs: Sequence[Runs], surroundings: dict[str, Any]) -> BucketLatency:
    warm = [warm_up(each.session) for each in runs]
    kept = [each.session[discarded:] for each, (discarded, _) in zip(runs, warm, strict=True)]
    own = [each.runtime[warm_up(each.runtime)[0] :] for each in runs if each.runtime is not None]
    together = np.concatenate(kept)
    return BucketLatency(
        name=bucket.name,
        sizes=dict(bucket.sizes),
        items=bucket.items,
        first_s=median(each.first_s for each in runs),
        runs=sum(len(each.session) for each in runs),
        discarded=sum(discarded for discarded, _ in warm),
        steady=all(steady for _, steady in warm),
        mean_s=float(together.mean()),
        quantiles=quantiles_between(kept),
        curve=curve(together),
        memory_bytes=int(median(each.memory_bytes for each in runs)),
        surroundings=surroundings,
        runtime=quantiles_between(own, (0.5,))[0] if own else None,
        process_medians_s=[float(np.median(each)) for each in own or kept],
        device_bytes=runs[-1].device_bytes,
        device_s=_median_of([each.device_s for each in runs if each.device_s is not None]),
    )


def _median_of(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def _with_streams(opens: Opens, bucket: Bucket, one: BucketLatency, asked: Asked) -> BucketLatency:
    with ExitStack() as stack:
        sessions = [stack.enter_context(opens()) for _ in range(asked.streams)]
        runs = [_runner(session, taken(session, bucket.inputs)) for session in sessions]
        for run in runs:
            run()
        rate = streams_per_second(runs, asked.seconds)
    return replace(one, streams=asked.streams, streams_items_per_s=rate * bucket.items)


def _runner(session: Session, inputs: Tensors) -> Callable[[], object]:
    return lambda: session.run(inputs)
