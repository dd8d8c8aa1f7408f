"""The quality of a quantized graph, its limits, and the time limit of a search."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from enginesmith.core.errors import EnginesmithError
from enginesmith.core.types import Rows
from validation.metrics.tasks.terms import TaskMetric


class OutOfTimeError(EnginesmithError):
    """A search was ended by its time limit; the message has its progress."""


@dataclass(frozen=True)
class SearchClock:
    """The time limit of a search. most_s: its length in seconds.  end: its end on the clock `time.monotonic`."""

    most_s: float = math.inf
    end: float = math.inf

    @classmethod
    def start(cls, most_s: float) -> "SearchClock":
        """A clock that ends `most_s` seconds from now."""
        return cls(most_s, time.monotonic() + most_s)

    def part(self, parts: int) -> "SearchClock":
        """A clock for the next of `parts` equal parts of the remaining time."""
        now_s = time.monotonic()
        return replace(self, end=now_s + (self.end - now_s) / parts)

    def check(self, during: str, done_count: int | None = None) -> None:
        """Raise OutOfTimeError if the time is over. during: the next work.  done_count: number of finished items."""
        if time.monotonic() > self.end:
            count_text = "" if done_count is None else f", {done_count} done"
            raise OutOfTimeError(f"ended after its {self.most_s:.0f} s, during {during}{count_text}")


@dataclass(frozen=True)
class Quality:
    """How close a quantized model's outputs are to the float model's; of several outputs, the worst.

    noise: energy of the difference over the signal's.  argmax_agreement: as in `Drift`, the least of all
    outputs.  accuracy: share of right answers; None without labels.  missed: number of the graph's own checks that
    fail, if the search counts them.  cosine: of the angle between both outputs.  finite: whether all outputs are."""

    noise: float
    cosine: float
    finite: bool = True
    argmax_agreement: float = 1.0
    accuracy: float | None = None
    missed: int = 0

    @property
    def sqnr_db(self) -> float:
        """Signal-to-quantization-noise ratio in decibels; -inf if an output is not finite."""
        if not self.finite:
            return -math.inf
        return math.inf if self.noise == 0 else -10 * math.log10(self.noise)


@dataclass(frozen=True)
class GraphLimits:
    """The limits of an int8 graph's own checks (the quantization stage), which a search must hold.  given: the spec's
    limits by metric, in place of the documented ones.  metrics: the spec's task metrics.  selected: outputs that are
    judged as sets of rows.
    """

    given: Mapping[str, float | None] = field(default_factory=dict)
    metrics: tuple[TaskMetric, ...] = ()
    selected: Mapping[str, Rows] = field(default_factory=dict)


@dataclass(frozen=True)
class SearchFloor:
    """The least quality that is good enough; None sets no limit. graph: the limits of the graph's own checks, too."""

    sqnr_db: float | None = None
    cosine: float | None = None
    argmax_agreement: float | None = None
    accuracy: float | None = None
    graph: GraphLimits | None = None

    def holds(self, result: Quality) -> bool:
        """Whether a measured quality is good enough. NaN and infinities never are."""
        if self.accuracy is not None and result.accuracy is None:
            return False  # it was not measured
        limits = {name: limit for name, limit in vars(self).items() if name != "graph" and limit is not None}
        is_within = all(getattr(result, name) >= limit for name, limit in limits.items())
        return result.finite and is_within and not (self.graph and result.missed)
