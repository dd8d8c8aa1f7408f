"""How far an output moved: metrics over pairs of arrays, in one pass; parts merge into the drift of the whole.

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
            the variation of all. A few samples with much greater errors do not hide what most have (`SampleErrors`)

The last three need to know the number of samples. On request, since they cost more: decisions along the last axis.

Sums of squares of float64 that would overflow or underflow are taken in units of a power of two (`exponent`).

An element is non-finite, and never passes, unless both are finite or both are the same infinity (a mask); equal
infinities are left out of the sums. Integers and booleans are decisions, which are compared for equality.

The arrays are read once, in order, and never copied whole.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from enginesmith.arrays import Array
from validation.metrics.passes import exponent_of, flat_parts, sampled_parts
from validation.metrics.rows import RowSums, measure_rows
from validation.metrics.slice_limits import worst_slice
from validation.metrics.slice_sums import SliceSums
from validation.metrics.slices import Slices

# Entries of `SampleErrors` for a factor of two: 0.1 dB each.
STEPS = 32


@dataclass(frozen=True)
class SampleErrors:
    """How many samples have which mean squared error, as a logarithmic histogram (as HdrHistogram: Tene, 2012).

    counts: samples by floor(STEPS log2(mean squared error)).  exact: samples without an error. A quantile of it does
    not see the few samples that have a much greater error by right, since an element fell to the other side of a
    quantization step; a mean would. At most some ten thousand entries, however many samples come.
    """

    counts: Mapping[int, int] = field(default_factory=dict)
    exact: int = 0

    @classmethod
    def of(cls, energies: Array, exponent: int) -> "SampleErrors":
        """The histogram of the mean squared errors `energies` (samples,), given in units of 2^(2 exponent)."""
        known = energies[(energies > 0) & np.isfinite(energies)]
        keys = np.floor(STEPS * (np.log2(known) + 2 * exponent)).astype(np.int64)
        least = int(keys.min(initial=0))
        counts = np.bincount(keys - least)
        found = np.flatnonzero(counts)
        exact = len(energies) - int(np.count_nonzero(energies))
        return cls(dict(zip((found + least).tolist(), counts[found].tolist(), strict=True)), exact)

    @property
    def samples(self) -> int:
        """The number of samples."""
        return self.exact + sum(self.counts.values())

    def merge(self, other: "SampleErrors") -> "SampleErrors":
        """The samples of both."""
        return SampleErrors(Counter(self.counts) + Counter(other.counts), self.exact + other.exact)

    def log2_at(self, rank: int) -> float:
        """log2 of the mean squared error that `rank` samples do not exceed; -inf where they have no error."""
        if rank <= self.exact:
            return -math.inf
        seen = self.exact
        for key in sorted(self.counts):
            if (seen := seen + self.counts[key]) >= rank:
                return (key + 1) / STEPS
        return math.inf


_SQUARES = ("error_sq", "expected_sq", "actual_sq", "dot", "centered_sq")
_SUMS = ("count", "error_sq", "expected_sq", "actual_sq", "dot", "nonfinite", "infinite")


@dataclass(frozen=True)
class Drift:
    """Sums and maxima over compared elements; `merge` of two parts is the drift of the whole.

    count: elements compared.  peak: max |e|.  error_sq, expected_sq, actual_sq, dot: sums.  centered_sq: sum of
    (e - m)^2, m the mean of that feature over the samples.  nonfinite: elements that are NaN or an infinity where none
    is expected.  infinite: equal infinities, left out.  worst_index: of max_abs, or of the first non-finite element.
    mismatches: unequal elements of an integer output; None for floating point.  rows: of decisions, if asked for.
    slices, samples: where the number of samples is known.  exponent: sums are in units of 2^exponent, those of squares
    and products in its square.
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
    slices: Slices | None = field(default=None, compare=False)
    samples: SampleErrors | None = field(default=None, compare=False)
    exponent: int = 0

    @property
    def max_rel(self) -> float:
        """Greatest error relative to the greatest expected magnitude."""
        return self.max_abs / self.peak if self.peak else math.inf if self.max_abs else 0.0

    @property
    def sqnr_db(self) -> float:
        """Signal-to-quantization-noise ratio in decibels; +inf without error, -inf without signal."""
        return _decibels(self.expected_sq, self.error_sq)

    @property
    def centered_sqnr_db(self) -> float:
        """SQNR against the variation over the samples; +inf without error, -inf where nothing varies."""
        return _decibels(self.centered_sq, self.error_sq)

    @property
    def slice_sqnr_db(self) -> float:
        """SQNR of the worst slice, as `worst_slice` judges it without a limit; +inf without any."""
        worst = worst_slice(self.slices, None) if self.slices else None
        return math.inf if worst is None else worst.sqnr_db

    @property
    def quartile_sqnr_db(self) -> float:
        """The SQNR against the variation that three of four samples have or exceed; +inf without an error."""
        return self.sample_sqnr_db(-(-3 * self.samples.samples // 4)) if self.samples else math.inf

    def sample_sqnr_db(self, rank: int) -> float:
        """The SQNR against the variation, in decibels, that `rank` samples have or exceed."""
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
        """Share of rows with the same argmax; of integer outputs, share of equal elements. 1 without any.

        NaN, which passes no limit, for floating point of which decisions were not measured.
        """
        if self.mismatches is not None:
            return self.agreement
        return self.rows.argmax_agreement if self.rows else math.nan if self.count else 1.0

    @property
    def agreement(self) -> float:
        """Of integer outputs, the share of equal elements; 1 without any."""
        return 1 - (self.mismatches or 0) / self.count if self.count else 1.0

    def scale_to(self, exponent: int) -> "Drift":
        """The same drift in units of 2^exponent."""
        if exponent == self.exponent:
            return self
        factor = math.ldexp(1.0, min(self.exponent - exponent, 400))
        sums = {name: getattr(self, name) * factor * factor for name in _SQUARES}
        slices = self.slices.scale(factor) if self.slices else None
        return replace(self, **sums, slices=slices, exponent=exponent)

    def merge(self, other: "Drift") -> "Drift":
        """The drift of both parts together."""
        if self.exponent != other.exponent:
            common = max((part.exponent for part in (self, other) if part.peak or part.max_abs), default=0)
            return self.scale_to(common).merge(other.scale_to(common))
        slices = _merge(self.slices, other.slices)
        worst = max(self, other, key=lambda part: (part.nonfinite > 0, part.max_abs, part.worst_index is not None))
        mismatches = (self.mismatches or 0) + (other.mismatches or 0)
        return Drift(
            **{name: getattr(self, name) + getattr(other, name) for name in _SUMS},
            max_abs=max(self.max_abs, other.max_abs),
            peak=max(self.peak, other.peak),
            worst_index=worst.worst_index,
            mismatches=None if self.mismatches is None and other.mismatches is None else mismatches,
            rows=_merge(self.rows, other.rows),
            centered_sq=slices.centered_sq if slices else self.centered_sq + other.centered_sq,
            slices=slices,
            samples=_merge(self.samples, other.samples),
            exponent=self.exponent,
        )


def measure(
    expected: Array, actual: Array, decisions: bool = False, threads: int = 0, samples: int | None = None
) -> Drift:
    """The drift of an output from what is expected: two arrays of one shape, which may be memory-mapped.

    decisions: whether to compare the argmax of rows along the last axis too, of floating point.
    threads: how many to use; 0 for as many as pay.  samples: entries along axis 0 that are samples, or 1 where the
    whole array is one; with it, slices and the variation over the samples are measured. Raises ValueError when shapes
    or kinds differ, and for complex numbers.
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
    if exact or not decisions:
        return total
    return replace(total, rows=measure_rows(expected, actual, divergences=False))


def is_exact(array: Array) -> bool:
    """Whether the array holds decisions (integers, booleans), which are compared for equality."""
    return array.dtype.kind in "biu"


Part = TypeVar("Part", Slices, RowSums, SampleErrors)


def _merge(left: Part | None, right: Part | None) -> Part | None:
    return left.merge(right) if left and right else left or right


def _decibels(signal: float, noise: float) -> float:
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf
