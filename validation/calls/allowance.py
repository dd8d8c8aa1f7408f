"""How long an engine is tried beside its golden set: a share of what the comparison took, and a little in any case.

Time decides where sizes and calls end, and never their order. What cheap engines need is done for them whatever the
share is: all sizes of a small grid, and the first calls, as long as that is a fraction of a second. So a busy machine
sees of them what a quiet one sees.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

# Of the time that the comparison with the graph took.
SHARE = 0.1
# Of that, for sizes; what they leave is for repeated calls.
SIZES_SHARE = 0.5
# So many sizes are tried in GRID_S seconds, and so many calls made in FEW_S, where the share is less.
SMALL_GRID, GRID_S = 256, 0.2
FEW_CALLS, FEW_S = 160, 0.15
# Done whatever the time.
LEAST_SIZES, LEAST_CALLS = 1, 16


@dataclass(frozen=True)
class Allowance:
    """Seconds for sizes and calls together; for the sizes of a small grid; and for the first FEW_CALLS."""

    seconds: float
    grid_s: float
    few_s: float
    clock: Callable[[], float] = time.perf_counter

    @classmethod
    def of(cls, seconds: float | None, compared_s: float) -> "Allowance":
        """What a spec asks for; None for a share of the seconds of the comparison."""
        if seconds is not None:
            return cls(seconds, SIZES_SHARE * seconds, 0.0)
        share = SHARE * compared_s
        return cls(share, max(SIZES_SHARE * share, GRID_S), FEW_S)

    def sizes(self, count: int) -> Callable[[int], bool]:
        """From now on: whether another size of so many is tried, after some."""
        now = self.clock()
        end = now + (self.grid_s if count <= SMALL_GRID else SIZES_SHARE * self.seconds)
        return self._more(LEAST_SIZES, now, end)

    def calls(self, start: float) -> Callable[[int], bool]:
        """From now on: whether another call is made, after some. start: when sizes were begun."""
        now = self.clock()
        enough, few = self._more(LEAST_CALLS, now, start + self.seconds), self._more(LEAST_CALLS, now, now + self.few_s)
        return lambda done: enough(done) or (done < FEW_CALLS and few(done))

    def _more(self, least: int, start: float, end: float) -> Callable[[int], bool]:
        """Whether one more, which takes as long as those before it took on average, ends in time."""

        def more(done: int) -> bool:
            return done < least or (now := self.clock()) + (now - start) / done <= end

        return more
