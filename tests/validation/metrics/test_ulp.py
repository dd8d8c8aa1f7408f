"""Distances in units in the last place, against a walk from number to number."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from validation.metrics.drift import measure
from validation.metrics.ulp import BINS, EXACT, _bin, _upper, measure_ulps

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(FLOATS, st.integers(0, 300))
def test_steps_to_the_next_number_are_counted(start, steps):
    stop = np.float32(start)
    with np.errstate(over="ignore"):
        for _ in range(steps):
            stop = np.nextafter(stop, np.float32(np.inf))
    found = measure_ulps(np.array([start], np.float32), np.array([stop]))
    if np.isfinite(stop):
        assert found.largest == steps
        assert found.percentile(50) == steps
    else:
        assert found.counts.sum() == 0


def test_signs_and_denormals_lie_on_one_line():
    tiny = np.array([-1e-45, 0.0, -0.0], np.float32)
    assert measure_ulps(tiny, np.array([1e-45, -0.0, 1e-45], np.float32)).largest == 2
    assert measure_ulps(np.float64([-0.0]), np.float64([5e-324])).largest == 1


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_every_type_counts_its_own_steps(dtype):
    one = np.ones(1, dtype)
    assert measure_ulps(one, one + ml_dtypes.finfo(dtype).eps.astype(dtype) * 3).largest == 3


def test_what_comes_in_a_wider_type_is_rounded_to_the_expected_one():
    assert measure_ulps(np.ones(1, np.float16), np.array([1.0001], np.float32)).largest == 0


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=50))
def test_a_bin_holds_what_it_says(distances):
    bins = _bin(np.array(distances, np.uint64))
    for distance, index in zip(distances, bins.tolist(), strict=True):
        assert 0 <= index < BINS
        assert distance <= _upper(index) and (index == 0 or distance > _upper(index - 1))
        assert distance >= EXACT or _upper(index) == distance
        assert _upper(index) <= distance * 1.125 + 1


@given(st.lists(st.integers(0, 255), min_size=1, max_size=40), st.sampled_from([0, 1, 50, 90, 99.9, 100]))
def test_percentiles_of_small_distances_are_exact(steps, percent):
    expected = np.ones(len(steps), np.float32)
    actual = (expected.view(np.int32) + np.array(steps, np.int32)).view(np.float32)
    wanted = np.percentile(steps, percent, method="inverted_cdf")
    assert measure_ulps(expected, actual).percentile(percent) == wanted


def test_what_is_not_finite_is_left_out_and_integers_have_none():
    found = measure(np.array([1.0, 2.0]), np.array([np.nan, 2.0]), also=("ulp",))
    assert found.ulps is not None and found.ulps.counts.sum() == 1 and found.nonfinite == 1
    assert measure(np.arange(3), np.arange(3), also=("ulp",)).ulps is None
