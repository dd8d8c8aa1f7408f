"""Machines that a rate takes, with headroom and with some to spare, and what a million requests then cost."""

import math
from dataclasses import dataclass

from enginesmith.core.errors import InputError
from validation.capacity.greatest_rate import Estimate

# Of rounding: 800 / (20 * 0.8) machines are 50, whatever the last bit says.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class CapacityDemand:
    """What machines have to carry. rate: requests a second.  headroom: share of each machine's greatest rate that stays
    free, 0 to below 1.  spare: machines that may be lost.  Raises InputError for what is none."""

    rate: float
    headroom: float = 0.0
    spare: int = 0

    def __post_init__(self) -> None:
        if not (self.rate > 0.0 and math.isfinite(self.rate)):
            raise InputError(f"rate {self.rate:g}: must be above 0 requests a second")
        if not 0.0 <= self.headroom < 1.0:
            raise InputError(f"headroom {100 * self.headroom:g} %: must be 0 % or more, and below 100 %")


@dataclass(frozen=True)
class MachineCount:
    """A number of machines; low, high: by the 95 % interval of the greatest rate of one. high: None where its lower end
    is 0, so that perhaps no number is enough."""

    value: int
    low: int
    high: int | None


def count_machines(one: float, demand: CapacityDemand) -> int:
    """Machines of one kind. one: the greatest rate of one, requests a second, above 0."""
    needed = demand.rate / (one * (1.0 - demand.headroom))
    return math.ceil(needed * (1.0 - _ROUNDING)) + demand.spare


def machines_for(one: Estimate, demand: CapacityDemand) -> MachineCount:
    """Machines of one kind, by the greatest rate of one with its interval."""
    value, low = (count_machines(rate, demand) for rate in (one.value, one.high))
    return MachineCount(value, low, count_machines(one.low, demand) if one.low > 0.0 else None)


def cost_per_million(machines: float, per_hour: float, rate: float) -> float:
    """What a million requests cost on machines at a price per hour each, which together get `rate` a second."""
    return machines * per_hour / (rate * 3600.0) * 1e6
