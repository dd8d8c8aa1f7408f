"""When two sides were observed: latency depends on the hour, so sides of different hours do not compare."""

from datetime import UTC, datetime

import numpy as np

from enginery.arrays.arrays import Array

MOST_APART_S = 900.0
# Smaller times than these (1973) are taken for seconds since some start.
_EPOCH = 1e8


def hours_apart(candidate: Array, baseline: Array) -> str:
    """Why the same requests do not compare: they arrived at other times of day at the other side; '' if they did not.

    candidate, baseline: arrivals in seconds, NaN where a request was not seen.
    """
    apart = float(np.nanmedian(np.abs(candidate - baseline)))
    if apart <= MOST_APART_S:
        return ""
    return (
        f"the same requests arrived {apart / 60:.0f} minutes apart: the candidate's {span_text(candidate)}, the "
        f"baseline's {span_text(baseline)}; what the hour does to latency is not the engine; send each request to both "
        "sides at the same time"
    )


def span_text(times: Array) -> str:
    """'2026-01-31 08:00:00 to 2026-01-31 17:00:00 UTC', or '0 s to 3600 s' of times that are no dates."""
    first, last = float(np.nanmin(times)), float(np.nanmax(times))
    if first < _EPOCH or last > 1e11:
        return f"{first:.6g} s to {last:.6g} s"
    return " to ".join(f"{datetime.fromtimestamp(one, UTC):%Y-%m-%d %H:%M:%S}" for one in (first, last)) + " UTC"
