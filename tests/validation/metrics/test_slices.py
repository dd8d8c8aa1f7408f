"""Slices and variation: the sums against plain numpy in exact or wide arithmetic, however the cases are cut."""

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from validation.metrics import slice_sums
from validation.metrics.drift import measure
from validation.metrics.slices import Slices, worst_slice

SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


def noisy(shape, seed, offset=0.0, dtype=np.float64):
    rng = np.random.default_rng(seed)
    expected = rng.normal(size=shape) + offset * rng.normal(size=shape[1:])
    return expected.astype(dtype), (expected + rng.normal(size=shape) / 8).astype(dtype)


def plain(expected, actual):
    """Per axis (0: the batch) the sums of e^2, (e - m)^2, (a - e)^2, |e|, and the greatest (e - m)^2, in longdouble."""
    e, a = expected.astype(np.longdouble), actual.astype(np.longdouble)
    away, result = (e - e.mean(axis=0)) ** 2, {}
    for axis in range(1, e.ndim):
        rest = tuple(index for index in range(e.ndim) if index != axis)
        result[axis] = [part.sum(axis=rest) for part in (e * e, away, (a - e) ** 2, np.abs(e))], away.max(axis=rest)
    return result, away.sum()


def assert_same(slices: Slices, expected, actual, rel=1e-9):
    axes, centered_sq = plain(expected, actual)
    scale = float((expected.astype(np.longdouble) ** 2).sum())
    assert slices.centered_sq == pytest.approx(float(centered_sq), rel=rel, abs=1e-13 * scale)
    assert slices.axes.keys() == axes.keys()
    for axis, ((expected_sq, centered_array, error_sq, magnitude), peak) in axes.items():
        result = slices.axes[axis]
        assert result.magnitude == pytest.approx(magnitude.astype(float), rel=rel)
        assert slices.centered_peaks[axis] == pytest.approx(peak.astype(float), rel=rel, abs=1e-13 * scale)
        assert result.expected_sq == pytest.approx(expected_sq.astype(float), rel=rel)
        assert result.centered_sq == pytest.approx(centered_array.astype(float), rel=rel, abs=1e-13 * scale)
        assert result.error_sq == pytest.approx(error_sq.astype(float), rel=rel)
        assert (result.count == expected.size / expected.shape[axis]).all()


@given(SHAPES, st.integers(0, 99), st.lists(st.integers(0, 5), max_size=3))
def test_merging_cases_gives_the_whole(shape, seed, cuts):
    expected, actual = noisy((6, *shape), seed, 5.0)
    numbers = [0, *sorted(cuts), 6]
    parts = [slice(start, end) for start, end in pairwise(numbers) if start < end]
    merge = measure(expected[parts[0]], actual[parts[0]], samples=parts[0].stop - parts[0].start)
    for part in parts[1:]:
        merge = merge.merge(measure(expected[part], actual[part], samples=part.stop - part.start))
    assert_same(merge.slices, expected, actual)
    assert merge.centered_sq == merge.slices.centered_sq and merge.slices.samples == 6


@pytest.mark.parametrize("shape", [(7, 40), (3, 5, 90), (2, 3, 4, 33), (1, 300), (4, 2), (50, 3), (9,)])
@pytest.mark.parametrize("threads", [1, 3])
def test_blocks_and_threads_change_nothing(monkeypatch, shape, threads):
    for name, size in {"CHUNK": 32, "SPAN": 64, "BLOCK": 16}.items():
        monkeypatch.setattr(slice_sums, name, size)
    expected, actual = noisy(shape, 1, 9.0)
    actual[-1].flat[-1] += 50
    for left_expected, right_actual in ((expected, actual), (np.asfortranarray(expected), np.asfortranarray(actual))):
        drift = measure(left_expected, right_actual, threads=threads, samples=shape[0])
        assert_same(drift.slices, expected, actual)
        plainly = measure(expected, actual)
        assert drift.worst_index == plainly.worst_index == tuple(size - 1 for size in shape)
        assert (drift.count, drift.max_abs, drift.peak) == (plainly.count, plainly.max_abs, plainly.peak)
        assert drift.error_sq == pytest.approx(plainly.error_sq) and drift.dot == pytest.approx(plainly.dot)


