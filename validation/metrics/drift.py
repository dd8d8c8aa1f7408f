"""How many samples are how far off: the error energy of each sample, in a histogram that merges and stays small.

A mean over samples says little of an error that each of them has, where a few hold a much greater one by right: an
element that falls to the other side of a quantization step. A quantile of the samples does not see the few.

An entry counts the samples whose mean squared error lies within 1/STEPS of a power of two (0.1 dB), as in HdrHistogram
(Tene, 2012): of ordinary errors some hundreds, and of all float64 some ten thousands, however many samples come.

How far an output moved: pure metrics over pairs of arrays, in one pass, mergeable over cases.

Definitions (e expected, a actual, sums over all finite elements, float64 throughout):

- max_abs   max |a - e|
- max_rel   max |a - e| / max |e|: relative to the output's peak. The element-wise ratio |a - e| / |e| is unbounded
            wherever e crosses zero and says nothing there.
- sqnr_db   10 log10(sum e^2 / sum (a - e)^2), the signal-to-quantization-noise ratio (Widrow and Kollar,
            "Quantization Noise", 2008); +inf for identical arrays
- cosine    sum e a / sqrt(sum e^2 sum a^2); 1 when both are zero
- centered_sqnr_db  10 log10(sum (e - m)^2 / sum (a - e)^2) = -10 log10(1 - R^2), m the mean of that feature over the
            samples: an offset, however large, is no signal
- slice_sqnr_db     sqnr_db of the worst slice: of one index of one axis (`slices`)
- quartile_sqnr_db  centered_sqnr_db that three of four samples have or more: the mean squared error of a sample against
            the variation of all. A few samples with much greater errors do not hide what most have (`sample_errors`)

The last three where `samples` says how many samples there are. On request, for what costs more: `rows` (decisions and
distributions along the last axis) and `ulp` (distances in units in the last place), in modules of their own.

Sums of squares of float64 that would overflow or underflow are taken in units of a power of two (`exponent`).

An element is non-finite, and never passes, unless both are finite or both are the same infinity (a mask); equal
infinities are left out of the sums. Integers and booleans are decisions: what counts is whether they are equal.

The arrays may be memory-mapped: they are read once, in order, and never copied whole.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from enginery.arrays import Array
from validation.metrics.passes import exponent_of, flat_parts, sampled_parts
from validation.metrics.rows import RowSums, measure_rows
from validation.metrics.slice_limits import worst_slice
from validation.metrics.slices import Slices, SliceSums
from validation.metrics.ulp import Ulps, measure_ulps

STEPS = 32


@dataclass(frozen=True)
class SampleErrors:
    """counts: samples by floor(STEPS log2(mean squared error)).  exact: samples without an error."""

    counts: Mapping[int, int] = field(default_factory=dict)
    exact: int = 0

    @classmethod
    def of(cls, energies: Array, exponent: int) -> "SampleErrors":
        """From the mean squared error of each sample, in units of 2^(2 exponent)."""
        known = energies[(energies > 0) & np.isfinite(energies)]
        keys = np.floor(STEPS * (np.log2(known) + 2 * exponent)).astype(np.int64)
        least = int(keys.min(initial=0))
        counts = np.bincount(keys - least)
        found = np.flatnonzero(counts)
        exact = len(energies) - int(np.count_nonzero(energies))
        return cls(dict(zip((found + least).tolist(), counts[found].tolist(), strict=True)), exact)

    @property
    def samples(self) -> int:
        """How many there are."""
        return self.exact + sum(self.counts.values())

    def merge(self, other: "SampleErrors") -> "SampleErrors":
        """Those of both."""
        return SampleErrors(Counter(self.counts) + Counter(other.counts), self.exact + other.exact)

    def log2_at(self, rank: int) -> float:
        """log2 of the mean squared error that so many samples are within; -inf where those have none."""
        if rank <= self.exact:
            return -math.inf
        seen = self.exact
        for key in sorted(self.counts):
            if (seen := seen + self.counts[key]) >= rank:
                return (key + 1) / STEPS
        return math.inf


Extra = Literal["argmax", "rows", "ulp"]
# Beside the metrics that cost little.
DECISIONS: tuple[Extra, ...] = ("argmax",)
_SQUARES = ("error_sq", "expected_sq", "actual_sq", "dot", "centered_sq")


@dataclass(frozen=True)
class Drift:
    """Sums and maxima over compared elements; `merge` of two parts is the drift of the whole.

    count: elements compared.  peak: max |e|.  error_sq, expected_sq, actual_sq, dot: sums.
    centered_sq: sum of (e - m)^2, m the mean of that feature over the samples.  slices, samples: where samples are
    known.
    nonfinite: elements that are NaN or an infinity where none is expected.  infinite: equal infinities, left out.
    worst_index: where max_abs, or the first non-finite element, is.
    mismatches: unequal elements of an integer output; None for floating point.  rows, ulps: where they were asked for.
    exponent: sums are in units of 2^exponent, those of squares and products in its square.
    """

    count: int = 0
    max_abs: float = 0.0
    peak: float = 0.0
    error_sq: float = 0.0
    expected_sq: float = 0.0
    actual_sq: float = 0.0
    dot: float = 0.0
    centered_sq: float = 0.0
    nonfinite: int = 0
    infinite: int = 0
    worst_index: tuple[int, ...] | None = None
    mismatches: int | None = None
    rows: RowSums | None = None
    ulps: Ulps | None = None
    slices: Slices | None = field(default=None, compare=False)
    samples: SampleErrors | None = field(default=None, compare=False)
    exponent: int = 0

    @property
    def max_rel(self) -> float:
        """Greatest error relative to the greatest expected magnitude."""
        return _ratio(self.max_abs, self.peak)

    @property
    def sqnr_db(self) -> float:
        """Signal-to-quantization-noise ratio in decibels; +inf without error, -inf without signal."""
        if self.error_sq == 0:
            return math.inf
        return 10 * math.log10(self.expected_sq / self.error_sq) if self.expected_sq else -math.inf

    @property
    def centered_sqnr_db(self) -> float:
        """SQNR against the variation over the samples; +inf without error, -inf where nothing varies."""
        if self.error_sq == 0:
            return math.inf
        return 10 * math.log10(self.centered_sq / self.error_sq) if self.centered_sq else -math.inf

    @property
    def slice_sqnr_db(self) -> float:
        """SQNR of the worst slice, as `worst_slice` judges it without a limit; +inf without any."""
        worst = worst_slice(self.slices, None) if self.slices else None
        return math.inf if worst is None else worst.sqnr_db

    @property
    def quartile_sqnr_db(self) -> float:
        """SQNR against the variation over the samples that three of four have or more; +inf without an error."""
        return self.sample_sqnr_db(-(-3 * self.samples.samples // 4)) if self.samples else math.inf

    def sample_sqnr_db(self, rank: int) -> float:
        """The SQNR against the variation over the samples that so many samples have or more."""
        log2 = self.samples.log2_at(rank) if self.samples else -math.inf
        if log2 == -math.inf:
            return math.inf
        mean = self.centered_sq / self.count if self.count else 0.0
        return 10 * (math.log10(mean) + (2 * self.exponent - log2) * math.log10(2)) if mean else -math.inf

    @property
    def cosine(self) -> float:
        """Cosine similarity of the two outputs as vectors."""
        norm = math.sqrt(self.expected_sq) * math.sqrt(self.actual_sq)
        return self.dot / norm if norm else float(self.expected_sq == self.actual_sq)

    @property
    def argmax_agreement(self) -> float:
        """Share of rows with the same decision; for integer outputs, share of equal elements. 1 without any.

        Of floating point, "argmax" or "rows" must be measured also; NaN, which passes no limit, without.
        """
        if self.mismatches is not None:
            return 1 - self.mismatches / self.count if self.count else 1.0
        return self.rows.argmax_agreement if self.rows else math.nan if self.count else 1.0

    def scale_to(self, exponent: int) -> "Drift":
        """The same in units of 2^exponent."""
        if exponent == self.exponent:
            return self
        factor = math.ldexp(1.0, min(max(self.exponent - exponent, -1074), 400))
        sums = {name: getattr(self, name) * factor * factor for name in _SQUARES}
        slices = self.slices.scale(factor) if self.slices else None
        return replace(self, **sums, slices=slices, exponent=exponent)

    def merge(self, other: "Drift") -> "Drift":
        """The drift of both parts together."""
        if self.exponent != other.exponent:
            common = max((part.exponent for part in (self, other) if part.peak or part.max_abs), default=0)
            return self.scale_to(common).merge(other.scale_to(common))
        slices = _merge_slices(self.slices, other.slices)
        worst = max(self, other, key=lambda part: (part.nonfinite > 0, part.max_abs, part.worst_index is not None))
        return Drift(
            count=self.count + other.count,
            max_abs=max(self.max_abs, other.max_abs),
            peak=max(self.peak, other.peak),
            error_sq=self.error_sq + other.error_sq,
            expected_sq=self.expected_sq + other.expected_sq,
            actual_sq=self.actual_sq + other.actual_sq,
            dot=self.dot + other.dot,
            nonfinite=self.nonfinite + other.nonfinite,
            infinite=self.infinite + other.infinite,
            worst_index=worst.worst_index,
            mismatches=_sum(self.mismatches, other.mismatches),
            rows=self.rows.merge(other.rows) if self.rows and other.rows else self.rows or other.rows,
            ulps=self.ulps.merge(other.ulps) if self.ulps and other.ulps else self.ulps or other.ulps,
            centered_sq=slices.centered_sq if slices else self.centered_sq + other.centered_sq,
            slices=slices,
            samples=self.samples.merge(other.samples)
            if self.samples and other.samples
            else self.samples or other.samples,
            exponent=self.exponent,
        )


def measure(
    expected: Array, actual: Array, also: Collection[Extra] = (), threads: int = 0, samples: int | None = None
) -> Drift:
    """Compare two arrays of one shape, in chunks. Raises ValueError when their shapes or kinds differ.

    also: what else to measure, for floating point: decisions (argmax), with their distributions (rows), and ulp.
    threads: 0 for as many as pay.  samples: entries along axis 0 that are samples of their own, or 1 where the whole is
    one: then slices, and the variation over the samples, are measured too.
    """
    expected, actual = np.asanyarray(expected), np.asanyarray(actual)
    if expected.shape != actual.shape:
        raise ValueError(f"expected shape {expected.shape}, got {actual.shape}")
    if expected.dtype.kind == actual.dtype.kind == "c":
        raise ValueError(
            "complex numbers are not compared; give their real and imaginary parts as outputs of their own"
        )
    if is_exact(expected) != is_exact(actual) or "c" in expected.dtype.kind + actual.dtype.kind:
        raise ValueError(f"expected {expected.dtype}, got {actual.dtype}")
    exact = is_exact(expected)
    exponent = exponent_of(expected, actual)
    total = Drift(mismatches=0 if exact else None, exponent=exponent)
    if samples is None:
        for part in flat_parts(expected, actual, exponent, threads):
            total = total.merge(Drift(**part))
    else:
        sums = SliceSums(expected.shape, samples)
        energies = np.zeros(sums.samples)
        for part in sampled_parts(expected, actual, exponent, threads, sums, energies):
            total = total.merge(Drift(**part))
        slices = sums.slices()
        errors = SampleErrors.of(energies * (sums.samples / max(expected.size, 1)), exponent)
        total = replace(total, slices=slices, centered_sq=slices.centered_sq, samples=errors)
    if exact:
        return total
    wanted = "rows" in also or "argmax" in also
    rows = measure_rows(expected, actual, divergences="rows" in also) if wanted else None
    return replace(total, rows=rows, ulps=measure_ulps(expected, actual) if "ulp" in also else None)


def is_exact(array: Array) -> bool:
    """Whether the array holds decisions (integers, booleans), which are compared for equality."""
    return array.dtype.kind in "biu"


def _sum(left: int | None, right: int | None) -> int | None:
    return (left or 0) + (right or 0) if left is not None or right is not None else None


def _merge_slices(left: Slices | None, right: Slices | None) -> Slices | None:
    return left.merge(right) if left and right else left or right


def _ratio(value: float, base: float) -> float:
    if value == 0:
        return 0.0
    return value / base if base else math.inf
