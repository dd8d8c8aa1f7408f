"""The greatest rate of requests that one machine serves within a limit of latency."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core.errors import DataError
from enginesmith.core.reports.latency import BucketLatency
from validation.latency.measurement.quantiles import BEYOND, LEAST_PROCESSES, half_width
from validation.plotting import (
    COLOURS,
    annotate,
    draw_svg,
    number_text,
    seconds_text,
    series,
    set_axis,
    shorten,
    span,
    tag,
)
from validation.statistics.serial_dependence import NORMAL, t_quantile
from validation.traffic.batching_simulation import BatchPolicy, simulate_batching
from validation.traffic.service_times import ServiceTimes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Run times of an engine by the number of samples in a batch, with their uncertainty, from its latency reports.

# The upper end of a 95 % interval.
_TAIL = 0.975
# Half of the 95 % interval of a time's logarithm if only one process measured it: other processes are unknown.
ONE_PROCESS = 0.10


@dataclass(frozen=True, eq=False)
class BatchTimes:
    """Run times of batches of 1, 2, ... `most` samples. curves: seconds, as quantiles at equal steps from 0 to 1,
    float64 [most, steps].  half: half of the 95 % interval of log(time) in one more process, float64 [most]."""

    curves: Array
    half: Array

    @property
    def most(self) -> int:
        """The largest batch that has a time."""
        return len(self.curves)

    def moved(self, sign: float) -> list[Array]:
        """The curves at the slow (1) or the fast end (-1) of their intervals, or unchanged (0).

        If one of few processes was disturbed, an interval can reach from nanoseconds to hours. Therefore medians are at
        most BEYOND times the slowest run, and at least the fastest run over BEYOND.
        """
        medians = self.curves[:, self.curves.shape[1] // 2]
        bounds = self.curves[:, 0] / BEYOND / medians, self.curves[:, -1] * BEYOND / medians
        return list(self.curves * np.clip(np.exp(sign * self.half), *bounds)[:, None])

    def with_overhead(self, batch_s: float, request_s: float) -> "BatchTimes":
        """The times plus a server's overhead: `batch_s` seconds per batch, and `request_s` per request in it."""
        overhead_s = batch_s + request_s * np.arange(1, self.most + 1)
        return BatchTimes(self.curves + overhead_s[:, None], self.half)


def merge_buckets(reports: Iterable[Sequence[BucketLatency]]) -> list[BucketLatency]:
    """The times of several reports of one engine on one kind of machine. reports: oldest first; if a size was timed
    twice, the newer time counts."""
    buckets_by_size = {tuple(sorted(bucket.sizes.items())): bucket for buckets in reports for bucket in buckets}
    return list(buckets_by_size.values())


def batch_times(
    buckets: Sequence[BucketLatency], batch: str | None, others: Mapping[str, int], max_batch: int, least: int = 1
) -> BatchTimes:
    """The times of a batch of 1 to `max_batch` samples.

    batch: name of the batch dim, None if there is none.  others: size of every other dim.  least: the smallest batch
    that the engine accepts; smaller batches are padded to `least`.
    Raises DataError for sizes outside the timed sizes; the message has the command to time them.
    """
    if batch is None:
        return _at(buckets, tuple(others), np.array([list(others.values())], np.int64).reshape(1, len(others)))
    matching_buckets = [bucket for bucket in buckets if others.items() <= bucket.sizes.items()]
    counts = np.maximum(np.arange(1, max_batch + 1), least)
    batch_sizes = [bucket.sizes[batch] for bucket in matching_buckets]
    if batch_sizes and min(batch_sizes) <= counts[0] and counts[-1] <= max(batch_sizes):
        return _at(matching_buckets, (batch,), counts[:, None])
    dims = (batch, *others)
    rows = np.array([[count, *others.values()] for count in counts.tolist()], np.int64)
    timed_sizes = np.array([[bucket.sizes[dim] for dim in dims] for bucket in buckets], np.int64)
    inside_mask = (rows >= timed_sizes.min(0)) & (rows <= timed_sizes.max(0))
    if not others or not inside_mask.all() or not _spans(timed_sizes):
        sizes_text = ",".join(f"{dim}={size}" for dim, size in others.items())
        suffix = f" at {sizes_text.replace(',', ' ')}" if sizes_text else ""
        options = " ".join(
            f"--bucket {','.join(dims_text for dims_text in (f'{batch}={size}', sizes_text) if dims_text)}"
            for size in dict.fromkeys((least, max_batch))
        )
        raise DataError(
            f"{batch}={least} to {max_batch}{suffix} was not timed; time it: enginesmith profile REF {options} --record"
        )
    return _at(buckets, dims, rows)