def test_an_offset_costs_no_digits():
    signal = np.random.default_rng(0).normal(size=(400, 3))
    expected = 1e8 + signal
    exact = [[Fraction(value) for value in column] for column in expected.T]
    means = [sum(column) / len(column) for column in exact]
    expected_result = sum((value - mean) ** 2 for column, mean in zip(exact, means, strict=True) for value in column)
    whole_measurement = measure(expected, expected + 0.5, samples=400)
    parts = [measure(expected[at : at + 50], expected[at : at + 50] + 0.5, samples=50) for at in range(0, 400, 50)]
    merge = parts[0]
    for part in parts[1:]:
        merge = merge.merge(part)
    for drift in (whole_measurement, merge):
        assert drift.centered_sq == pytest.approx(float(expected_result), rel=1e-7)
        assert drift.centered_sqnr_db == pytest.approx(10 * np.log10(float(expected_result) / 300))


def test_differing_sizes_are_averaged_over():
    short_pair, long_pair = noisy((4, 3, 5), 1, 3.0)[0], noisy((6, 7, 5), 2, 3.0)[0]
    merged_slices = measure(short_pair, short_pair, samples=4).merge(measure(long_pair, long_pair, samples=6)).slices
    columns = np.concatenate([short_pair.reshape(-1, 5), long_pair.reshape(-1, 5)])
    assert merged_slices.centered_sq == pytest.approx(((columns - columns.mean(axis=0)) ** 2).sum())
    assert merged_slices.axes[2].centered_sq == pytest.approx(((columns - columns.mean(axis=0)) ** 2).sum(axis=0))
    assert merged_slices.axes[1].count.tolist() == [50, 50, 50, 30, 30, 30, 30]
    assert merged_slices.axes[1].expected_sq[5] == pytest.approx((long_pair[:, 5] ** 2).sum())


def test_an_output_without_a_batch_is_one_sample():
    boxes = np.random.default_rng(0).normal(size=(2, 30, 4))
    drifts = [measure(box, box + 1e-3, samples=1) for box in boxes]
    merged_slices = drifts[0].merge(drifts[1]).slices
    assert list(merged_slices.axes) == [0, 1] and merged_slices.samples == 2
    assert merged_slices.centered_sq == pytest.approx(((boxes - boxes.mean(axis=0)) ** 2).sum())
    more_slices = measure(np.ones((7, 4)), np.ones((7, 4)), samples=1).merge(drifts[0]).slices
    assert more_slices.mean.shape == (1, 4)


def test_variance_of_one_sample_is_within_the_sample():
    expected = 288 + np.random.default_rng(0).normal(size=(1, 64))
    slices = measure(expected, expected, samples=1).slices
    assert slices.centered_sq == 0
    assert slices.within().centered_sq == pytest.approx(((expected - expected.mean()) ** 2).sum())
    for count in (2, 9):
        rows = np.random.default_rng(1).normal(size=(1, count, 4))
        assert measure(rows, rows, samples=1).slices.within().centered_sq == pytest.approx(
            ((rows - rows.mean(axis=1, keepdims=True)) ** 2).sum()
        )


