"""What buckets are chosen for: the dims, the batcher, the arrivals, checked against the spec and the traffic."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core.errors import DataError, InputError
from enginesmith.core.text import suggest
from enginesmith.core.types import Dim, TensorSpec
from pipeline.traffic.place import TrafficAtPlace
from pipeline.traffic.search.request_grid import RequestGrid, grid_of
from pipeline.traffic.search.run_times import sizes_to_time
from validation.data.batches import leading_dim
from validation.traffic.batching import BatchPolicy
from validation.traffic.trace import Trace


@dataclass(frozen=True)
class BucketOptions:
    """dims: that get buckets; () for all but the batch.  most: profiles at most; None for as many as pay.

    batch: samples in a batch at most; None for the greatest that the model takes, where the traffic has times.
    wait_s: as in `BatchPolicy`.  rate: requests a second to plan for; None for that of the traffic.
    profile_price_s: engine seconds that a profile costs in a day; None for what is on record.
    shrink: whether the greatest bucket may end at the greatest size of the traffic.  timing_s: of each size.
    """

    dims: tuple[str, ...] = ()
    most: int | None = None
    batch: int | None = None
    wait_s: float = 0.0
    rate: float | None = None
    profile_price_s: float | None = None
    shrink: bool = False
    timing_s: float = 0.3


@dataclass(frozen=True, eq=False)
class BucketTask:
    """dims: all of the spec.  chosen: those that get buckets.  batch: the dim of samples, if it gets none.

    policy: None where each request runs alone.  remarks: what was decided, for people.
    """

    dims: tuple[Dim, ...]
    chosen: tuple[str, ...]
    batch: Dim | None
    policy: BatchPolicy | None
    grid: RequestGrid
    remarks: tuple[str, ...]

    @property
    def most_samples(self) -> int:
        """The most samples in a run: of a batch, or of a request that is larger."""
        return int(max(self.grid.samples.max(), self.policy.most if self.policy else 1))

    def first_sizes(self) -> list[dict[str, int]]:
        """The sizes at which an engine is timed before anything is chosen."""
        tops = {dim.name: dim.max for dim in self.dims}
        return sizes_to_time(self.grid, self.chosen, self.batch, self.most_samples, tops)


def plan_task(
    inputs: Sequence[TensorSpec], dims: Sequence[Dim], traffic: TrafficAtPlace, within: Trace, options: BucketOptions
) -> BucketTask:
    """The task for traffic to a model.  within: its requests that lie within the dims.

    Raises InputError for options that the model or its traffic has nothing for.
    """
    batch = _batch_dim(inputs, dims, options)
    chosen = _choose_dims(dims, batch, options)
    policy, remarks = _policy(batch, within, options)
    at = _arrivals(traffic, within, options)
    tops = {dim.name: _top(dim, within, options.shrink) for dim in dims}
    grid = grid_of(within, dims, batch.name if batch else None, chosen, tops=tops, at=at)
    if at is None and options.most is None:
        raise InputError("without times of arrival a profile has no price for each request; give --most, or --rate")
    for name in chosen:
        count = len(np.unique(within.sizes[name]))
        if len(chosen) == 1 and options.most is not None and options.most > len(grid.edges_of(name)):
            remarks += (f"{name} has {count} distinct sizes in the traffic: more buckets than that save nothing",)
    return BucketTask(tuple(dims), chosen, batch, policy, grid, remarks)


def _batch_dim(inputs: Sequence[TensorSpec], dims: Sequence[Dim], options: BucketOptions) -> Dim | None:
    name = leading_dim(inputs)
    found = next((dim for dim in dims if dim.name == name), None)
    if found is None or found.name not in options.dims:
        return found
    if options.batch and options.batch > 1:
        raise InputError(f"{found.name} gets no buckets of its own where requests are put together; leave out --batch")
    return None


def _choose_dims(dims: Sequence[Dim], batch: Dim | None, options: BucketOptions) -> tuple[str, ...]:
    known = {dim.name: dim for dim in dims}
    for name in options.dims:
        if name not in known:
            raise InputError(f"dim {name!r} is no dynamic dim of the model; {suggest(name, known)}")
        if known[name].static:
            raise InputError(f"dim {name!r} has the size {known[name].min} alone, so there is nothing to choose")
    chosen = options.dims or tuple(dim.name for dim in dims if dim is not batch and not dim.static)
    if not chosen:
        raise InputError("the model has no dynamic dim but the batch; --dim names a dim that shall get buckets")
    if len(chosen) > 3:
        raise InputError(f"{', '.join(chosen)} are {len(chosen)} dims, and 3 at most are chosen at once; give --dim")
    return chosen


def _policy(batch: Dim | None, within: Trace, options: BucketOptions) -> tuple[BatchPolicy | None, tuple[str, ...]]:
    asked = (options.batch or 0) > 1 or options.wait_s > 0
    if batch is None:
        if asked:
            raise InputError("requests cannot be put together: the model has no dim that all inputs begin with")
        return None, ()
    if options.batch is not None and options.batch > batch.max:
        raise InputError(f"--batch {options.batch} is more than dims.{batch.name} takes ({batch.words})")
    if not within.timed and options.rate is None:
        if asked:
            raise DataError(
                "the traffic has no times of arrival, so how batches form is not known; record it with `at`, "
                "or give --rate"
            )
        return None, ("the traffic has no times of arrival: each request is taken to run alone",)
    most = options.batch or batch.max
    return (BatchPolicy(most, options.wait_s), ()) if most > 1 else (None, ())


def _arrivals(traffic: TrafficAtPlace, within: Trace, options: BucketOptions) -> Array | None:
    """Seconds of arrival of the real traffic, of which a share was recorded; at the rate asked for. Without times in
    the record those of a Poisson process."""
    if within.timed:
        faster = options.rate / within.per_second if options.rate else 1.0 / traffic.sampling
        return within.at / faster
    if options.rate is None:
        return None
    at = np.cumsum(np.random.default_rng(0).exponential(1.0 / options.rate, len(within)))
    return np.asarray(at - at[0])


def _top(dim: Dim, within: Trace, shrink: bool) -> int:
    greatest = int(within.sizes[dim.name].max())
    return min(-(-greatest // dim.multiple) * dim.multiple, dim.max) if shrink else dim.max


def whole_range(task: BucketTask) -> dict[str, tuple[int, ...]]:
    """One bucket for each chosen dim."""
    return _edges(task, lambda dim: (dim.max,))


def powers_of_two(task: BucketTask) -> dict[str, tuple[int, ...]]:
    """Powers of two (of a dim with multiples, their products with it) as the edges of each chosen dim."""

    def powers(dim: Dim) -> tuple[int, ...]:
        sizes = (dim.multiple * 2**power for power in range(dim.max.bit_length()))
        return (*(size for size in sizes if dim.min <= size < dim.max), dim.max)

    return _edges(task, powers)


def present_buckets(task: BucketTask) -> dict[str, tuple[int, ...]]:
    """The edges that the spec has."""
    return _edges(task, lambda dim: tuple(high for _, _, high in dim.buckets()))


def _edges(task: BucketTask, of_chosen: Callable[[Dim], tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {
        dim.name: of_chosen(dim) if dim.name in task.chosen else tuple(high for _, _, high in dim.buckets())
        for dim in task.dims
        if dim.name in task.grid.dims
    }
