"""Quantiles of latency with 95 % intervals, for the runs of one process and over several processes.

Within a process no distribution is assumed: the number of values below the quantile p is binomial, and ranks l < u
with P(l <= Bin(n, p) < u) >= 95 % determine the interval [x(l), x(u)] (Hahn & Meeker, Statistical Intervals, 1991, 5.2;
David & Nagaraja, Order Statistics, 2003, 7.1). If n is too small for such ranks, the result has no interval and no
quantile, but the necessary number of runs. Consecutive runs depend on each other: the variance of the share of runs
beyond the quantile, between blocks of runs, over that of independent runs, is the design effect. The ranks are computed
for the effective number of runs: n over the design effect.

Processes differ by more than their runs do, because of memory addresses, threads and the state of the machine: for an
engine of 40 µs the medians of two processes differ by some percent, while the interval within either is 0.5 % wide.
Therefore each of k processes has one value of the quantile, and the interval follows from their differences, by
Student's t with k - 1 degrees of freedom (Georges et al., "Statistically rigorous Java performance evaluation", OOPSLA
2007; Kalibera & Jones, "Rigorous benchmarking in reasonable time", ISMM 2013). It is the prediction interval for one
more process (Hahn & Meeker, 4.7), not the interval of the mean, because the machine is in another state for another
measurement. It is computed from logarithms, because a slower process is slower by a factor. The value is the median of
the k values, which one disturbed process does not change.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core.reports.latency import Quantile
from validation.statistics.rates import estimate_design_effect
from validation.statistics.serial_dependence import LEAST_BLOCKS, block_length, t_quantile

# The confidence of intervals; and the quantiles to show.
LEVEL = 0.95
SHOWN = (0.5, 0.9, 0.99, 0.999)
# The number of points of a distribution's stored curve.
CURVE = 101
# With two processes (one degree of freedom), an interval would extend 12.7 standard errors to either side.
LEAST_PROCESSES = 3
# An interval is clipped to the fastest run over this and the slowest run times this: if one of few processes was
# disturbed for most of its time, the interval could extend from nanoseconds to seconds.
BEYOND = 1.5


def quantiles(latencies: Array, levels: tuple[float, ...] = SHOWN) -> tuple[Quantile, ...]:
    """Each of the quantiles `levels` of a steady series: [runs], seconds, in the order of measurement."""
    sorted_times, estimates = np.sort(latencies), []
    for p in levels:
        effect = design_effect(latencies, p)
        needed_runs, effective_count = math.ceil(runs_needed(p) * effect), len(latencies) / effect
        ranks = order_ranks(math.floor(effective_count), p)
        if ranks is None:
            estimates.append(Quantile(p, None, None, None, effective_count, max(needed_runs, len(latencies) + 1)))
            continue
        low, high = max(1, math.floor(ranks[0] * effect)), min(len(sorted_times), math.ceil(ranks[1] * effect))
        middle_rank = min(max(math.ceil(p * len(sorted_times)), low), high)
        value, lower, upper = (float(sorted_times[rank - 1]) for rank in (middle_rank, low, high))
        estimates.append(Quantile(p, value, lower, upper, effective_count, needed_runs))
    return tuple(estimates)


def design_effect(latencies: Array, p: float) -> float:
    """The number of consecutive runs that count as one independent run, for the share beyond the quantile p; >= 1."""
    if len(latencies) < 2 or float(np.ptp(latencies)) == 0.0:
        return 1.0
    exceedances = (latencies > np.quantile(latencies, p)).astype(float)
    length = block_length(np.log(np.maximum(latencies, 1e-12)), exceedances)
    max_block = max(1, len(latencies) // LEAST_BLOCKS)
    # A block does not show a dependence that is longer than the block.
    return max(estimate_design_effect(exceedances, min(length * multiple, max_block)) for multiple in (1, 2, 4))


@lru_cache(maxsize=4096)
def order_ranks(count: int, p: float) -> tuple[int, int] | None:
    """The ranks (from 1) of the order statistics around the quantile p of `count` independent values; each end is wrong
    in at most 2.5 % of cases. None if a rank does not exist."""
    tail = (1.0 - LEVEL) / 2
    k = np.arange(1.0, count + 1.0)
    ratios = np.log((count - k + 1.0) / k) + math.log(p) - math.log1p(-p)  # of P(Bin = k) to P(Bin = k - 1)
    probabilities = np.exp(count * math.log1p(-p) + np.concatenate([[0.0], np.cumsum(ratios)]))
    cdf = np.cumsum(probabilities)  # P(Bin <= k) for k from 0
    low, high = int(np.searchsorted(cdf, tail, "right")), int(np.searchsorted(cdf, 1.0 - tail)) + 1
    return (low, high) if low >= 1 and high <= count else None


def runs_needed(p: float) -> int:
    """The least number of independent runs whose extremes enclose the quantile p."""
    return math.ceil(math.log((1.0 - LEVEL) / 2) / math.log(max(p, 1.0 - p)))


def curve(latencies: Array) -> tuple[float, ...]:
    """The distribution function as CURVE quantiles at equal steps from 0 to 1, in seconds."""
    return tuple(map(float, np.quantile(latencies, np.linspace(0.0, 1.0, CURVE), method="inverted_cdf")))


def quantiles_between(series: Sequence[Array], levels: tuple[float, ...] = SHOWN) -> tuple[Quantile, ...]:
    """Each of the quantiles `levels`, from the steady latencies ([runs], seconds, in order) of each process.

    The value is the median of the processes' quantiles if each process has enough runs, and always for the median of
    latency. Else it is the quantile of all runs together, with an interval widened by the differences of the medians.
    With fewer than `LEAST_PROCESSES` processes, all runs count as one series.
    """
    pooled_quantiles = quantiles(np.concatenate(series), levels)
    if len(series) < LEAST_PROCESSES:
        return pooled_quantiles
    widening = half_width(np.log([float(np.median(times)) for times in series]))
    return tuple(_widen(quantile, series, widening) for quantile in pooled_quantiles)


def _widen(quantile: Quantile, series: Sequence[Array], shift: float) -> Quantile:
    if quantile.p != 0.5 and min(map(len, series)) < runs_needed(quantile.p):
        if quantile.value is None or quantile.low is None or quantile.high is None:
            return quantile
        log_low, log_high = (
            math.hypot(shift, math.log(ratio))
            for ratio in (quantile.value / quantile.low, quantile.high / quantile.value)
        )
        return replace(quantile, low=quantile.value * math.exp(-log_low), high=quantile.value * math.exp(log_high))
    log_values = np.log([float(np.quantile(values, quantile.p)) for values in series])
    half_log = half_width(log_values)
    low, high = (math.exp(float(log_values.mean()) + sign * half_log) for sign in (-1, 1))
    fastest, slowest = min(float(values.min()) for values in series), max(float(values.max()) for values in series)
    low, high = max(low, fastest / BEYOND), min(high, BEYOND * slowest)
    # If processes agree by chance, the interval is at least that of their runs.
    return replace(
        quantile,
        value=math.exp(float(np.median(log_values))),
        low=min(low, quantile.low or low),
        high=max(high, quantile.high or high),
    )


def half_width(logs: Array) -> float:
    """Half the width of the 95 % interval for one more process. logs: logarithms of one value of each process."""
    factor = t_quantile(1.0 - (1.0 - LEVEL) / 2, len(logs) - 1.0)
    return factor * float(np.std(logs, ddof=1)) * math.sqrt(1.0 + 1.0 / len(logs))
