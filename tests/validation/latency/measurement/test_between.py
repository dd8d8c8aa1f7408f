"""Quantiles over several processes, on series whose truth is known: nothing here measures a time."""

import math
from statistics import NormalDist

import numpy as np
import pytest

from validation.latency.measurement.quantiles import BEYOND, quantiles, quantiles_between
from validation.statistics.serial_dependence import t_quantile

MEDIAN = 4e-5


def processes(seed: int, count: int = 5, luck: float = 0.03, runs: int = 300) -> list[np.ndarray]:
    """Runs of `count` processes; each is slower or faster by a factor of its own, of standard deviation `luck`."""
    rng = np.random.default_rng(seed)
    factors = np.exp(luck * rng.standard_normal(count))
    return [MEDIAN * factor * np.exp(0.05 * rng.standard_normal(runs)) for factor in factors]


def test_the_medians_interval_is_students_t_for_one_more_process() -> None:
    medians = [10.0, 11.0, 12.0, 9.0, 10.5]
    series = [np.full(31, median) * np.linspace(0.999, 1.001, 31) for median in medians]
    result = quantiles_between(series, (0.5,))[0]
    logs = np.log(medians)
    half_value = 2.776 * logs.std(ddof=1) * math.sqrt(1 + 1 / 5)  # Student's t, 97.5 %, 4 degrees of freedom
    assert result.value == pytest.approx(10.5)
    assert result.low == pytest.approx(math.exp(logs.mean() - half_value), rel=2e-3)
    assert result.high == pytest.approx(math.exp(logs.mean() + half_value), rel=2e-3)
    assert t_quantile(0.975, 4) == pytest.approx(2.776, rel=3e-3)


@pytest.mark.parametrize("luck", [0.0, 0.01, 0.05, 0.2])
@pytest.mark.parametrize("count", [3, 5])
def test_the_next_process_falls_into_the_interval(luck: float, count: int) -> None:
    trials, covered_number = 300, 0
    for seed in range(trials):
        *series, following_array = processes(seed, count + 1, luck, 60)
        result = quantiles_between(series, (0.5,))[0]
        covered_number += result.low <= float(np.median(following_array)) <= result.high  # type: ignore[operator]
    assert covered_number / trials >= 0.92  # 95 %, and what 300 trials leave open


def test_the_interval_within_processes_misses_it() -> None:
    covered_number = 0
    for seed in range(100):
        *series, following_array = processes(seed, 6, 0.05, 60)
        item = quantiles(np.concatenate(series), (0.5,))[0]
        covered_number += item.low <= float(np.median(following_array)) <= item.high  # type: ignore[operator]
    assert covered_number < 50


def test_measurements_at_different_moments_agree_within_intervals() -> None:
    """What the processes of one measurement share differs between measurements as much as they do among themselves."""
    moments = np.exp(0.03 * np.random.default_rng(0).standard_normal(100))
    intervals = [
        quantiles_between([moment_s * array for array in processes(seed, luck=0.03)], (0.5,))[0]
        for seed, moment_s in enumerate(moments)
    ]
    middle_value = float(np.median([item.value for item in intervals]))
    assert sum(item.low <= middle_value <= item.high for item in intervals) >= 90  # type: ignore[operator]


def test_one_disturbed_process_widens_only_the_interval() -> None:
    series = processes(0, luck=0.01)
    disturbed_series = [*series[:-1], 3 * series[-1]]
    calm, result = (quantiles_between(column, (0.5,))[0] for column in (series, disturbed_series))
    assert result.value == pytest.approx(calm.value, rel=0.02) and result.high > 2 * calm.high  # type: ignore[operator]
    assert result.low >= min(float(column.min()) for column in series) / BEYOND  # type: ignore[operator]


def test_an_outer_quantile_includes_the_spread_of_medians() -> None:
    truth = MEDIAN * math.exp(math.hypot(0.05, 0.05) * NormalDist().inv_cdf(0.9))
    covered_number = 0
    for seed in range(100):
        series = processes(seed, luck=0.05, runs=30)  # too few of each for its own p90
        interval, quantile = quantiles_between(series, (0.9,))[0], quantiles(np.concatenate(series), (0.9,))[0]
        assert interval.value == quantile.value and interval.low < quantile.low and interval.high > quantile.high  # type: ignore[operator]
        covered_number += interval.low <= truth <= interval.high  # type: ignore[operator]
    assert covered_number >= 90


def test_unavailable_quantiles_are_none() -> None:
    result = {item.p: item for item in quantiles_between(processes(0, runs=20))}
    assert result[0.5].value is not None and result[0.999].value is None and result[0.999].needed > 100


def test_one_run_per_process_gives_a_median_with_an_interval() -> None:
    result = quantiles_between(processes(0, runs=1), (0.5,))[0]
    assert result.low < result.value < result.high  # type: ignore[operator]


def test_two_processes_use_only_their_runs() -> None:
    series = processes(1, 2)
    assert quantiles_between(series) == quantiles(np.concatenate(series))
