"""Times between measured sizes: known functions, uncertainty, and what is not predicted."""

import numpy as np
import pytest

from enginesmith.core.errors import DataError
from validation.traffic.service_times import ServiceTimes

LENGTHS = np.array([[16], [32], [64], [128], [256]])


def times(seconds, sizes=LENGTHS, dims=("length",)) -> ServiceTimes:
    values = np.array([seconds(*row) for row in sizes.tolist()])
    curves = values[:, None] * np.linspace(0.9, 1.1, 101)[None]
    return ServiceTimes(dims, sizes, curves, np.full(len(sizes), 0.005))


def test_a_power_law_is_met_between_measured_sizes():
    result, error = times(lambda length: 1e-5 * length**1.3).predict(np.array([[24], [48], [200]]))
    assert result == pytest.approx([1e-5 * length**1.3 for length in (24, 48, 200)], rel=0.01)
    assert (error < 0.05).all()


def test_a_sum_of_a_constant_and_a_square_is_met_within_its_uncertainty():
    def seconds(length: float) -> float:
        return 1e-3 + 1e-7 * length**2

    result, error = times(seconds).predict(np.array([[24], [48], [96], [200]]))
    expected = np.array([seconds(length) for length in (24, 48, 96, 200)])
    assert (np.abs(np.log(result / expected)) <= 3 * error).all()
    assert result == pytest.approx(expected, rel=0.05)


def test_measured_sizes_have_their_own_times_and_small_errors():
    service = times(lambda length: 1e-3 + 1e-7 * length**2)
    result, error = service.predict(LENGTHS)
    assert result == pytest.approx([1e-3 + 1e-7 * length**2 for length in LENGTHS[:, 0]], rel=0.01)
    assert (error < 0.01).all()


def test_between_measured_sizes_the_uncertainty_is_larger():
    service = times(lambda length: 1e-3 * (1.5 + np.sin(length)))
    _, prediction = service.predict(np.array([[64]]))
    _, between = service.predict(np.array([[90]]))
    assert between > 5 * prediction


def test_the_distribution_has_the_shape_of_the_nearest_measured_size():
    curve = times(lambda length: 1e-5 * length).curves_at(np.array([[60]]))[0]
    assert curve[0] / curve[50] == pytest.approx(0.9) and curve[-1] / curve[50] == pytest.approx(1.1)


def test_one_measured_size_gives_that_time():
    result, _ = times(lambda length: 0.25, np.array([[8]])).predict(np.array([[8]]))
    assert result == pytest.approx([0.25])


def test_beyond_timed_sizes_nothing_is_predicted():
    with pytest.raises(DataError, match=r"length=300 is beyond what was timed \(16 to 256\).*--bucket length=300"):
        times(lambda length: 1.0).predict(np.array([[300]]))


def test_two_dims_are_predicted():
    sizes = np.array([[batch, length] for batch in (1, 4, 8) for length in (16, 64, 256)])
    service = times(lambda batch, length: 1e-5 * batch * length, sizes, ("batch", "length"))
    result, _ = service.predict(np.array([[2, 32]]))
    assert result == pytest.approx([1e-5 * 64], rel=0.02)
