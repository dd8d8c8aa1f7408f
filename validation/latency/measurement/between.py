"""Quantiles of a latency over several processes, with intervals that the next process keeps as well.

A process keeps its luck however long it runs: where its memory lies, which threads it got, what the machine did at that
moment. On an engine of 40 µs the medians of two processes differ by some percent where the interval within either is
0.5 % wide. So the levels are kept apart (Georges et al., "Statistically rigorous Java performance evaluation", OOPSLA
2007; Kalibera & Jones, "Rigorous benchmarking in reasonable time", ISMM 2013): each of k processes gives one value of
the quantile, and what they differ by gives the interval, by Student's t of k - 1 degrees of freedom.

It is the interval of one more process (a prediction interval; Hahn & Meeker, Statistical Intervals, 1991, 4.7), and not
of the mean over the k: whoever measures again gets another moment of the machine, which the k processes of one
measurement shared. All of that on logarithms: what slows a process slows it by a factor. The value is the median of the
k, which one process that was disturbed does not move.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from enginery.arrays.arrays import Array
from enginery.core.reports.latency import Quantile
from validation.latency.measurement.quantiles import LEVEL, SHOWN, quantiles, runs_needed
from validation.statistics.distributions import t_quantile

# Two processes have one degree of freedom, with which an interval is 12.7 standard errors wide to either side.
LEAST_PROCESSES = 3
# How far beyond the fastest and the slowest of all runs an interval goes at most: one process of a few that was held up
# for most of its time would make it reach from nanoseconds to seconds.
BEYOND = 1.5


def quantiles_between(series: Sequence[Array], shown: tuple[float, ...] = SHOWN) -> tuple[Quantile, ...]:
    """Each of the quantiles, from the steady latencies (seconds, in order) of each process.

    A quantile that each process has runs enough for, and the median in any case, is the median of theirs. One further
    out is that of all runs together, and its interval adds what the medians differ by to what all runs together leave
    open. With fewer than `LEAST_PROCESSES` the interval holds within them.
    """
    found = quantiles(np.concatenate(series), shown)
    if len(series) < LEAST_PROCESSES:
        return found
    shift = _half_width(np.log([float(np.median(each)) for each in series]))
    return tuple(_widen(item, series, shift) for item in found)


def _widen(item: Quantile, series: Sequence[Array], shift: float) -> Quantile:
    if item.p != 0.5 and min(map(len, series)) < runs_needed(item.p):
        if item.value is None or item.low is None or item.high is None:
            return item
        down, up = (math.hypot(shift, math.log(ratio)) for ratio in (item.value / item.low, item.high / item.value))
        return replace(item, low=item.value * math.exp(-down), high=item.value * math.exp(up))
    each = np.log([float(np.quantile(values, item.p)) for values in series])
    half = _half_width(each)
    low, high = (math.exp(float(each.mean()) + sign * half) for sign in (-1, 1))
    fastest, slowest = min(float(values.min()) for values in series), max(float(values.max()) for values in series)
    low, high = max(low, fastest / BEYOND), min(high, BEYOND * slowest)
    # Processes that happen to agree say no more than their runs do.
    return replace(
        item, value=math.exp(float(np.median(each))), low=min(low, item.low or low), high=max(high, item.high or high)
    )


def _half_width(logs: Array) -> float:
    """Half of the 95 % interval of one more process, from the logarithms of one value of each process."""
    factor = t_quantile(1.0 - (1.0 - LEVEL) / 2, len(logs) - 1.0)
    return factor * float(np.std(logs, ddof=1)) * math.sqrt(1.0 + 1.0 / len(logs))
