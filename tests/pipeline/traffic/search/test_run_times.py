import numpy as np
import pytest

from enginesmith.core.types import Dim
from pipeline.traffic.request_grid import RunTimes, edges_to_time, pad_samples, sizes_to_time, spread
from tests.pipeline.traffic.instances import BATCH, grid_of_sizes, measure, seconds_at
from validation.traffic.service_times import ServiceTimes


def test_a_table_has_the_time_of_each_batch_at_each_edge():
    sizes = [{"batch": batch, "length": length} for batch in (1, 2, 4, 8) for length in (2, 4, 8, 16, 32, 64)]
    times = RunTimes(ServiceTimes.of_buckets(measure(sizes), ["batch", "length"]), BATCH)
    table = times.table([np.array([2, 20, 64])], 8)
    expected = [[seconds_at(batch, length) for batch in range(1, 9)] for length in (2, 20, 64)]
    assert table.shape == (3, 8) and table == pytest.approx(np.array(expected), rel=0.03)
    assert times.log_sd(np.array([[2], [20]]), 4).shape == (2,)


def test_the_mean_equals_that_of_the_distribution():
    runs = measure([{"length": 2}, {"length": 64}])
    skewed_array = np.array([bucket.curve for bucket in runs]) * np.linspace(0.5, 2.5, 101)
    times = RunTimes(ServiceTimes(("length",), np.array([[2], [64]]), skewed_array, np.full(2, 0.01)), None)
    assert times.table([np.array([64])], 1)[0, 0] == pytest.approx(skewed_array[1].mean(), rel=0.01)


def test_a_batch_is_padded_to_its_own_buckets_and_multiples():
    assert [pad_samples(Dim("batch", 1, 8, 8, (2, 8)), count) for count in (1, 2, 3, 9)] == [2, 2, 8, 8]
    assert pad_samples(Dim("batch", 4, 8, 8, (), 4), 5) == 8 and pad_samples(Dim("batch", 4, 8, 8), 1) == 4
    assert pad_samples(None, 5) == 1


def test_sizes_to_time_span_the_candidates_and_the_batch():
    grid = grid_of_sizes([3, 10, 20, 40])
    sizes = sizes_to_time(grid, ("length",), BATCH, 8, {"length": 64})
    expected = {3, 10, 20, 40, 64}
    assert {size["length"] for size in sizes} == expected and {size["batch"] for size in sizes} == {1, 2, 4, 8}
    fixed_sizes = sizes_to_time(grid, (), BATCH, 1, {"length": 64})
    assert fixed_sizes == [{"batch": 1, "length": length} for length in (3, 10, 20, 40)]
    assert edges_to_time({"length": (8, 64)}, BATCH, 8)[-1] == {"batch": 8, "length": 64}


def test_spread_sizes_have_equal_ratios():
    assert spread(np.arange(1, 257), 9) == [1, 2, 4, 8, 16, 32, 64, 128, 256]