@pytest.mark.parametrize("power", [300, 150, -170, -300])
def test_squares_beyond_float64_are_handled(power):
    expected, actual = noisy((20, 4), 0, 2.0)
    unit = 2.0 ** round(power / np.log10(2))
    near = measure(expected, actual, samples=20)
    assert near.slice_sqnr_db < near.sqnr_db, "the worst slice is worse than all together"
    far_measurement = measure(expected * unit, actual * unit, samples=20)
    for name in ("sqnr_db", "centered_sqnr_db", "slice_sqnr_db", "quartile_sqnr_db", "cosine", "max_rel"):
        assert getattr(far_measurement, name) == pytest.approx(getattr(near, name), rel=1e-12), name
    merge = far_measurement.merge(measure(np.zeros((4, 4)), np.zeros((4, 4)), samples=4))
    assert merge.sqnr_db == measure(expected * unit, actual * unit).sqnr_db == pytest.approx(near.sqnr_db)
    both_merge = near.merge(far_measurement)
    assert both_merge.sqnr_db == pytest.approx(near.sqnr_db, abs=1e-9 if power > 0 else 1e-3)
    worse_measurement = measure(expected * unit, 2 * expected * unit, samples=20)
    for mixed_merge in (near.merge(worse_measurement), worse_measurement.merge(near)):
        assert mixed_merge.sqnr_db == pytest.approx(0.0 if power > 0 else near.sqnr_db), "the larger numbers decide"


@pytest.mark.parametrize("scale", [0.0, 1e-7])
def test_dead_channels_are_measured_against_the_rest(scale):
    expected, actual = noisy((64, 6), 0)
    actual = expected * (1 + 1e-6)
    expected[:, 2] *= scale
    actual[:, 2] = expected[:, 2] + 1e-7 * np.random.default_rng(1).normal(size=64)
    assert worst_slice(measure(expected, actual, samples=64).slices, 80.0).sqnr_db > 110
    actual[:, 2] = 0.1
    assert worst_slice(measure(expected, actual, samples=64).slices, 80.0).sqnr_db < 25


def test_slices_of_a_few_elements_are_not_judged():
    expected, actual = noisy((15, 200), 0)
    assert worst_slice(measure(expected, actual, samples=15).slices, 20.0) is None
    assert measure(expected, actual, samples=15).slice_sqnr_db == np.inf
    expected, actual = noisy((16, 200), 0)
    assert worst_slice(measure(expected, actual, samples=16).slices, 20.0) is not None


def test_an_edges_slice_is_measured_against_its_usual_values():
    expected, actual = noisy((64, 6), 0)
    quiet = expected[:16] * np.where(np.arange(6) == 3, 1e-3, 1)
    usual_slices, edge = measure(expected, actual, samples=64).slices, measure(quiet, quiet + 1e-2, samples=16).slices
    assert worst_slice(edge, None).index == 3 and worst_slice(edge, None).sqnr_db < 0
    assert worst_slice(edge, None, usual_slices).sqnr_db > 30


def test_honest_rounding_allows_twice_its_amplitude():
    expected, _ = noisy((64, 6), 0)
    error = np.where(np.arange(6) == 3, 0.5, 1e-4)
    slices = measure(expected[:32], expected[:32] + error, samples=32).slices
    for factor, is_allowed in ((1.9, True), (2.1, False)):
        result = worst_slice(measure(expected, expected + factor * error, samples=64).slices, 40.0, honest=slices)
        assert result.index == 3 and (result.margin_db >= 0) is is_allowed and result.sqnr_db < 10 > result.limit_db


def test_an_index_beyond_honest_rounding_has_its_maximum():
    expected, _ = noisy((64, 6), 0)
    honest_slices = measure(expected[:, :4], expected[:, :4] + np.array([1e-4, 0.3, 0.5, 0.4]), samples=64).slices
    for factor, is_allowed in ((1.9, True), (2.1, False)):
        error = np.where(np.arange(6) == 5, 0.5 * factor, 1e-4)
        result = worst_slice(measure(expected, expected + error, samples=64).slices, 40.0, honest=honest_slices)
        assert result.index == 5 and (result.margin_db >= 0) is is_allowed


