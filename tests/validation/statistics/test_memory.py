import math

import numpy as np
import pytest

from tests.validation.canary.latencies import autoregressive
from validation.statistics.rates import quantile_effects
from validation.statistics.serial_dependence import (
    LEAST_INDEPENDENT,
    autocorrelation_time,
    drifts,
    memory_of,
    memory_of_difference,
)


def test_the_autocorrelation_time_is_that_of_the_process():
    for memory in (0.5, 0.9, 0.98):
        values = autoregressive(np.random.default_rng(0), 40_000, memory, 1.0)
        assert autocorrelation_time(values)[0] == pytest.approx((1 + memory) / (1 - memory), rel=0.25)
    assert autocorrelation_time(np.ones(50)) == (1.0, 1)


@pytest.mark.parametrize("memory", [0.0, 0.9, 0.98])
def test_the_variance_of_a_mean_is_the_true_one(memory):
    rng = np.random.default_rng(1)
    count = 20_000
    items = [memory_of(autoregressive(rng, count, memory, 1.0)).variance for _ in range(20)]
    assert np.median(items) == pytest.approx((1 + memory) / (1 - memory) / count, rel=0.25)


@pytest.mark.parametrize("memory", [0.99, 0.995, 0.999])
def test_too_few_independent_blocks_give_infinite_variance(memory):
    items = [memory_of(autoregressive(np.random.default_rng(seed), 2000, memory, 1.0)) for seed in range(20)]
    assert sum(math.isinf(item.variance) for item in items) >= 18
    assert all(item.block * LEAST_INDEPENDENT > 2000 for item in items if math.isinf(item.variance))


def test_a_weak_slow_component_is_found_in_block_means():
    items = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        weak = autoregressive(rng, 20_000, 0.999, math.sqrt(0.05)) + math.sqrt(0.95) * rng.normal(size=20_000)
        items.append(autocorrelation_time(weak)[0] < 100 and math.isinf(memory_of(weak).variance))
    assert sum(items) >= 12


def test_a_level_that_moves_over_the_whole_run_gives_no_variance():
    noise = np.random.default_rng(0).normal(size=5000)
    assert math.isfinite(memory_of(noise).variance)
    assert math.isinf(memory_of(noise + np.linspace(0, 1, 5000)).variance)


@pytest.mark.parametrize("count", [160, 2000])
def test_a_steady_level_is_rarely_reported_as_moving(count):
    rng = np.random.default_rng(3)
    items = [drifts(rng.normal(size=count), max(1, count // 400), level) for level in (0.05, 0.02) for _ in range(1000)]
    assert sum(items[:1000]) == pytest.approx(50, abs=21) and sum(items[1000:]) == pytest.approx(20, abs=14)
    assert not drifts(np.ones(count), 1, 0.05)


def test_a_drift_without_a_slowest_wave_is_detected():
    """Kwiatkowski et al. give that wave four times the weight of the next one, and saw two of three of these."""
    rng = np.random.default_rng(2)
    items = []
    for _ in range(100):
        noise, array = rng.normal(size=2000), (np.arange(2000) + 0.5) / 2000
        waves = sum(rng.normal() / order * np.cos(np.pi * order * array) for order in (2, 3, 4, 5, 6))
        items.append(drifts(noise + 0.35 * waves, 5, 0.05))
    assert sum(items) >= 90


def test_common_moves_of_a_pair_cancel():
    rng = np.random.default_rng(2)
    both_array, our_array, their_array = (autoregressive(rng, 5000, 0.999, 1.0) for _ in "abc")
    own_array = rng.normal(size=(2, 5000)) * 0.1
    shared_memory = memory_of_difference((both_array + own_array[0], both_array + own_array[1]))
    assert shared_memory.variance == pytest.approx(2 * 0.01 / 5000, rel=0.5)
    separate_memory = memory_of_difference((our_array + own_array[0], their_array + own_array[1]))
    assert math.isinf(separate_memory.variance)


def test_an_effect_of_unknown_variance_gives_the_needed_requests():
    """What races engines opening by opening has its own variance, and asks for these alone."""
    rng = np.random.default_rng(3)
    levels = np.repeat(rng.normal(size=8) * 0.05, 250)
    sides = np.exp(levels + rng.normal(size=2000) * 0.02), np.exp(rng.normal(size=2000) * 0.02)
    [effect] = quantile_effects(sides, [0.5], 0, 100)
    assert math.isinf(effect.share_error) and effect.beyond > 0.0 and math.isfinite(effect.error)


def test_blocks_independent_by_design_count_unless_their_means_disagree():
    """The requests of a segment are alike, and a segment knows nothing of the one before."""
    result, flat = [], []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        alike_array = np.repeat(rng.normal(size=40), 50) + rng.normal(size=2000)
        result.append(memory_of(alike_array, design_block=50))
        flat.append(memory_of(alike_array))
    assert sum(array.block == 50 for array in result) >= 16
    assert np.median([array.variance for array in result]) == pytest.approx((1 + 1 / 50) / 40, rel=0.25)
    assert sum(array.block > 100 for array in flat) >= 16, "which the requests alone do not tell: blocks are far longer"
    slow_arrays = [autoregressive(np.random.default_rng(seed), 2000, 0.999, 1.0) for seed in range(20)]
    assert sum(math.isinf(memory_of(array, design_block=50).variance) for array in slow_arrays) >= 18
