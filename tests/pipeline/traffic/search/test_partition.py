"""Buckets of least cost: what every partition costs, tried one by one, is no less."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.traffic.costs import BatchGrowth, CostModel, count_profiles, partition_dim, partition_grid, total_of
from tests.pipeline.traffic.instances import KnownTimes, grid_of_sizes

sizes = st.lists(st.integers(1, 40), min_size=2, max_size=60)


def all_partitions(count: int):
    for inner in itertools.product((False, True), repeat=count - 1):
        yield (*(index for index, kept in enumerate(inner) if kept), count - 1)


def model_of(*columns, growth: bool = False) -> CostModel:
    grid = grid_of_sizes(*columns)
    return CostModel(grid, KnownTimes().table(grid.edges, 4), BatchGrowth.idle(grid.at, 4, 0.02) if growth else None)


def direct_cost(model: CostModel, partitions) -> float:
    """Each request by itself at the edges that hold it."""
    total = 0.0
    for place in model.grid.places:
        edges = [min(end for end in ends if end >= at) for ends, at in zip(partitions, place, strict=True)]
        total += model.times[(*edges, 0)]
    return total


def total_cost(model: CostModel, partitions, price: float) -> float:
    return total_of(model.intervals(0, partitions), partitions[0]) + price * count_profiles(partitions)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=40), st.floats(0, 2e-3), st.integers(1, 9), st.booleans())
def test_one_dim_is_exact(lengths, price, most, batched):
    model = model_of(lengths, growth=batched)
    costs = model.intervals(0, [()])
    found = partition_grid(model, [0], most, price)
    allowed = [each for each in all_partitions(len(model.grid.edges[0])) if len(each) <= most]
    best = min(total_of(costs, each) + price * len(each) for each in allowed)
    assert total_cost(model, found, price) == pytest.approx(best, rel=1e-9) and len(found[0]) <= most


@settings(max_examples=25, deadline=None)
@given(sizes)
def test_a_partition_costs_what_its_requests_do(lengths):
    model = model_of(lengths)
    for _, partition in partition_dim(model.intervals(0, [()]), 5):
        assert total_of(model.intervals(0, [()]), partition) == pytest.approx(direct_cost(model, [partition]), rel=1e-9)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=4, max_size=30), st.floats(0, 1e-3))
def test_two_dims_cost_hardly_more_than_the_best(pairs, price):
    model = model_of(*zip(*pairs, strict=True))
    found = partition_grid(model, [0, 1], 6, price)
    axes = [all_partitions(len(edges)) for edges in model.grid.edges]
    tried = [each for each in itertools.product(*axes) if count_profiles(each) <= 6]
    best = min(direct_cost(model, each) + price * count_profiles(each) for each in tried)
    total = total_cost(model, found, price)
    assert best <= total * (1 + 1e-9) and total <= 1.01 * best
    assert total == pytest.approx(direct_cost(model, found) + price * count_profiles(found))


@pytest.mark.parametrize("growth", [False, True])
def test_three_dims_stay_within_the_number_of_profiles(growth):
    rng = np.random.default_rng(1)
    model = model_of(*(rng.integers(1, 9, 200) for _ in range(3)), growth=growth)
    found = partition_grid(model, [0, 1, 2], 12, 0.0)
    assert count_profiles(found) <= 12
    assert total_cost(model, found, 0.0) < total_cost(model, partition_grid(model, [0, 1, 2], 1, 0.0), 0.0)


def test_a_dim_that_is_not_chosen_keeps_its_edges():
    rng = np.random.default_rng(2)
    found = partition_grid(model_of(rng.integers(1, 9, 100), rng.integers(1, 4, 100)), [0], 6, 0.0)
    assert found[1] == (0, 1, 2) and len(found[0]) == 2
