"""One engine in one fresh process: how long it takes to load, what it holds in memory, how fast it answers."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from builders.profiles import DeviceMemory, DeviceTimed
from builders.types import Session, Tensors
from validation.latency.buckets import Bucket
from validation.latency.loop import latencies, streams_per_second, timed
from validation.latency.memory import forget_peak, peak_bytes, resident_bytes
from validation.latency.quantiles import Quantile, curve, quantiles
from validation.latency.surroundings import Watch
from validation.latency.warmup import warm_up
from validation.npz import Array

Opens = Callable[[], AbstractContextManager[Session]]
FORMAT = 1
# Of a bucket, timed by the device's events besides those timed by the clock here.
DEVICE_RUNS = 30


@dataclass(frozen=True)
class Asked:
    """seconds: for each bucket.  streams: as many sessions at once, each in a thread, for the throughput; 1: none."""

    seconds: float
    streams: int = 1


@dataclass(frozen=True)
class BucketLatency:
    """What was measured at one size. Times in seconds.

    first_s: the first run at this size, which is not among `runs`.  discarded: of the runs, as warm-up.  steady:
    whether what followed looked steady.  items_per_s: of one stream, by the median.  streams_items_per_s: of several
    at once, together.  memory_bytes: peak over the process before it loaded the engine; of all buckets so far, in
    rising order.  device_bytes: in use on the engine's own device, by everybody; None where it has none.
    device_s: median of what the device itself is busy with a run, by its own events; None where it tells nothing.
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
    device_bytes: int | None = None
    streams: int = 1
    streams_items_per_s: float | None = None
    device_s: float | None = None

    @property
    def median_s(self) -> float:
        """The middle of the distribution: of a few runs too, where it has no interval."""
        return self.curve[len(self.curve) // 2]

    @property
    def items_per_s(self) -> float:
        """As many as a run holds, over its median: runs that the machine holds up belong to the tail."""
        return self.items / self.median_s

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        return {**asdict(self), "median_s": self.median_s, "items_per_s": self.items_per_s}


@dataclass(frozen=True)
class Speed:
    """load_s: from the engine's file, which lies in the page cache, to a session; the runtime was imported before.

    loaded_bytes: resident memory that this took.  resettable: whether the peak could be counted from there on.
    """

    load_s: float
    loaded_bytes: int
    resettable: bool
    buckets: Sequence[BucketLatency]

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        return {
            "load_s": self.load_s,
            "loaded_bytes": self.loaded_bytes,
            "memory_resettable": self.resettable,
            "buckets": [bucket.to_json() for bucket in self.buckets],
        }


def measure_speed(opens: Opens, buckets: Sequence[Bucket], asked: Asked) -> Speed:
    """Open an engine and measure it at each of its sizes. Raises what `opens` and the session raise."""
    resettable = forget_peak()
    before = resident_bytes()
    with ExitStack() as stack:
        opened: list[Session] = []
        load_s = timed(lambda: opened.append(stack.enter_context(opens())))
        loaded = resident_bytes() - before
        found = [_measured(opened[0], bucket, asked, before) for bucket in buckets]
    if asked.streams > 1:
        found = [_with_streams(opens, bucket, one, asked) for bucket, one in zip(buckets, found, strict=True)]
    return Speed(load_s, max(loaded, 0), resettable, found)


def _measured(session: Session, bucket: Bucket, asked: Asked, before: int) -> BucketLatency:
    inputs = _taken(session, bucket.inputs)
    first_s = timed(lambda: session.run(inputs))
    watch = Watch()
    series = latencies(lambda: session.run(inputs), asked.seconds)
    surroundings = watch.stop()
    discarded, steady = warm_up(series)
    kept = series[discarded:]
    return BucketLatency(
        name=bucket.name,
        sizes=dict(bucket.sizes),
        items=bucket.items,
        first_s=first_s,
        runs=len(series),
        discarded=discarded,
        steady=steady,
        mean_s=float(kept.mean()),
        quantiles=quantiles(kept),
        curve=curve(kept),
        memory_bytes=max(peak_bytes() - before, 0),
        surroundings=surroundings.to_json(),
        device_bytes=session.used_bytes() if isinstance(session, DeviceMemory) else None,
        device_s=median(session.device_seconds(inputs, DEVICE_RUNS)) if isinstance(session, DeviceTimed) else None,
    )


def _with_streams(opens: Opens, bucket: Bucket, one: BucketLatency, asked: Asked) -> BucketLatency:
    with ExitStack() as stack:
        sessions = [stack.enter_context(opens()) for _ in range(asked.streams)]
        runs = [_runner(session, _taken(session, bucket.inputs)) for session in sessions]
        for run in runs:
            run()
        rate = streams_per_second(runs, asked.seconds)
    return BucketLatency(**{**vars(one), "streams": asked.streams, "streams_items_per_s": rate * bucket.items})


def _runner(session: Session, inputs: Tensors) -> Callable[[], object]:
    return lambda: session.run(inputs)


def _taken(session: Session, inputs: Tensors) -> dict[str, Array]:
    return {spec.name: inputs[spec.name] for spec in session.inputs}
