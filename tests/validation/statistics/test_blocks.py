import numpy as np
import pytest

from tests.validation.canary.latencies import autoregressive
from validation.statistics.serial_dependence import block_length, draw_block_counts, politis_white, quantile_replicates


def test_blocks_are_as_long_as_the_memory():
    rng = np.random.default_rng(0)
    lengths = [politis_white(autoregressive(rng, 4000, memory, 1.0)) for memory in (0.0, 0.5, 0.9)]
    assert lengths[0] < 4 < lengths[1] < lengths[2]
    # AR(1), Politis & White: (2 rho / (1 - rho^2))^(2/3) (3/2 n)^(1/3), here for circular blocks.
    assert lengths[2] == pytest.approx((2 * 0.9 / (1 - 0.81)) ** (2 / 3) * (1.5 * 4000) ** (1 / 3), rel=0.4)
    assert politis_white(np.ones(100)) == 1.0 and block_length(np.arange(5.0)) == 1


def test_replicates_equal_sorted_resamples():
    rng = np.random.default_rng(1)
    values, block = rng.lognormal(size=600), 3
    draws = draw_block_counts(200, 50, 0)
    actual = quantile_replicates(values, [0.5, 0.9], block, draws)
    blocks = values.reshape(200, 3)
    for row, counts in zip(actual, draws.astype(int), strict=True):
        resample = np.repeat(blocks, counts, axis=0).ravel()
        expected = np.quantile(resample, [0.5, 0.9], method="inverted_cdf")
        assert row == pytest.approx(expected, rel=0.02)


def test_the_standard_error_of_a_median_is_the_true_one():
    rng = np.random.default_rng(2)
    errors = []
    for _ in range(20):
        values = autoregressive(rng, 2000, 0.8, 1.0)
        length = block_length(values)
        errors.append(quantile_replicates(values, [0.5], length, draw_block_counts(2000 // length, 300, 0)).std())
    truth = np.std([np.median(autoregressive(rng, 2000, 0.8, 1.0)) for _ in range(150)])
    assert np.mean(errors) == pytest.approx(truth, rel=0.2)
    assert quantile_replicates(values, [0.5], 1, draw_block_counts(2000, 100, 0)).std() < 0.6 * truth, (
        "blocks are what it takes"
    )
