"""Alpha spending: the published boundaries, and an error that many looks do not add up to more than promised."""

import numpy as np
import pytest

from enginesmith.core.errors import InputError
from validation.canary.judging.judge import Looks, level_of, spend_error
from validation.statistics.serial_dependence import NORMAL

QUARTERS = (0.25, 0.5, 0.75, 1.0)


def boundaries(alpha: float) -> list[float]:
    return [NORMAL.inv_cdf(1 - level_of(QUARTERS[: look + 1], alpha)) for look in range(4)]


def test_boundaries_equal_those_of_lan_and_demets():
    # O'Brien-Fleming spending, four equal looks, one-sided 0.025: Jennison & Turnbull (2000), Reboussin et al. (2000).
    assert boundaries(0.025) == pytest.approx([4.333, 2.963, 2.359, 2.014], abs=0.003)


def test_one_look_at_all_data_has_the_whole_level():
    assert level_of((1.0,), 0.05) == pytest.approx(0.05)
    assert spend_error(1.0, 0.05) == 0.05 and spend_error(0.1, 0.05) < 1e-8


def test_early_looks_add_no_error():
    rng = np.random.default_rng(0)
    path = np.cumsum(rng.normal(size=(40_000, 4)) / 2, axis=1) / np.sqrt(np.array(QUARTERS))
    crossed_mean = (path > np.array(boundaries(0.05))).any(1).mean()
    assert crossed_mean == pytest.approx(0.05, abs=0.004)
    assert (path > NORMAL.inv_cdf(0.95)).any(1).mean() > 0.1, "looking four times at the full level would not be honest"


@pytest.mark.parametrize("looks", [(0.5, 0.5), (0.5, 0.4), (0.0, 1.0), (0.5, 1.2)])
def test_each_look_must_see_more_data(looks):
    with pytest.raises(InputError, match="each must have at least"):
        level_of(looks, 0.05)


def test_a_finished_plan_allows_no_further_look():
    assert Looks(100, (50,)).fractions(140) == (0.5, 1.0)
    with pytest.raises(InputError, match="the plan is used up"):
        Looks(100, (50, 100)).fractions(200)
    with pytest.raises(InputError, match="planned requests must be given"):
        Looks(None, (50,)).fractions(60)
