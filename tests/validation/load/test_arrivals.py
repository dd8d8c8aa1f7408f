"""Planned arrivals: rates, bursts, and recorded ones."""

import numpy as np
import pytest

from enginesmith.core.errors import InputError
from validation.load.arrivals import BurstTerms, plan_poisson, plan_recorded


def test_poisson_arrivals_have_the_rate_and_its_gaps():
    plan = plan_poisson(500, 100, BurstTerms(), 0)
    assert len(plan) == pytest.approx(50_000, rel=0.02) and not plan.burst.any()
    gaps = np.diff(plan.at)
    assert (gaps >= 0).all() and gaps.std() == pytest.approx(gaps.mean(), rel=0.02)


def test_bursts_have_so_many_times_the_rate():
    plan = plan_poisson(100, 100, BurstTerms(5, 2, 10), 0)
    assert plan.shares_s == (80, 20)
    assert plan.burst.sum() == pytest.approx(5 * 100 * 20, rel=0.05)
    inside = plan.at % 10 >= 8
    assert (plan.burst == inside).all()


def test_the_same_seed_gives_the_same_arrivals():
    one, again, other = (plan_poisson(100, 5, BurstTerms(3), seed).at for seed in (1, 1, 2))
    assert one.tolist() == again.tolist() != other.tolist()


def test_recorded_arrivals_are_scaled_and_repeated():
    plan = plan_recorded([0.0, 1.0, 1.5, 4.0], rate=2.0, seconds=10.0)
    assert len(plan) == 20 and plan.at[-1] < 10
    assert plan.at[:4] == pytest.approx([0.0, 0.375, 0.5625, 1.5])
    assert plan.at[4:8] == pytest.approx(plan.at[:4] + 2.0)


def test_seconds_with_twice_the_recorded_mean_are_bursts():
    at = np.concatenate([np.linspace(0, 19.9, 200), 10 + np.linspace(0, 0.9, 100)])
    plan = plan_recorded(np.sort(at), rate=15.0, seconds=20.0)
    assert 90 <= plan.burst.sum() <= 130 and plan.shares_s[1] <= 2


def test_bursts_without_time_between_them_and_too_many_requests_are_refused():
    with pytest.raises(InputError, match="leave nothing between"):
        plan_poisson(1, 10, BurstTerms(2, 10, 10), 0)
    with pytest.raises(InputError, match="too many"):
        plan_poisson(1e6, 60, BurstTerms(), 0)
    with pytest.raises(InputError, match="too many"):
        plan_recorded([0.0, 1.0], 1e6, 60)