def _at(buckets: Sequence[BucketLatency], dims: tuple[str, ...], sizes: Array) -> BatchTimes:
    times = ServiceTimes.of_buckets(buckets, dims)
    _, error = times.predict(sizes)
    medians = [bucket.process_medians_s for bucket in buckets]
    spreads = np.array(
        [half_width(np.log(values)) if len(values) >= LEAST_PROCESSES else ONE_PROCESS for values in medians]
    )
    distances = np.abs(np.log(sizes)[:, None] - np.log(times.sizes)[None]).sum(-1)
    log_half = np.hypot(spreads[distances.argmin(1)], NORMAL.inv_cdf(_TAIL) * error)
    return BatchTimes(times.curves_at(sizes), log_half)


def _spans(timed_sizes: Array) -> bool:
    """Whether timed sizes ([points, dims], above 0) determine the effect of each dim separately: their logarithms are
    not all in one line or plane."""
    logs = np.log(timed_sizes)
    return len(logs) > logs.shape[1] and bool(np.linalg.matrix_rank(logs - logs.mean(0), tol=0.1) == logs.shape[1])


# The greatest rate of arrivals at which one machine keeps a limit of latency, from the times of its engine's runs.
#
# The simulated batcher (`validation.traffic`) serves the requests of a workload at a rate that is bisected. All rates
# have the same requests and the same draws of run times: the share of late requests then depends only on the rate
# (common random numbers: Glasserman, Monte Carlo Methods in Financial Engineering, 2003, 7.1). The result is at most
# the rate at which the machine is never idle: in a short run, a queue may grow and still keep the limit. Under a
# policy that waits, a machine may keep the limit at full load and break it at a lower rate, if batches do not fill
# before the longest wait is over. Therefore lower rates are tested, too, and must keep the limit.

# Requests of a simulation, and of a simulation that only chooses a policy: 200 and 40 of these are beyond p99.
REQUESTS, FEW_REQUESTS = 20_000, 4_000
# The rate is the mean of this many independent simulations.
SIMULATIONS = 4
# The longest waits to try if the caller sets none, as shares of the limit.
WAITS = (0.0, 0.05, 0.125, 0.25, 0.5)
_STEP, _COARSE_STEP = 0.002, 0.02
_WARM = 0.05
# If this share of the rate of an always busy machine breaks the limit, every rate counts as breaking the limit.
_LEAST = 1e-3
# The factor between the lower rates that are tested for the limit.
_LOWER = 1.4


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class LatencyLimit:
    """A limit of latency: at least the share `p` of the requests is answered within `seconds` of their arrival."""

    seconds: float
    p: float = 0.99


@dataclass(frozen=True, eq=False)
class Workload:
    """Requests at a mean rate of 1 per second. at: arrival in seconds, float64 [requests], rising.  samples: of each
    request, int64 [requests].  queues: index of the batcher's queue for each request, int64 [requests]."""

    at: Array
    samples: Array
    queues: Array

    def __len__(self) -> int:
        return len(self.at)

    def head(self, count: int) -> "Workload":
        """The first `count` requests."""
        return Workload(self.at[:count], self.samples[:count], self.queues[:count])


@dataclass(frozen=True)
class GreatestRate:
    """The greatest rate of one machine. rate: requests per second, with an interval.  utilization: share of the time in
    which the engine runs at that rate.  batch: mean number of samples per batch at that rate."""

    rate: Estimate
    policy: BatchPolicy
    utilization: float
    batch: float


