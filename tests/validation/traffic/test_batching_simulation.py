"""The simulated batcher: queueing theory's closed forms, and the policy's promises on random arrivals."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from validation.traffic.batching_simulation import BatchPolicy, simulate_batching


def constant(seconds: float) -> np.ndarray:
    return np.full(101, seconds)


def poisson(rate: float, count: int, seed: int = 0) -> np.ndarray:
    sums = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, count))
    return sums - sums[0]


def test_without_batches_the_mean_wait_is_that_of_a_queue_with_constant_service():
    """M/D/1: rho s / (2 (1 - rho)) (Pollaczek-Khinchine)."""
    array = poisson(700, 100_000)
    other_array, zeros = np.ones(len(array), np.int64), np.zeros(len(array), np.int64)
    result = simulate_batching(array, other_array, zeros, [[constant(0.001)]], BatchPolicy())
    assert result.waited_s.mean() == pytest.approx(0.7 * 0.001 / (2 * 0.3), rel=0.05)
    assert result.utilization == pytest.approx(0.7, rel=0.02)


def test_run_times_are_drawn_from_the_curve_of_the_batch():
    array = np.arange(5000) * 1.0
    other_array, zeros = np.ones(len(array), np.int64), np.zeros(len(array), np.int64)
    result = simulate_batching(array, other_array, zeros, [[np.linspace(0.1, 0.3, 101)]], BatchPolicy())
    assert result.service_s.mean() == pytest.approx(0.2, rel=0.02)
    assert 0.1 <= result.service_s.min() < 0.11 and 0.29 < result.service_s.max() <= 0.3


def test_a_lone_request_waits_its_limit():
    result = simulate_batching(np.array([0.0]), np.array([1]), np.array([0]), [[constant(0.01)]], BatchPolicy(4, 0.005))
    assert result.waited_s[0] == pytest.approx(0.005)


def test_a_full_batch_does_not_wait():
    array = np.array([0.0, 0.001, 0.002, 0.003])
    result = simulate_batching(
        array, np.ones(4, np.int64), np.zeros(4, np.int64), [[constant(0.01)] * 4], BatchPolicy(4, 1.0)
    )
    assert result.batches.tolist() == [4]
    assert result.waited_s[-1] == pytest.approx(0.0) and result.waited_s[0] == pytest.approx(0.003)


def test_the_bucket_with_the_oldest_request_goes_first():
    at = np.array([0.0, 0.001, 0.002])
    result = simulate_batching(
        at, np.ones(3, np.int64), np.array([0, 1, 0]), [[constant(1.0)] * 2, [constant(1.0)] * 2], BatchPolicy(2, 0.0)
    )
    # The first runs alone; then bucket 1 holds the older request.
    assert result.waited_s.tolist() == pytest.approx([0.0, 0.999, 1.998])


def test_an_oversized_request_runs_alone_by_the_last_curve():
    array = np.zeros(2)
    curves = [[constant(0.1), constant(0.2)]]
    result = simulate_batching(array, np.array([5, 1]), np.zeros(2, np.int64), curves, BatchPolicy(2, 0.0))
    assert result.batches.tolist() == [5, 1] and result.service_s.tolist() == pytest.approx([0.2, 0.1])


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 8), st.floats(0, 0.01), st.integers(1, 3), st.integers(0, 10_000))
def test_each_request_is_answered_once_in_a_batch_that_holds_it(most, wait_s, buckets, seed):
    rng = np.random.default_rng(seed)
    value = np.sort(rng.random(60)) * 0.1
    samples, places = rng.integers(1, 4, 60), rng.integers(0, buckets, 60)
    curves = [[constant(0.001 * size) for size in range(1, most + 1)]] * buckets
    result = simulate_batching(value, samples, places, curves, BatchPolicy(most, wait_s), seed)
    assert result.batches.sum() == samples.sum()
    assert (result.batches <= np.maximum(most, 3)).all()
    assert (result.waited_s >= -1e-12).all() and (result.service_s > 0).all()
    assert result.busy_s <= result.seconds + 1e-9


def test_each_request_has_the_index_of_its_batch():
    array = np.array([0.0, 0.1, 0.2, 5.0])
    other_array, zeros = np.ones(4, np.int64), np.zeros(4, np.int64)
    result = simulate_batching(array, other_array, zeros, [[constant(1.0)] * 2], BatchPolicy(2, 0.0))
    assert result.batch_of.tolist() == [0, 1, 1, 2] and result.batches[result.batch_of].tolist() == [1, 2, 2, 1]


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 8), st.sampled_from([0.0, 0.002, 0.01]), st.integers(1, 4), st.integers(0, 10_000))
def test_the_fast_path_of_one_queue_equals_the_general_one(most, wait_s, largest, seed):
    rng = np.random.default_rng(seed)
    number = np.sort(rng.random(80)).round(2) * 0.2
    samples, places = rng.integers(1, largest + 1, 80), np.zeros(80, np.int64)
    curves = [np.linspace(0.001, 0.002, 11) * size for size in range(1, most + 1)]
    service = simulate_batching(number, samples, places, [curves], BatchPolicy(most, wait_s), seed)
    general = simulate_batching(number, samples, places, [curves, curves], BatchPolicy(most, wait_s), seed)
    assert service.batches.tolist() == general.batches.tolist()
    assert service.waited_s == pytest.approx(general.waited_s) and service.service_s == pytest.approx(general.service_s)
    assert (service.busy_s, service.seconds) == pytest.approx((general.busy_s, general.seconds))
