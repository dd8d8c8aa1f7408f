"""How far an output moved: pure metrics over pairs of arrays, in one pass, mergeable over cases.

Definitions (e expected, a actual, sums over all finite elements, float64 throughout):

- max_abs   max |a - e|
- mean_abs  sum |a - e| / n
- max_rel   max |a - e| / max |e|: relative to the output's peak. The element-wise ratio |a - e| / |e| is unbounded
            wherever e crosses zero and says nothing there.
- rmse      sqrt(sum (a - e)^2 / n)
- sqnr_db   10 log10(sum e^2 / sum (a - e)^2), the signal-to-quantization-noise ratio (Widrow and Kollar,
            "Quantization Noise", 2008); +inf for identical arrays
- psnr_db   20 log10(max |e| / rmse), the peak signal-to-noise ratio over the output's own peak
- cosine    sum e a / sqrt(sum e^2 sum a^2); 1 when both are zero

On request, for what costs more: `rows` (decisions and distributions along the last axis) and `ulp` (distances in units
in the last place), in modules of their own.

An element is non-finite, and never passes, unless both are finite or both are the same infinity (a mask); equal
infinities are left out of the sums. Integers and booleans are decisions: what counts is whether they are equal.

The arrays may be memory-mapped: they are read once, in order, and never copied whole.
"""

import math
import os
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from validation.npz import Array
from validation.pairs import pairs_of
from validation.rows import Rows, measure_rows
from validation.slices import Slices
from validation.ulp import Ulps, measure_ulps

# Elements of one sum of products in BLAS, which wakes other threads for more than 10,000; that does not pay.
PIECE = 1 << 13
# Elements: float64 copies of a chunk stay in the cache, and threads seldom wait for the interpreter's lock.
CHUNK = 6 * PIECE
# Elements that one thread takes at a time. Parts are added up in order, so the result does not depend on the threads.
SPAN = 64 * CHUNK
MOST_THREADS = 4

Extra = Literal["argmax", "rows", "ulp"]
# Beside the metrics that cost little.
DECISIONS: tuple[Extra, ...] = ("argmax",)


@dataclass(frozen=True)
class Drift:
    """Sums and maxima over compared elements; `merge` of two parts is the drift of the whole.

    count: elements compared.  peak: max |e|.  abs_sum, error_sq, expected_sq, actual_sq, dot: sums.
    centered_sq: sum of (e - m)^2, m the mean of that feature over the samples.  slices: where samples are known.
    nonfinite: elements that are NaN or an infinity where none is expected.
    worst_index: where max_abs, or the first non-finite element, is.
    mismatches: unequal elements of an integer output; None for floating point.  rows, ulps: where they were asked for.
    """

    count: int = 0
    max_abs: float = 0.0
    peak: float = 0.0
    abs_sum: float = 0.0
    error_sq: float = 0.0
    expected_sq: float = 0.0
    actual_sq: float = 0.0
    dot: float = 0.0
    centered_sq: float = 0.0
    nonfinite: int = 0
    worst_index: tuple[int, ...] | None = None
    mismatches: int | None = None
    rows: Rows | None = None
    ulps: Ulps | None = None
    slices: Slices | None = field(default=None, compare=False)

    @property
    def mean_abs(self) -> float:
        """Mean absolute error."""
        return self.abs_sum / self.count if self.count else 0.0

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
    def centered_sqnr_db(self) -> float:
        """The same against the variation over the samples: -10 log10(1 - R2); -inf where nothing varies."""
        if self.error_sq == 0:
            return math.inf
        return 10 * math.log10(self.centered_sq / self.error_sq) if self.centered_sq else -math.inf

    @property
    def slice_sqnr_db(self) -> float:
        """SQNR of the worst slice; +inf without slices."""
        return self.slices.worst_db if self.slices else math.inf

    @property
    def psnr_db(self) -> float:
        """Peak signal-to-noise ratio in decibels; +inf without error, -inf without signal."""
        if self.error_sq == 0:
            return math.inf
        return 20 * math.log10(self.peak / self.rmse) if self.peak else -math.inf

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

    def merge(self, other: "Drift") -> "Drift":
        """The drift of both parts together."""
        worst = max(self, other, key=lambda part: (part.nonfinite > 0, part.max_abs, part.worst_index is not None))
        return Drift(
            count=self.count + other.count,
            max_abs=max(self.max_abs, other.max_abs),
            peak=max(self.peak, other.peak),
            abs_sum=self.abs_sum + other.abs_sum,
            error_sq=self.error_sq + other.error_sq,
            expected_sq=self.expected_sq + other.expected_sq,
            actual_sq=self.actual_sq + other.actual_sq,
            dot=self.dot + other.dot,
            nonfinite=self.nonfinite + other.nonfinite,
            worst_index=worst.worst_index,
            mismatches=_sum(self.mismatches, other.mismatches),
            rows=self.rows.merge(other.rows) if self.rows and other.rows else self.rows or other.rows,
            ulps=self.ulps.merge(other.ulps) if self.ulps and other.ulps else self.ulps or other.ulps,
        )