def test_masks_and_non_finite_numbers_are_outside_the_sums():
    expected = np.array([[-np.inf, 1.0], [-np.inf, 3.0]])
    slices = measure(expected, expected + 1, samples=2).slices
    assert slices.axes[1].error_sq.tolist() == [0, 2] and slices.centered_sq == 2
    assert measure(np.full((2, 2), np.nan), np.ones((2, 2)), samples=2).slices.centered_sq == 0


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (4, 3, 0), (4, 2, 0, 5)])
def test_an_empty_output_has_no_sums(shape):
    empty_array = np.zeros(shape, np.float32)
    drift = measure(empty_array, empty_array, samples=shape[0])
    assert drift.count == 0
    assert drift.slices is not None
    for slices in (drift.slices, drift.slices.merge(drift.slices), drift.slices.about(drift.slices)):
        assert slices is not None and all(not sums.error_sq.any() for sums in slices.axes.values())


def test_an_empty_output_of_one_case_keeps_the_variation_of_others():
    boxes = noisy((2, 3, 4), 3, 100.0)[0]
    measurement, empty, last = (measure(part, part, samples=1) for part in (boxes[:1], np.zeros((1, 0, 4)), boxes[1:]))
    for merge in (measurement.merge(empty).merge(last), empty.merge(measurement).merge(last)):
        assert np.isfinite(merge.slices.centered_sq) and merge.slices.freedom > 0


@pytest.mark.parametrize(("size", "scale", "offset", "lost", "times", "allowed"), [
    (300, 1e-2, 0, 0.8, 1, False), (300, 2e-3, 0, 0.8, 1, True), (30, 1e-4, 0, 0.8, 1, False),
    (300, 2e-3, 0, 0.2, 5, False), (30, 1e-4, 10, 0.2, 5, False),  # a slice of zeros where honest rounding has 14 dB
    (30, 1e-4, 10, 0.8, 3.9, True), (30, 1e-4, 10, 0.8, 8, False), (30, 1e-2, 10, 0.8, 1, False),
    (30, 1e-4, 0.01, 0.8, 1, False),
])  # fmt: skip
def test_honest_rounding_may_lose_the_variation_of_a_faint_slice(size, scale, offset, lost, times, allowed):
    flag = np.arange(size) == 3
    expected = noisy((64, size), 0)[0] * np.where(flag, scale, 1)
    slices, honest_slices = (
        measure(expected + offset * flag, expected + (offset + factor * lost * expected) * flag, samples=64).slices
        for factor in (times, 1.0)
    )
    result = worst_slice(slices, 1.0, honest=honest_slices, rounded=False)
    assert result.index == 3 and (result.margin_db >= 0) is allowed


@pytest.mark.parametrize(("size", "off", "factor", "allowed"), [
    (300, 3, 9.0, True), (300, 3, 11.0, False), (300, 4, 9.0, False), (200, 1, 9.0, False),
])  # fmt: skip
def test_a_hundredth_of_many_slices_may_exceed_honest_rounding_by_chance(size, off, factor, allowed):
    expected, error = noisy((64, size), 0)[0], np.full(size, 0.01)
    honest_slices = measure(expected, expected + error, samples=64).slices
    actual = expected + np.where(np.arange(size) < off, factor, 1.0) * error
    result = worst_slice(measure(expected, actual, samples=64).slices, 60.0, honest=honest_slices, rounded=False)
    assert (result.margin_db >= 0) is allowed


@pytest.mark.parametrize(("peak", "judged"), [(0.0, True), (10.0, False)])
def test_a_variation_within_the_rounding_of_the_peak_is_not_judged(peak, judged):
    expected = noisy((64, 6), 0)[0] * np.where(np.arange(6) == 3, 1e-6, 1.0) + np.where(np.arange(6) == 3, 1e-5, 0.0)
    actual = expected + np.where(np.arange(6) == 3, 0.9 * (expected - expected.mean(axis=0)), 0.0)
    slices = measure(expected, actual, samples=64).slices
    result = worst_slice(slices, 20.0, honest=slices, still=(8 * 2.0**-23) ** 2, rounded=False, peak=peak)
    assert result.of_variation is judged
