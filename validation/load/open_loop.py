"""An open loop: each request is sent at its planned time, whether or not those before it were answered.

Nothing is caught up by leaving out requests: what is late is sent at once, and counted from when it was to be sent
(coordinated omission: G. Tene, "How NOT to Measure Latency", 2013).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from enginesmith.arrays import Array

# Sleeps end some 60 microseconds late; the rest of the way is waited for awake, if it is shorter than this.
_AWAKE_S = 0.0002


@dataclass(frozen=True, eq=False)
class SentRequests:
    """begun: when the plan began, by `time.perf_counter`.  sent: seconds from there, float64 [requests that were sent].
    interrupted: whether Ctrl-C ended it."""

    begun: float
    sent: Array
    interrupted: bool


def send_open_loop(send: Callable[[int], object], at: Array) -> SentRequests:
    """Call `send` with the number of each request at its time. at: seconds from now, float64 [requests], rising.

    KeyboardInterrupt ends it early; what `send` raises is raised.
    """
    sent: list[float] = []
    begun = time.perf_counter()
    try:
        for number, when in enumerate(at.tolist()):
            while (left := begun + when - time.perf_counter()) > 0.0:
                if left > _AWAKE_S:
                    time.sleep(left - _AWAKE_S)
            sent.append(time.perf_counter() - begun)
            send(number)
    except KeyboardInterrupt:
        return SentRequests(begun, np.array(sent), True)
    return SentRequests(begun, np.array(sent), False)
