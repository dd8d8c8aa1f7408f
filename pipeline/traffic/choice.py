"""The buckets that cost a trace least, and their saving compared with others."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from enginesmith.core.reports.latency import BucketLatency
from pipeline.traffic.costs import (
    BatchGrowth,
    CostModel,
    Partition,
    ServedTrace,
    edges_of,
    interval_of,
    partition_grid,
    resample_plans,
    serve_trace,
)
from pipeline.traffic.place import BucketTask, EdgesOf, powers_of_two, present_edges
from pipeline.traffic.request_grid import MOST_TIMED, RunTimes, edges_to_time
from validation.capacity.greatest_rate import Estimate
from validation.traffic.service_times import ServiceTimes

# The most profiles without --most; more are refused by compilers (`pipeline.compile.plan.MOST_PROFILES`).
MOST_PROFILES = 64
DAY_S = 86400.0
# Rounds of choosing, simulating how long batches wait, and choosing again; and of timing the edges that were chosen.
_ROUNDS, _TIMINGS = 4, 2
# Baselines for the chosen buckets.
OTHERS: Mapping[str, EdgesOf] = {
    "one profile": lambda dim: (dim.max,),
    "powers of two": powers_of_two,
    "present": present_edges,
}
Measure = Callable[[Sequence[Mapping[str, int]]], Sequence[BucketLatency]]


@dataclass(frozen=True)
class BucketPlan:
    """Buckets, and their cost for a trace. name: 'chosen', 'one profile', 'powers of two', 'present'.  edges: by dim.
    seconds: engine seconds per request.  price_s: the profiles' price per request, in engine seconds.  padding, batch,
    utilization: as in `ServedTrace`.  saved: share of this cost, seconds and price, that the chosen buckets save; None
    for the chosen buckets."""

    name: str
    edges: Mapping[str, tuple[int, ...]]
    profiles: int
    seconds: Estimate
    price_s: float
    padding: float
    batch: float
    utilization: float | None
    saved: Estimate | None = None


@dataclass(frozen=True)
class BucketChoice:
    """The buckets of least cost, beside other plans. edges: of the dims that were chosen.  timed: number of sizes at
    which the engine was timed.  plans: the chosen one first."""

    edges: Mapping[str, tuple[int, ...]]
    timed: int
    plans: tuple[BucketPlan, ...]


def choose_buckets(
    task: BucketTask, timings: Sequence[BucketLatency], measure: Measure | None, max_profiles: int, price_s: float
) -> BucketChoice:
    """The buckets of least cost. timings: measured times of runs.  measure: times the engine at the edges of all plans;
    None uses only `timings`.  price_s: price of a profile in engine seconds a day.

    Raises DataError for a size beyond the timed ones, and what `measure` raises."""
    timing_cache = {tuple(sorted(timing.sizes.items())): timing for timing in timings}
    price = price_s * task.grid.seconds / DAY_S
    other_sizes = [size for rule in OTHERS.values() for size in _sizes_used(task, task.edges(rule))]
    _measure_missing(timing_cache, other_sizes, measure)
    for _ in range(_TIMINGS):
        times = _times(task, timing_cache)
        partitions, _ = search_buckets(task, times, max_profiles, price)
        if not _measure_missing(timing_cache, _sizes_used(task, edges_of(task.grid, partitions)), measure):
            break
    times = _times(task, timing_cache)
    _, trace = search_buckets(task, times, max_profiles, price)
    # The cheapest plan by the simulation, of those with `max_profiles` at most; the first one is always allowed. The
    # costs that a search adds up leave out how buckets share an engine that is always busy.
    plans = [trace, *_serve_others(task, times).values()]
    fit_plans = [plan for plan in plans if plan is plans[0] or plan.profiles <= max_profiles]
    trace = min(fit_plans, key=lambda plan: float(plan.seconds.sum()) + price * plan.profiles)
    bucket_edges = {dim: edges for dim, edges in trace.edges.items() if dim in task.chosen}
    return BucketChoice(bucket_edges, len(timing_cache), compare_plans(task, times, trace, price / len(task.grid)))


def search_buckets(
    task: BucketTask, times: RunTimes, max_profiles: int, price: float
) -> tuple[tuple[Partition, ...], ServedTrace]:
    """The partitions of least cost, and the trace under them. price: of a profile, in seconds over the whole trace.

    With a batcher, the wait of batches depends on the buckets. So buckets are chosen, simulated, and chosen again with
    the simulated waits, until a choice repeats, at most `_ROUNDS` times. Returns the choice of least simulated cost.
    """
    grid, policy = task.grid, task.policy
    growth = None
    if policy and grid.at is not None:
        max_requests = max(int(policy.most / grid.samples.mean()), 1)
        growth = BatchGrowth.idle(grid.at, max_requests, policy.wait_s)
    time_table = times.table(grid.edges, task.most_samples)
    axes = [grid.dims.index(name) for name in task.chosen]
    best_plan: tuple[float, tuple[Partition, ...], ServedTrace] | None = None
    visited_partitions = set()
    for _ in range(_ROUNDS):
        partitions = partition_grid(CostModel(grid, time_table, growth), axes, max_profiles, price)
        if partitions in visited_partitions:
            break
        visited_partitions.add(partitions)
        trace = serve_trace(grid, edges_of(grid, partitions), times, policy)
        cost = float(trace.seconds.sum()) + price * trace.profiles
        if best_plan is None or cost < best_plan[0]:
            best_plan = cost, partitions, trace
        if growth is None or trace.service is None:
            break
        growth = growth.after(trace.service)
    assert best_plan is not None  # noqa: S101 - the first round gives one
    return best_plan[1], best_plan[2]


def _serve_others(task: BucketTask, times: RunTimes) -> dict[str, ServedTrace]:
    """The trace under each of OTHERS."""
    return {name: serve_trace(task.grid, task.edges(rule), times, task.policy) for name, rule in OTHERS.items()}


def compare_plans(task: BucketTask, times: RunTimes, trace: ServedTrace, price_s: float) -> tuple[BucketPlan, ...]:
    """The chosen buckets, one profile, powers of two and the present buckets. price_s: of a profile, per request."""
    traces = {"chosen": trace} | _serve_others(task, times)
    resamples = resample_plans([*traces.values()])
    costs = resamples + price_s * np.array([[plan.profiles] for plan in traces.values()])
    plans = []
    for index, (name, plan) in enumerate(traces.items()):
        ratio = (trace.mean_s + price_s * trace.profiles) / (plan.mean_s + price_s * plan.profiles)
        saving = None if index == 0 else interval_of(1.0 - ratio, 1.0 - costs[0] / costs[index])
        seconds = interval_of(plan.mean_s, resamples[index])
        price = price_s * plan.profiles
        plan_figures = (plan.padding, plan.batch, plan.utilization)
        plans.append(BucketPlan(name, plan.edges, plan.profiles, seconds, price, *plan_figures, saving))
    return tuple(plans)


def _sizes_used(task: BucketTask, edges: Mapping[str, Sequence[int]]) -> list[dict[str, int]]:
    """Sizes of the buckets that hold requests."""
    used_edges = {}
    for dim, ends in edges.items():
        sizes = task.grid.sizes[:, task.grid.dims.index(dim)]
        used_edges[dim] = sorted({int(edge) for edge in np.array(ends)[np.unique(np.searchsorted(ends, sizes))]})
    return edges_to_time(used_edges, task.batch, task.most_samples)


def _measure_missing(
    timing_cache: dict[tuple[tuple[str, int], ...], BucketLatency],
    size_sets: Sequence[Mapping[str, int]],
    measure: Measure | None,
) -> bool:
    """Time the sizes that were not timed yet, and say whether there were any."""
    distinct_sets = {tuple(sorted(size_set.items())): size_set for size_set in size_sets}
    missing_sets = [size_set for key, size_set in distinct_sets.items() if key not in timing_cache][
        : max(MOST_TIMED - len(timing_cache), 0)
    ]
    if measure is None or not missing_sets:
        return False
    timing_cache.update({tuple(sorted(timing.sizes.items())): timing for timing in measure(missing_sets)})
    return True


def _times(task: BucketTask, timing_cache: Mapping[tuple[tuple[str, int], ...], BucketLatency]) -> RunTimes:
    names = [*([task.batch.name] if task.batch else []), *task.grid.dims]
    return RunTimes(ServiceTimes.of_buckets([*timing_cache.values()], names), task.batch)
