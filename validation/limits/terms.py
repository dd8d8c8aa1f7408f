"""The limits of drift in a spec. Imports only the standard library and annotated-types."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated

from annotated_types import Ge, Interval

from enginesmith.core.errors import InputError
from enginesmith.core.text import suggest


@dataclass(frozen=True)
class Budget:
    """A spec's limits of the metrics of `Drift`, by metric name. A metric without a limit (None) is reported and not
    checked.

    max_abs, max_rel: upper limits (max_rel relative to the output's peak).  Lower limits, the dB ones in decibels:
    sqnr_db; centered_sqnr_db, against the output's variation over the samples; slice_sqnr_db, of the worst slice;
    quartile_sqnr_db, which three of four golden samples have; cosine and argmax_agreement, at most 1.
    """

    max_abs: Annotated[float, Ge(0)] | None = None
    max_rel: Annotated[float, Ge(0)] | None = None
    sqnr_db: float | None = None
    centered_sqnr_db: float | None = None
    slice_sqnr_db: float | None = None
    quartile_sqnr_db: float | None = None
    cosine: Annotated[float, Interval(ge=-1, le=1)] | None = None
    argmax_agreement: Annotated[float, Interval(ge=0, le=1)] | None = None

    @property
    def agreement(self) -> float:
        """The least share of equal elements of integers: `argmax_agreement`, or 1 without that limit."""
        return 1.0 if self.argmax_agreement is None else self.argmax_agreement

    def override(self, limits: Mapping[str, float | None]) -> "Budget":
        """The budget with some limits replaced; None lifts a limit. Raises InputError for an unknown name or value."""
        metric_names = [metric.name for metric in fields(self)]
        for name, value in limits.items():
            if name not in metric_names:
                raise InputError(f"limit {name!r} is not a metric; {suggest(name, metric_names)}")
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if value is not None and not (is_number and not math.isnan(float(str(value)))):
                raise InputError(f"limit {name}: {value!r} is not a number; give one, or null to lift the limit")
        return replace(self, **{name: None if value is None else float(value) for name, value in limits.items()})

    def with_sqnr(self, sqnr_db: float | None) -> "Budget":
        """The budget with another SQNR limit. If that is lower, the limits on slices and variation fall as much."""
        limits = {"sqnr_db": sqnr_db}
        for name in ("centered_sqnr_db", "slice_sqnr_db"):
            limit = getattr(self, name)
            has_margin = sqnr_db is not None and limit is not None and self.sqnr_db is not None
            limits[name] = min(limit, limit + sqnr_db - self.sqnr_db) if has_margin else None
        return self.override(limits)

    def items(self) -> list[tuple[str, float | None]]:
        """(metric, limit) pairs in the order of the fields."""
        return [(metric.name, getattr(self, metric.name)) for metric in fields(self)]
