"""Requests on a grid of candidate edges, and the time of a run at each."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core.types import Dim
from validation.traffic.service_times import ServiceTimes
from validation.traffic.trace import Trace

# Candidates of the only dim that is chosen, and of each where there are several.
MOST_ALONE, MOST_EACH = 256, 32
# Longer traces are reduced to this many requests, in this many evenly spaced stretches.
MOST_REQUESTS, STRETCHES = 100_000, 50


@dataclass(frozen=True, eq=False)
class RequestGrid:
    """Requests in the order of arrival. dims: all but the batch.  edges: of each dim its candidates, rising, int64.

    places: index of the smallest candidate that holds the request, int64 [requests, dims].  sizes: int64, likewise.
    samples: in each request, int64 [requests].  at: arrival in seconds, float64 [requests]; None without times.
    """

    dims: tuple[str, ...]
    edges: tuple[Array, ...]
    places: Array
    sizes: Array
    samples: Array
    at: Array | None

    def __len__(self) -> int:
        return len(self.places)

    @property
    def seconds(self) -> float:
        """Seconds over which the requests came, one mean gap more than from the first to the last; 0 without times."""
        if self.at is None or len(self) < 2:
            return 0.0
        return float(self.at[-1]) * len(self) / (len(self) - 1)

    def edges_of(self, dim: str) -> Array:
        """The candidates of a dim."""
        return self.edges[self.dims.index(dim)]


def grid_of(
    trace: Trace,
    dims: Sequence[Dim],
    batch: str | None,
    bucket_dims: Sequence[str],
    *,
    tops: Mapping[str, int],
    at: Array | None,
) -> RequestGrid:
    """The requests of a trace, whose sizes lie within the dims.

    batch: the dim of samples, which gets no buckets here.  bucket_dims: dims that get buckets; the others keep theirs.
    tops: of chosen dims, the last edge.  at: arrivals in seconds; None for requests without times.
    Candidates of a chosen dim are all sizes that occur, as multiples of the dim's; where these are more than MOST_ALONE
    (MOST_EACH of several dims), as many of them at equal shares of the requests.
    """
    request_indices = _stretches(len(trace))
    axes = [dim for dim in dims if dim.name != batch]
    max_candidates = MOST_ALONE if len(bucket_dims) == 1 else MOST_EACH
    edges, positions, sizes = [], [], []
    for dim in axes:
        dim_sizes = trace.sizes[dim.name][request_indices]
        multiples = np.ceil(dim_sizes / dim.multiple).astype(np.int64) * dim.multiple
        if dim.name in bucket_dims:
            candidates = _thin(np.append(multiples, tops[dim.name]), max_candidates)
        else:
            candidates = np.array([high for _, _, high in dim.buckets()], np.int64)
        edges.append(candidates)
        positions.append(np.searchsorted(candidates, multiples))
        sizes.append(dim_sizes)
    count = len(request_indices)
    samples = trace.sizes[batch][request_indices] if batch else np.ones(count, np.int64)
    arrivals = None if at is None else _close_gaps(at, request_indices)
    shape = (count, len(axes))
    position_rows, size_rows = (np.stack(rows, 1) if rows else np.zeros(shape, np.int64) for rows in (positions, sizes))
    return RequestGrid(tuple(dim.name for dim in axes), tuple(edges), position_rows, size_rows, samples, arrivals)


def _thin(sizes: Array, max_sizes: int) -> Array:
    """The distinct sizes, rising; of too many, those at equal shares of the requests, and the greatest."""
    distinct_sizes = np.unique(sizes)
    if len(distinct_sizes) <= max_sizes:
        return distinct_sizes
    return np.unique(np.append(np.quantile(sizes, np.linspace(0, 1, max_sizes), method="higher"), distinct_sizes[-1]))


def _stretches(count: int) -> Array:
    """Indices of the requests that are used: all, or STRETCHES runs of neighbours evenly over them."""
    if count <= MOST_REQUESTS:
        return np.arange(count)
    length = MOST_REQUESTS // STRETCHES
    starts = np.linspace(0, count - length, STRETCHES).astype(np.int64)
    return np.asarray((starts[:, None] + np.arange(length)).ravel())


def _close_gaps(times: Array, kept_indices: Array) -> Array:
    """The times of the kept requests, without the gaps where requests were left out."""
    gaps = np.diff(times[kept_indices], prepend=times[kept_indices[0]])
    jumps = np.diff(kept_indices, prepend=kept_indices[0] - 1) > 1
    gaps[jumps] = float(times[-1]) / max(len(times) - 1, 1)
    return np.asarray(np.cumsum(gaps))


# Sizes at which the only chosen dim is timed, each of several, and the numbers of samples with several.
_ALONE, _EACH, _BATCHES = 8, 4, 3
MOST_TIMED = 96


@dataclass(frozen=True, eq=False)
class RunTimes:
    """Times of runs in seconds. service: over the batch, if there is one, and then the dims, in order.

    batch: the dim of samples; None where a run has one.
    """

    service: ServiceTimes
    batch: Dim | None

    def table(self, edges: Sequence[Array], max_samples: int) -> Array:
        """Mean seconds of a run of 1, 2, ... `max_samples` samples at each combination of edges, [edges of each dim,
        samples].

        Raises DataError for a size beyond those that were timed.
        """
        batch_sizes = np.array([pad_samples(self.batch, count) for count in range(1, max_samples + 1)])
        distinct_sizes, size_indices = np.unique(batch_sizes, return_inverse=True)
        axes = [np.asarray(edge) for edge in edges]
        sizes = np.array([*itertools.product(*axes, distinct_sizes)], np.int64)
        rows = np.roll(sizes, 1, 1) if self.batch else sizes[:, :-1]
        medians, _ = self.service.predict(rows)
        shape = (*map(len, axes), len(distinct_sizes))
        return np.asarray((medians * self._tail).reshape(shape)[..., size_indices])

    def log_sd(self, sizes: Array, samples: int) -> Array:
        """Standard deviation of the logarithm of the time at each row of sizes, int64 [rows, dims]: float64 [rows]."""
        batch_column = np.full((len(sizes), 1), pad_samples(self.batch, samples), np.int64)
        return self.service.predict(np.hstack([batch_column, sizes]) if self.batch else sizes)[1]

    @cached_property
    def _tail(self) -> float:
        """Mean over median of run times: the median over the sizes that were timed."""
        curves = self.service.curves
        means = ((curves[:, 1:] + curves[:, :-1]) / 2).mean(1)
        return float(np.median(means / curves[:, curves.shape[1] // 2]))


def pad_samples(batch: Dim | None, count: int) -> int:
    """Round `count` samples up to the size that an engine runs: the next edge of `batch`, or the next multiple."""
    if batch is None:
        return 1
    edges = batch.edges or [-(-max(count, batch.min) // batch.multiple) * batch.multiple]
    return next((edge for edge in edges if edge >= count), edges[-1])


def sizes_to_time(
    grid: RequestGrid, bucket_dims: Sequence[str], batch: Dim | None, max_samples: int, tops: Mapping[str, int]
) -> list[dict[str, int]]:
    """The sizes at which to time an engine: sizes of `bucket_dims` at about equal ratios up to `tops`, every bucket of
    other dims, and powers of two up to `max_samples` for the batch."""
    max_count = _ALONE if len(bucket_dims) == 1 else _EACH
    axes: dict[str, list[int]] = {}
    if batch:
        powers = [2**power for power in range(max_samples.bit_length()) if 2**power < max_samples] + [max_samples]
        if len(bucket_dims) > 1:
            powers = sorted({powers[index] for index in np.linspace(0, len(powers) - 1, _BATCHES).astype(int)})
        axes[batch.name] = sorted({pad_samples(batch, power) for power in powers})
    for dim, edges in zip(grid.dims, grid.edges, strict=True):
        axes[dim] = spread(np.union1d(edges, [tops[dim]]), max_count) if dim in bucket_dims else edges.tolist()
    return [dict(zip(axes, sizes, strict=True)) for sizes in itertools.product(*axes.values())]


def edges_to_time(edges: Mapping[str, Sequence[int]], batch: Dim | None, max_samples: int) -> list[dict[str, int]]:
    """The sizes of buckets with these edges, with one sample and with `max_samples`."""
    counts = sorted({pad_samples(batch, 1), pad_samples(batch, max_samples)})
    axes = ({batch.name: counts} if batch else {}) | {dim: list(sizes) for dim, sizes in edges.items()}
    return [dict(zip(axes, sizes, strict=True)) for sizes in itertools.product(*axes.values())]


def spread(edges: Array, count: int) -> list[int]:
    """At most `count` of the edges at about equal ratios, both ends among them."""
    target_sizes = np.geomspace(edges[0], edges[-1], count) if edges[0] > 0 else np.linspace(edges[0], edges[-1], count)
    nearest_indices = np.abs(edges[:, None] - target_sizes).argmin(0)
    return [int(size) for size in np.unique(edges[nearest_indices])]
