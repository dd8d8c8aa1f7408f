"""Times of arrival, all fixed before the first request is sent: Poisson with bursts, or those of recorded traffic."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core.errors import InputError

# Of a test that nobody could wait for, or hold in memory.
MOST_ARRIVALS = 5_000_000


@dataclass(frozen=True)
class BurstTerms:
    """Bursts: `factor` times the rate for `seconds`, one every `every_s`. The first begins after every_s - seconds."""

    factor: float = 1.0
    seconds: float = 2.0
    every_s: float = 10.0


@dataclass(frozen=True, eq=False)
class PlannedArrivals:
    """at: seconds from the start, float64 [requests], rising.  burst: bool [requests].  shares_s: seconds of the run
    outside of bursts, and within."""

    at: Array
    burst: Array
    shares_s: tuple[float, float]

    def __len__(self) -> int:
        return len(self.at)


def plan_poisson(rate: float, seconds: float, bursts: BurstTerms, seed: int) -> PlannedArrivals:
    """Poisson arrivals at `rate` a second, and at a multiple of it in bursts.

    A Poisson process of rate 1 whose time is stretched by the rate of each moment (Lewis & Shedler 1979, inversion).
    Raises InputError for more than MOST_ARRIVALS, and for bursts that leave no time between them.
    """
    if bursts.factor != 1.0 and not 0.0 < bursts.seconds < bursts.every_s:
        raise InputError(f"bursts of {bursts.seconds:g} s every {bursts.every_s:g} s leave nothing between; give more")
    edges, rates = _phases(rate, seconds, bursts)
    expected = np.concatenate([[0.0], np.cumsum(np.diff(edges) * rates)])
    if expected[-1] > MOST_ARRIVALS:
        raise InputError(f"{expected[-1]:.0f} requests are too many; give a lower rate or fewer seconds")
    rng = np.random.default_rng(seed)
    count = rng.poisson(expected[-1])
    at = np.interp(np.sort(rng.random(count)) * expected[-1], expected, edges)
    inside = rates[np.clip(np.searchsorted(edges, at, "right") - 1, 0, len(rates) - 1)] != rate
    within = float(np.diff(edges)[rates != rate].sum())
    return PlannedArrivals(at, inside, (seconds - within, within))


def _phases(rate: float, seconds: float, bursts: BurstTerms) -> tuple[Array, Array]:
    """Edges of the phases in seconds, float64 [phases + 1], and the rate in each, float64 [phases]."""
    edges, rates = [0.0], list[float]()
    while edges[-1] < seconds:
        quiet_until = seconds if bursts.factor == 1.0 else edges[-1] + bursts.every_s - bursts.seconds
        for end, value in ((quiet_until, rate), (quiet_until + bursts.seconds, bursts.factor * rate)):
            if edges[-1] < seconds:
                edges.append(min(end, seconds))
                rates.append(value)
    return np.array(edges), np.array(rates)


def plan_recorded(at: Sequence[float], rate: float, seconds: float) -> PlannedArrivals:
    """Recorded arrivals, scaled in time to a mean of `rate` a second and repeated until `seconds` are full.

    at: seconds, rising from 0, its last above 0. The tenth of the seconds with most arrivals counts as bursts, where
    they hold at least twice the mean. Raises InputError for more than MOST_ARRIVALS.
    """
    if rate * seconds > MOST_ARRIVALS:
        raise InputError(f"{rate * seconds:.0f} requests are too many; give a lower rate or fewer seconds")
    times = np.asarray(at, np.float64)
    period = len(times) / rate
    once = times * (period * (len(times) - 1) / len(times) / times[-1])
    turns = int(np.ceil(seconds / period)) + 1
    every = (once[None] + period * np.arange(turns)[:, None]).ravel()
    every = every[every < seconds]
    counts = np.bincount(every.astype(np.int64), minlength=max(int(np.ceil(seconds)), 1))
    threshold = max(np.quantile(counts, 0.9), 2.0 * rate)
    busy = counts > threshold
    return PlannedArrivals(every, busy[every.astype(np.int64)], (float((~busy).sum()), float(busy.sum())))