def poisson_workload(seed: int, count: int = REQUESTS, shapes: tuple[Array, Array] | None = None) -> Workload:
    """Poisson arrivals of one sample each, or of (samples, queues) drawn from `shapes`, int64 [kinds] each."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1.0, count))
    if shapes is None:
        return Workload(arrivals - arrivals[0], np.ones(count, np.int64), np.zeros(count, np.int64))
    kind_indices = rng.integers(len(shapes[0]), size=count)
    return Workload(arrivals - arrivals[0], shapes[0][kind_indices], shapes[1][kind_indices])


def recorded_workload(times_s: Array, samples: Array, queues: Array, seed: int, count: int = REQUESTS) -> Workload:
    """Recorded arrivals, scaled to a mean of 1 per second. They start at a random request and repeat up to `count`.

    times_s: seconds, [requests], rising from 0 to a last value above 0.
    samples: of each request, [requests].  queues: index of each request's queue, [requests].
    """
    gaps = np.diff(times_s, append=times_s[-1] * len(times_s) / (len(times_s) - 1)) * (len(times_s) - 1) / times_s[-1]
    start = int(np.random.default_rng(seed).integers(len(times_s)))
    order = (start + np.arange(max(count, len(times_s)))) % len(times_s)
    times = np.concatenate([[0.0], np.cumsum(gaps[order[:-1]])])
    return Workload(times, samples[order], queues[order])


def find_greatest_rate(
    workloads: Sequence[Workload], times: Sequence[BatchTimes], limit: LatencyLimit, policies: Sequence[BatchPolicy]
) -> GreatestRate | None:
    """The greatest rate under the best policy, with an interval for the uncertainty of the run times and of the
    simulations; None if no rate keeps the limit.

    workloads: at least two independent ones.  times: for each queue of the workloads.
    """
    workload = workloads[0]
    near_rate, policy = choose_policy(workload, times, limit, policies)
    if near_rate <= 0.0:
        return None
    rates = [_search(load, times, limit, policy, near_rate, seed=seed) for seed, load in enumerate(workloads)]
    if min(rates) <= 0.0:
        return None
    slow_rate, fast_rate = (_search(workload, times, limit, policy, near_rate, sign) for sign in (1.0, -1.0))
    logs = np.log(rates)
    value = math.exp(float(logs.mean()))
    noise = t_quantile(0.975, len(logs) - 1.0) * float(np.std(logs, ddof=1)) / math.sqrt(len(logs))
    log_low = math.hypot(noise, math.log(rates[0] / slow_rate)) if slow_rate > 0.0 else math.inf
    log_high = math.hypot(noise, math.log(max(fast_rate, rates[0]) / rates[0]))
    simulation = simulate_batching(workload.at / value, workload.samples, workload.queues, _curves(times, 0.0), policy)
    rate = Estimate(value, value * math.exp(-log_low), value * math.exp(log_high))
    return GreatestRate(rate, policy, simulation.utilization, float(simulation.batches.mean()))


def choose_policy(
    work: Workload, times: Sequence[BatchTimes], limit: LatencyLimit, policies: Sequence[BatchPolicy]
) -> tuple[float, BatchPolicy]:
    """The greatest rate to within a few percent (few requests are simulated), and its policy; 0 if no rate keeps the
    limit. Among policies within 1 % of the best rate, the first is chosen.

    times: of a batch, by queue.
    """
    short_load = work.head(FEW_REQUESTS)
    rates = [_search(short_load, times, limit, policy, step=_COARSE_STEP) for policy in policies]
    visited_indices = set[int]()
    while True:
        policy_index = next(index for index, rate in enumerate(rates) if rate >= 0.99 * max(rates))
        if policy_index in visited_indices:
            return rates[policy_index], policies[policy_index]
        rates[policy_index] = _held_from_below(short_load, times, limit, policies[policy_index], rates[policy_index])
        visited_indices.add(policy_index)


def policies_to_try(limit: LatencyLimit, batch_sizes: Sequence[int], wait_s: float | None) -> list[BatchPolicy]:
    """The batching policies to try: each greatest batch with the wait `wait_s`, or with each of WAITS if it is None. A
    batch of one has no wait."""
    waits = [share * limit.seconds for share in WAITS] if wait_s is None else [wait_s]
    return [BatchPolicy(size, delay_s) for size in batch_sizes for delay_s in (waits if size > 1 else [0.0])]


def saturation(work: Workload, times: Sequence[BatchTimes], policy: BatchPolicy, sign: float = 0.0) -> float:
    """Requests per second of a machine whose queue is always full.

    times: of a batch, by queue.  sign: 1 takes the times at the upper ends of their intervals, -1 at the lower ends,
    0 the times themselves.
    """
    arrivals = np.zeros(len(work))
    return len(work) / simulate_batching(arrivals, work.samples, work.queues, _curves(times, sign), policy).busy_s


def _search(
    work: Workload,
    times: Sequence[BatchTimes],
    limit: LatencyLimit,
    policy: BatchPolicy,
    near_rate: float | None = None,
    sign: float = 0.0,
    seed: int = 0,
    step: float = _STEP,
) -> float:
    """The greatest rate that keeps the limit; 0 if none does. near_rate: the expected rate."""
    keeps_limit = _test_of(work, _curves(times, sign), limit, policy, seed)
    low, high = 0.0, (saturation_rate := saturation(work, times, policy, sign))
    if near_rate is not None:
        low, high = _bracket(keeps_limit, near_rate, saturation_rate)
    if high == saturation_rate and keeps_limit(saturation_rate):
        return saturation_rate
    if low == 0.0 and not keeps_limit(_LEAST * saturation_rate):
        return 0.0
    return _bisect(keeps_limit, low, high, step, 1e-6 * saturation_rate)


def _held_from_below(
    work: Workload, times: Sequence[BatchTimes], limit: LatencyLimit, policy: BatchPolicy, rate: float
) -> float:
    """The greatest rate, up to `rate`, below which every tested rate keeps the limit; 0 if the lowest breaks it."""
    if not rate or not policy.wait_s:
        return rate
    keeps_limit, low, high = _test_of(work, _curves(times, 0.0), limit, policy), 0.0, _LEAST * rate
    while high < rate:
        if not keeps_limit(high):
            return _bisect(keeps_limit, low, high, _COARSE_STEP) if low else 0.0
        low, high = high, high * _LOWER
    return rate


def _test_of(
    work: Workload, curves: list[list[Array]], limit: LatencyLimit, policy: BatchPolicy, seed: int = 0
) -> Callable[[float], bool]:
    """A function that returns whether a rate keeps the limit."""
    warm_count = int(_WARM * len(work))

    def keeps(rate: float) -> bool:
        simulation = simulate_batching(work.at / rate, work.samples, work.queues, curves, policy, seed)
        late_count = int(np.count_nonzero(simulation.latency_s[warm_count:] > limit.seconds))
        return late_count <= (1.0 - limit.p) * (len(work) - warm_count)

    return keeps


def _bisect(keeps: Callable[[float], bool], low: float, high: float, step: float, least_rate: float = 0.0) -> float:
    """The greatest rate between `low`, which keeps the limit, and `high`, to within the share `step` of that rate; the
    search also ends below `least_rate`."""
    while high - low > step * high and high > least_rate:
        midpoint = (low + high) / 2
        low, high = (midpoint, high) if keeps(midpoint) else (low, midpoint)
    return low


def _bracket(keeps: Callable[[float], bool], near_rate: float, saturation_rate: float) -> tuple[float, float]:
    """A lower rate that keeps the limit and a higher one that breaks it, close to `near_rate` if possible."""
    low, high = 0.0, saturation_rate
    for width in (1.05, 1.3):
        if high == saturation_rate and near_rate * width < saturation_rate and not keeps(near_rate * width):
            high = near_rate * width
        if low == 0.0 and near_rate / width < high and keeps(near_rate / width):
            low = near_rate / width
        if low > 0.0 and high < saturation_rate:
            break
    return low, high


def _curves(times: Sequence[BatchTimes], sign: float) -> list[list[Array]]:
    return [batch_curve.moved(sign) for batch_curve in times]


@dataclass(frozen=True)
class CostCurve:
    """The costs of one kind of machine. points: (latency limit in seconds, cost of a million requests), rising."""

    name: str
    points: tuple[tuple[float, float], ...]


def cost_svg(curves: Sequence[CostCurve], asked_s: float, currency: str) -> str:
    """A standalone SVG of the cost by latency limit. asked_s: the requested limit, which gets a mark."""
    points = [point for curve in curves for point in curve.points]
    unit = f"{currency} a million requests" if currency else "cost of a million requests"

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        axes.axvline(asked_s, color=COLOURS["muted"], linewidth=1.0, linestyle="--", gid=tag("asked", "asked for"))
        for index, curve in enumerate(curves):
            xs, ys = [point_x for point_x, _ in curve.points], [cost for _, cost in curve.points]
            axes.plot(xs, ys, label=shorten(curve.name), gid=tag("curve", curve.name), **series(index))
        x_range = span([asked_s, *(point_x for point_x, _ in points)], log=True)
        set_axis(axes, "x", x_range, "limit of p99", log=True, text=seconds_text)
        set_axis(axes, "y", span([cost for _, cost in points], log=True, least=0.3), unit, log=True)
        annotate(axes, "asked for", (asked_s, 1.0), (4, -12), top=True)

    least_costs = {curve.name: min(cost for _, cost in curve.points) for curve in curves if curve.points}
    alt_text = "; ".join(f"{name}: {number_text(cost)} at least" for name, cost in least_costs.items())
    return draw_svg("costs", f"Cost of a million requests by the limit of p99. {alt_text}", draw, standalone=True)