def measure(expected: Array, actual: Array, also: Collection[Extra] = (), threads: int = 0) -> Drift:
    """Compare two arrays of one shape, in chunks. Raises ValueError when their shapes or kinds differ.

    also: what else to measure, for floating point: decisions (argmax), with their distributions (rows), and ulp.
    threads: 0 for as many as pay.
    """
    expected, actual = np.asanyarray(expected), np.asanyarray(actual)
    if expected.shape != actual.shape:
        raise ValueError(f"expected shape {expected.shape}, got {actual.shape}")
    if is_exact(expected) != is_exact(actual):
        raise ValueError(f"expected {expected.dtype}, got {actual.dtype}")
    exact = is_exact(expected)
    total = Drift(mismatches=0 if exact else None)
    for part in _parts(expected, actual, threads):
        total = total.merge(part)
    if exact:
        return total
    wanted = "rows" in also or "argmax" in also
    rows = measure_rows(expected, actual, divergences="rows" in also) if wanted else None
    return replace(total, rows=rows, ulps=measure_ulps(expected, actual) if "ulp" in also else None)


def is_exact(array: Array) -> bool:
    """Whether the array holds decisions (integers, booleans), which are compared for equality."""
    return array.dtype.kind in "biu"


def _parts(expected: Array, actual: Array, threads: int) -> Iterator[Drift]:
    """The drift of spans of the flattened arrays, in order."""
    if not (expected.flags.c_contiguous and actual.flags.c_contiguous):
        yield from _strided(expected, actual)
        return
    flat = expected.reshape(-1), actual.reshape(-1)
    spans = [slice(start, start + SPAN) for start in range(0, expected.size, SPAN)]
    workers = min(threads or min(os.cpu_count() or 1, MOST_THREADS), len(spans))
    if workers <= 1:
        yield from (_measure_span(*flat, span, expected.shape) for span in spans)
        return
    with ThreadPoolExecutor(workers) as pool:
        yield from pool.map(lambda span: _measure_span(*flat, span, expected.shape), spans)


def _strided(expected: Array, actual: Array) -> Iterator[Drift]:
    """The same for arrays that do not lie in one piece, which a flat view would copy whole."""
    start = 0
    for e, a in pairs_of(expected, actual, CHUNK):
        part = _measure_span(e, a, slice(0, len(e)), e.shape)
        at = part.worst_index and _unravel(start + part.worst_index[0], expected.shape)
        yield replace(part, worst_index=at)
        start += len(e)


