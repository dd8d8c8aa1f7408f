import numpy as np
import pytest

from validation.latency.formatting import LEAST_POINTS, clip, find_changes, noise_of


def noisy(seed: int, count: int, spread: float = 0.008) -> np.ndarray:
    return np.exp(np.random.default_rng(seed).normal(0, spread, count))


@pytest.mark.parametrize("seed", range(5))
def test_a_step_of_3_percent_is_found_within_5_points(seed: int) -> None:
    series = noisy(seed, 85)
    series[80:] *= 1.03
    assert not find_changes(series[:80])
    (result,) = find_changes(series)
    assert abs(result.index - 80) <= 2 and result.ratio == pytest.approx(1.03, abs=0.015) and result.z > 4


def test_a_step_back_counts_as_another_change() -> None:
    series = noisy(1, 120)
    series[40:80] *= 0.9
    changes = find_changes(series)
    assert [change.index for change in changes] == [40, 80] and changes[0].ratio < 1 < changes[1].ratio


def test_single_slow_days_are_no_change() -> None:
    series = noisy(2, 100)
    series[[30, 60, 61, 99]] *= 3.0
    assert find_changes(series) == []


def test_few_and_equal_points_have_no_change() -> None:
    assert find_changes([1.0] * (LEAST_POINTS - 1)) == [] and find_changes([1.0] * 50) == []
    assert find_changes([1.0] * 20 + [2.0] * 20)[0].index == 20


def test_the_unit_is_irrelevant() -> None:
    series = noisy(3, 60)
    series[30:] *= 1.1
    assert [change.index for change in find_changes(series * 1e-6)] == [change.index for change in find_changes(series)]


def test_a_step_of_the_level_hardly_affects_the_noise() -> None:
    logs = np.log(noisy(4, 200))
    stepped_array = np.where(np.arange(200) < 100, logs, logs + 1.0)
    assert noise_of(stepped_array) == pytest.approx(noise_of(logs), rel=0.2)
    assert np.abs(clip(stepped_array, noise_of(stepped_array)) - stepped_array).max() < 0.05
