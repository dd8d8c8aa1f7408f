import math

import numpy as np
import pytest

from validation.statistics.rates import (
    anytime_level,
    count_needed,
    detectable,
    effective,
    estimate_design_effect,
    lower,
    lower_anytime,
    upper,
)
from validation.statistics.serial_dependence import NORMAL, beta_cdf, t_quantile


def binomial(count: int, total: int, share: float) -> float:
    return math.comb(total, count) * share**count * (1 - share) ** (total - count)


@pytest.mark.parametrize("total", [10, 60, 300])
@pytest.mark.parametrize("share", [0.001, 0.01, 0.2, 0.5, 0.93])
def test_bounds_are_wrong_as_rarely_as_promised(total, share):
    lower_total = sum(binomial(x, total, share) for x in range(total + 1) if upper(x, total, 0.05) < share)
    upper_total = sum(binomial(x, total, share) for x in range(total + 1) if lower(x, total, 0.05) > share)
    assert lower_total <= 0.05 and upper_total <= 0.05


def test_the_bounds_invert_the_binomial():
    for count, total in ((0, 40), (3, 40), (40, 40), (17, 5000)):
        if count < total:
            high = upper(count, total, 0.05)
            assert sum(binomial(x, total, high) for x in range(count + 1)) == pytest.approx(0.05, rel=1e-6)
        if count:
            low = lower(count, total, 0.05)
            assert 1 - sum(binomial(x, total, low) for x in range(count)) == pytest.approx(0.05, rel=1e-6)


def test_the_incomplete_beta_function_is_right_at_its_ends():
    assert (beta_cdf(0.0, 2, 3), beta_cdf(1.0, 2, 3)) == (0.0, 1.0)
    assert beta_cdf(0.3, 1, 1) == pytest.approx(0.3) and beta_cdf(0.3, 2, 1) == pytest.approx(0.09)
    assert t_quantile(0.95, 10) == pytest.approx(1.8125, rel=1e-3)
    assert t_quantile(0.975, 2) == pytest.approx(4.3027, rel=1e-4)


def test_a_burst_is_less_evidence_than_as_many_failures_apart():
    separate_array, burst = np.zeros(2000), np.zeros(2000)
    separate_array[::100], burst[400:420] = 1, 1
    assert estimate_design_effect(separate_array, 20) == 1.0
    assert estimate_design_effect(burst, 20) > 10
    assert lower(*effective(burst), 0.05) < lower(*effective(separate_array), 0.05)
    assert upper(*effective(burst), 0.05) > upper(*effective(separate_array), 0.05)


def test_the_promised_numbers_of_requests_hold():
    enough = count_needed(0.001, 0.025)
    assert enough == 3688
    assert upper(0, enough, 0.025) <= 0.001 < upper(0, enough - 1, 0.025)
    rng = np.random.default_rng(0)
    share = detectable(5000, 0.001, 0.01, True)
    bound_text = upper(0, 5000, 0.005)
    result = np.mean([lower(int(x), 5000, 0.005) - bound_text > 0.001 for x in rng.binomial(5000, share, 2000)])
    assert result == pytest.approx(0.8, abs=0.04)
    assert detectable(5, 0.3, 0.01, True) is None and count_needed(1.5, 0.05) is None


def test_anytime_bounds_hold():
    """Looking after every hundred requests: the bounds for one look are wrong far more often than promised."""
    rng = np.random.default_rng(0)
    counts = np.cumsum(rng.binomial(100, 0.01, (300, 60)), 1)
    wrong_means = {
        bound: np.mean([any(bound(int(x), 100 * (at + 1), 0.05) > 0.01 for at, x in enumerate(row)) for row in counts])
        for bound in (lower, lower_anytime)
    }
    assert wrong_means[lower_anytime] <= 0.05 < 0.1 < wrong_means[lower]
    looks = np.arange(100, 6001, 100)
    means = np.cumsum(rng.normal(size=(3000, 60)), 1) / np.sqrt(np.arange(1, 61))
    bounds = [NORMAL.inv_cdf(1 - anytime_level(int(n), 0.05)) for n in looks]
    assert (means > bounds).any(1).mean() <= 0.05 < 0.2 < (means > NORMAL.inv_cdf(0.95)).any(1).mean()
    assert lower_anytime(0, 100, 0.05) == 0.0 and 0.08 < lower_anytime(20, 100, 0.05) < lower(20, 100, 0.05)
