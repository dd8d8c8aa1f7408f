"""How errors spread over an output, as a report keeps it for distribution functions and worst cases.

A kilobyte or two of JSON however much was compared; `tally` measures it. No numpy here: reports are read where nothing
is measured.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from builders.codec import decode
from builders.errors import IntegrityError


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
        """A JSON object that `from_json` reads back: four digits a number, and no bare NaN or infinity."""
        plain = {**vars(self), "worst": [_plain(item) for item in self.worst]}
        return plain | {name: [_number(value) for value in plain[name]] for name in ("abs_error", "sqnr_db")}

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> "Spread":
        """Read what `to_json` wrote. Raises IntegrityError when it is something else."""
        try:
            return decode(marked_spread(data), cls)
        except IntegrityError as error:
            raise IntegrityError(f"the spread of errors in a report is not whole ({error}); validate again") from None


def marked_spread(data: object) -> dict[str, object]:
    """What `Spread.to_json` wrote, as `builders.codec` reads it. Raises IntegrityError."""
    found = marked_floats(data, "abs_error", "sqnr_db")
    if isinstance(worst := found.get("worst"), list | tuple):
        found["worst"] = [marked_floats(item, "expected", "actual", "sqnr_db") for item in worst]
    return found


def marked_floats(data: object, *names: str) -> dict[str, object]:
    """A report's object as `builders.codec` reads it: floats of these names that are 'nan', 'inf' or '-inf' marked.

    Raises IntegrityError for what is no object.
    """
    if not isinstance(data, Mapping):
        raise IntegrityError(f"a part of a report is {str(data)[:80]!r}; it must be an object")
    return {name: _marked(item) if name in names else item for name, item in data.items()}


def _marked(value: object) -> object:
    if isinstance(value, list | tuple):
        return list(map(_marked, value))
    return {"float": value} if value in ("nan", "inf", "-inf") else value


def _number(value: float | None, digits: int = 4) -> float | str | None:
    if value is None or not math.isfinite(value):
        return None if value is None else str(float(value))
    return float(f"{value:.{digits}g}")


def _plain(worst: Worst) -> dict[str, object]:
    values = {name: _number(getattr(worst, name), 7) for name in ("expected", "actual", "sqnr_db")}
    return {**vars(worst), **values, "index": list(worst.index)}
