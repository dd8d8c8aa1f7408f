import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from pipeline.quantization.statistics.histogram import CHUNK, LogHistogram

ANY = arrays.arrays(np.float32, st.integers(0, 40), elements=st.floats(width=32))
FINITE = arrays.arrays(
    np.float32, st.integers(1, 40), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)
)


@given(ANY, ANY, ANY)
def test_merging_equals_counting_in_any_order(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
    x, y, z = (LogHistogram.of(part) for part in (a, b, c))
    whole_value = LogHistogram.of(np.concatenate([c, a, b]))
    assert x.merge(y).merge(z) == whole_value == z.merge(y.merge(x))
    assert whole_value.digest == x.merge(y).merge(z).digest and whole_value.total == a.size + b.size + c.size


@given(FINITE)
def test_every_value_lies_in_a_bin_of_one_part_in_128(values: np.ndarray) -> None:
    for value in values.astype(np.float64):
        ((low,), (high,), (count,)) = LogHistogram.of(np.array([value], np.float32)).bins
        assert (low <= value <= high and count == 1) or abs(value) < 1e-40
        assert high - low <= max(abs(value), np.finfo(np.float32).tiny) / 128


def test_a_histogram_larger_than_one_chunk_loses_nothing() -> None:
    values = np.random.default_rng(0).normal(size=2 * CHUNK + 7).astype(np.float32)
    assert LogHistogram.of(values).total == values.size
    assert LogHistogram.of(values) == LogHistogram.of(values.reshape(1, -1)[:, ::-1])


@pytest.mark.parametrize("share", [0.001, 0.1, 0.5, 0.9, 0.999])
def test_quantiles_are_right_to_one_part_in_128(share: float) -> None:
    values = np.random.default_rng(0).normal(size=100_000).astype(np.float32)
    expected = np.quantile(values, share)
    assert LogHistogram.of(values).quantile(share) == pytest.approx(expected, rel=1 / 128, abs=1e-3)


def test_the_share_outside_a_range_is_computed() -> None:
    histogram = LogHistogram.of(np.array([-4, -1, 0, 0, 1, 1, 2, 8], np.float32))
    assert histogram.share_outside(-2, 4) == pytest.approx(2 / 8) and histogram.share_outside(-8, 16) == 0
    assert histogram.share_outside(0, 0) == pytest.approx(6 / 8)


def test_non_finite_values_are_counted_separately() -> None:
    infinite = LogHistogram.of(np.array([1, np.inf, -np.inf], np.float32))
    assert infinite.nonfinite == 2 and infinite.bins[2].sum() == 1


def test_magnitudes_ignore_signs() -> None:
    values = np.array([-3, -1, 0, -0.0, 1, 2], np.float32)
    assert LogHistogram.of(values).magnitudes() == LogHistogram.of(np.abs(values))


def test_the_largest_finite_value_has_a_finite_bin() -> None:
    low, high, counts = LogHistogram.of(np.array([np.finfo(np.float32).max], np.float32)).bins
    assert low[0] <= np.finfo(np.float32).max <= high[0] == 2.0**128 and counts[0] == 1
