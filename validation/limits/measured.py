"""Turns the drift of an output into values beside their limits.

A ratio to an output's energy says nothing where that is an offset: logits of 288 and a signal of 0.4 keep 57 dB when
the answer is 288 for ever. So there is a limit on the ratio to its variation over the golden samples too. It does not
count where the expected output itself does not vary (masks, anchors): by no more than `STILL` of its type's unit in
amplitude; at the engine stage, where the graph rounds to the engine's precision, also by so little that an honest
kernel's rounding is half of it.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from enginery.arrays import Array
from validation.limits.budget import LEAST_DB, Budget
from validation.metrics.drift import Drift
from validation.metrics.slice_limits import FEWEST, worst_slice
from validation.metrics.slices import Slices

STILL = 8.0
_FEW = "too few samples to judge"
_WORST = "as the worst golden sample"
# The same, for an answer that does not vary at all.
MOVES = 2.0


@dataclass(frozen=True)
class Value:
    """One metric. value: None where there is nothing to measure.  limit: None where it is only measured."""

    name: str
    limit: float | None
    value: float | None
    note: str = ""


@dataclass(frozen=True)
class MeasuredDrift:
    """The drift of an output over some cases. still: share of the energy below which a variation is none.

    usual: of an edge, the drift of the golden cases.  honest: the drift that an honest kernel adds.  rounded: whether
    the expected output was rounded to the same precision, as at the engine stage.
    """

    drift: Drift
    budget: Budget
    still: float = 0.0
    usual: Drift | None = None
    honest: Drift | None = None
    rounded: bool = False

    @property
    def varies(self) -> bool:
        """Whether the expected output varies over the samples by more than its rounding."""
        return self._variation > self._bound_rounding(STILL)

    @property
    def moves(self) -> bool:
        """Whether it varies by more than the last bits of its type: an answer that is constant there is none."""
        return self._variation > self._bound_rounding(MOVES)

    def _bound_rounding(self, units: float) -> float:
        """Energy of so many units of the output's type; of an honest kernel's rounding where that is more."""
        known = self.honest if self.rounded else None
        made = 2 * _mean(known.error_sq, known) * self.drift.count if known else 0.0
        return max((units / STILL) ** 2 * self.still * self.drift.expected_sq, made)

    @property
    def _variation(self) -> float:
        """Energy of the variation, and no less than as many elements of the golden cases have."""
        usual = _mean(self.usual.centered_sq, self.usual) * self.drift.count if self.usual else 0.0
        return max(self.drift.centered_sq, usual)

    @property
    def _sized(self) -> Drift:
        """The drift with no less energy and no lower a peak than the golden cases have: an edge may hold one sample."""
        if self.usual is None:
            return self.drift
        energy = _mean(self.usual.expected_sq, self.usual) * self.drift.count
        return replace(
            self.drift,
            expected_sq=max(self.drift.expected_sq, energy),
            peak=max(self.drift.peak, self.usual.peak),
        )

    def _of_worst(self, limit: float | None, energy: float) -> float | None:
        """The limit of an edge of a graph, which is a few golden samples: no more than the worst of those has, of so
        much energy. An engine's edges are there to show what its other kernels do: they keep the limit."""
        errors = self.usual.samples if self.usual and not self.rounded else None
        if limit is None or errors is None or not energy:
            return limit
        worst = errors.log2_at(errors.samples) - 2 * self.drift.exponent
        if not math.isfinite(worst):
            return limit
        sqnr_db = 10 * math.log10(energy / self.drift.count) - 10 * math.log10(2) * worst
        return min(limit, max(math.floor(10 * sqnr_db) / 10, LEAST_DB))

    def values(self) -> Iterator[Value]:
        """Every metric in order. Non-finite elements always have the limit 0."""
        drift, budget = self.drift, self.budget
        left_out = f"{drift.infinite} equal infinities are left out" if drift.infinite else ""
        yield Value("nonfinite", 0.0, float(drift.nonfinite), _where(drift) if drift.nonfinite else left_out)
        if drift.mismatches is not None:
            limit = 1.0 if budget.argmax_agreement is None else budget.argmax_agreement
            yield Value("agreement", limit, drift.argmax_agreement)
            return
        for name, least in budget.items():
            if name == "centered_sqnr_db":
                yield from self._measure_centered(least)
            elif name == "slice_sqnr_db":
                yield from self._slice(least)
            elif name == "quartile_sqnr_db":
                yield from self._quartile(least)
            elif name == "sqnr_db":
                held = self._of_worst(least, self._sized.expected_sq)
                yield Value(name, held, self._sized.sqnr_db, "" if held == least else _WORST)
            elif name == "max_rel":
                yield Value(name, least, self._sized.max_rel)
            else:
                yield Value(name, least, getattr(drift, name), _where(drift) if name == "max_abs" else "")

    def _measure_centered(self, limit: float | None) -> Iterator[Value]:
        drift = self.drift
        if drift.slices is None or not drift.count:
            return
        if not self.varies:
            yield Value("centered_sqnr_db", None, None, "the expected output does not vary over the samples")
            return
        value = math.inf if not drift.error_sq else 10 * math.log10(self._variation / drift.error_sq)
        limit, before = self._of_worst(limit, self._variation), limit
        note = "of one sample: within the output" if drift.slices.samples == 1 and self.usual is None else ""
        note = note if limit == before else _WORST
        yield Value("centered_sqnr_db", None if self._few else limit, value, _FEW if self._few else note)

    def _quartile(self, limit: float | None) -> Iterator[Value]:
        """Of the golden set alone: an edge is a few of its samples, tiled."""
        if self.drift.samples is not None and self.drift.count and self.varies:
            value = self.drift.quartile_sqnr_db
            yield Value("quartile_sqnr_db", None if self._few else limit, value, _FEW if self._few else "")

    @property
    def _few(self) -> bool:
        slices = self.drift.slices
        return slices is not None and slices.freedom < FEWEST and self.usual is None

    def _slice(self, limit: float | None) -> Iterator[Value]:
        if self.drift.slices is None:
            return
        usual, honest = (part.slices if part else None for part in (self.usual, self.honest))
        worst = worst_slice(self.drift.slices, limit, usual, honest, self.still, self.rounded)
        if worst is not None:
            yield Value("slice_sqnr_db", worst.limit_db, worst.sqnr_db, str(worst))


