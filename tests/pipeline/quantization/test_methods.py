import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from enginesmith.core.errors import DataError, InputError
from pipeline.quantization.ranges import Ranges
from pipeline.quantization.statistics.histogram import LogHistogram
from pipeline.quantization.statistics.methods import (
    ENTROPY,
    MINMAX,
    MOVING_AVERAGE,
    MSE,
    Activation,
    Method,
    expected_error,
    method,
    percentile,
    ranges,
)
from pipeline.quantization.statistics.observations import Observations, TensorStatistics
from tests.scheduling import slow_after_first

METHODS: list[Method] = [MINMAX, MOVING_AVERAGE, percentile(), percentile(99), ENTROPY, MSE]
EVERY = pytest.mark.parametrize("chosen", METHODS, ids=lambda item: item.name)
BOTH = pytest.mark.parametrize("activation", slow_after_first(["int8", "uint8"], 2))
FLOATS = st.floats(-(2.0**60), 2.0**60, width=32)


def seen(values: np.ndarray, histogram: bool = True) -> TensorStatistics:
    values = values.astype(np.float32)
    statistics = TensorStatistics().extend_with(float(values.min()), float(values.max()), values.size)
    return TensorStatistics(**vars(statistics) | {"histogram": LogHistogram.of(values) if histogram else None})


def observed(**tensors: TensorStatistics) -> Observations:
    return Observations("m" * 64, "d" * 64, ((0, 8),), tensors)


def chosen_range(values: np.ndarray, chosen: Method, activation: Activation) -> tuple[float, float]:
    return ranges(observed(x=seen(values)), chosen, activation).tensors["x"]


def quantized(values: np.ndarray, low: float, high: float, activation: Activation) -> np.ndarray:
    """As Q/DQ does it."""
    if activation == "int8":
        step = max(-low, high) / 127
        return np.clip(np.rint(values / step), -127, 127) * step
    low, high = min(low, 0), max(high, 0)
    step = (high - low) / 255
    zero = np.rint(-low / step)
    return (np.clip(np.rint(values / step) + zero, 0, 255) - zero) * step


def error(values: np.ndarray, pair: tuple[float, float], activation: Activation) -> float:
    return float(np.square(values - quantized(values, *pair, activation)).sum())


SHAPES = {
    "normal": np.random.default_rng(0).normal(size=20000),
    "relu": np.maximum(np.random.default_rng(1).normal(size=20000), 0),
    "heavy": np.random.default_rng(2).standard_t(3, size=20000),
    "outlier": np.append(np.random.default_rng(3).normal(size=20000), [90.0]),
    "shifted": np.random.default_rng(4).normal(5, 1, size=20000),
    "negative": -np.random.default_rng(5).exponential(size=20000),
}


@EVERY
@BOTH
@given(arrays.arrays(np.float32, st.integers(1, 30), elements=FLOATS))
def test_every_range_is_finite_and_within_the_observed_values(chosen, activation, values):
    actual = ranges(observed(x=seen(values)), chosen, activation)
    low, high = actual.tensors["x"]
    assert values.min() <= low <= high <= values.max()
    assert Ranges.from_json(actual.to_json()) == actual


@BOTH
@pytest.mark.parametrize("shape", SHAPES)
def test_mse_is_near_the_best_of_all_bounds(shape: str, activation: Activation) -> None:
    values = SHAPES[shape].astype(np.float32)
    low, high = float(values.min()), float(values.max())
    best_error = min(
        error(values, (low * fraction, high * right_fraction), activation)
        for fraction in np.geomspace(0.05, 1, 40)
        for right_fraction in ([fraction] if activation == "int8" else np.geomspace(0.05, 1, 40))
    )
    assert error(values, chosen_range(values, MSE, activation), activation) <= 1.03 * best_error


@given(st.floats(0.01, 100), st.floats(0, 50))
def test_the_expected_error_assumes_uniform_values_in_each_bin(reach: float, clip: float) -> None:
    assume(clip < reach)
    bound = reach - clip / 2
    bins = LogHistogram.of(np.linspace(-reach, reach, 500).astype(np.float32)).bins
    values = (bins[0] + (bins[1] - bins[0]) * np.linspace(0.0005, 0.9995, 1000)[:, None]) + 0.0
    exact_error = (np.square(values - quantized(values, -bound, bound, "int8")).mean(axis=0) * bins[2]).sum()
    assert expected_error(bins, -bound, bound, bound / 127) == pytest.approx(exact_error, rel=0.03)


