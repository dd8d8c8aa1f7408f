"""The distribution of an output's errors: quantiles and worst samples, as a report stores it.

One or two kilobytes of JSON, whatever the number of elements; `tally` measures it. No numpy, because reports are also
read where nothing is measured.
"""

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Worst:
    """A sample with a large error. case, sample: its place.  index: of the element with the largest error.
    expected, actual: the values of that element.

    sqnr_db: of the sample; NaN where it is not finite.  unequal: number of differing elements, of an integer output.
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
        """Whether the sample has no error."""
        return self.unequal == 0 if self.sqnr_db is None else self.sqnr_db == math.inf

    @property
    def badness(self) -> tuple[float, float]:
        """Sort key: greater is worse, and not finite is worst."""
        if self.sqnr_db is None:
            return float(self.unequal or 0), 0.0
        size = abs(self.actual - self.expected)
        return (math.inf if math.isnan(self.sqnr_db) else -self.sqnr_db), (math.inf if math.isnan(size) else size)


@dataclass(frozen=True)
class Spread:
    """The distribution of one output's errors at one stage (`joint`).

    elements, samples: numbers over the golden cases.  equal: elements without any error.  nonfinite: elements left out
    of the quantiles.  abs_error: quantiles 0 to 100 % of |actual - expected|; empty for integer outputs.  sqnr_db:
    quantiles over samples, rising.
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

    @property
    def rounded(self) -> "Spread":
        """With four digits a number, and seven of single elements, as a report keeps it."""
        errors, levels = (tuple(map(_round, values)) for values in (self.abs_error, self.sqnr_db))
        return replace(self, abs_error=errors, sqnr_db=levels, worst=tuple(map(_round_worst, self.worst)))


def _round_worst(worst: Worst) -> Worst:
    quality = None if worst.sqnr_db is None else _round(worst.sqnr_db, 7)
    return replace(worst, expected=_round(worst.expected, 7), actual=_round(worst.actual, 7), sqnr_db=quality)


def _round(value: float, digits: int = 4) -> float:
    return float(f"{value:.{digits}g}")
