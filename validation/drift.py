"""How far an output moved: pure metrics over pairs of arrays, in one pass, mergeable over cases.

Definitions (e expected, a actual, sums over all finite elements, float64 throughout):

- max_abs   max |a - e|
- max_rel   max |a - e| / max |e|: relative to the output's peak. The element-wise ratio |a - e| / |e| is unbounded
            wherever e crosses zero and says nothing there.
- rmse      sqrt(sum (a - e)^2 / n)
- sqnr_db   10 log10(sum e^2 / sum (a - e)^2), the signal-to-quantization-noise ratio (Widrow and Kollar,
            "Quantization Noise", 2008); +inf for identical arrays
- cosine    sum e a / sqrt(sum e^2 sum a^2); 1 when both are zero
- argmax_agreement   share of rows (last axis) whose argmax in `a` is also a maximum of `e`, so ties in `e` agree

An element is non-finite, and never passes, unless both are finite or both are the same infinity (a mask); equal
infinities are left out of the sums. Integers and booleans are decisions: what counts is whether they are equal.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from validation.npz import Array

CHUNK = 1 << 13  # elements: float64 copies stay in the processor's cache, and BLAS on one thread


@dataclass(frozen=True)
class Drift:
    """Sums and maxima over compared elements; `merge` of two parts is the drift of the whole.

    count: elements compared.  peak: max |e|.  error_sq, expected_sq, actual_sq, dot: sums.  nonfinite: elements that
    are NaN or an infinity where none is expected.  worst_index: where max_abs (or the first non-finite element) is.
    mismatches: unequal elements of an integer output; None for floating point.  rows, agreeing: of the argmax.
    """

    count: int = 0
    max_abs: float = 0.0
    peak: float = 0.0
    error_sq: float = 0.0
    expected_sq: float = 0.0
    actual_sq: float = 0.0
    dot: float = 0.0
    nonfinite: int = 0
    worst_index: tuple[int, ...] | None = None
    mismatches: int | None = None
    rows: int = 0
    agreeing: int = 0

    @property
    def max_rel(self) -> float:
        """Greatest error relative to the greatest expected magnitude."""
        return _ratio(self.max_abs, self.peak)

    @property
    def rmse(self) -> float:
        """Root of the mean squared error."""
        return math.sqrt(self.error_sq / self.count) if self.count else 0.0

    @property
    def sqnr_db(self) -> float:
        """Signal-to-quantization-noise ratio in decibels; +inf without error, -inf without signal."""
        if self.error_sq == 0:
            return math.inf
        return 10 * math.log10(self.expected_sq / self.error_sq) if self.expected_sq else -math.inf

    @property
    def cosine(self) -> float:
        """Cosine similarity of the two outputs as vectors."""
        norm = math.sqrt(self.expected_sq) * math.sqrt(self.actual_sq)
        return self.dot / norm if norm else float(self.expected_sq == self.actual_sq)

    @property
    def argmax_agreement(self) -> float:
        """Share of rows with the same decision; for integer outputs, share of equal elements. 1 without any."""
        if self.mismatches is not None:
            return 1 - self.mismatches / self.count if self.count else 1.0
        return self.agreeing / self.rows if self.rows else 1.0

    def merge(self, other: "Drift") -> "Drift":
        """The drift of both parts together."""
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
            worst_index=worst.worst_index,
            mismatches=_sum(self.mismatches, other.mismatches),
            rows=self.rows + other.rows,
            agreeing=self.agreeing + other.agreeing,
        )


def measure(expected: Array, actual: Array) -> Drift:
    """Compare two arrays of one shape, in chunks. Raises ValueError when their shapes or kinds differ."""
    if expected.shape != actual.shape:
        raise ValueError(f"expected shape {expected.shape}, got {actual.shape}")
    if is_exact(expected) != is_exact(actual):
        raise ValueError(f"expected {expected.dtype}, got {actual.dtype}")
    rows, agreeing = (0, 0) if is_exact(expected) else _agreement(expected, actual)
    total = Drift(mismatches=0 if is_exact(expected) else None)
    flat_expected, flat_actual = expected.reshape(-1), actual.reshape(-1)
    for start in range(0, expected.size, CHUNK):
        part = slice(start, start + CHUNK)
        total = total.merge(_measure_chunk(flat_expected[part], flat_actual[part], start, expected.shape))
    return total.merge(Drift(rows=rows, agreeing=agreeing))


def is_exact(array: Array) -> bool:
    """Whether the array holds decisions (integers, booleans), which are compared for equality."""
    return array.dtype.kind in "biu"


def _measure_chunk(expected: Array, actual: Array, start: int, shape: tuple[int, ...]) -> Drift:
    mismatches = int(np.count_nonzero(expected != actual)) if is_exact(expected) else None
    e, a = expected.astype(np.float64), actual.astype(np.float64)
    part, worst = _finite_sums(e, a)
    if not math.isfinite(part.error_sq + part.expected_sq + part.actual_sq):
        part, worst = _masked_sums(e, a)
    return replace(part, worst_index=_unravel(start + worst, shape), mismatches=mismatches)


def _finite_sums(e: Array, a: Array) -> tuple[Drift, int]:
    """The drift of finite elements and the position of the worst; any NaN or infinity shows in the sums."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        error = np.abs(a - e)
        sums = Drift(error_sq=float(error @ error), expected_sq=float(e @ e), actual_sq=float(a @ a), dot=float(e @ a))
    worst = int(np.argmax(error))
    peak = max(float(e.max()), -float(e.min()))
    return replace(sums, count=len(e), max_abs=float(error[worst]), peak=peak), worst


def _masked_sums(e: Array, a: Array) -> tuple[Drift, int]:
    """The same for chunks with NaN or infinities, which are counted when they differ and left out of the sums."""
    finite = np.isfinite(e) & np.isfinite(a)
    wrong = ~finite & (e != a)
    part, worst = _finite_sums(np.where(finite, e, 0.0), np.where(finite, a, 0.0))
    worst = int(np.argmax(wrong)) if wrong.any() else worst
    return replace(part, count=int(finite.sum()), nonfinite=int(wrong.sum())), worst


def _unravel(position: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(at) for at in np.unravel_index(position, shape))


def _agreement(expected: Array, actual: Array) -> tuple[int, int]:
    """Rows along the last axis, and those in which the two agree; NaN agrees with nothing."""
    if expected.ndim == 0 or expected.size == 0:
        return 0, 0
    e, a = expected.reshape(-1, expected.shape[-1]), actual.reshape(-1, expected.shape[-1])
    chosen = np.argmax(a, axis=1)[:, None]
    same = np.take_along_axis(e, chosen, axis=1)[:, 0] == e.max(axis=1)
    return len(e), int((same & ~np.isnan(np.take_along_axis(a, chosen, axis=1)[:, 0])).sum())


def _sum(left: int | None, right: int | None) -> int | None:
    return (left or 0) + (right or 0) if left is not None or right is not None else None


def _ratio(value: float, base: float) -> float:
    if value == 0:
        return 0.0
    return value / base if base else math.inf
