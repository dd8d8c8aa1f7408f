"""The time of a run at each candidate size, of those at which an engine was timed."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core.types import Dim
from pipeline.traffic.search.request_grid import RequestGrid
from validation.traffic.service_times import ServiceTimes

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

    def table(self, edges: Sequence[Array], most: int) -> Array:
        """Mean seconds of a run of 1, 2, ... `most` samples at each combination of edges, [edges of each dim, most].

        Raises DataError for a size beyond those that were timed.
        """
        padded = np.array([pad_samples(self.batch, count) for count in range(1, most + 1)])
        distinct, places = np.unique(padded, return_inverse=True)
        axes = [np.asarray(edge) for edge in edges]
        sizes = np.array([*itertools.product(*axes, distinct)], np.int64)
        rows = np.roll(sizes, 1, 1) if self.batch else sizes[:, :-1]
        medians, _ = self.service.predict(rows)
        shape = (*map(len, axes), len(distinct))
        return np.asarray((medians * self._tail).reshape(shape)[..., places])

    def log_sd(self, sizes: Array, samples: int) -> Array:
        """Standard deviation of the logarithm of the time at each row of sizes, int64 [rows, dims]: float64 [rows]."""
        padded = np.full((len(sizes), 1), pad_samples(self.batch, samples), np.int64)
        return self.service.predict(np.hstack([padded, sizes]) if self.batch else sizes)[1]

    @cached_property
    def _tail(self) -> float:
        """Mean over median of run times: the median over the sizes that were timed."""
        curves = self.service.curves
        means = ((curves[:, 1:] + curves[:, :-1]) / 2).mean(1)
        return float(np.median(means / curves[:, curves.shape[1] // 2]))


def pad_samples(batch: Dim | None, count: int) -> int:
    """The number of samples that a run of `count` has: of a dim with buckets the next edge, else the next multiple."""
    if batch is None:
        return 1
    edges = batch.edges or [-(-max(count, batch.min) // batch.multiple) * batch.multiple]
    return next((edge for edge in edges if edge >= count), edges[-1])


def sizes_to_time(
    grid: RequestGrid, chosen: Sequence[str], batch: Dim | None, most: int, tops: Mapping[str, int]
) -> list[dict[str, int]]:
    """Sizes at which an engine is timed: candidates of chosen dims at about equal ratios, up to the tops, every bucket
    of the others, and powers of two for the samples, up to `most` in a run."""
    each = _ALONE if len(chosen) == 1 else _EACH
    axes: dict[str, list[int]] = {}
    if batch:
        powers = [2**power for power in range(most.bit_length()) if 2**power < most] + [most]
        if len(chosen) > 1:
            powers = sorted({powers[index] for index in np.linspace(0, len(powers) - 1, _BATCHES).astype(int)})
        axes[batch.name] = sorted({pad_samples(batch, power) for power in powers})
    for dim, edges in zip(grid.dims, grid.edges, strict=True):
        axes[dim] = spread(np.union1d(edges, [tops[dim]]), each) if dim in chosen else edges.tolist()
    return [dict(zip(axes, sizes, strict=True)) for sizes in itertools.product(*axes.values())]


def edges_to_time(edges: Mapping[str, Sequence[int]], batch: Dim | None, most: int) -> list[dict[str, int]]:
    """The sizes of buckets with these edges, with one sample and with `most`."""
    counts = sorted({pad_samples(batch, 1), pad_samples(batch, most)})
    axes = ({batch.name: counts} if batch else {}) | {dim: list(sizes) for dim, sizes in edges.items()}
    return [dict(zip(axes, sizes, strict=True)) for sizes in itertools.product(*axes.values())]


def spread(edges: Array, count: int) -> list[int]:
    """At most `count` of the edges at about equal ratios, both ends among them."""
    wanted = np.geomspace(edges[0], edges[-1], count) if edges[0] > 0 else np.linspace(edges[0], edges[-1], count)
    nearest = np.abs(edges[:, None] - wanted).argmin(0)
    return [int(size) for size in np.unique(edges[nearest])]
