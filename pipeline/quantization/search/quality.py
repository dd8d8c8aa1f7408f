"""How close a quantized graph comes to the float model, and the least quality that a search keeps."""

import math
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Quality:
    """How close a quantized model's outputs come to the float model's; of several outputs, the worst.

    noise: energy of the difference over that of the signal.  argmax_agreement: share of the rows along the last axis
    whose decision stays.  accuracy: share of right answers, where there are labels.
    """

    noise: float
    cosine: float
    finite: bool = True
    argmax_agreement: float = 1.0
    accuracy: float | None = None

    @property
    def sqnr_db(self) -> float:
        """Signal-to-quantization-noise ratio in decibels; -inf where an output is not finite."""
        if not self.finite:
            return -math.inf
        return math.inf if self.noise == 0 else -10 * math.log10(self.noise)


@dataclass(frozen=True)
class SearchFloor:
    """The least quality that is good enough; None sets no limit."""

    sqnr_db: float | None = None
    cosine: float | None = None
    argmax_agreement: float | None = None
    accuracy: float | None = None

    def holds(self, found: Quality) -> bool:
        """Whether a measured quality is good enough. NaN and infinities never are."""
        if self.accuracy is not None and found.accuracy is None:
            return False  # it was not measured
        limits = asdict(self).items()
        return found.finite and all(limit is None or getattr(found, name) >= limit for name, limit in limits)
