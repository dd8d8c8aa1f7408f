"""Drift: the metrics against plain numpy, merging, and the rules about NaN, infinities and integers."""

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from validation.metrics.drift import Drift, measure
from validation.metrics.slice_sums import CHUNK

FLOATS = hnp.arrays(np.float32, st.integers(0, 40), elements=st.floats(-1e4, 1e4, width=32))
PAIRS = hnp.arrays(np.float64, st.tuples(st.just(2), st.integers(1, 50)), elements=st.floats(-1e6, 1e6))


@given(PAIRS)
def test_metrics_match_their_definitions(pair):
    expected, actual = pair
    error = actual - expected
    drift = measure(expected, actual)
    assert drift.count == expected.size
    assert drift.max_abs == np.abs(error).max()
    assume(np.linalg.norm(error) > 1e-100 and np.linalg.norm(expected) > 1e-100 and np.linalg.norm(actual) > 1e-100)
    assert drift.max_rel == pytest.approx(np.abs(error).max() / np.abs(expected).max())
    assert drift.sqnr_db == pytest.approx(20 * np.log10(np.linalg.norm(expected) / np.linalg.norm(error)))
    cosine = expected @ actual / np.linalg.norm(expected) / np.linalg.norm(actual)
    assert drift.cosine == pytest.approx(cosine, abs=1e-9)


@given(PAIRS, st.integers(0, 50))
def test_merging_parts_gives_the_whole(pair, at):
    expected, actual = pair
    merge = measure(expected[:at], actual[:at]).merge(measure(expected[at:], actual[at:]))
    measurement = measure(expected, actual)
    assert (merge.count, merge.max_abs, merge.peak) == (measurement.count, measurement.max_abs, measurement.peak)
    assert merge.error_sq == pytest.approx(measurement.error_sq)
    assert merge.dot == pytest.approx(measurement.dot, rel=1e-9, abs=1e-3)


def test_measurements_of_one_part_are_kept():
    expected = np.random.default_rng(0).normal(size=(20, 3))
    measurement = measure(expected, expected + 0.1, decisions=True, samples=20)
    for merge in (measurement.merge(Drift()), Drift().merge(measurement)):
        assert merge == measurement and merge.rows is not None
        assert merge.slices is measurement.slices and merge.samples is measurement.samples


@given(FLOATS)
def test_an_array_does_not_drift_from_itself(x):
    drift = measure(x, x.copy(), decisions=True)
    assert (drift.max_abs, drift.max_rel, drift.nonfinite) == (0, 0, 0)
    assert drift.sqnr_db == math.inf
    assert drift.cosine == pytest.approx(1)
    assert drift.argmax_agreement == 1


def test_the_worst_index_is_found_beyond_the_first_chunk():
    expected = np.zeros((3, CHUNK), np.float32)
    actual = expected.copy()
    actual[2, 7] = -5
    assert measure(expected, actual).worst_index == (2, 7)
    assert measure(expected, actual).max_abs == 5


def test_float32_sums_do_not_lose_small_errors():
    expected = np.full(3_000_000, 1000, np.float32)
    actual = expected + np.float32(0.125)
    assert measure(expected, actual).error_sq / expected.size == pytest.approx(0.125**2, rel=1e-12)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_non_finite_value_is_counted(bad):
    drift = measure(np.ones(5, np.float32), np.array([1, 1, bad, 1, 2], np.float32))
    assert drift.nonfinite == 1
    assert drift.worst_index == (2,)
    assert drift.max_abs == 1


def test_the_worst_index_stays_on_a_non_finite_value():
    drift = measure(np.ones(2), np.array([1, np.nan])).merge(measure(np.ones(2), np.array([9.0, 1])))
    assert (drift.nonfinite, drift.worst_index) == (1, (1,))


def test_equal_infinities_are_a_mask_outside_the_sums():
    drift = measure(np.array([np.inf, -np.inf, 1.0]), np.array([np.inf, -np.inf, 2.0]))
    assert (drift.nonfinite, drift.count, drift.max_abs) == (0, 1, 1)
    assert measure(np.array([np.inf]), np.array([-np.inf])).nonfinite == 1


def test_nan_is_wrong_even_where_expected():
    assert measure(np.array([np.nan]), np.array([np.nan])).nonfinite == 1
    assert measure(np.array([np.nan]), np.array([1.0])).nonfinite == 1
    assert measure(np.array([[np.nan, 1.0]]), np.array([[np.nan, 1.0]]), decisions=True).argmax_agreement == 0


def test_without_signal_any_error_is_infinite():
    drift = measure(np.zeros(3), np.ones(3))
    assert (drift.sqnr_db, drift.max_rel, drift.cosine) == (-math.inf, math.inf, 0)
    assert measure(np.zeros(3), np.zeros(3)).cosine == 1


def test_integers_are_compared_for_equality_beyond_float64():
    big_array = np.array([2**60, 2**60 + 1, 0, 0])
    drift = measure(big_array, np.array([2**60 + 1, 2**60 + 1, 0, 0]))
    assert drift.mismatches == 1
    assert drift.argmax_agreement == 0.75
    assert measure(np.array([True, False]), np.array([True, True])).mismatches == 1


def test_argmax_agreement_counts_rows_and_forgives_ties():
    expected = np.array([[1.0, 3.0, 2.0], [0.0, 0.0, 0.0], [5.0, 1.0, 1.0]])
    actual = np.array([[1.0, 2.0, 3.0], [0.0, 0.0, 0.1], [4.0, 1.0, 1.0]])
    assert measure(expected, actual, decisions=True).argmax_agreement == pytest.approx(2 / 3)


def test_empty_and_scalar_arrays_are_compared():
    assert measure(np.zeros((0, 3)), np.zeros((0, 3))) == Drift()
    assert measure(np.float32(2), np.float32(3)).max_abs == 1
    assert measure(np.zeros(0, int), np.zeros(0, int)).argmax_agreement == 1


def test_shapes_and_kinds_must_match():
    with pytest.raises(ValueError, match=r"expected shape \(2,\), got \(3,\)"):
        measure(np.ones(2), np.ones(3))
    with pytest.raises(ValueError, match="expected float64, got int64"):
        measure(np.ones(2), np.ones(2, np.int64))
    assert measure(np.ones(2, np.float32), np.ones(2, np.float16)).max_abs == 0


@given(st.integers(0, 99), st.sampled_from(["swapped", "stepped", "reversed"]))
def test_layout_is_irrelevant(seed, layout):
    rng = np.random.default_rng(seed)
    expected, noise = rng.normal(size=(2, 40, 30)).astype(np.float32)
    actual = expected + noise
    views = {"swapped": lambda x: x.T, "stepped": lambda x: x[::3, 1::2], "reversed": lambda x: x[::-1]}
    left_view, right_view = views[layout](expected), views[layout](actual)
    one, other = measure(left_view, right_view), measure(left_view.copy(), right_view.copy())
    assert (one.count, one.max_abs, one.worst_index) == (other.count, other.max_abs, other.worst_index)
    assert one.sqnr_db == pytest.approx(other.sqnr_db)


def test_the_result_is_independent_of_threads(monkeypatch):
    monkeypatch.setattr("validation.metrics.slice_sums.SPAN", 3 * CHUNK)
    expected, actual = np.random.default_rng(0).normal(size=(2, 20 * CHUNK + 5)).astype(np.float32)
    assert measure(expected, actual, threads=1) == measure(expected, actual, threads=3)


@pytest.mark.parametrize("layout", ["flat", "strided"])
def test_large_files_are_read_in_blocks(tmp_path, layout):
    shape = (1 << 12, 1 << 10)
    for name in ("expected", "actual"):
        np.lib.format.open_memmap(tmp_path / f"{name}.npy", "w+", np.float32, shape).flush()
    expected, actual = (np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in ("expected", "actual"))
    if layout == "strided":
        expected, actual = expected.T, actual.T
    tracemalloc.start()
    assert measure(expected, actual, decisions=True).count == 1 << 22
    assert tracemalloc.get_traced_memory()[1] < 8 << 20  # of two files of 16 MiB
    tracemalloc.stop()


def test_denormals_count():
    drift = measure(np.full(3, 1e-45, np.float32), np.full(3, 3e-45, np.float32))
    assert drift.max_abs > 0 and drift.max_rel == pytest.approx(1)


@given(st.floats(-8, 8), st.integers(0, 99))
def test_the_norm_of_the_actual_values_survives_cancellation(power, seed):
    expected = np.random.default_rng(seed).normal(size=50)
    actual = expected * 10.0**power
    assert measure(expected, actual).actual_sq == pytest.approx(actual @ actual, rel=1e-9)
    assert measure(expected, actual).cosine == pytest.approx(1, abs=1e-9)


def test_the_error_explains_that_complex_numbers_are_not_compared():
    values = np.ones(4, np.complex64)
    with pytest.raises(ValueError, match="real and imaginary parts"):
        measure(values, values)
