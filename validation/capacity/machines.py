"""The number of machines for a rate, and the cheapest mix of machines."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core.errors import InputError
from validation.capacity.greatest_rate import Estimate

# The cheapest numbers of machines of several kinds that together carry a rate, even if some machines are lost.
#
# An integer program: the least sum of price * number for which the sum of all rates, less the rate of the greatest
# machine in use for each machine that may be lost, is at least the required rate. The result is exact: for each kind
# that may be the greatest in use, all combinations are built kind by kind, in order of price per rate. A combination is
# dropped if another has both a lower cost and a higher rate (Nemhauser & Ullmann, Management Science 15, 1969), or if
# it cannot be cheaper than the best known mix by over a millionth, even if parts of further machines could be bought.

# A sum of rates covers the need if at most this share is missing: floats are not exact.
_ROUNDING = 1e-9
# The search ignores mixes that are cheaper by less than this share.
_PRECISION = 1e-6
_BEAM = 500

# The greatest number of machines of one kind in a mix.
MOST_MACHINES = 1_000_000


@dataclass(frozen=True)
class MachineOffer:
    """A kind of machine. rate: requests per second of one machine, above 0.  per_hour: its price, above 0.
    count: the number available; None: as many as needed, up to MOST_MACHINES."""

    name: str
    rate: float
    per_hour: float
    count: int | None = None


@dataclass(frozen=True)
class FleetMix:
    """Numbers of machines by kind, each above 0. rate, per_hour: total requests per second and total price."""

    machines: Mapping[str, int]
    rate: float
    per_hour: float


def cheapest_mix(offers: Sequence[MachineOffer], rate: float, spare: int = 0) -> FleetMix | None:
    """The cheapest mix that serves `rate` requests per second even without its `spare` greatest machines; None if all
    available machines are too few."""
    # A mix without a machine of the kind taken as the greatest may be larger than needed, but is never too small.
    need_pairs = [(max_rate, rate + spare * max_rate) for max_rate in sorted({offer.rate for offer in offers})]
    best_mix: FleetMix | None = None
    for most_states in (_BEAM, None):  # the first round finds a good mix, which rules out nearly all others
        for max_rate, need in need_pairs:
            small_offers = [offer for offer in offers if offer.rate <= max_rate]
            bound = math.inf if best_mix is None else best_mix.per_hour
            best_mix = _cover(small_offers, need * (1.0 - _ROUNDING), bound, most_states) or best_mix
    return best_mix


def _cover(offers: Sequence[MachineOffer], need: float, bound: float, most_states: int | None) -> FleetMix | None:
    """The cheapest machines whose rates sum to at least `need`; None if no mix is cheaper than `bound`.

    most_states: the number of partial mixes to continue, those with the least possible cost; None: all.
    """
    order = sorted(offers, key=lambda offer: (offer.per_hour / offer.rate, -offer.rate))
    caps = [MOST_MACHINES if offer.count is None else offer.count for offer in order]
    max_counts = [min(cap, int(need / offer.rate) + 1) for cap, offer in zip(caps, order, strict=True)]
    costs, rates = np.zeros(1), np.zeros(1)
    step_choices: list[tuple[Array, Array]] = []
    for index, offer in enumerate(order):
        parents, numbers = _more(costs, rates, offer, max_counts[index], need, bound * (1.0 - _PRECISION))
        total_costs, total = costs[parents] + numbers * offer.per_hour, rates[parents] + numbers * offer.rate
        least_costs = total_costs + _fractional_cost(order[index + 1 :], max_counts[index + 1 :], need - total)
        state_indices = np.flatnonzero(least_costs < bound * (1.0 - _PRECISION))
        state_indices = state_indices[_undominated(total_costs[state_indices], np.minimum(total[state_indices], need))]
        if most_states is not None and len(state_indices) > most_states:
            state_indices = state_indices[np.argpartition(least_costs[state_indices], most_states)[:most_states]]
        step_choices.append((parents[state_indices], numbers[state_indices]))
        costs, rates = total_costs[state_indices], total[state_indices]
    if not (rates >= need).any():
        return None
    state_index = int(np.where(rates >= need, costs, np.inf).argmin())
    machine_counts: dict[str, int] = {}
    for offer, (parents, numbers) in zip(reversed(order), reversed(step_choices), strict=True):
        machine_counts[offer.name], state_index = int(numbers[state_index]), int(parents[state_index])
    machines = {name: number for name, number in reversed(machine_counts.items()) if number}
    rate = sum(machines.get(offer.name, 0) * offer.rate for offer in order)
    per_hour = sum(machines.get(offer.name, 0) * offer.per_hour for offer in order)
    return FleetMix(machines, rate, per_hour)


def _more(costs: Array, rates: Array, offer: MachineOffer, cap: int, need: float, bound: float) -> tuple[Array, Array]:
    """Each mix with each number of machines of one more kind, while these are needed and the cost is within `bound`:
    indices of the mixes and the numbers, int64 [combinations] each."""
    needed_counts = np.ceil(np.maximum(need - rates, 0.0) / offer.rate)
    payable_counts = np.floor(np.maximum(bound - costs, 0.0) / offer.per_hour)
    counts = np.minimum(np.minimum(needed_counts, payable_counts), cap).astype(np.int64) + 1
    parents = np.repeat(np.arange(len(costs)), counts)
    return parents, np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def _fractional_cost(offers: Sequence[MachineOffer], max_counts: Sequence[int], needs: Array) -> Array:
    """A lower bound of the cost of the rates `needs` ([needs], requests per second), as if parts of machines could be
    bought; infinite if all machines are too few."""
    sizes = np.array([number * offer.rate for number, offer in zip(max_counts, offers, strict=True)])
    prices = np.array([number * offer.per_hour for number, offer in zip(max_counts, offers, strict=True)])
    capacities, totals = np.concatenate([[0.0], np.cumsum(sizes)]), np.concatenate([[0.0], np.cumsum(prices)])
    return np.where(needs <= capacities[-1], np.interp(needs, capacities, totals), np.inf)


def _undominated(costs: Array, rates: Array) -> Array:
    """Indices of entries that no other entry equals or beats in both cost and rate (one of equal entries is kept)."""
    order = np.lexsort((-rates, costs))
    best_rates = np.maximum.accumulate(np.concatenate([[-np.inf], rates[order][:-1]]))
    return order[rates[order] > best_rates]


# The number of machines for a rate, with headroom and spare machines, and the cost of a million requests on them.


@dataclass(frozen=True)
class CapacityDemand:
    """The demand on machines. rate: requests per second.  headroom: share of each machine's greatest rate that stays
    free, from 0 to below 1.  spare: number of machines that may be lost.  Raises InputError for values out of range."""

    rate: float
    headroom: float = 0.0
    spare: int = 0

    def __post_init__(self) -> None:
        if not (self.rate > 0.0 and math.isfinite(self.rate)):
            raise InputError(f"rate {self.rate:g}: must be above 0 requests per second")
        if not 0.0 <= self.headroom < 1.0:
            raise InputError(f"headroom {100 * self.headroom:g} %: must be 0 % or more, and below 100 %")


@dataclass(frozen=True)
class MachineCount:
    """A number of machines. low, high: from the 95 % interval of one machine's greatest rate; high is None if that
    interval begins at 0, where no number may suffice."""

    value: int
    low: int
    high: int | None


def count_machines(machine_rate: float, demand: CapacityDemand) -> int:
    """The number of machines of one kind. machine_rate: greatest rate of a machine in requests per second, above 0."""
    needed_machines = demand.rate / (machine_rate * (1.0 - demand.headroom))
    return math.ceil(needed_machines * (1.0 - _ROUNDING)) + demand.spare


def machines_for(machine_rate: Estimate, demand: CapacityDemand) -> MachineCount:
    """The number of machines of one kind. machine_rate: greatest rate of one, with an interval."""
    value, low = (count_machines(rate, demand) for rate in (machine_rate.value, machine_rate.high))
    return MachineCount(value, low, count_machines(machine_rate.low, demand) if machine_rate.low > 0.0 else None)


def cost_per_million(machines: float, per_hour: float, rate: float) -> float:
    """The cost of a million requests on machines that cost `per_hour` each and serve `rate` per second together."""
    return machines * per_hour / (rate * 3600.0) * 1e6
