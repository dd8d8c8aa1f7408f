import pytest

from enginesmith.core.errors import InputError
from validation.capacity.greatest_rate import Estimate
from validation.capacity.machines import CapacityDemand, cost_per_million, count_machines, machines_for


def test_a_throughput_of_eighteen_tenths_needs_23_machines_instead_of_40():
    demand = CapacityDemand(800.0)
    count_before, current_count = count_machines(20.0, demand), count_machines(1.8 * 20.0, demand)
    assert (count_before, current_count) == (40, 23)
    assert cost_per_million(count_before, 0.71, 800) == pytest.approx(9.861, abs=0.001)
    assert cost_per_million(current_count, 0.71, 800) == pytest.approx(5.670, abs=0.001)


def test_headroom_reserves_a_share_of_each_machine():
    assert count_machines(20.0, CapacityDemand(800.0, headroom=0.2)) == 50
    # 0.7 is no binary fraction: 700 / (1000 * (1 - 0.3)) is a little over 1.
    assert count_machines(1000.0, CapacityDemand(700.0, headroom=0.3)) == 1
    assert count_machines(20.0, CapacityDemand(800.0, headroom=0.2, spare=1)) == 51
    assert count_machines(5000.0, CapacityDemand(800.0, spare=1)) == 2


def test_machines_have_the_interval_of_the_rate():
    result = machines_for(Estimate(20.0, 16.0, 25.0), CapacityDemand(800.0))
    assert (result.value, result.low, result.high) == (40, 32, 50)


@pytest.mark.parametrize(("rate", "headroom"), [(0.0, 0.0), (-1.0, 0.0), (float("inf"), 0.0), (1.0, 1.0), (1.0, -0.1)])
def test_invalid_demands_are_refused(rate, headroom):
    with pytest.raises(InputError, match="must be"):
        CapacityDemand(rate, headroom)
