"""How close a quantized graph comes to the float model, and the least quality that a search keeps."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Quality:
    """How close a quantized model's outputs come to the float model's; of several outputs, the worst.

    noise: energy of the difference over that of the signal.  argmax_agreement: share of the rows along the last axis
    whose decision stays.  accuracy: share of right answers, where there are labels.
    missed: how many of the graph's own checks fail, where a search asks for them.
    """

    noise: float
    cosine: float
    finite: bool = True
    argmax_agreement: float = 1.0
    accuracy: float | None = None
    missed: int = 0

    @property
    def sqnr_db(self) -> float:
        """Signal-to-quantization-noise ratio in decibels; -inf where an output is not finite."""
        if not self.finite:
            return -math.inf
        return math.inf if self.noise == 0 else -10 * math.log10(self.noise)


@dataclass(frozen=True)
class GraphLimits:
    """The limits that an int8 graph is judged by (the quantization stage), for a search that shall hold them.

    given: what the spec says, by metric, in place of the documented ones.  decisions: the output whose decisions are
    judged; None where none is.
    """

    given: Mapping[str, float | None] = field(default_factory=dict)
    decisions: str | None = None


@dataclass(frozen=True)
class SearchFloor:
    """The least quality that is good enough; None sets no limit. graph: the limits of the graph's own checks, too."""

    sqnr_db: float | None = None
    cosine: float | None = None
    argmax_agreement: float | None = None
    accuracy: float | None = None
    graph: GraphLimits | None = None

    def holds(self, found: Quality) -> bool:
        """Whether a measured quality is good enough. NaN and infinities never are."""
        if self.accuracy is not None and found.accuracy is None:
            return False  # it was not measured
        limits = {name: limit for name, limit in vars(self).items() if name != "graph" and limit is not None}
        within = all(getattr(found, name) >= limit for name, limit in limits.items())
        return found.finite and within and not (self.graph and found.missed)
