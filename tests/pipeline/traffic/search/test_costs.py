"""Buckets of least cost, against every partition tried one by one; batch sizes in closed form and by simulation."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.traffic.costs import (
    BatchGrowth,
    CostModel,
    count_profiles,
    partition_dim,
    partition_grid,
    per_requests,
    serve_trace,
    total_of,
)
from tests.pipeline.traffic.instances import KnownTimes, grid_of_sizes
from validation.traffic.batching_simulation import BatchPolicy

sizes = st.lists(st.integers(1, 40), min_size=2, max_size=60)


def all_partitions(count: int):
    for inner in itertools.product((False, True), repeat=count - 1):
        yield (*(index for index, block_index in enumerate(inner) if block_index), count - 1)


def model_of(*columns, growth: bool = False) -> CostModel:
    grid = grid_of_sizes(*columns)
    return CostModel(grid, KnownTimes().table(grid.edges, 4), BatchGrowth.idle(grid.at, 4, 0.02) if growth else None)


def direct_cost(model: CostModel, partitions) -> float:
    """Each request by itself at the edges that hold it."""
    total = 0.0
    for place in model.grid.places:
        edges = [min(end for end in partition if end >= at) for partition, at in zip(partitions, place, strict=True)]
        total += model.times[(*edges, 0)]
    return total


def total_cost(model: CostModel, partitions, price: float) -> float:
    return total_of(model.intervals(0, partitions), partitions[0]) + price * count_profiles(partitions)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=40), st.floats(0, 2e-3), st.integers(1, 9), st.booleans())
def test_the_choice_for_one_dim_is_exact(lengths, price, most, batched):
    model = model_of(lengths, growth=batched)
    costs = model.intervals(0, [()])
    result = partition_grid(model, [0], most, price)
    allowed_partitions = [partition for partition in all_partitions(len(model.grid.edges[0])) if len(partition) <= most]
    best_value = min(total_of(costs, partition) + price * len(partition) for partition in allowed_partitions)
    assert total_cost(model, result, price) == pytest.approx(best_value, rel=1e-9) and len(result[0]) <= most


@settings(max_examples=25, deadline=None)
@given(sizes)
def test_a_partitions_cost_is_that_of_its_requests(lengths):
    model = model_of(lengths)
    for _, partition in partition_dim(model.intervals(0, [()]), 5):
        assert total_of(model.intervals(0, [()]), partition) == pytest.approx(direct_cost(model, [partition]), rel=1e-9)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=4, max_size=30), st.floats(0, 1e-3))
def test_two_dims_cost_hardly_more_than_the_best(pairs, price):
    model = model_of(*zip(*pairs, strict=True))
    result = partition_grid(model, [0, 1], 6, price)
    axes = [all_partitions(len(edges)) for edges in model.grid.edges]
    tried_points = [point for point in itertools.product(*axes) if count_profiles(point) <= 6]
    best_value = min(direct_cost(model, point) + price * count_profiles(point) for point in tried_points)
    total = total_cost(model, result, price)
    assert best_value <= total * (1 + 1e-9) and total <= 1.01 * best_value
    assert total == pytest.approx(direct_cost(model, result) + price * count_profiles(result))


@pytest.mark.parametrize("growth", [False, True])
def test_three_dims_stay_within_the_number_of_profiles(growth):
    rng = np.random.default_rng(1)
    model = model_of(*(rng.integers(1, 9, 200) for _ in range(3)), growth=growth)
    result = partition_grid(model, [0, 1, 2], 12, 0.0)
    assert count_profiles(result) <= 12
    assert total_cost(model, result, 0.0) < total_cost(model, partition_grid(model, [0, 1, 2], 1, 0.0), 0.0)


def test_a_dim_that_is_not_chosen_keeps_its_edges():
    rng = np.random.default_rng(2)
    result = partition_grid(model_of(rng.integers(1, 9, 100), rng.integers(1, 4, 100)), [0], 6, 0.0)
    assert result[1] == (0, 1, 2) and len(result[0]) == 2


def poisson(rate: float, count: int) -> np.ndarray:
    sums = np.cumsum(np.random.default_rng(0).exponential(1 / rate, count))
    return sums - sums[0]


def test_a_batch_has_one_request_and_those_that_arrive_while_it_waits():
    growth = BatchGrowth.idle(poisson(100.0, 4000), 64, 0.03)
    counts = np.full((1, 1, len(growth.seconds)), 100.0)
    seconds = growth.seconds_of(counts, np.full_like(counts, 100.0), growth.tables(np.ones((1, 64))))
    assert seconds[0] == pytest.approx(100.0 * len(growth.seconds) / (1 + 100.0 * 0.03), rel=0.01)


def test_a_full_batch_does_not_grow():
    growth = BatchGrowth.idle(poisson(100.0, 4000), 2, 10.0)
    counts = np.full((1, 1, len(growth.seconds)), 10.0)
    seconds = growth.seconds_of(counts, np.full_like(counts, 1e5), growth.tables(np.ones((1, 2))))
    assert seconds[0] == pytest.approx(5.0 * len(growth.seconds))


@pytest.mark.parametrize(("rate", "wait_s"), [(0.004, 0.0), (0.0015, 0.002), (0.0008, 0.0)])
def test_modelled_batches_cost_the_same_as_simulated_ones(rate, wait_s):
    grid = grid_of_sizes(np.random.default_rng(0).choice([8, 16, 40], 3000))
    grid.at[:] *= rate / 0.004
    times, policy = KnownTimes(), BatchPolicy(8, wait_s)
    growth = BatchGrowth.idle(grid.at, 8, wait_s)
    served_trace = serve_trace(grid, {"length": (8, 16, 40)}, times, policy)
    costs = CostModel(grid, times.table(grid.edges, 8), growth.after(served_trace.service)).intervals(0, [()])
    assert total_of(costs, (0, 1, 2)) == pytest.approx(served_trace.seconds.sum(), rel=0.06)


def test_requests_of_several_samples_fill_a_batch_sooner():
    assert per_requests(np.array([1.0, 2.0, 3.0, 4.0]), 2.0, 2).tolist() == [2.0, 4.0]
    assert per_requests(np.array([1.0, 2.0, 3.0, 4.0]), 1.5, 2).tolist() == [1.5, 3.0]


def test_times_at_different_rates_have_different_batches():
    growth = BatchGrowth.idle(np.concatenate([poisson(10.0, 2000), 300.0 + poisson(1000.0, 2000)]), 8, 0.01)
    assert growth.seconds[0] > 50 * growth.seconds[-1]
    counts = np.full((1, 1, len(growth.seconds)), 1.0)
    rates = 1.0 * np.bincount(growth.bin_of) / growth.seconds
    slow, fast = counts.copy(), counts.copy()
    slow[..., len(rates) // 2 :] = 0
    fast[..., : len(rates) // 2] = 0
    tables = growth.tables(np.ones((1, 8)))
    assert growth.seconds_of(slow, rates * counts, tables)[0] > 3 * growth.seconds_of(fast, rates * counts, tables)[0]
