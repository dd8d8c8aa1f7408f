"""What a trace holds: histograms of dims, joint ones of pairs, the same by hour, and how bursty its arrivals are."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import combinations

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core.types import Dim
from pipeline.traffic.place import TrafficAtPlace
from validation.traffic.trace import Trace

HOUR_S = 3600.0
# With more hours than this they are put together by the hour of the day.
MOST_HOURS = 48
QUANTILES = (0.5, 0.9, 0.99)
# Rates are over a minute at least: an hour of which a second was recorded has none.
_LEAST_S = 60.0


@dataclass(frozen=True)
class SizeCounts:
    """A histogram. counts: size -> requests.  quantiles: of the sizes, at QUANTILES."""

    counts: Mapping[int, int]
    mean: float
    quantiles: tuple[float, ...]

    @property
    def least(self) -> int:
        """The smallest size."""
        return min(self.counts)

    @property
    def greatest(self) -> int:
        """The greatest size."""
        return max(self.counts)


@dataclass(frozen=True)
class PairCounts:
    """A joint histogram. dims: the pair.  counts: (size, size, requests) of each pair that occurs."""

    dims: tuple[str, str]
    counts: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class HourOfTraffic:
    """An hour. name: '2026-03-01 14:00' or '14:00' (UTC) of absolute times, else 'hour 3' since the first request.

    per_second: mean rate of the real traffic in requests a second.
    """

    name: str
    requests: int
    per_second: float
    sizes: Mapping[str, SizeCounts]


@dataclass(frozen=True)
class Burstiness:
    """peak_per_second: the most requests within a second.  dispersion: variance over mean of the requests in each
    second, 1 for a Poisson process (Fano, Physical Review 72, 1947).  longest_gap_s: between two requests.

    All of what was recorded; a sample of the traffic has smaller peaks, and a dispersion nearer to 1.
    """

    peak_per_second: int
    dispersion: float
    longest_gap_s: float


@dataclass(frozen=True)
class TrafficSummary:
    """seconds, per_second, bursts: None without times.  per_second: of the real traffic.  hours: () without times.

    start: of absolute times, ISO 8601 in UTC.  beyond: dim -> requests whose size the spec's dim does not have.
    """

    requests: int
    files: int
    sampling: float
    made: str
    start: str | None
    seconds: float | None
    per_second: float | None
    dims: Mapping[str, SizeCounts]
    beyond: Mapping[str, int]
    pairs: tuple[PairCounts, ...]
    hours: tuple[HourOfTraffic, ...]
    bursts: Burstiness | None


def summarize(traffic: TrafficAtPlace, dims: Sequence[Dim]) -> TrafficSummary:
    """The summary of traffic to a model with these dims."""
    trace, timed = traffic.trace, traffic.trace.timed
    start = datetime.fromtimestamp(trace.start, UTC).isoformat(timespec="seconds") if traffic.absolute else None
    outside = {dim.name: (trace.sizes[dim.name] < dim.min) | (trace.sizes[dim.name] > dim.max) for dim in dims}
    return TrafficSummary(
        requests=len(trace),
        files=len(traffic.files),
        sampling=traffic.sampling,
        made=traffic.made,
        start=start,
        seconds=float(trace.at[-1]) if timed else None,
        per_second=traffic.per_second if timed else None,
        dims={dim.name: count_sizes(trace.sizes[dim.name]) for dim in dims},
        beyond={name: int(mask.sum()) for name, mask in outside.items() if mask.any()},
        pairs=tuple(_count_pair(trace, a.name, b.name) for a, b in combinations(dims, 2)),
        hours=tuple(_split_hours(traffic, dims)) if timed else (),
        bursts=measure_bursts(trace.at) if timed else None,
    )


def count_sizes(sizes: Array) -> SizeCounts:
    """The histogram of sizes, int64 [requests], at least one."""
    values, counts = np.unique(sizes, return_counts=True)
    quantiles = tuple(float(value) for value in np.quantile(sizes, QUANTILES))
    return SizeCounts(dict(zip(values.tolist(), counts.tolist(), strict=True)), float(sizes.mean()), quantiles)


def measure_bursts(at: Array) -> Burstiness:
    """How bursty arrivals are. at: seconds, float64 [requests], rising, two at least."""
    within = np.searchsorted(at, at + 1.0, "left") - np.arange(len(at))
    _, counts = np.unique(at.astype(np.int64), return_counts=True)  # seconds without requests may be many
    seconds = int(at[-1]) + 1
    mean = len(at) / seconds
    variance = float((counts.astype(np.float64) ** 2).sum()) / seconds - mean**2
    return Burstiness(int(within.max()), max(variance, 0.0) / mean, float(np.diff(at).max()))


def _count_pair(trace: Trace, first: str, second: str) -> PairCounts:
    pairs, counts = np.unique(np.stack([trace.sizes[first], trace.sizes[second]], 1), axis=0, return_counts=True)
    rows = ((int(a), int(b), int(count)) for (a, b), count in zip(pairs, counts, strict=True))
    return PairCounts((first, second), tuple(rows))


def _split_hours(traffic: TrafficAtPlace, dims: Sequence[Dim]) -> "list[HourOfTraffic]":
    """Each hour that has requests; by the hour of the day where there are many and times are absolute."""
    trace, first = traffic.trace, traffic.trace.start if traffic.absolute else 0.0
    hours = np.floor((first + trace.at) / HOUR_S).astype(np.int64)
    by_day = traffic.absolute and hours[-1] - hours[0] >= MOST_HOURS
    keys = hours % 24 if by_day else hours
    found = []
    for key in np.unique(keys):
        chosen = keys == key
        seconds = _seconds_in(int(key), first + float(trace.at[-1]), by_day) - _seconds_in(int(key), first, by_day)
        name = f"{key:02}:00" if by_day else _name_hour(int(key), traffic.absolute)
        sizes = {dim.name: count_sizes(trace.sizes[dim.name][chosen]) for dim in dims}
        rate = float(chosen.sum()) / max(seconds, _LEAST_S) / traffic.sampling
        found.append(HourOfTraffic(name, int(chosen.sum()), rate, sizes))
    return found


def _name_hour(hour: int, absolute: bool) -> str:
    return datetime.fromtimestamp(hour * HOUR_S, UTC).strftime("%Y-%m-%d %H:00") if absolute else f"hour {hour}"


def _seconds_in(hour: int, until: float, by_day: bool) -> float:
    """Seconds from time 0 until `until` that lie in an hour; in that hour of each day where `by_day`."""
    days, rest = divmod(until, 24 * HOUR_S) if by_day else (0.0, until)
    return days * HOUR_S + min(max(rest - hour * HOUR_S, 0.0), HOUR_S)
