"""Recorded traffic at a place, and the task of choosing buckets for it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core.errors import DataError, InputError
from enginesmith.core.text import pluralize, suggest
from enginesmith.core.types import Dim, TensorSpec
from enginesmith.recording.json_lines import JsonLinesReader
from enginesmith.recording.traffic import MOST_LINE_BYTES, RecordedTraffic, read_traffic
from pipeline.traffic.request_grid import RequestGrid, grid_of, sizes_to_time
from validation.data.batches import leading_dim
from validation.traffic.batching_simulation import BatchPolicy
from validation.traffic.trace import Trace, trace_of

SUFFIXES = (".jsonl", ".ndjson", ".npz")
# Times of arrival from here on (2001) are taken for seconds since the epoch.
EPOCH_S = 1e9


@dataclass(frozen=True, eq=False)
class TrafficAtPlace:
    """The trace of all files.  sampling: share of the real traffic that was recorded.  cut: files whose last line was
    half written.  made: how it was generated; '' for recorded traffic."""

    trace: Trace
    files: tuple[Path, ...]
    sampling: float = 1.0
    cut: tuple[Path, ...] = ()
    made: str = ""

    @property
    def absolute(self) -> bool:
        """Whether its times are seconds since the epoch."""
        return self.trace.timed and self.trace.start >= EPOCH_S

    @property
    def per_second(self) -> float:
        """Mean requests a second of the real traffic. Raises DataError for traffic without times."""
        return self.trace.per_second / self.sampling


@dataclass(frozen=True, eq=False)
class SplitTrace:
    """Requests whose sizes the dims have, and how many lie beyond them.

    beyond: dim -> sizes beyond it and how many requests have each; a request may be beyond several dims.
    """

    within: Trace
    beyond: dict[str, dict[int, int]]
    requests: int

    @property
    def fallback_share(self) -> float:
        """Share of the requests that no bucket of these dims can hold."""
        return 1.0 - len(self.within) / self.requests


def model_of_place(place: Path) -> str:
    """The model that traffic names; '' if it names none. Raises DataError for a place without traffic."""
    return _said_model(_files_of(place)[0])


def _said_model(file: Path) -> str:
    if file.suffix == ".npz":
        return ""
    first_record = next((record for _, record in JsonLinesReader(file, MOST_LINE_BYTES)), {})
    model = first_record.get("model") if "kind" in first_record else None
    return model if isinstance(model, str) else ""


def read_place(place: Path, inputs: Sequence[TensorSpec], model: str = "") -> TrafficAtPlace:
    """The traffic of a file, or of all .jsonl, .ndjson and .npz files of a folder, in the order of arrival.

    inputs: of the model.  model: its name; '' for any. Raises DataError for traffic that is empty, damaged or of
    another model, and for files that do not belong together.
    """
    files = _files_of(place)
    traffic_parts: list[tuple[RecordedTraffic, Trace]] = []
    for file in files:
        check_model(file, model)
        traffic = read_traffic(file, inputs)
        # The inputs are let go: only their sizes are needed.
        traffic_parts.append((replace(traffic, requests=traffic.requests[:1]), trace_of(traffic, inputs)))
    records = [record for record, _ in traffic_parts]
    first_record = records[0]
    for file, record in zip(files[1:], records[1:], strict=True):
        file_pair = f"{files[0]} and {file}"
        if record.sampling != first_record.sampling:
            shares = f"{first_record.sampling:g} and {record.sampling:g}"
            raise DataError(f"{file_pair} hold {shares} of the traffic; give files with the same share")
        if record.timed != first_record.timed:
            raise DataError(f"only one of {file_pair} has times of arrival; give such files separately")
        if record.timed and min(record.start, first_record.start) < EPOCH_S:
            raise DataError(f"{file_pair} have times that are not seconds since the epoch, so their order is unknown")
    cut_files = tuple(file for file, record in zip(files, records, strict=True) if record.cut)
    origin = next((record.made for record in records if record.made), "")
    return TrafficAtPlace(_merge([trace for _, trace in traffic_parts]), files, records[0].sampling, cut_files, origin)


def check_model(file: Path, model: str) -> None:
    """Raise DataError for a file whose first line says that it is of another model. model: '' for any."""
    if model and (stated_model := _said_model(file)) not in ("", model):
        raise DataError(f"{file} is traffic of {stated_model!r}, not of {model!r}; give its own spec or version")


def split_beyond(trace: Trace, dims: Sequence[Dim]) -> SplitTrace:
    """The requests that lie within all dims, and the sizes of the others. Raises DataError if none lies within."""
    is_within = np.ones(len(trace), bool)
    outlier_counts: dict[str, dict[int, int]] = {}
    for dim in dims:
        sizes = trace.sizes[dim.name]
        outliers = (sizes < dim.min) | (sizes > dim.max)
        is_within &= ~outliers
        if outliers.any():
            values, counts = np.unique(sizes[outliers], return_counts=True)
            outlier_counts[dim.name] = dict(zip(values.tolist(), counts.tolist(), strict=True))
    if not is_within.any():
        ranges = ", ".join(f"{dim.name} {dim.words}" for dim in dims)
        raise DataError(f"none of the {pluralize(len(trace), 'request')} is within the dims ({ranges}); widen them")
    arrivals = trace.at[is_within]
    start = trace.start + float(arrivals[0]) if trace.start else 0.0
    inner_sizes = {name: values[is_within] for name, values in trace.sizes.items()}
    return SplitTrace(Trace(arrivals - arrivals[0], inner_sizes, start), outlier_counts, len(trace))


def _files_of(place: Path) -> tuple[Path, ...]:
    if place.is_file():
        return (place,)
    if not place.is_dir():
        raise DataError(
            f"{place} does not exist; give a file that `enginesmith traffic record` wrote, or a folder of them"
        )
    files = tuple(sorted(file for file in place.iterdir() if file.suffix in SUFFIXES))
    if not files:
        raise DataError(f"{place} holds no traffic; files of traffic end in {', '.join(SUFFIXES)}")
    return files


def _merge(traces: Sequence[Trace]) -> Trace:
    """Several traces as one, by the time of arrival; without times, one behind the other."""
    if len(traces) == 1:
        return traces[0]
    start = min(trace.start for trace in traces)
    arrivals = np.concatenate([trace.at + (trace.start - start) for trace in traces])
    order = np.argsort(arrivals, kind="stable")
    names = traces[0].sizes
    sizes = {name: np.concatenate([trace.sizes[name] for trace in traces])[order] for name in names}
    return Trace(arrivals[order], sizes, start)


# Gives the edges of a dim's buckets.
EdgesOf = Callable[[Dim], tuple[int, ...]]


@dataclass(frozen=True)
class BucketOptions:
    """How buckets are chosen. dims: that get buckets; () for all but the batch.  max_profiles: None for as many as
    reduce the cost.

    batch: samples in a batch at most; None for the greatest that the model takes, where the traffic has times.
    wait_s: as in `BatchPolicy`.  rate: requests a second to plan for; None for that of the traffic.
    profile_price_s: engine seconds that a profile costs in a day; None for what is on record.
    shrink: whether the greatest bucket may end at the greatest size of the traffic.  timing_s: of each size.
    """

    dims: tuple[str, ...] = ()
    max_profiles: int | None = None
    batch: int | None = None
    wait_s: float = 0.0
    rate: float | None = None
    profile_price_s: float | None = None
    shrink: bool = False
    timing_s: float = 0.3


@dataclass(frozen=True, eq=False)
class BucketTask:
    """The task of choosing buckets.  dims: all of the spec.  chosen: those that get buckets.  batch: the dim of
    samples, if it gets none.

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

    def edges(self, of_chosen: EdgesOf) -> dict[str, tuple[int, ...]]:
        """The edges of each dim of the grid: of a chosen one by `of_chosen`, of another those of the spec."""
        dims = [dim for dim in self.dims if dim.name in self.grid.dims]
        return {dim.name: (of_chosen if dim.name in self.chosen else present_edges)(dim) for dim in dims}

    def first_sizes(self) -> list[dict[str, int]]:
        """The sizes at which an engine is timed before anything is chosen."""
        top_sizes = {dim.name: dim.max for dim in self.dims}
        return sizes_to_time(self.grid, self.chosen, self.batch, self.most_samples, top_sizes)


