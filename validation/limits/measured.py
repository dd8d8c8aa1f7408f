"""Computes the values of an output's metrics from its drift, each with its limit.

The ratio of an output's energy to the error says little if most of the energy is an offset: logits of 288 with a signal
of 0.4 have 57 dB even if the answer is always 288. Therefore the ratio of the variation over the golden samples to the
error has a limit too (`centered_sqnr_db`). This limit does not apply to an output that hardly varies (masks, anchors):
by at most `STILL` units of its type in amplitude. At the engine stage, where the graph itself rounds to the engine's
precision, it also does not apply if an honest kernel's rounding is half of the variation or more.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from validation.limits.budget import LEAST_DB
from validation.limits.terms import Budget
from validation.metrics.drift import Drift
from validation.metrics.slices import FEWEST, Slices, WorstSlice, worst_slice

# Amplitudes in units of the output's type: a variation up to STILL is not judged, one up to MOVES counts as none.
STILL, MOVES = 8.0, 2.0
_FEW = "too few samples to judge"
_WORST = "as the worst golden sample"


@dataclass(frozen=True)
class Value:
    """One metric. limit: None if the metric is only reported.  value: None if there is nothing to measure.  note: a
    remark for the reader, or ''."""

    name: str
    limit: float | None
    value: float | None
    note: str = ""


@dataclass(frozen=True)
class MeasuredDrift:
    """The drift of an output over some cases, beside its budget.

    still: share of the output's energy up to which its variation counts as rounding.  usual: the drift of the golden
    cases, if this is an edge case.  honest: the drift that an honest kernel adds.  rounded: whether the expected output
    was rounded to the engine's precision, as at the engine stage.
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
        """Whether the expected output varies by more than the last bits of its type, and thus is not constant."""
        return self._variation > self._bound_rounding(MOVES)

    def _bound_rounding(self, units: float) -> float:
        """The energy of `units` units of the output's type, or twice that of an honest kernel's rounding if greater."""
        rounding_error = 2 * self._per_count("error_sq", self.honest if self.rounded else None)
        return max((units / STILL) ** 2 * self.still * self.drift.expected_sq, rounding_error)

    def _per_count(self, name: str, drift: Drift | None) -> float:
        """The energy `name` of another drift, scaled to this drift's number of elements; 0 without another drift."""
        energy: float = getattr(drift, name) / drift.count if drift and drift.count else 0.0
        return energy * self.drift.count

    @property
    def _variation(self) -> float:
        """Energy of the variation; at least that of the golden cases, scaled to as many elements."""
        return max(self.drift.centered_sq, self._per_count("centered_sq", self.usual))

    @cached_property
    def _sized(self) -> Drift:
        """The drift with at least the golden cases' energy and peak, since an edge case may have only one sample."""
        if self.usual is None:
            return self.drift
        energy = max(self.drift.expected_sq, self._per_count("expected_sq", self.usual))
        return replace(self.drift, expected_sq=energy, peak=max(self.drift.peak, self.usual.peak))

    def _of_worst(self, limit: float | None, energy: float) -> float | None:
        """The limit for an edge case: of a quantized graph, at most the SQNR of the worst golden sample at this energy.

        Such a case has a few golden samples. An engine's edges keep `limit`, because they run other kernels.
        """
        sample_errors = self.usual.samples if self.usual and not self.rounded else None
        if limit is None or sample_errors is None or not energy:
            return limit
        worst_log = sample_errors.log2_at(sample_errors.samples) - 2 * self.drift.exponent
        if not math.isfinite(worst_log):
            return limit
        sqnr_db = 10 * math.log10(energy / self.drift.count) - 10 * math.log10(2) * worst_log
        return min(limit, max(math.floor(10 * sqnr_db) / 10, LEAST_DB))

    def values(self) -> Iterator[Value]:
        """The value of every metric, in the budget's order. The limit of `nonfinite` is always 0."""
        drift, budget = self.drift, self.budget
        infinite_text = f"{drift.infinite} equal infinities are left out" if drift.infinite else ""
        yield Value("nonfinite", 0.0, float(drift.nonfinite), _where(drift) if drift.nonfinite else infinite_text)
        if drift.mismatches is not None:
            yield Value("agreement", budget.agreement, drift.agreement)
            return
        for name, limit in budget.items():
            if name == "centered_sqnr_db":
                yield from self._measure_centered(limit)
            elif name == "slice_sqnr_db":
                if (weakest_slice := self._worst_slice(limit)) is not None:
                    yield Value(name, weakest_slice.limit_db, weakest_slice.sqnr_db, str(weakest_slice))
            elif name == "quartile_sqnr_db":
                if drift.samples is not None and drift.count and self.varies:  # never at an edge: few samples, tiled
                    yield Value(name, None if self._few else limit, drift.quartile_sqnr_db, _FEW if self._few else "")
            elif name == "sqnr_db":
                worst_limit = self._of_worst(limit, self._sized.expected_sq)
                yield Value(name, worst_limit, self._sized.sqnr_db, "" if worst_limit == limit else _WORST)
            elif name == "max_rel":
                yield Value(name, limit, self._sized.max_rel)
            else:
                yield Value(name, limit, getattr(drift, name), _where(drift) if name == "max_abs" else "")

    def _measure_centered(self, limit: float | None) -> Iterator[Value]:
        drift = self.drift
        if drift.slices is None or not drift.count:
            return
        if not self.varies:
            yield Value("centered_sqnr_db", None, None, "the expected output does not vary over the samples")
            return
        value = math.inf if not drift.error_sq else 10 * math.log10(self._variation / drift.error_sq)
        limit, base_limit = self._of_worst(limit, self._variation), limit
        note = "of one sample: within the output" if drift.slices.samples == 1 and self.usual is None else ""
        note = note if limit == base_limit else _WORST
        yield Value("centered_sqnr_db", None if self._few else limit, value, _FEW if self._few else note)

    @property
    def _few(self) -> bool:
        slices = self.drift.slices
        return slices is not None and slices.freedom < FEWEST and self.usual is None

    def _worst_slice(self, limit: float | None) -> WorstSlice | None:
        if self.drift.slices is None:
            return None
        usual_slices, honest_slices = (
            noise_drift.slices if noise_drift else None for noise_drift in (self.usual, self.honest)
        )
        peak = math.ldexp(self._sized.peak, -self.drift.exponent)
        return worst_slice(self.drift.slices, limit, usual_slices, honest_slices, self.still, self.rounded, peak)


def still_share(expected: np.dtype) -> float:
    """The share of an output's energy up to which variation counts as rounding of its type (of float32 at least)."""
    unit = float(np.finfo(expected).eps) if expected.kind == "f" else 0.0
    return (STILL * max(unit, float(np.finfo(np.float32).eps))) ** 2


def of_golden(drift: Drift) -> Drift:
    """The drift of the golden cases for comparison with limits; a single sample has the variation within the sample."""
    if drift.slices is None or drift.slices.samples != 1:
        return drift
    return _with_slices(drift, drift.slices.within())


def of_edge(drift: Drift, usual: Drift | None) -> Drift:
    """The drift of an edge case for comparison with limits, with the variation about the means of the golden cases.
    usual: the drift of the golden cases; None: the variation within the output is used."""
    if drift.slices is None:
        return drift
    edge_slices = drift.slices.about(usual.slices) if usual and usual.slices else drift.slices.within()
    return replace(_with_slices(drift, edge_slices.without_means()), samples=None)


def _with_slices(drift: Drift, slices: Slices) -> Drift:
    return replace(drift, slices=slices, centered_sq=slices.centered_sq)


def _where(drift: Drift) -> str:
    return "" if drift.worst_index is None else f"at index {list(drift.worst_index)}"
