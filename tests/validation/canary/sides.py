"""Sides of a canary's evidence from latencies alone."""

import numpy as np

from enginesmith.arrays import Array
from validation.statistics.rates import Side


def side(latency: Array, ok: Array | None = None, score: Array | None = None, time: Array | None = None) -> Side:
    """A side from its latencies; by default all answered, one a second, without scores."""
    count = len(latency)
    return Side(
        np.arange(count, dtype=float) if time is None else time,
        latency,
        np.ones(count, bool) if ok is None else ok,
        np.full(count, np.nan) if score is None else score,
    )
