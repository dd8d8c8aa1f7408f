"""Run times of an engine by the number of samples in a batch, with their uncertainty, from its latency reports."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core.errors import DataError
from enginesmith.core.reports.latency import BucketLatency
from validation.latency.measurement.quantiles import BEYOND
from validation.statistics.distributions import NORMAL, t_quantile
from validation.traffic.service_times import ServiceTimes

_TAIL = 0.975
# Half of the 95 % interval of a time's logarithm where one process alone measured it: nothing is known of others.
ONE_PROCESS = 0.10


@dataclass(frozen=True, eq=False)
class BatchTimes:
    """Times of a run in seconds. curves: of a batch of 1, 2, ... samples, quantiles at equal steps from 0 to 1, float64
    [most, steps].  half: half of the 95 % interval of the logarithm of each, for one more process, float64 [most]."""

    curves: Array
    half: Array

    @property
    def most(self) -> int:
        """The largest batch that has a time."""
        return len(self.curves)

    def moved(self, sign: float) -> list[Array]:
        """The curves at the slow (1) or the fast end (-1) of their intervals, or as they are (0).

        With few processes, of which one was disturbed, an interval would reach from nanoseconds to hours: medians are
        at most BEYOND times the slowest run, and at least the fastest over it.
        """
        middle = self.curves[:, self.curves.shape[1] // 2]
        ends = self.curves[:, 0] / BEYOND / middle, self.curves[:, -1] * BEYOND / middle
        return list(self.curves * np.clip(np.exp(sign * self.half), *ends)[:, None])

    def with_overhead(self, batch_s: float, request_s: float) -> "BatchTimes":
        """The times with what a server adds to them: `batch_s` to each batch, `request_s` for each of its requests."""
        added = batch_s + request_s * np.arange(1, self.most + 1)
        return BatchTimes(self.curves + added[:, None], self.half)


def merge_buckets(reports: Iterable[Sequence[BucketLatency]]) -> list[BucketLatency]:
    """The times of several reports of one engine on one kind of machine. reports: oldest first; of a size that was
    timed again the newer one counts."""
    found = {tuple(sorted(bucket.sizes.items())): bucket for buckets in reports for bucket in buckets}
    return list(found.values())


def batch_times(
    buckets: Sequence[BucketLatency], batch: str | None, others: Mapping[str, int], most: int, least: int = 1
) -> BatchTimes:
    """The times of a batch of 1 to `most` samples.

    batch: the dim of the batch, None where the engine has none.  others: size of every other dim.  least: the smallest
    batch that the engine takes; to it smaller ones are padded.
    Raises DataError, with the command that times it, for sizes outside of what was timed.
    """
    if batch is None:
        return _at(buckets, tuple(others), np.array([list(others.values())], np.int64).reshape(1, len(others)))
    at_others = [one for one in buckets if all(one.sizes.get(dim) == size for dim, size in others.items())]
    counts = np.maximum(np.arange(1, most + 1), least)
    timed = [one.sizes[batch] for one in at_others]
    if timed and min(timed) <= counts[0] and counts[-1] <= max(timed):
        return _at(at_others, (batch,), counts[:, None])
    dims = (batch, *others)
    rows = np.array([[count, *others.values()] for count in counts.tolist()], np.int64)
    timed_sizes = np.array([[one.sizes[dim] for dim in dims] for one in buckets], np.int64)
    inside = (rows >= timed_sizes.min(0)) & (rows <= timed_sizes.max(0))
    if not others or not inside.all() or not _spans(timed_sizes):
        raise DataError(_remedy(batch, others, least, most))
    return _at(buckets, dims, rows)


def _at(buckets: Sequence[BucketLatency], dims: tuple[str, ...], sizes: Array) -> BatchTimes:
    times = ServiceTimes.of_buckets(buckets, dims)
    _, error = times.predict(sizes)
    spread = np.array([_process_half(one.process_medians_s) for one in buckets])
    apart = np.abs(np.log(sizes)[:, None] - np.log(times.sizes)[None]).sum(-1)
    half = np.hypot(spread[apart.argmin(1)], NORMAL.inv_cdf(_TAIL) * error)
    return BatchTimes(times.curves_at(sizes), half)


def _process_half(medians_s: Sequence[float]) -> float:
    """Half of the 95 % interval of the logarithm of one more process's median (as `latency.measurement.quantiles`)."""
    if len(medians_s) < 3:
        return ONE_PROCESS
    spread = float(np.std(np.log(medians_s), ddof=1))
    return t_quantile(_TAIL, len(medians_s) - 1.0) * spread * math.sqrt(1.0 + 1.0 / len(medians_s))


def _spans(timed: Array) -> bool:
    """Whether sizes ([points, dims]) say how each dim by itself changes the time: they lie on no line or plane."""
    logs = np.log(timed)
    return len(logs) > logs.shape[1] and bool(np.linalg.matrix_rank(logs - logs.mean(0), tol=0.1) == logs.shape[1])


def _remedy(batch: str, others: Mapping[str, int], least: int, most: int) -> str:
    at = ",".join(f"{dim}={size}" for dim, size in others.items())
    where = f" at {at.replace(',', ' ')}" if at else ""
    ends = " ".join(
        f"--bucket {','.join(part for part in (f'{batch}={size}', at) if part)}"
        for size in dict.fromkeys((least, most))
    )
    return f"{batch}={least} to {most}{where} was not timed; time it: enginesmith profile REF {ends} --record"