def still_share(expected: np.dtype) -> float:
    """The share of an output's energy below which its variation counts as the rounding of its own type."""
    unit = float(np.finfo(expected).eps) if expected.kind == "f" else 0.0
    return (STILL * max(unit, float(np.finfo(np.float32).eps))) ** 2


def of_golden(drift: Drift) -> Drift:
    """To judge the golden cases by: of one sample, with its variation within itself."""
    if drift.slices is None or drift.slices.samples != 1:
        return drift
    return with_slices(drift, drift.slices.within())


def of_edge(drift: Drift, usual: Drift | None) -> Drift:
    """To judge an edge by: its variation about the means of the golden set."""
    if drift.slices is None:
        return drift
    found = drift.slices.about(usual.slices) if usual and usual.slices else drift.slices.within()
    return replace(with_slices(drift, found.without_means()), samples=None)


def with_slices(drift: Drift, slices: Slices) -> Drift:
    """A drift with its slices replaced."""
    return replace(drift, slices=slices, centered_sq=slices.centered_sq)


def _mean(energy: float, drift: Drift) -> float:
    return energy / drift.count if drift.count else 0.0


def _where(drift: Drift) -> str:
    return "" if drift.worst_index is None else f"at index {list(drift.worst_index)}"


def as_declared(expected: Array, actual: Array, declared: str | None) -> bool:
    """Whether an answer has the type of what is expected, or another float that its session declares."""
    if actual.dtype == expected.dtype:
        return True
    floats = actual.dtype.kind == expected.dtype.kind == "f"
    return floats and bool(actual.dtype.name == declared)
