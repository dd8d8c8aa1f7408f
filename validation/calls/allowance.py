"""How long an engine is tried beside its golden set: a share of what the comparison took, and a little in any case.

Time decides where sizes and calls end, and never their order. So that a busy machine sees what a quiet one sees, few
of them do not depend on the share: FEW of each are done as long as they take no more than FEW_S.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

# Of the time that the comparison with the graph took.
SHARE = 0.1
# Of the time, for sizes; what they leave is for repeated calls.
SIZES_SHARE = 0.5
# Seconds for the first FEW, where SHARE is less.
FEW_S = 0.06
FEW_SIZES, FEW_CALLS = 32, 160
# Done whatever the time.
LEAST_SIZES, LEAST_CALLS = 2, 16


@dataclass(frozen=True)
class Allowance:
    """Seconds for sizes and calls together, and for the first few of them."""

    seconds: float
    few_s: float
    clock: Callable[[], float] = time.perf_counter

    @classmethod
    def of(cls, seconds: float | None, compared_s: float) -> "Allowance":
        """What a spec asks for; None for a share of the seconds of the comparison."""
        share = SHARE * compared_s
        return cls(share, max(share, FEW_S)) if seconds is None else cls(seconds, seconds)

    def sizes(self) -> Callable[[int], bool]:
        """From now on: whether another size is tried, after so many."""
        return self._more(SIZES_SHARE, LEAST_SIZES, FEW_SIZES, self.clock())

    def calls(self, start: float) -> Callable[[int], bool]:
        """From `start`, when sizes were begun: whether another call is made, after so many."""
        return self._more(1.0, LEAST_CALLS, FEW_CALLS, start)

    def _more(self, part: float, least: int, few: int, start: float) -> Callable[[int], bool]:
        end, few_end = start + part * self.seconds, start + part * self.few_s

        def more(done: int) -> bool:
            return done < least or (now := self.clock()) < end or (done < few and now < few_end)

        return more
