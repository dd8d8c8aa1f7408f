"""Warm-up, quantiles and the A/B on series whose truth is known: nothing here measures a time."""

from statistics import NormalDist

import numpy as np
import pytest

from validation.latency.measurement.loop import warm_up
from validation.latency.measurement.paired import compare_times
from validation.latency.measurement.quantiles import order_ranks, quantiles, runs_needed
from validation.statistics.serial_dependence import beta_cdf


def remembering(rng, count, memory, size):
    """An AR(1) process of standard deviation `size`, started in its steady state."""
    noise = rng.standard_normal(count) * np.sqrt(1 - memory**2)
    series = np.empty(count)
    last_memory = rng.standard_normal()
    for index in range(count):
        last_memory = series[index] = memory * last_memory + noise[index]
    return series * size


def latencies(rng, count=600, memory=0.0, spikes=0.0):
    values = np.exp(remembering(rng, count, memory, 0.05)) * 1e-3
    return np.where(rng.random(count) < spikes, values * 8, values)


def test_ranks_equal_those_of_the_binomial_distribution():
    # Hahn & Meeker (1991), table A.15a, and by summing: n = 100, p = 0.5, 95 %.
    assert order_ranks(100, 0.5) == (40, 61)
    assert order_ranks(6, 0.5) == (1, 6) and order_ranks(5, 0.5) is None
    assert runs_needed(0.5) == 6 and runs_needed(0.99) == 368
    assert order_ranks(367, 0.99) is None and order_ranks(368, 0.99) is not None
    for count, p in ((100, 0.5), (999, 0.9), (50_000, 0.99), (400_000, 0.999)):
        low, high = order_ranks(count, p)
        values = [beta_cdf(1 - p, count - max_low, max_low + 1.0) for max_low in (low - 1, low, high - 2, high - 1)]
        assert values[0] <= 0.025 < values[1], "P(Bin < l) is at most 2.5 %, and l the greatest such rank"
        assert values[2] < 0.975 <= values[3], "P(Bin < u) is at least 97.5 %, and u the least such rank"


def test_unavailable_quantiles_are_none():
    result = {item.p: item for item in quantiles(latencies(np.random.default_rng(0), 300))}
    assert result[0.5].low < result[0.5].value < result[0.5].high
    for p, least_count in ((0.99, 368), (0.999, 3688)):
        assert (result[p].value, result[p].low, result[p].high) == (None, None, None)
        assert result[p].needed >= least_count


@pytest.mark.parametrize(("memory", "least"), [(0.0, 0.93), (0.8, 0.90)])
def test_intervals_have_their_coverage(memory, least):
    truth = {p: np.exp(0.05 * NormalDist().inv_cdf(p)) * 1e-3 for p in (0.5, 0.9)}
    covered_truth = dict.fromkeys(truth, 0)
    for seed in range(120):
        for item in quantiles(latencies(np.random.default_rng(seed), 500, memory), tuple(truth)):
            covered_truth[item.p] += item.low <= truth[item.p] <= item.high
    assert min(covered_truth.values()) / 120 >= least


def test_correlated_runs_count_for_fewer():
    single_quantile, alike = (quantiles(latencies(np.random.default_rng(3), 1000, memory))[0] for memory in (0.0, 0.95))
    assert single_quantile.effective > 600 and alike.effective < 200
    assert alike.high - alike.low > 1.5 * (single_quantile.high - single_quantile.low)


def test_a_slow_beginning_is_cut_and_a_spike_is_not():
    for seed in range(10):
        rng = np.random.default_rng(seed)
        steady_latencies = latencies(rng, 400, spikes=0.01)
        assert warm_up(steady_latencies)[0] <= 60
        slow_latencies = steady_latencies.copy()
        slow_latencies[:80] *= 1.6
        cut_count, is_settled = warm_up(slow_latencies)
        assert 75 <= cut_count <= 140 and is_settled
    assert warm_up(1e-3 * np.linspace(2.0, 1.0, 400)) == (200, False)


def pairs(seed, slower=0.0, memory=0.6, luck=0.0, storm=0.05):
    """Eight openings of 80 runs of either; both suffer the same slow weather."""
    rng = np.random.default_rng(seed)
    items = []
    for _ in range(8):
        weather = np.exp(remembering(rng, 80, 0.95, storm))
        sides = [latencies(rng, 80, memory) * weather * np.exp(luck * rng.standard_normal()) for _ in range(2)]
        items.append((sides[0] * (1 + slower), sides[1]))
    return items


@pytest.mark.parametrize("luck", [0.0, 0.03])
def test_an_engine_against_itself_shows_no_difference(luck):
    verdicts = [compare_times(pairs(seed, luck=luck), seed, replicates=150).verdict for seed in range(100)]
    assert sum(verdict != "no difference shown" for verdict in verdicts) <= 8  # 5 %, and what 100 trials leave open


def test_a_real_difference_is_shown_with_the_detectable_one():
    slower_times = compare_times(pairs(1, slower=0.2), 1)
    assert slower_times.verdict == "slower" and slower_times.ratios[0].low < 1.2 < slower_times.ratios[0].high
    assert compare_times(pairs(1, slower=-0.2), 1).verdict == "faster"
    equal_times = compare_times(pairs(2), 2)
    assert 0.0 < equal_times.ratios[0].detectable < 0.2
    assert equal_times.ratios[1].ratio is None and "it takes 1000" in equal_times.ratios[1].note


def test_common_changes_cancel():
    calm_detectable, stormy = (compare_times(pairs(4, storm=storm), 4).ratios[0].detectable for storm in (0.05, 0.5))
    assert stormy < 3 * calm_detectable
