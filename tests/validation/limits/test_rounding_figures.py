"""What few elements show of honest rounding."""

import numpy as np
import pytest

from validation.limits.rounding import with_chance
from validation.metrics.drift import measure


@pytest.mark.parametrize("count", [4, 8, 16])
def test_few_elements_allow_what_a_second_sample_may_show(count: int) -> None:
    """Of two samples of one honest rounding, the second is over four times what is allowed in hardly any case."""
    rng = np.random.default_rng(0)
    plain = allowed = 0
    for _ in range(1000):
        expected = np.ones((count, 1))
        first = measure(expected, expected + 1e-6 * rng.normal(size=(count, 1)), samples=count)
        second = float(np.square(1e-6 * rng.normal(size=(48, 1))).mean())
        plain += second > 4 * first.error_sq / count
        allowed += second > 4 * with_chance(first, count).error_sq / count
    assert allowed <= 10 and (count > 8 or plain > 10)


def test_many_elements_allow_no_more() -> None:
    expected = np.random.default_rng(0).normal(size=(32, 4))
    drift = measure(expected, expected * (1 + 1e-6), samples=32)
    assert with_chance(drift, drift.count).error_sq == drift.error_sq
    slices, same = drift.slices, with_chance(drift, drift.count).slices
    assert slices and same and np.array_equal(same.axes[1].error_sq, slices.axes[1].error_sq)


def test_an_energy_of_few_elements_of_a_slice_counts_as_that_of_so_few() -> None:
    expected = np.random.default_rng(0).normal(size=(64, 3))
    error = np.where(np.arange(64)[:, None] < [[64, 4, 64]], 1e-6, 1e-12)
    drift = measure(expected, expected + error, samples=64)
    found = with_chance(drift, drift.count, {1: error.sum(axis=0)})
    assert drift.slices and found.slices
    assert (found.slices.axes[1].error_sq / drift.slices.axes[1].error_sq > 2).tolist() == [False, True, False]
