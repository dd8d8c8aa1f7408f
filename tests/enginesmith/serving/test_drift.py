"""The sequential test of a rate: false alarms, power, what the alarm says. Its bars: bench_traffic_drift.py."""

import numpy as np
import pytest

from enginesmith.core.errors import InputError
from enginesmith.serving.drift import LEAST_RATE, ODDS, RateDriftDetector, wilson_upper


def alarm(detector, rates, seed):
    draws = np.random.default_rng(seed).random(len(rates)) < rates
    return next(filter(None, (detector.add(bool(counts)) for counts in draws)), None)


def test_a_steady_rate_raises_no_alarm():
    assert [alarm(RateDriftDetector(0.01), np.full(25_000, 0.01), seed) for seed in range(8)] == [None] * 8


@pytest.mark.parametrize("reference", [5.0, -0.1, float("nan")])
def test_a_reference_that_is_no_share_is_refused(reference):
    with pytest.raises(InputError, match="give a share of the requests, from 0 to 1"):
        RateDriftDetector(reference)


def test_a_rise_is_found_and_the_alarm_says_since_when():
    found = [alarm(RateDriftDetector(0.01), np.repeat([0.01, 0.03], [3000, 2000]), seed) for seed in range(40)]
    assert sum(each is not None for each in found) >= 38
    drifts = [each for each in found if each]
    assert np.median([abs(each.since - 3001) for each in drifts]) < 300
    assert np.median([each.rate for each in drifts]) == pytest.approx(0.03, rel=0.4)
    assert all(each.since <= each.requests and each.since_at <= each.found_at for each in drifts)


def test_a_rate_is_learned_from_the_first_requests():
    detector = RateDriftDetector(learn=5000)
    assert alarm(detector, np.full(5000, 0.01), 0) is None
    assert detector.reference == pytest.approx(wilson_upper(detector.counted, 5000))
    assert alarm(detector, np.full(5000, 0.06), 1) is not None


def test_no_fallback_at_all_is_no_reference_of_zero():
    detector = RateDriftDetector(0.0)
    assert detector.reference == LEAST_RATE and detector.add(True) is None


def test_only_one_alarm():
    detector = RateDriftDetector(0.01)
    assert sum(detector.add(True) is not None for _ in range(100)) == 1 and detector.requests == 100


@pytest.mark.parametrize("rate", [0.001, 0.01, 0.3])
def test_every_bet_has_a_mean_of_one_at_the_reference_and_less_below(rate):
    detector = RateDriftDetector(rate)
    for other, counting in detector._bets:
        assert rate * counting + (1 - rate) * other == pytest.approx(1.0)
        assert rate / 2 * counting + (1 - rate / 2) * other < 1.0
    assert len(detector._bets) == len(ODDS)


def test_the_statistic_is_that_of_its_formula():
    """The sum over all beginnings of the product of the bets since, averaged over the odds."""
    detector, draws = RateDriftDetector(0.2, threshold=1e12), np.random.default_rng(0).random(50) < 0.4
    draws[-1] = True  # a statistic is brought up to the last request that counts
    for counts in draws:
        detector.add(bool(counts))
    expected = [
        sum(float(np.prod([row[bool(counts)] for counts in draws[begin:]])) for begin in range(50))
        for row in detector._bets
    ]
    np.testing.assert_allclose(detector._statistics, expected)


def test_wilsons_limit():
    assert wilson_upper(10, 1000) == pytest.approx(0.01831, abs=1e-5)  # statsmodels' proportion_confint(10, 1000)
    assert 0 < wilson_upper(0, 1000) < 0.004
