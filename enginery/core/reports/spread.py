"""How errors spread over an output, as a report keeps it for distribution functions and worst cases.

A kilobyte or two of JSON however much was compared; `tally` measures it. No numpy here: reports are read where nothing
is measured.
"""

import math
from dataclasses import dataclass, replace

from enginery.core.codec import encode_document


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

    def to_json(self) -> dict[str, object]:
        """A JSON object that `enginery.core.codec` reads: four digits a number."""
        return encode_document(self._rounded)

    @property
    def _rounded(self) -> "Spread":
        errors, levels = (tuple(map(_round, values)) for values in (self.abs_error, self.sqnr_db))
        return replace(self, abs_error=errors, sqnr_db=levels, worst=tuple(map(_round_worst, self.worst)))


def _round_worst(worst: Worst) -> Worst:
    quality = None if worst.sqnr_db is None else _round(worst.sqnr_db, 7)
    return replace(worst, expected=_round(worst.expected, 7), actual=_round(worst.actual, 7), sqnr_db=quality)


def _round(value: float, digits: int = 4) -> float:
    return float(f"{value:.{digits}g}")
