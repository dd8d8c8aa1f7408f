import numpy as np
import pytest

from enginesmith.core.errors import DataError
from enginesmith.core.reports.latency import BucketLatency, Quantile, SystemLoad
from validation.capacity.greatest_rate import ONE_PROCESS, batch_times, merge_buckets

MEDIAN = (Quantile(0.5, None, None, None, 1.0, 10),)


def bucket(seconds: float, processes: tuple[float, ...] = (), **sizes: int) -> BucketLatency:
    load = SystemLoad(1.0, 0.1, 0.0, 0.0, 0.0, None, 2)
    curve = tuple((seconds * np.linspace(0.9, 1.1, 101)).tolist())
    medians = tuple(seconds * factor for factor in processes)
    return BucketLatency(
        "", sizes, sizes.get("batch", 1), seconds, 100, 10, True, seconds, MEDIAN, curve, 0, load,
        process_medians_s=medians,
    )  # fmt: skip


def test_batches_between_timed_ones_are_interpolated_with_more_uncertainty():
    processes = (0.99, 0.995, 1.0, 1.005, 1.01)
    actual = batch_times([bucket(0.001 * size, processes, batch=size) for size in (1, 4, 16)], "batch", {}, 16)
    assert actual.most == 16
    assert actual.curves[:, 50] == pytest.approx([0.001 * size for size in range(1, 17)], rel=0.02)
    assert actual.half[0] > 2 * 0.0079 and actual.half[1] >= actual.half[0] * 0.99


def test_another_process_may_be_slower_within_the_spread_of_processes():
    calm_times, separate_times = (
        batch_times([bucket(0.001, spread, batch=1)], "batch", {}, 1).half[0]
        for spread in ((1.0, 1.001, 0.999), (1.0, 1.1, 0.9))
    )
    assert separate_times > 20 * calm_times
    assert batch_times([bucket(0.001, (), batch=1)], "batch", {}, 1).half[0] >= ONE_PROCESS


def test_only_times_at_the_wanted_sizes_count_if_sufficient():
    timed_buckets = [bucket(0.001 * size * length, batch=size, length=length) for size in (1, 8) for length in (1, 64)]
    actual = batch_times(timed_buckets, "batch", {"length": 64}, 8)
    assert actual.curves[7, 50] == pytest.approx(0.001 * 8 * 64, rel=0.01)


def test_sizes_on_one_line_do_not_separate_the_dims():
    line = [bucket(0.001 * size, batch=size, length=16 * size) for size in (1, 4, 8)]
    with pytest.raises(DataError, match=r"batch=1 to 8 at length=16 was not timed.*--bucket batch=1,length=16"):
        batch_times(line, "batch", {"length": 16}, 8)


def test_a_timed_empty_batch_does_not_hide_untimed_ones():
    """The logarithm of 0 must not be taken where the sizes are refused anyway."""
    with pytest.raises(DataError, match="batch=1 to 8 was not timed"):
        batch_times([bucket(0.001, batch=0), bucket(0.001, batch=1)], "batch", {}, 8)


def test_a_batch_beyond_the_timed_ones_names_the_timing_command():
    with pytest.raises(DataError, match=r"batch=1 to 8 was not timed.*--bucket batch=1 --bucket batch=8"):
        batch_times([bucket(0.001, batch=1), bucket(0.002, batch=4)], "batch", {}, 8)


def test_an_engine_without_a_batch_has_one_time():
    actual = batch_times([bucket(0.002)], None, {}, 1)
    assert actual.most == 1 and actual.curves[0, 50] == pytest.approx(0.002)


def test_batches_below_the_minimum_cost_the_smallest():
    actual = batch_times([bucket(0.004, batch=4), bucket(0.008, batch=8)], "batch", {}, 8, least=4)
    assert actual.curves[0, 50] == pytest.approx(0.004, rel=0.01) == actual.curves[3, 50]


def test_of_two_times_of_a_size_the_newer_counts():
    merged_latencies = merge_buckets([[bucket(1.0, batch=1), bucket(2.0, batch=2)], [bucket(3.0, batch=1)]])
    assert {latency.sizes["batch"]: latency.mean_s for latency in merged_latencies} == {1: 3.0, 2: 2.0}


def test_a_servers_overhead_is_added_to_each_batch_and_request():
    result = batch_times([bucket(0.001, batch=1), bucket(0.002, batch=2)], "batch", {}, 2).with_overhead(0.01, 0.1)
    assert result.curves[:, 50] == pytest.approx([0.111, 0.212], rel=0.01)


def test_an_interval_ends_near_the_fastest_and_the_slowest_run():
    actual = batch_times([bucket(0.001, (1.0, 1.0, 30.0), batch=1)], "batch", {}, 1)
    slow_time, same_time, fast_time = (actual.moved(sign)[0][50] for sign in (1.0, 0.0, -1.0))
    assert actual.half[0] > 3 and same_time == pytest.approx(0.001)
    assert slow_time == pytest.approx(1.5 * 0.0011) and fast_time == pytest.approx(0.0009 / 1.5)
