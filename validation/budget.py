"""How much drift is allowed, per joint and precision. docs/validation.md gives the reason of each number."""

import difflib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Literal

from builders.errors import InputError
from builders.types import Precision

Joint = Literal["export", "quantization", "engine", "task"]
JOINTS: tuple[Joint, ...] = ("export", "quantization", "engine", "task")


@dataclass(frozen=True)
class Budget:
    """Limits; None is not checked, though its value is still reported.

    max_abs, max_rel: at most (max_rel is relative to the output's peak).  sqnr_db, cosine, argmax_agreement: at least.
    """

    max_abs: float | None = None
    max_rel: float | None = None
    sqnr_db: float | None = None
    cosine: float | None = None
    argmax_agreement: float | None = None

    def override(self, limits: Mapping[str, float | None]) -> "Budget":
        """The budget with some limits replaced; None lifts one. Raises InputError for an unknown name or value."""
        for name, value in limits.items():
            _check_limit(name, value)
        return replace(self, **{name: None if value is None else float(value) for name, value in limits.items()})

    def items(self) -> list[tuple[str, float | None]]:
        """(metric, limit) pairs in order."""
        return list(asdict(self).items())


def at_most(name: str) -> bool:
    """Whether a metric's limit is an upper one (errors); the others are lower ones (likenesses)."""
    return name.startswith("max_") or name == "nonfinite"


def within(name: str, value: float, limit: float) -> bool:
    """Whether a metric's value keeps its limit. NaN keeps none."""
    return value <= limit if at_most(name) else value >= limit


def default_budget(joint: Joint, precision: Precision) -> Budget:
    """The documented limits. Export is always fp32; the task's floor comes from the spec, so nothing is set here."""
    if joint == "task":
        return Budget()
    if joint == "export":
        return _EXPORT
    return _DEFAULTS[joint][precision]


_EXPORT = Budget(max_rel=1e-3, sqnr_db=80.0)
_DEFAULTS: dict[str, dict[Precision, Budget]] = {
    "quantization": {
        "fp32": Budget(max_rel=1e-3, sqnr_db=80.0),
        "fp16": Budget(max_rel=0.03, sqnr_db=45.0),
        "bf16": Budget(max_rel=0.2, sqnr_db=25.0),
        "fp8": Budget(max_rel=0.6, sqnr_db=15.0),
        "int8": Budget(max_rel=0.6, sqnr_db=15.0),
        "int8-dynamic": Budget(max_rel=0.6, sqnr_db=15.0),
        "int4": Budget(max_rel=0.9, sqnr_db=10.0),
    },
    "engine": {
        "fp32": Budget(max_rel=1e-3, sqnr_db=80.0),
        "fp16": Budget(max_rel=0.03, sqnr_db=45.0),
        "bf16": Budget(max_rel=0.2, sqnr_db=25.0),
        "fp8": Budget(max_rel=0.6, sqnr_db=15.0),
        "int8": Budget(max_rel=0.6, sqnr_db=15.0),
        "int8-dynamic": Budget(max_rel=0.6, sqnr_db=15.0),
        "int4": Budget(max_rel=0.9, sqnr_db=10.0),
    },
}


def _check_limit(name: str, value: object) -> None:
    known = [item.name for item in fields(Budget)]
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
        raise InputError(f"limit {name!r} is not a metric; {hint}")
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is not None and not (number and not math.isnan(float(str(value)))):
        raise InputError(f"limit {name}: {value!r} is not a number; give one, or null to lift the limit")
