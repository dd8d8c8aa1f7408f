"""The evidence of a canary: the requests of two sides as arrays, in the order of their arrival."""

from dataclasses import dataclass

import numpy as np

from enginesmith.arrays import Array


@dataclass(frozen=True)
class Side:
    """One engine's requests: an entry for each in every array.

    time: arrival in seconds.  latency: seconds from arrival to answer, without meaning where it failed.  ok: bool,
    whether it was answered.  score: quality as the owner measures it, NaN where there is none.
    """

    time: Array
    latency: Array
    ok: Array
    score: Array

    def __len__(self) -> int:
        return len(self.ok)


@dataclass(frozen=True)
class CanaryEvidence:
    """Both sides' requests. paired: whether entry i of both sides is the same request.

    replayed: whether one run sent recorded requests to both, with nothing between it and the engines.
    differs, flipped: bool [requests that both answered], whether the candidate's answer, or its argmax, is another
    one; None where that was not observed.
    stopped: why the end of a log may hide that an engine died, which rules out a PASS.  unlike: why the sides do not
    compare, which leaves INSUFFICIENT alone. Both are sentences with a remedy, or ''.
    design_block: how many successive requests are independent of all others by design, as regards the machine: those of
    two segments of a replay in segments, in the two orders of the engines (`validation.canary.concurrent`; randomised
    blocks: Fisher, The Design of Experiments, 1935). 1 for any other evidence.
    """

    candidate: Side
    baseline: Side
    paired: bool
    differs: Array | None = None
    flipped: Array | None = None
    stopped: str = ""
    unlike: str = ""
    replayed: bool = False
    design_block: int = 1

    @property
    def requests(self) -> int:
        """The number of requests of the smaller side."""
        return min(len(self.candidate), len(self.baseline))

    @property
    def seconds(self) -> float | None:
        """Seconds from the baseline's first arrival to its last; None where that is 0 or not known."""
        seen = self.baseline.time[np.isfinite(self.baseline.time)]
        span = float(np.ptp(seen)) if len(seen) else 0.0
        return span if span > 0.0 else None
