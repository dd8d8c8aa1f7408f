"""The greatest rate against queueing theory, its interval, and the choice of a policy."""

import math

import numpy as np
import pytest

from validation.capacity.greatest_rate import (
    BatchTimes,
    LatencyLimit,
    _bracket,
    find_greatest_rate,
    poisson_workload,
    policies_to_try,
    recorded_workload,
    saturation,
)
from validation.traffic.batching_simulation import BatchPolicy

WORK = [poisson_workload(seed, 8000) for seed in range(3)]
ALONE = [BatchPolicy()]


def constant(*seconds: float, half: float = 0.0) -> BatchTimes:
    return BatchTimes(np.repeat(np.array(seconds)[:, None], 101, 1), np.full(len(seconds), half))


def exact_md1(service: float, limit: float, p: float) -> float:
    """The greatest rate of M/D/1 (Erlang 1909: the distribution of the wait with constant service)."""

    def within(load: float) -> float:
        t = limit / service - 1
        terms = ((load * (k - t)) ** k / math.factorial(k) * math.exp(-load * (k - t)) for k in range(int(t) + 1))
        return (1 - load) * sum(terms)

    low, high = 0.0, 1.0
    for _ in range(50):
        middle_low = (low + high) / 2
        low, high = (middle_low, high) if within(middle_low) >= p else (low, middle_low)
    return low / service


@pytest.mark.parametrize(
    ("near", "low", "high"), [(1.0, 1 / 1.05, 1.05), (0.8, 0.8 / 1.05, 1.04), (1.2, 1.2 / 1.3, 1.26), (20.0, 0.0, 10.0)]
)
def test_a_search_begins_close_to_the_rate_that_was_expected(near, low, high):
    assert _bracket(lambda rate: rate < 1.02, near, 10.0) == pytest.approx((low, high))


@pytest.mark.parametrize("limit", [0.003, 0.006])
def test_one_by_one_with_constant_times_the_rate_equals_theory(limit):
    greatest_rate = find_greatest_rate(WORK, [constant(0.001)], LatencyLimit(limit), ALONE)
    expected = exact_md1(0.001, limit, 0.99)
    assert greatest_rate.rate.value == pytest.approx(expected, rel=0.06)
    assert greatest_rate.rate.low <= expected <= greatest_rate.rate.high
    assert greatest_rate.utilization == pytest.approx(expected * 0.001, rel=0.05)


def test_a_rate_never_exceeds_that_of_a_busy_machine():
    greatest_rate = find_greatest_rate(WORK, [constant(0.001)], LatencyLimit(10.0), ALONE)
    assert 970 < greatest_rate.rate.value <= 1000.1


def test_the_spread_of_times_decides_not_their_mean():
    even = constant(0.001)
    tail = BatchTimes(np.concatenate([np.full(95, 0.0008), np.full(6, 0.004)])[None], np.zeros(1))
    assert tail.curves.mean() == pytest.approx(0.001, rel=0.02)
    rates = [find_greatest_rate(WORK, [times], LatencyLimit(0.005), ALONE).rate.value for times in (even, tail)]
    assert rates[1] < 0.6 * rates[0]


def test_no_rate_keeps_a_limit_below_the_fastest_run():
    assert find_greatest_rate(WORK, [constant(0.001)], LatencyLimit(0.0009), ALONE) is None


def test_uncertain_times_widen_the_interval_by_about_as_much():
    sure_rate, unsure_rate = (
        find_greatest_rate(WORK, [constant(0.001, half=half)], LatencyLimit(0.05), ALONE).rate for half in (0.0, 0.1)
    )
    assert sure_rate.high / sure_rate.low < 1.1 and unsure_rate.value == pytest.approx(sure_rate.value, rel=0.02)
    assert 1.15 < unsure_rate.high / unsure_rate.low < 1.4


def test_batches_raise_the_rate_if_cheaper_than_their_parts():
    times = [constant(*(0.001 + 0.0001 * size for size in range(1, 9)))]
    limit = LatencyLimit(0.02)
    greatest_rate = find_greatest_rate(WORK, times, limit, policies_to_try(limit, (1, 4, 8), None))
    single_rate = find_greatest_rate(WORK, times, limit, ALONE)
    assert greatest_rate.policy.most == 8 and greatest_rate.rate.value > 4 * single_rate.rate.value
    assert greatest_rate.rate.value <= saturation(WORK[0], times, BatchPolicy(8)) == pytest.approx(8 / 0.0018, rel=0.01)


def test_a_stated_wait_is_used_and_a_batch_of_one_never_waits():
    limit = LatencyLimit(0.1)
    assert policies_to_try(limit, (1, 8), 0.01) == [BatchPolicy(1, 0.0), BatchPolicy(8, 0.01)]
    assert len(policies_to_try(limit, (1, 8), None)) == 6


def test_a_rate_counts_only_if_all_lower_ones_keep_the_limit():
    """Batches of 32 fill within milliseconds when the machine is full; with fewer requests each waits for its time."""
    times, limit = [constant(*(0.001 + 0.0005 * size for size in range(1, 33)))], LatencyLimit(0.05)
    short_rate, middle_rate, long_rate = (
        find_greatest_rate(WORK, times, limit, [BatchPolicy(32, wait)]) for wait in (0.01, 0.04, 0.0495)
    )
    assert short_rate.rate.value > 1700
    # Some 17 requests within 40 ms run for 9.5 ms: of more, the first one of a batch is late.
    assert 150 < middle_rate.rate.value < 500 and middle_rate.rate.high < 1000
    assert long_rate is None, "even a request alone, which runs for 1.5 ms, is late"
    best_rate = find_greatest_rate(WORK, times, limit, [BatchPolicy(32, wait) for wait in (0.04, 0.01)])
    assert best_rate.policy.wait_s == 0.01 and best_rate.rate.value == pytest.approx(short_rate.rate.value, rel=0.02)


def test_bursty_traffic_needs_more_machines_than_poisson_traffic():
    rng = np.random.default_rng(0)
    gaps = np.concatenate([rng.exponential(0.2 if array % 10 == 0 else 1.8, 400) for array in range(20)])
    array = np.concatenate([[0.0], np.cumsum(gaps[1:])])
    other_array, zeros = np.ones(len(array), np.int64), np.zeros(len(array), np.int64)
    workloads = [recorded_workload(array, other_array, zeros, seed, 9000) for seed in range(2)]
    assert [len(work) for work in workloads] == [9000, 9000]
    assert workloads[0].at[-1] / len(workloads[0]) == pytest.approx(1.0, rel=0.15)
    limit = LatencyLimit(0.01)
    rates = [find_greatest_rate(work, [constant(0.001)], limit, ALONE).rate.value for work in (WORK[:2], workloads)]
    assert rates[1] < 0.6 * rates[0]


def test_two_queues_have_their_own_times():
    shapes = (np.array([1, 1]), np.array([0, 1]))
    work = [poisson_workload(seed, 3000, shapes) for seed in range(2)]
    greatest_rate = find_greatest_rate(work, [constant(0.001), constant(0.003)], LatencyLimit(1.0), ALONE)
    assert greatest_rate.rate.value == pytest.approx(500, rel=0.04)
