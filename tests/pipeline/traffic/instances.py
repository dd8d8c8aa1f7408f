"""Small instances: requests on a grid, and times of runs that are a known function of the sizes."""

from collections.abc import Callable, Sequence

import numpy as np

from enginesmith.core.reports.latency import BucketLatency, Quantile, SystemLoad
from enginesmith.core.types import Dim, TensorSpec
from pipeline.traffic.place import BucketOptions, BucketTask, TrafficAtPlace, plan_task
from pipeline.traffic.request_grid import RequestGrid, RunTimes
from validation.traffic.service_times import ServiceTimes
from validation.traffic.trace import Trace

INPUTS = (TensorSpec("ids", "int64", ("batch", "length")),)
BATCH = Dim("batch", 1, 4, 8)
LENGTH = Dim("length", 1, 64, 64)


def seconds_at(batch: float, *sizes: float) -> float:
    """A run has an overhead, and costs more than its share of the batch."""
    return 2e-4 + 1e-5 * batch * float(np.prod([1.0 + 0.01 * size for size in sizes])) * sum(sizes)


def latency(sizes: dict[str, int], seconds: float) -> BucketLatency:
    return BucketLatency(
        name="",
        sizes=sizes,
        items=1,
        first_s=0.0,
        runs=100,
        discarded=0,
        steady=True,
        mean_s=seconds,
        quantiles=(Quantile(0.5, seconds, seconds, seconds, 100.0, 6),),
        curve=(seconds,) * 101,
        memory_bytes=0,
        surroundings=SystemLoad(1.0, None, None, None, 0.0, None, 1),
        process_medians_s=(seconds, seconds * 1.001),
    )


def measure(sizes: Sequence[dict[str, int]]) -> list[BucketLatency]:
    """Stands for an engine that is timed."""
    return [latency(dict(size), seconds_at(*size.values())) for size in sizes]


class KnownTimes(RunTimes):
    """Times without interpolation. of: seconds of a run of (samples, size of each dim...)."""

    def __init__(self, of: Callable[..., float] = seconds_at) -> None:
        zero_size = np.zeros((1, 1), np.int64)
        super().__init__(ServiceTimes(("length",), zero_size, np.ones((1, 3)), np.ones(1)), None)
        object.__setattr__(self, "of", of)

    def table(self, edges, max_samples):
        axes = np.meshgrid(*edges, np.arange(1, max_samples + 1), indexing="ij")
        return np.vectorize(lambda *sizes: self.of(sizes[-1], *sizes[:-1]))(*axes)

    def log_sd(self, sizes, samples):
        return np.full(len(sizes), 0.02)


def trace_of_sizes(lengths: Sequence[int], per_second: float | None = 200.0, seed: int = 0, **others) -> Trace:
    count = len(lengths)
    gaps = np.random.default_rng(seed).exponential(1.0 / per_second, count) if per_second else np.zeros(count)
    sizes = {"batch": np.ones(count, np.int64), "length": np.array(lengths, np.int64)}
    sizes |= {name: np.array(values, np.int64) for name, values in others.items()}
    sums = np.cumsum(gaps)
    return Trace(sums - sums[0], sizes)


def task_of(trace: Trace, options: BucketOptions | None = None, dims=(BATCH, LENGTH), inputs=INPUTS) -> BucketTask:
    return plan_task(inputs, dims, TrafficAtPlace(trace, ()), trace, options or BucketOptions())


def grid_of_sizes(*columns: Sequence[int], seed: int = 0) -> RequestGrid:
    """Requests whose candidates are their own sizes."""
    sizes = np.stack([np.array(column, np.int64) for column in columns], 1)
    edges = tuple(np.unique(column) for column in sizes.T)
    places = np.stack([np.searchsorted(edge, column) for edge, column in zip(edges, sizes.T, strict=True)], 1)
    sums = np.cumsum(np.random.default_rng(seed).exponential(0.004, len(sizes)))
    names = ("length", "width", "depth")[: len(columns)]
    return RequestGrid(names, edges, places, sizes, np.ones(len(sizes), np.int64), sums - sums[0])
