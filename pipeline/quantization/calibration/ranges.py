"""Calibrated ranges: the artifact between calibration and Q/DQ insertion, readable by people and by `jq`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from builders.digest import digest_of
from builders.errors import DataError

FORMAT = 1


@dataclass(frozen=True)
class Ranges:
    """Per tensor the (lowest, highest) value that calibration saw.

    method: 'minmax'.  dataset: digest of the calibration file.  samples: how many samples were seen.
    """

    tensors: Mapping[str, tuple[float, float]]
    method: str
    dataset: str
    samples: int

    @cached_property
    def digest(self) -> str:
        """Digest over method and ranges only: other data that gives the same scales gives the same engine."""
        return digest_of({"method": self.method, "tensors": self._json_tensors()})

    def reach(self, tensor: str) -> float | None:
        """Largest magnitude of a tensor, or None where it was not measured."""
        found = self.tensors.get(tensor)
        return None if found is None else max(abs(found[0]), abs(found[1]))

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` reads back."""
        return {
            "format": FORMAT,
            "method": self.method,
            "dataset": self.dataset,
            "samples": self.samples,
            "tensors": self._json_tensors(),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Ranges":
        """Read what `to_json` wrote. Raises DataError for anything else, a reversed or a non-finite range included."""
        try:
            if data["format"] != FORMAT:
                raise DataError(f"ranges: format {data['format']!r} is not {FORMAT}; calibrate again")
            tensors = {str(name): _pair(name, pair) for name, pair in data["tensors"].items()}
            return cls(tensors, str(data["method"]), str(data["dataset"]), int(data["samples"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"ranges: not a ranges file ({error!r}); calibrate again") from error

    def _json_tensors(self) -> dict[str, list[float]]:
        return {name: list(self.tensors[name]) for name in sorted(self.tensors)}


def _pair(name: str, pair: Any) -> tuple[float, float]:
    low, high = (float(value) for value in pair)
    if not (math.isfinite(low) and math.isfinite(high) and low <= high):
        raise DataError(f"ranges: tensor {name!r} has the range [{low}, {high}]; it must be finite and rising")
    return low, high
