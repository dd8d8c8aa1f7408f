import json
import math

import numpy as np
import pytest

from enginesmith.core.codec import decode, encode_document
from enginesmith.core.errors import IntegrityError
from enginesmith.core.reports.proof import Spread
from validation.metrics.tally import CHUNK, MOST_OUTPUTS, OutputTally, Spreads, samples_of


def pair(seed: int = 0, rows: int = 40, length: int = 300) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    expected = rng.standard_normal((rows, length)).astype(np.float32)
    noise = rng.standard_normal((rows, length)) * 10.0 ** rng.uniform(-6, -1, (rows, 1))
    return expected, (expected + noise).astype(np.float32)


def spread(*pairs: tuple[np.ndarray, np.ndarray], samples: int | None = None) -> Spread:
    tally = OutputTally()
    for index, (e, a) in enumerate(pairs):
        tally.add(f"golden {index}", e, a, samples=len(e) if samples is None else samples)
    return tally.spread("engine", "y")


def test_quantiles_of_the_error_are_within_a_percent_of_the_true_ones():
    expected, actual = pair()
    result = spread((expected, actual))
    true_quantile = np.quantile(np.abs(actual.astype(float) - expected), np.linspace(0, 1, 101), method="inverted_cdf")
    np.testing.assert_allclose(result.abs_error, true_quantile, rtol=0.008)
    assert result.abs_error[-1] == true_quantile[-1] and result.elements == expected.size


def test_the_sqnr_of_each_sample_is_independent():
    expected, actual = pair(rows=50)
    e, error = expected.astype(float), actual.astype(float) - expected
    true_db = np.sort(10 * np.log10((e**2).sum(1) / (error**2).sum(1)))
    assert spread((expected, actual)).sqnr_db == pytest.approx(tuple(true_db))
    many_spread = spread(pair(rows=500, length=20))
    assert many_spread.samples == 500 and len(many_spread.sqnr_db) == 101


@pytest.mark.parametrize("scale", [1e300, 1e-170])
def test_squares_beyond_float64_are_handled(scale):
    expected = np.random.default_rng(0).normal(size=(5, 8)) * scale
    assert spread((expected, 1.1 * expected)).sqnr_db == pytest.approx((20,) * 5)


def test_long_rows_and_many_rows_are_cut_equally():
    for shape in ((3, CHUNK * 2 + 5), (CHUNK + 3, 2)):
        expected = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
        result = spread((expected, expected + np.float32(0.25)))
        assert result.elements == expected.size and result.samples == shape[0]
        assert result.abs_error[50] == pytest.approx(0.25, rel=0.01)


def test_the_worst_samples_come_first_with_their_place_and_values():
    expected = np.ones((6, 2, 3), np.float32)
    actual = expected.copy()
    actual[4, 1, 2], actual[1, 0, 1] = 3.0, 1.5
    result = spread((expected, expected), (expected, actual)).worst
    assert [(item.case, item.sample, item.index) for item in result[:2]] == [
        ("golden 1", 4, (4, 1, 2)),
        ("golden 1", 1, (1, 0, 1)),
    ]
    assert (result[0].expected, result[0].actual) == (1.0, 3.0)
    assert result[0].sqnr_db == pytest.approx(10 * math.log10(6 / 4))
    assert len(result) == 2, "samples without any error are no worst cases"


def test_non_finite_values_are_worst_and_in_no_quantile():
    expected, actual = pair(rows=4, length=5)
    actual[2, 3] = np.nan
    expected[0, 0] = actual[0, 0] = -np.inf  # a mask: no error
    result = spread((expected, actual))
    assert result.nonfinite == 1 and result.worst[0].index == (2, 3) and math.isnan(result.worst[0].actual)
    assert len(result.sqnr_db) == 3 and all(map(math.isfinite, (*result.abs_error, *result.sqnr_db)))


def test_integers_have_worst_cases_and_no_quantiles():
    expected = np.arange(12).reshape(4, 3)
    actual = expected.copy()
    actual[2, 1:] = 0
    result = spread((expected, actual))
    assert result.abs_error == result.sqnr_db == () and result.equal == 10
    assert [(item.sample, item.index, item.unequal) for item in result.worst] == [(2, (2, 1), 2)]


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (3, 0)])
def test_odd_shapes_are_accepted(shape):
    value = np.ones(shape, np.float32)
    result = spread((value, value), samples=shape[0] if shape else 1)
    assert result.elements == value.size and result.worst == ()
    assert decode(json.loads(json.dumps(encode_document(result), allow_nan=False)), Spread) == result


def test_edge_cases_count_only_among_the_worst():
    spreads = Spreads()
    expected, actual = pair(rows=4, length=5)
    spreads.add("y", "golden 0", True, (expected, expected), 4)
    spreads.add("y", "batch=4", False, (expected, actual), 4)
    (result,) = spreads.at("engine")
    assert result.samples == 4 and result.abs_error[-1] == 0 and result.worst[0].case == "batch=4"
    for index in range(MOST_OUTPUTS + 5):
        spreads.add(f"y{index}", "golden 0", True, (expected, actual), 4)
    assert len(spreads.at("engine")) == MOST_OUTPUTS


def test_samples_are_entries_if_inputs_and_outputs_agree():
    x, y = np.zeros((4, 3)), np.zeros((4, 2))
    assert samples_of([x, np.zeros(())], y) == 4
    assert (
        samples_of([x, np.zeros((3, 3))], y) == samples_of([x], np.zeros((8, 2))) == samples_of([x], np.zeros(())) == 1
    )


def test_truncated_json_is_refused():
    data = encode_document(spread(pair(rows=2, length=2)))
    restored_value = decode(json.loads(json.dumps(data, allow_nan=False)), Spread)
    assert encode_document(restored_value) == data
    for change in ({"abs_error": None}, {"worst": [{}]}, {"more": 1}):
        with pytest.raises(IntegrityError, match="Spread"):
            decode({**data, **change}, Spread)
