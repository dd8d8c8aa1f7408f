"""The sizes of batches: closed forms, the simulation, and what a bucket alone costs."""

import numpy as np
import pytest

from pipeline.traffic.costs import BatchGrowth, CostModel, per_requests, serve_trace, total_of
from tests.pipeline.traffic.instances import KnownTimes, grid_of_sizes
from validation.traffic.trace import BatchPolicy


def poisson(rate: float, count: int) -> np.ndarray:
    at = np.cumsum(np.random.default_rng(0).exponential(1 / rate, count))
    return at - at[0]


def test_a_batch_has_one_request_and_those_that_come_while_it_waits():
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
def test_the_model_of_batches_costs_what_the_simulation_does(rate, wait_s):
    grid = grid_of_sizes(np.random.default_rng(0).choice([8, 16, 40], 3000))
    grid.at[:] *= rate / 0.004
    times, policy = KnownTimes(), BatchPolicy(8, wait_s)
    growth = BatchGrowth.idle(grid.at, 8, wait_s)
    served = serve_trace(grid, {"length": (8, 16, 40)}, times, policy)
    costs = CostModel(grid, times.table(grid.edges, 8), growth.after(served.service)).intervals(0, [()])
    assert total_of(costs, (0, 1, 2)) == pytest.approx(served.seconds.sum(), rel=0.06)


def test_requests_of_several_samples_fill_a_batch_sooner():
    assert per_requests(np.array([1.0, 2.0, 3.0, 4.0]), 2.0, 2).tolist() == [2.0, 4.0]
    assert per_requests(np.array([1.0, 2.0, 3.0, 4.0]), 1.5, 2).tolist() == [1.5, 3.0]


def test_times_of_different_rates_have_batches_of_different_sizes():
    growth = BatchGrowth.idle(np.concatenate([poisson(10.0, 2000), 300.0 + poisson(1000.0, 2000)]), 8, 0.01)
    assert growth.seconds[0] > 50 * growth.seconds[-1]
    counts = np.full((1, 1, len(growth.seconds)), 1.0)
    rates = 1.0 * np.bincount(growth.bin_of) / growth.seconds
    slow, fast = counts.copy(), counts.copy()
    slow[..., len(rates) // 2 :] = 0
    fast[..., : len(rates) // 2] = 0
    tables = growth.tables(np.ones((1, 8)))
    assert growth.seconds_of(slow, rates * counts, tables)[0] > 3 * growth.seconds_of(fast, rates * counts, tables)[0]