def plan_task(
    inputs: Sequence[TensorSpec], dims: Sequence[Dim], traffic: TrafficAtPlace, within: Trace, options: BucketOptions
) -> BucketTask:
    """The task for traffic to a model.  within: its requests that lie within the dims.

    Raises InputError for options that do not apply to the model or its traffic.
    """
    batch = _batch_dim(inputs, dims, options)
    bucket_dims = _choose_dims(dims, batch, options)
    policy, remarks = _policy(batch, within, options)
    arrivals = _arrivals(traffic, within, options)
    largest_sizes = {dim: int(within.sizes[dim.name].max()) if options.shrink else dim.max for dim in dims}
    top_sizes = {dim.name: min(-(-size // dim.multiple) * dim.multiple, dim.max) for dim, size in largest_sizes.items()}
    grid = grid_of(within, dims, batch.name if batch else None, bucket_dims, tops=top_sizes, at=arrivals)
    if arrivals is None and options.max_profiles is None:
        raise InputError("without times of arrival a profile has no price for each request; give --most, or --rate")
    if len(bucket_dims) == 1 and (options.max_profiles or 0) > len(grid.edges_of(bucket_dims[0])):
        count = len(np.unique(within.sizes[bucket_dims[0]]))
        remarks += (f"{bucket_dims[0]} has {count} distinct sizes in the traffic: more buckets than that save nothing",)
    return BucketTask(tuple(dims), bucket_dims, batch, policy, grid, remarks)


def _batch_dim(inputs: Sequence[TensorSpec], dims: Sequence[Dim], options: BucketOptions) -> Dim | None:
    name = leading_dim(inputs)
    named_dim = next((dim for dim in dims if dim.name == name), None)
    if named_dim is None or named_dim.name not in options.dims:
        return named_dim
    if options.batch and options.batch > 1:
        raise InputError(f"{named_dim.name} gets no buckets of its own if requests are batched; leave out --batch")
    return None


def _choose_dims(dims: Sequence[Dim], batch: Dim | None, options: BucketOptions) -> tuple[str, ...]:
    dims_by_name = {dim.name: dim for dim in dims}
    for name in options.dims:
        if name not in dims_by_name:
            raise InputError(f"dim {name!r} is not a dynamic dim of the model; {suggest(name, dims_by_name)}")
        if dims_by_name[name].static:
            raise InputError(f"dim {name!r} has only the size {dims_by_name[name].min}, so there is nothing to choose")
    bucket_dims = options.dims or tuple(dim.name for dim in dims if dim is not batch and not dim.static)
    if not bucket_dims:
        raise InputError("the model has no dynamic dim but the batch; give --dim to choose buckets for the batch")
    if len(bucket_dims) > 3:
        raise InputError(
            f"{', '.join(bucket_dims)} are {len(bucket_dims)} dims, but at most 3 can be chosen at once; give --dim"
        )
    return bucket_dims


def _policy(batch: Dim | None, within: Trace, options: BucketOptions) -> tuple[BatchPolicy | None, tuple[str, ...]]:
    is_batched = (options.batch or 0) > 1 or options.wait_s > 0
    if batch is None:
        if is_batched:
            raise InputError(
                "requests cannot be batched: no dim begins all inputs, or --dim names it; leave out --batch and --wait"
            )
        return None, ()
    if options.batch is not None and options.batch > batch.max:
        raise InputError(f"--batch {options.batch} is more than dims.{batch.name} accepts ({batch.words})")
    if not within.timed and options.rate is None:
        if is_batched:
            raise DataError(
                "the traffic has no times of arrival, so how batches form is not known; record it with `at`, "
                "or give --rate"
            )
        return None, ("the traffic has no times of arrival: each request is taken to run alone",)
    max_batch = options.batch or batch.max
    return (BatchPolicy(max_batch, options.wait_s), ()) if max_batch > 1 else (None, ())


def _arrivals(traffic: TrafficAtPlace, within: Trace, options: BucketOptions) -> Array | None:
    """Seconds of arrival of the real traffic, of which a share was recorded; at the rate asked for. Without times in
    the record those of a Poisson process."""
    if within.timed:
        speedup = options.rate / within.per_second if options.rate else 1.0 / traffic.sampling
        return within.at / speedup
    if options.rate is None:
        return None
    arrivals = np.cumsum(np.random.default_rng(0).exponential(1.0 / options.rate, len(within)))
    return np.asarray(arrivals - arrivals[0])


def powers_of_two(dim: Dim) -> tuple[int, ...]:
    """Powers of two as the edges of a dim; of one with multiples, their products with it."""
    sizes = (dim.multiple * 2**power for power in range(dim.max.bit_length()))
    return (*(size for size in sizes if dim.min <= size < dim.max), dim.max)


def present_edges(dim: Dim) -> tuple[int, ...]:
    """The edges that the spec has for a dim."""
    return tuple(high for _, _, high in dim.buckets())
