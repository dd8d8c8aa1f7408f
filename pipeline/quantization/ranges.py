"""Calibrated ranges: the JSON file between calibration and Q/DQ insertion."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from enginesmith.core.codec import decode
from enginesmith.core.digest import digest_of
from enginesmith.core.errors import DataError, IntegrityError

FORMAT = 2

Pair = tuple[float, float]


@dataclass(frozen=True)
class RangeSource:
    """Source of a range. seen: extremes.  histogram: its digest, where there was one.  clipped: share of the values
    outside of the range."""

    seen: Pair
    histogram: str | None = None
    clipped: float = 0.0


@dataclass(frozen=True)
class Ranges:
    """Per tensor the (lowest, highest) value that its quantized form shall hold.

    method: how they were chosen, e.g. 'minmax' or 'mse int8'.  dataset: digest of the calibration data.
    samples: how many samples were seen.  sources: what the ranges were chosen from, where that is known.
    """

    tensors: Mapping[str, Pair]
    method: str
    dataset: str
    samples: int
    sources: Mapping[str, RangeSource] = field(default_factory=dict)

    @cached_property
    def digest(self) -> str:
        """Digest over method and ranges alone: other data with the same ranges makes the same engine."""
        tensors = {name: list(self.tensors[name]) for name in sorted(self.tensors)}
        return digest_of({"method": self.method, "tensors": tensors})

    def reach(self, tensor: str) -> float | None:
        """Largest magnitude that was seen of a tensor, clipped or not, or None where it was not measured."""
        found = self.sources[tensor].seen if tensor in self.sources else self.tensors.get(tensor)
        return None if found is None else max(abs(found[0]), abs(found[1]))

    def to_json(self) -> dict[str, object]:
        """A JSON object that `from_json` reads back."""
        return {
            "format": FORMAT,
            "method": self.method,
            "dataset": self.dataset,
            "samples": self.samples,
            "tensors": {name: self._described(name) for name in sorted(self.tensors)},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> "Ranges":
        """Read what `to_json` wrote. Raises DataError for anything else, a reversed or a non-finite range included."""
        try:
            found = decode(dict(data), _RangesDocument)
        except IntegrityError as error:
            raise DataError(f"ranges: not a ranges file ({error}); calibrate again") from error
        if found.format != FORMAT:
            raise DataError(f"ranges: format {found.format!r} is not {FORMAT}; calibrate again")
        for name, item in found.tensors.items():
            for low, high in filter(None, (item.range, item.seen)):
                if not (math.isfinite(low) and math.isfinite(high) and low <= high):
                    raise DataError(
                        f"ranges: tensor {name!r} has the range [{low}, {high}]; it must be finite and rising"
                    )
        tensors = {name: item.range for name, item in found.tensors.items()}
        sources = {
            name: RangeSource(item.seen, item.histogram, item.clipped)
            for name, item in found.tensors.items()
            if item.seen
        }
        return cls(tensors, found.method, found.dataset, found.samples, sources)

    def _described(self, name: str) -> dict[str, object]:
        item: dict[str, object] = {"range": list(self.tensors[name])}
        if source := self.sources.get(name):
            item |= {"seen": list(source.seen), "histogram": source.histogram, "clipped": source.clipped}
        return item


@dataclass(frozen=True)
class _StoredRange:
    range: Pair
    seen: Pair | None = None
    histogram: str | None = None
    clipped: float = 0.0


@dataclass(frozen=True)
class _RangesDocument:
    """What `Ranges.to_json` writes."""

    format: int
    method: str
    dataset: str
    samples: int
    tensors: Mapping[str, _StoredRange]
