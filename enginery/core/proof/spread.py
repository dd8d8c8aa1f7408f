"""How errors spread over an output, as a report keeps it for distribution functions and worst cases.

A kilobyte or two of JSON however much was compared; `tally` measures it. No numpy here: reports are read where nothing
is measured.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from enginery.core.errors import IntegrityError


@dataclass(frozen=True)
class Worst:
    """One sample. case, sample: which.  index: where in the case's output it is off most.  expected, actual: there.

    sqnr_db: of the sample; NaN where it is not finite.  unequal: elements that differ, of an integer output.
    """

    case: str
    sample: int
    index: tuple[int, ...]
    expected: float
    actual: float
    sqnr_db: float | None = None
    unequal: int | None = None

    @property
    def fine(self) -> bool:
        """Whether nothing is off."""
        return self.unequal == 0 if self.sqnr_db is None else self.sqnr_db == math.inf

    @property
    def badness(self) -> tuple[float, float]:
        """Greater is worse; not finite is worst."""
        if self.sqnr_db is None:
            return float(self.unequal or 0), 0.0
        size = abs(self.actual - self.expected)
        return (math.inf if math.isnan(self.sqnr_db) else -self.sqnr_db), (math.inf if math.isnan(size) else size)


@dataclass(frozen=True)
class Spread:
    """How the errors of one output spread at one joint.

    elements, samples: of the golden cases.  equal: elements without any error.  nonfinite: that are left out below.
    abs_error: quantiles 0 to 100 % of |a - e|; empty for integer outputs.  sqnr_db: quantiles over samples, rising.
    """

    joint: str
    output: str
    elements: int
    samples: int
    equal: int
    nonfinite: int
    abs_error: tuple[float, ...]
    sqnr_db: tuple[float, ...]
    worst: tuple[Worst, ...]

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` reads back: four digits a number, and no bare NaN or infinity."""
        plain = {**vars(self), "worst": [_plain(item) for item in self.worst]}
        return plain | {name: [_number(value) for value in plain[name]] for name in ("abs_error", "sqnr_db")}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Spread":
        """Read what `to_json` wrote. Raises IntegrityError when it is something else."""
        try:
            numbers = {name: tuple(float(value) for value in data[name]) for name in ("abs_error", "sqnr_db")}
            return cls(**{**data, **numbers, "worst": tuple(_worst(item) for item in data["worst"])})
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise IntegrityError(f"the spread of errors in a report is not whole ({error!r}); validate again") from None


def _number(value: float | None, digits: int = 4) -> float | str | None:
    if value is None or not math.isfinite(value):
        return None if value is None else str(float(value))
    return float(f"{value:.{digits}g}")


def _plain(worst: Worst) -> dict[str, Any]:
    values = {name: _number(getattr(worst, name), 7) for name in ("expected", "actual", "sqnr_db")}
    return {**vars(worst), **values, "index": list(worst.index)}


def _worst(data: Mapping[str, Any]) -> Worst:
    quality = None if data["sqnr_db"] is None else float(data["sqnr_db"])
    values = {name: float(data[name]) for name in ("expected", "actual")}
    return Worst(**{**data, **values, "sqnr_db": quality, "index": tuple(data["index"])})