def _measure_span(expected: Array, actual: Array, span: slice, shape: tuple[int, ...]) -> Drift:
    e, a = expected[span], actual[span]
    tally = _Tally(min(CHUNK, len(e)))
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        for start in range(0, len(e), CHUNK):
            chunk = slice(start, start + CHUNK)
            if not tally.add(e[chunk], a[chunk], start):
                tally.add_masked(e[chunk], a[chunk], start)
    mismatches = int(np.count_nonzero(e != a)) if is_exact(e) else None
    at = None if tally.worst is None else _unravel((span.start or 0) + tally.worst, shape)
    return replace(tally.drift(), mismatches=mismatches, worst_index=at)


class _Tally:
    """The running sums of one span; its two buffers hold a chunk in float64."""

    def __init__(self, size: int) -> None:
        self._wide, self._error = np.empty((2, size))
        self.count = self.nonfinite = 0
        self.max_abs, self.peak, self.worst = -1.0, 0.0, None  # type: float, float, int | None
        self.sums = [0.0] * 5

    def add(self, e: Array, a: Array, start: int) -> bool:
        """Add a chunk of finite elements; False, and nothing is added, when it holds NaN or infinities.

        start: index of its first element in the span.
        """
        wide, error = self._wide[: len(e)], self._error[: len(e)]
        wide[...], error[...] = e, a
        np.subtract(error, wide, out=error)
        expected_sq, cross, error_sq = _dot(wide, wide), _dot(wide, error), _dot(error, error)
        actual_sq, dot = expected_sq + 2 * cross + error_sq, expected_sq + cross  # a = e + (a - e): a pass less
        if not actual_sq > 1e-4 * expected_sq:  # too much cancels
            narrow = a.astype(np.float64)
            actual_sq, dot = _dot(narrow, narrow), _dot(wide, narrow)
        if not math.isfinite(error_sq + expected_sq + actual_sq):
            return False
        np.absolute(error, out=error)
        found = float(np.add.reduce(error)), error_sq, expected_sq, actual_sq, dot
        self.sums = [total + value for total, value in zip(self.sums, found, strict=True)]
        self.peak = max(self.peak, float(np.maximum.reduce(e)), -float(np.minimum.reduce(e)))
        self.count += len(e)
        if (largest := float(np.maximum.reduce(error))) > self.max_abs:
            self.max_abs = largest
            if not self.nonfinite:
                self.worst = start + int(np.argmax(error))
        return True

    def add_masked(self, e: Array, a: Array, start: int) -> None:
        """Add any chunk: NaN and infinities are counted when they differ, and left out of the sums."""
        finite = np.isfinite(e) & np.isfinite(a)
        wrong = np.flatnonzero(~finite & (e != a))
        if not self.add(np.where(finite, e, 0), np.where(finite, a, 0), start):
            self.sums = [math.inf] * 5  # finite, but their squares are not
        self.count -= len(e) - int(finite.sum())
        if len(wrong) and not self.nonfinite:
            self.worst = start + int(wrong[0])
        self.nonfinite += len(wrong)

    def drift(self) -> Drift:
        """What was added."""
        abs_sum, error_sq, expected_sq, actual_sq, dot = self.sums
        return Drift(
            count=self.count,
            max_abs=max(self.max_abs, 0.0),
            peak=self.peak,
            abs_sum=abs_sum,
            error_sq=error_sq,
            expected_sq=expected_sq,
            actual_sq=actual_sq,
            dot=dot,
            nonfinite=self.nonfinite,
        )


def _dot(left: Array, right: Array) -> float:
    if rest := len(left) % PIECE:
        whole = len(left) - rest
        return _dot(left[:whole], right[:whole]) + float(np.dot(left[whole:], right[whole:]))
    return float(np.add.reduce(np.vecdot(left.reshape(-1, PIECE), right.reshape(-1, PIECE))))


def _unravel(position: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(at) for at in np.unravel_index(position, shape))


def _sum(left: int | None, right: int | None) -> int | None:
    return (left or 0) + (right or 0) if left is not None or right is not None else None


def _ratio(value: float, base: float) -> float:
    if value == 0:
        return 0.0
    return value / base if base else math.inf
