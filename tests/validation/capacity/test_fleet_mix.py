"""The cheapest mix against all mixes, with and without a machine lost."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from validation.capacity.machines import MachineOffer, cheapest_mix


def brute_force(offers: list[MachineOffer], rate: float, spare: int) -> float | None:
    """The least cost of all mixes."""
    best_cost = None
    for numbers in product(*(range((offer.count or 0) + 1) for offer in offers)):
        rates = sorted(offer.rate for offer, number in zip(offers, numbers, strict=True) for _ in range(number))
        remaining_rates = rates[: len(rates) - spare]
        if len(rates) > spare and sum(remaining_rates) >= rate - 1e-9:
            cost = sum(number * offer.per_hour for offer, number in zip(offers, numbers, strict=True))
            best_cost = cost if best_cost is None else min(best_cost, cost)
    return best_cost


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20), st.integers(0, 4)), min_size=1, max_size=4),
    st.integers(1, 120),
    st.integers(0, 1),
)
def test_the_mix_is_the_cheapest_of_all(kinds, rate, spare):
    offers = [MachineOffer(str(index), float(r), p / 10, n) for index, (r, p, n) in enumerate(kinds)]
    expected, result = brute_force(offers, rate, spare), cheapest_mix(offers, rate, spare)
    assert (result is None) == (expected is None)
    if result is not None:
        assert result.per_hour == pytest.approx(expected)
        rates = sorted(offer.rate for offer in offers for _ in range(result.machines.get(offer.name, 0)))
        assert sum(rates[: len(rates) - spare]) >= rate - 1e-6 and result.rate == pytest.approx(sum(rates))


def test_with_one_machine_lost_a_fleet_of_small_ones_is_cheaper():
    offers = [MachineOffer("a100", 100.0, 2.0), MachineOffer("l4", 20.0, 0.7)]
    assert cheapest_mix(offers, 100.0).machines == {"a100": 1}
    assert cheapest_mix(offers, 110.0).machines == {"a100": 1, "l4": 1}
    assert cheapest_mix(offers, 100.0, spare=1).machines == {"a100": 2}
    assert cheapest_mix(offers, 20.0, spare=1).machines == {"l4": 2}


@pytest.mark.timeout(120)
def test_large_fleets_of_many_kinds_with_close_prices_are_quick():
    rng = np.random.default_rng(0)
    offers = [
        MachineOffer(str(index), float(rate), round(float(rate) * 0.01 * float(rng.uniform(0.99, 1.01)), 4), 2000)
        for index, rate in enumerate(rng.uniform(5, 300, 8))
    ]
    assert cheapest_mix(offers, 100_000.0, spare=1) is not None
