"""Requests on a grid of candidate edges: what buckets are chosen from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core.types import Dim
from validation.traffic.trace import Trace

# Candidates of the only dim that is chosen, and of each where there are several.
MOST_ALONE, MOST_EACH = 256, 32
# Longer traces are cut down to so many requests, in so many stretches evenly over them.
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
    chosen: Sequence[str],
    *,
    tops: Mapping[str, int],
    at: Array | None,
) -> RequestGrid:
    """The requests of a trace, whose sizes lie within the dims.

    batch: the dim of samples, which gets no buckets here.  chosen: dims that get buckets; the others keep theirs.
    tops: of chosen dims, the last edge.  at: arrivals in seconds; None for requests without times.
    Candidates of a chosen dim are all sizes that occur, as multiples of the dim's; where these are more than MOST_ALONE
    (MOST_EACH of several dims), as many of them at equal shares of the requests.
    """
    kept = _stretches(len(trace))
    axes = [dim for dim in dims if dim.name != batch]
    most = MOST_ALONE if len(chosen) == 1 else MOST_EACH
    edges, places, sizes = [], [], []
    for dim in axes:
        found = trace.sizes[dim.name][kept]
        rounded = np.ceil(found / dim.multiple).astype(np.int64) * dim.multiple
        if dim.name in chosen:
            candidates = _thin(np.append(rounded, tops[dim.name]), most)
        else:
            candidates = np.array([high for _, _, high in dim.buckets()], np.int64)
        edges.append(candidates)
        places.append(np.searchsorted(candidates, rounded))
        sizes.append(found)
    count = len(kept)
    samples = trace.sizes[batch][kept] if batch else np.ones(count, np.int64)
    when = None if at is None else _close_gaps(at, kept)
    shape = (count, len(axes))
    placed, sized = (np.stack(rows, 1) if rows else np.zeros(shape, np.int64) for rows in (places, sizes))
    return RequestGrid(tuple(dim.name for dim in axes), tuple(edges), placed, sized, samples, when)


def _thin(sizes: Array, most: int) -> Array:
    """The distinct sizes, rising; of too many, those at equal shares of the requests, and the greatest."""
    distinct = np.unique(sizes)
    if len(distinct) <= most:
        return distinct
    return np.unique(np.append(np.quantile(sizes, np.linspace(0, 1, most), method="higher"), distinct[-1]))


def _stretches(count: int) -> Array:
    """Indices of the requests that are used: all, or STRETCHES runs of neighbours evenly over them."""
    if count <= MOST_REQUESTS:
        return np.arange(count)
    length = MOST_REQUESTS // STRETCHES
    starts = np.linspace(0, count - length, STRETCHES).astype(np.int64)
    return np.asarray((starts[:, None] + np.arange(length)).ravel())


def _close_gaps(at: Array, kept: Array) -> Array:
    """The times of the kept requests, without the gaps where requests were left out."""
    gaps = np.diff(at[kept], prepend=at[kept[0]])
    jumps = np.diff(kept, prepend=kept[0] - 1) > 1
    gaps[jumps] = float(at[-1]) / max(len(at) - 1, 1)
    return np.asarray(np.cumsum(gaps))
