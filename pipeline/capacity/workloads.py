"""What one machine is asked to do: workloads from Poisson or recorded arrivals, and which sizes of other dims run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core.errors import DataError, InputError
from enginesmith.core.types import Dim
from validation.capacity.greatest_rate import REQUESTS, SIMULATIONS, Workload, poisson_workload, recorded_workload
from validation.latency.measurement.buckets import parse_sizes, tuned_for
from validation.traffic.trace import Trace

# Recorded requests that are too few to show the latest in a hundred are refused.
LEAST_REQUESTS = 100


@dataclass(frozen=True, eq=False)
class AskedWorkload:
    """Independent workloads, and what each of their queues runs at: sizes of the dims but the batch.  words: what the
    arrivals are."""

    workloads: tuple[Workload, ...]
    queues: tuple[Mapping[str, int], ...]
    words: str


def sizes_of_request(text: str | None, dims: Sequence[Dim], batch: str | None) -> dict[str, int]:
    """Sizes of a request of one sample: those of 'length=64', and for other dims what they are tuned for.

    Raises InputError as `parse_sizes`, and for more samples, which a batcher joins.
    """
    sizes = parse_sizes(text, dims) if text else tuned_for(dims)
    named = {part.partition("=")[0].strip() for part in (text or "").split(",")}
    if batch in named and sizes[batch] != 1:
        raise InputError(
            f"--at {batch}={sizes[batch]}: a request has one sample, and the batcher joins them (--batch);"
            " requests of more are those of --traffic"
        )
    return {name: 1 if name == batch else size for name, size in sizes.items()}


def steady_workload(sizes: Mapping[str, int]) -> AskedWorkload:
    """Poisson arrivals of one sample each. sizes: of the other dims."""
    works = tuple(poisson_workload(seed) for seed in range(SIMULATIONS))
    at = ", ".join(f"{dim}={size}" for dim, size in sizes.items())
    return AskedWorkload(works, (sizes,), "Poisson arrivals of one sample" + (f" at {at}" if at else ""))


def traffic_workload(trace: Trace, dims: Sequence[Dim], batch: str | None) -> AskedWorkload:
    """Arrivals and sizes of recorded requests; Poisson arrivals where those have no times.

    A size becomes the edge of the bucket that holds it, where the spec has buckets for the dim.
    Raises DataError for too few requests, and for a size beyond the spec's.
    """
    if len(trace) < LEAST_REQUESTS:
        raise DataError(f"the traffic has {len(trace)} requests; p99 takes at least {LEAST_REQUESTS}: record more")
    ones = np.ones(len(trace), np.int64)
    samples = trace.sizes.get(batch, ones) if batch else ones
    rows = [_raise_to_edges(dim, trace.sizes[dim.name]) for dim in dims if dim.name != batch]
    names = [dim.name for dim in dims if dim.name != batch]
    distinct, queues = np.unique(np.array(rows, np.int64).reshape(len(rows), len(trace)), axis=1, return_inverse=True)
    sizes = tuple(dict(zip(names, column, strict=True)) for column in distinct.T.tolist()) or ({},)
    queues = np.asarray(queues, np.int64).ravel()
    seeds = range(SIMULATIONS)
    if trace.timed:
        works = tuple(recorded_workload(trace.at, samples, queues, seed) for seed in seeds)
    else:
        works = tuple(poisson_workload(seed, REQUESTS, (samples, queues)) for seed in seeds)
    arrivals = "recorded arrivals, scaled in time" if trace.timed else "Poisson arrivals of recorded sizes"
    return AskedWorkload(works, sizes, f"{arrivals} ({len(trace)} requests)")


def _raise_to_edges(dim: Dim, sizes: Array) -> Array:
    if beyond := sizes[(sizes < dim.min) | (sizes > dim.max)].tolist():
        raise DataError(
            f"the traffic has {dim.name}={beyond[0]}, and the model takes {dim.words}; record other traffic"
        )
    edges = np.array(dim.edges, np.int64)
    return edges[np.searchsorted(edges, sizes)] if len(edges) else sizes