def test_a_single_outlier_does_not_stretch_percentiles_and_entropy() -> None:
    values = SHAPES["outlier"]
    assert chosen_range(values, MINMAX, "int8")[1] == 90
    for clipping in (percentile(99.9), ENTROPY):
        assert chosen_range(values, clipping, "int8")[1] < 20, clipping.name


def test_entropy_keeps_a_uniform_distribution_whole() -> None:
    low, high = chosen_range(np.random.default_rng(0).uniform(-2, 2, 50000), ENTROPY, "int8")
    assert low == pytest.approx(-2, rel=0.02) and high == pytest.approx(2, rel=0.02)


@pytest.mark.parametrize("shape", SHAPES)
def test_entropy_has_more_levels_for_uint8_where_all_values_have_one_sign(shape: str) -> None:
    values = SHAPES[shape] / 100
    pairs = {chosen_range(values, ENTROPY, activation) for activation in ("int8", "uint8")}
    assert len(pairs) == (2 if shape in ("relu", "negative", "shifted") else 1)


def test_percentiles_are_of_magnitudes_for_int8_and_of_both_ends_for_uint8() -> None:
    values = np.concatenate([np.linspace(0, 1, 9901), np.linspace(-10, 0, 99)])
    low, high = chosen_range(values, percentile(99), "int8")
    assert -low == pytest.approx(high, rel=1e-6) or high == 1  # the extreme seen is nearer
    low, high = chosen_range(values, percentile(98), "uint8")
    assert low == pytest.approx(np.quantile(values, 0.01), abs=0.1) and high == pytest.approx(0.99, abs=0.02)
    for sign in (1, -1):  # of values with one sign, the end that is far from zero alone is clipped, by all of the share
        end_values = chosen_range(sign * np.linspace(0.1, 1, 9901), percentile(98), "uint8")
        assert sorted(map(abs, end_values)) == pytest.approx([0.118, 0.982], abs=0.005)


def test_the_moving_average_is_over_samples() -> None:
    result = TensorStatistics().extend_with(-1, 2, 4).extend_with(-3, 10, 4)
    assert ranges(observed(x=result), MOVING_AVERAGE, "int8").tensors["x"] == (-2, 6)


def test_masks_and_empty_tensors_have_no_range_and_unobserved_ones_keep_extremes() -> None:
    tensors = {
        "mask": TensorStatistics().extend_with(-np.inf, 0, 4),
        "empty": TensorStatistics(),
        "plain": seen(SHAPES["outlier"], histogram=False),
        "x": seen(SHAPES["outlier"]),
    }
    actual = ranges(observed(**tensors), MSE, "int8")
    assert set(actual.tensors) == {"plain", "x"} and actual.tensors["plain"][1] == 90
    with pytest.raises(DataError, match="observe with histograms"):
        MSE.choose(tensors["plain"], "int8")


def test_the_scales_file_names_its_sources() -> None:
    item = seen(SHAPES["outlier"])
    actual = ranges(observed(x=item), MSE, "int8")
    document = actual.to_json()
    assert document["method"] == "mse int8" and document["dataset"] == "d" * 64 and document["samples"] == 8
    assert document["tensors"]["x"]["histogram"] == item.histogram.digest
    assert document["tensors"]["x"]["seen"] == [item.low, 90] and actual.reach("x") == 90
    assert 0 < document["tensors"]["x"]["clipped"] < 0.01


@pytest.mark.parametrize("value", [0.0, 3.0, -3.0, 1e36, 1e-44])
@EVERY
@BOTH
def test_constant_tensors_have_a_range(chosen: Method, activation: Activation, value: float) -> None:
    low, high = chosen_range(np.full(100, value), chosen, activation)
    assert low == high == np.float32(value) or low <= np.float32(value) <= high


def test_methods_are_found_by_name() -> None:
    assert method("percentile", 99.9).name == "percentile 99.9" and method("percentile").name == percentile().name
    assert [method(name).name for name in ("minmax", "moving-average", "entropy", "mse")] == [
        "minmax", "moving-average", "entropy", "mse"]  # fmt: skip
    with pytest.raises(InputError, match="no calibration method 'max'; known: percentile, entropy"):
        method("max")
    with pytest.raises(InputError, match="method 'mse' accepts no percentile"):
        method("mse", 99.9)
