"""The time that a search may take: asked between its parts, so that it ends with what it knows."""

import math
import time
from dataclasses import dataclass, replace

from enginesmith.core.errors import EnginesmithError


class OutOfTimeError(EnginesmithError):
    """A search ended before it was done; says how far it got."""


@dataclass(frozen=True)
class SearchClock:
    """When a search ends. most_s: what it may take.  end: of `time.monotonic`."""

    most_s: float = math.inf
    end: float = math.inf

    @classmethod
    def start(cls, most_s: float) -> "SearchClock":
        """From now on."""
        return cls(most_s, time.monotonic() + most_s)

    def part(self, parts: int) -> "SearchClock":
        """A clock for one of so many parts of what is left, that all may take as much."""
        now = time.monotonic()
        return replace(self, end=now + (self.end - now) / parts)

    def check(self, during: str, done: int | None = None) -> None:
        """Raises OutOfTimeError when the time is over. during: what comes next.  done: how many of these there were."""
        if time.monotonic() > self.end:
            count = "" if done is None else f", {done} done"
            raise OutOfTimeError(f"ended after its {self.most_s:.0f} s, during {during}{count}")
