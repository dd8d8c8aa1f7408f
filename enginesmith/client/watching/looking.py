"""When a watcher looks: at random times around an interval, later after errors.

An interval of 120 s is 0.0083 requests a second and node, and 417 a second for 50,000 nodes, a thirteenth of what
Amazon S3 gives one prefix (docs/scale.md). Random times keep nodes that were started together from looking together,
also after the registry was away.
"""

import random
from collections.abc import Callable
from threading import Event

# Seconds between two looks, for each document that a look asks for.
INTERVAL_S = 120.0
JITTER = 0.2
# After errors the interval doubles, up to so many times.
MOST_INTERVALS = 8


def keep_looking(look: Callable[[], bool], stop: Event, interval_s: float) -> None:
    """Call `look` until `stop` is set. look: whether it succeeded.  interval_s: seconds to the next look."""
    failures = 0
    while not stop.is_set():
        failures = 0 if look() else failures + 1
        stop.wait(pause_s(interval_s, failures))


def pause_s(interval_s: float, failures: int) -> float:
    """Seconds to wait after a look; failures: how many looks failed since the last good one."""
    backed_off = interval_s * min(2.0 ** min(failures, 16), MOST_INTERVALS)
    return backed_off * random.uniform(1 - JITTER, 1 + JITTER)  # noqa: S311 - no secret
