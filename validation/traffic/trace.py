"""Recorded traffic as a trace: when each request arrives, and its sizes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core.errors import DataError
from enginesmith.core.types import TensorSpec
from enginesmith.recording.traffic import RecordedTraffic


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests in the order of their arrival. at: seconds since the first, float64 [requests], rising; all 0 if the
    traffic has no times.  sizes: named dim -> its size in each request, int64 [requests].  start: arrival of the first,
    in seconds since the epoch if that was recorded; 0 without times."""

    at: Array
    sizes: Mapping[str, Array]
    start: float = 0.0

    def __len__(self) -> int:
        return len(self.at)

    @property
    def timed(self) -> bool:
        """Whether the trace has times of arrival."""
        return len(self.at) > 1 and bool(self.at[-1] > 0)

    @property
    def per_second(self) -> float:
        """Mean rate of arrivals in requests a second. Raises DataError for a trace without times."""
        if not self.timed:
            raise DataError(
                "the traffic has no times of arrival, or all of them are the same; record it with `at`, or give a rate"
            )
        return (len(self.at) - 1) / float(self.at[-1])


def trace_of(traffic: RecordedTraffic, inputs: Sequence[TensorSpec]) -> Trace:
    """The trace of recorded traffic. inputs: the model's, with named dims. Raises DataError if a dim has two sizes in
    one request."""
    axes = [
        (spec.name, axis, dim)
        for spec in inputs
        for axis, dim in enumerate(spec.shape)
        if isinstance(dim, str) and dim.isidentifier()
    ]
    sizes: dict[str, list[int]] = {str(dim): [] for _, _, dim in axes}
    for number, request in enumerate(traffic.requests):
        dim_sizes: dict[str, int] = {}
        for name, axis, dim in axes:
            size = request.inputs[name].shape[axis]
            if dim_sizes.setdefault(str(dim), size) != size:
                raise DataError(
                    f"request {number}: dim {dim!r} is {dim_sizes[str(dim)]} in one input and {size} in {name!r}"
                )
        for dim, size in dim_sizes.items():
            sizes[dim].append(size)
    arrivals = np.array([request.at for request in traffic.requests], np.float64)
    return Trace(arrivals, {dim: np.array(values, np.int64) for dim, values in sizes.items()}, traffic.start)
