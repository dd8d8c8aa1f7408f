"""The least quality that a search for a quantized graph keeps."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.quantization.search.sensitivity import Quality


@dataclass(frozen=True)
class SearchFloor:
    """The least quality that is good enough; None asks for nothing."""

    sqnr_db: float | None = None
    cosine: float | None = None
    argmax_agreement: float | None = None
    accuracy: float | None = None

    def holds(self, found: "Quality") -> bool:
        """Whether a measured quality is good enough. NaN and infinities never are."""
        if self.accuracy is not None and found.accuracy is None:
            return False  # it was not measured
        limits = asdict(self).items()
        return found.finite and all(limit is None or getattr(found, name) >= limit for name, limit in limits)
