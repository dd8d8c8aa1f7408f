"""Detects that traffic has drifted from the buckets: that a rate has risen."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from enginesmith.core.errors import InputError

# Whether a rate has risen, by a sequential test that may be looked at after every request.
#
# The test is a Shiryaev-Roberts e-detector (Shin, Ramdas and Rinaldo, "E-detectors: a nonparametric framework for
# sequential change detection", The New England Journal of Statistics in Data Science, 2023; the statistic is that of
# Shiryaev, 1963, and Roberts, 1966). Under the reference rate p the bet against it, q/p for a request that counts and
# (1-q)/(1-p) for any other, has a mean of at most 1, so that M_n = (1 + M_{n-1}) * bet is at most n on average. It is
# mixed over some greater rates q with weights of sum 1, because the new rate is not known. So the mean time to a false
# alarm is at least the threshold, and by Doob's inequality n requests at the reference rate, or below it, raise one
# with a probability of at most n / threshold, however often one looks, and whatever the dependence between requests, as
# long as none has a greater chance than p given those before it.


# Odds of the greater rates over those of the reference, which share the mixture equally.
ODDS = (1.5, 2.0, 3.0, 6.0)
# Odds by which the beginning of a rise is estimated.
_ONSET_ODDS = 2.0
# One false alarm in so many requests at the reference rate, at most, on average.
THRESHOLD = 1_000_000
# Requests from which a reference rate is learned.
LEARN = 10_000
# No reference rate is taken to be less: a single request that counts among few would be an alarm.
LEAST_RATE = 1e-4
# Of the upper limit of a learned rate, one-sided, 97.5 %.
_Z = 1.959964


@dataclass(frozen=True)
class RateDrift:
    """A rate that has risen. reference: the rate before.  rate: since the estimated beginning of the rise, which is
    request number `since` (the first is 1), at the time `since_at`.

    requests, counted: all, and those that count (fallbacks of a router), until the alarm.  found_at: time of the alarm.
    Times are ISO 8601, UTC.
    """

    reference: float
    rate: float
    since: int
    since_at: str
    requests: int
    counted: int
    found_at: str


class RateDriftDetector:
    """Raises one alarm when a rate has risen above a reference. A request takes a constant time. Not for several
    threads at once.

    reference: the rate in the traffic that buckets were chosen from; None learns it from the first `learn` requests, as
    the upper limit of its one-sided 97.5 % interval (Wilson, 1927), so that an error of the estimate raises no alarm.
    threshold: the mean number of requests at the reference rate to a false alarm, at least.
    Raises InputError for a reference that is no share.
    """

    def __init__(self, reference: float | None = None, *, learn: int = LEARN, threshold: float = THRESHOLD) -> None:
        self._learn, self._threshold = learn, threshold
        self.requests = self.counted = 0
        self.drift: RateDrift | None = None
        self.reference: float | None = None
        self._bets: Sequence[tuple[float, float]] = ()
        self._last = 0
        self._onset_bets, self._onset, self._since = (1.0, 1.0), 1.0, (0, 0, 0.0)
        self._statistics = [0.0] * len(ODDS)
        if reference is not None:
            if not 0.0 <= reference <= 1.0:
                raise InputError(f"reference rate {reference}: give a share of the requests, from 0 to 1")
            self._begin(reference)

    def add(self, counts: bool) -> RateDrift | None:
        """Take a request into account; the alarm with the request that raises it, and None with all others."""
        self.requests += 1
        if counts:
            self.counted += 1
            if self.reference is not None and self.drift is None:
                return self._add_counted()
        if self.reference is None and self.requests >= self._learn:
            self._begin(wilson_upper(self.counted, self.requests))
        return None

    def _add_counted(self) -> RateDrift | None:
        """Bring the statistics up to a request that counts: over the `quiet` ones before it, all at once. Those lower
        a statistic or leave it under a bound far below the threshold, so that none of them could raise the alarm."""
        quiet = self.requests - self._last - 1
        self._last = self.requests
        statistics = self._statistics
        for index, (other, counted) in enumerate(self._bets):
            share = other**quiet
            before = statistics[index] * share + other * (1.0 - share) / (1.0 - other)
            statistics[index] = (1.0 + before) * counted
        other, counted = self._onset_bets
        onset = self._onset * other**quiet
        if onset <= 1.0:
            onset, self._since = 1.0, (self.requests - 1, self.counted - 1, time.time())
        self._onset = onset * counted
        return self._alarm() if sum(statistics) >= self._threshold * len(statistics) else None

    def _begin(self, reference: float) -> None:
        self.reference = min(max(reference, LEAST_RATE), 1.0 - LEAST_RATE)
        self._bets = [_bets(self.reference, odds) for odds in ODDS]
        self._last = self.requests
        self._onset_bets = _bets(self.reference, _ONSET_ODDS)
        self._since = self.requests, self.counted, time.time()

    def _alarm(self) -> RateDrift:
        before, counted, at = self._since
        rate = (self.counted - counted) / max(self.requests - before, 1)
        times = (datetime.fromtimestamp(moment, UTC).isoformat(timespec="seconds") for moment in (at, time.time()))
        since_at, found_at = times
        self.drift = RateDrift(self.reference or 0.0, rate, before + 1, since_at, self.requests, self.counted, found_at)
        return self.drift


def _bets(reference: float, odds: float) -> tuple[float, float]:
    """What a bet on a rate of `odds` times the odds of the reference gives for a request that does not count, and for
    one that does."""
    greater = odds * reference / (1.0 - reference + odds * reference)
    return (1.0 - greater) / (1.0 - reference), greater / reference


def wilson_upper(counted: int, requests: int) -> float:
    """Upper limit of the one-sided 97.5 % interval of a rate (Wilson, JASA 22, 1927)."""
    share, square = counted / requests, _Z * _Z
    spread = _Z * math.sqrt(share * (1.0 - share) / requests + square / (4.0 * requests * requests))
    return (share + square / (2.0 * requests) + spread) / (1.0 + square / requests)
