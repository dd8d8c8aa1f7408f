"""Running sums over chunks of two arrays, in float64 buffers that stay in the cache."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from enginesmith.arrays import Array
from validation.metrics.slice_sums import FeatureSums

# Elements of one sum of products in BLAS, which wakes other threads for more than 10,000; that does not pay.
PIECE = 1 << 13
# Narrower rows are not worth a sum by BLAS each.
NARROW = 128
# Of a = e + (a - e), sum a^2 is computed from the other sums, unless it is less than that share of sum e^2: then too
# much cancels.
CANCELLED = 1e-4

Part = dict[str, Any]


class ChunkSums:
    """Running sums over chunks, in units of 2^exponent; two buffers hold a chunk in float64.

    features: takes the chunks too, in whole rows of `width` elements, whose squared errors are `energies`.
    """

    def __init__(self, exponent: int, features: FeatureSums | None = None, width: int = 1) -> None:
        self._exponent, self._features, self._width = exponent, features, width
        self.energies: list[Array] = []
        self._buffers = np.empty((2, 0))
        self.taken = self.count = self.nonfinite = self.infinite = 0
        self.max_abs, self.peak, self.worst = -1.0, 0.0, None  # type: float, float, int | None
        self.mismatches: int | None = None
        self.sums = [0.0] * 4

    def take_span(self, e: Array, a: Array, chunk: int) -> None:
        """Add two flat, contiguous arrays: what `take` adds of each `chunk` elements, in a quarter less time."""
        whole = len(e) // chunk * chunk
        parts = list(zip(e[:whole].reshape(-1, chunk), a[:whole].reshape(-1, chunk), strict=True))
        if not parts or e.dtype.kind in "biu" or self._exponent or not self._add_chunks(parts, chunk):
            whole = 0
        for at in range(whole, len(e), chunk):
            self.take(e[at : at + chunk], a[at : at + chunk])

    def _add_chunks(self, parts: list[tuple[Array, Array]], chunk: int) -> bool:
        """Add chunks of one size; False, and nothing is added, when one has to be looked at by itself.

        A call of numpy costs as much as a pass over a thousand elements: sums of pieces and extremes of chunks are kept
        in arrays, and looked at once for all chunks.
        """
        piece = math.gcd(PIECE, chunk)
        squares, products = np.empty((len(parts), 2, chunk // piece)), np.empty((len(parts), chunk // piece))
        low, high = np.empty((2, len(parts), 2))
        pair = self._buffer(chunk)
        (wide, error), pieces = pair, pair.reshape(2, -1, piece)
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            for at, (one, two) in enumerate(parts):
                wide[...], error[...] = one, two
                np.subtract(error, wide, out=error)
                np.vecdot(pieces, pieces, out=squares[at])
                np.vecdot(pieces[0], pieces[1], out=products[at])
                np.minimum.reduce(pair, axis=1, out=low[at])
                np.maximum.reduce(pair, axis=1, out=high[at])
            (expected_sq, error_sq), cross = squares.sum(axis=-1).T, products.sum(axis=-1)
            actual_sq = expected_sq + 2 * cross + error_sq
            if not (np.isfinite(actual_sq + error_sq) & (actual_sq > CANCELLED * expected_sq)).all():
                return False
        sums = (error_sq, expected_sq, actual_sq, expected_sq + cross)
        self._add_sums(chunk * len(parts), *(float(one.sum()) for one in sums))
        peaks, greatest = np.maximum(high, -low).T
        self.peak = max(self.peak, float(peaks.max()))
        at = int(np.argmax(greatest))
        self._note_greatest(float(greatest[at]), at * chunk, lambda: np.subtract(*parts[at][::-1], dtype=np.float64))
        self.taken += chunk * len(parts)
        return True

    def take(self, e: Array, a: Array) -> None:
        """Add a chunk of both arrays, of any shape, in C order."""
        if e.dtype.kind in "biu":
            self.mismatches = (self.mismatches or 0) + int(np.count_nonzero(e != a))
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            if not self._add(e, a):
                self._add_masked(e.reshape(-1), a.reshape(-1))
        self.taken += e.size

    def _add(self, e: Array, a: Array) -> bool:
        """Add a chunk of finite elements; False, and nothing is added, when it holds NaN or infinities."""
        pair = self._widen(e, a)
        wide, error = pair
        np.subtract(error, wide, out=error)
        if self._features is None:
            (expected_sq, error_sq), cross = _dots(pair, pair).tolist(), float(_dots(wide, error))
        else:
            energies = _row_energies(error, self._width)
            expected_sq, error_sq, cross = float(_dots(wide, wide)), float(energies.sum()), float(_dots(wide, error))
        actual_sq, dot = expected_sq + 2 * cross + error_sq, expected_sq + cross  # a = e + (a - e): a pass less
        if not actual_sq > CANCELLED * expected_sq:
            narrow = np.ldexp(a.astype(np.float64).reshape(-1), -self._exponent)
            actual_sq, dot = float(_dots(narrow, narrow)), float(_dots(wide, narrow))
        if not math.isfinite(error_sq + expected_sq + actual_sq):
            return False
        self._add_sums(e.size, error_sq, expected_sq, actual_sq, dot)
        greatest = max(float(np.maximum.reduce(error)), -float(np.minimum.reduce(error)))
        self._note_greatest(greatest, 0, lambda: error)
        values = e.reshape(-1) if e.dtype == np.float32 else wide  # half the bytes to read again
        if self._features is None:
            low, high = np.minimum.reduce(values), np.maximum.reduce(values)
        else:
            self.energies.append(energies)
            low, high = self._features.add(wide, error, values)
        self.peak = max(self.peak, -float(low), float(high))
        return True

    def _widen(self, e: Array, a: Array) -> Array:
        """Both in float64, flat and in units of 2^exponent, as an array of (2, elements) that the next call reuses."""
        pair = self._buffer(e.size)
        for wide, values in zip(pair, (e, a), strict=True):
            wide.reshape(e.shape)[...] = values
        return np.ldexp(pair, -self._exponent, out=pair) if self._exponent else pair

    def _buffer(self, elements: int) -> Array:
        if elements > self._buffers.shape[1]:
            self._buffers = np.empty((2, elements))
        return self._buffers[:, :elements]

    def _add_sums(self, elements: int, *sums: float) -> None:
        self.sums = [total + value for total, value in zip(self.sums, sums, strict=True)]
        self.count += elements

    def _note_greatest(self, greatest: float, start: int, errors: Callable[[], Array]) -> None:
        """Keep the greatest magnitude so far, and its place unless that of a non-finite element is kept.

        errors: gives those among which it is, which begin `start` elements after what was taken.
        """
        if greatest > self.max_abs:
            self.max_abs = greatest
            if not self.nonfinite:
                self.worst = self.taken + start + int(np.argmax(np.absolute(errors())))

    def _add_masked(self, e: Array, a: Array) -> None:
        """Add any chunk: NaN and infinities are left out of the sums, and counted where they differ."""
        finite = np.isfinite(e) & np.isfinite(a)
        wrong = np.flatnonzero(~finite & (e != a))
        if not self._add(np.where(finite, e, 0), np.where(finite, a, 0)):
            self.sums = [math.inf] * 4  # finite, but their squares are not
            self.energies.append(np.full(len(e) // self._width, math.inf))
        masked = len(e) - int(finite.sum())
        self.count -= masked
        if len(wrong) and not self.nonfinite:
            self.worst = self.taken + int(wrong[0])
        self.nonfinite += len(wrong)
        self.infinite += masked - len(wrong)

    def part(self, place: Callable[[int], tuple[int, ...]]) -> Part:
        """The sums. place: gives the index in the output of the element that was taken after so many others."""
        names = ("error_sq", "expected_sq", "actual_sq", "dot")
        with np.errstate(over="ignore"):
            max_abs, peak = np.ldexp([max(self.max_abs, 0.0), self.peak], self._exponent).tolist()
        counts = {name: getattr(self, name) for name in ("count", "nonfinite", "infinite", "mismatches")}
        at = None if self.worst is None else place(self.worst)
        sums = dict(zip(names, self.sums, strict=True))
        return {**counts, **sums, "max_abs": max_abs, "peak": peak, "exponent": self._exponent, "worst_index": at}


def _dots(left: Array, right: Array) -> Array:
    """The sums of products along the last axis, by pieces."""
    whole = left.shape[-1] // PIECE * PIECE
    shape = (*left.shape[:-1], -1, PIECE)
    found = np.vecdot(left[..., :whole].reshape(shape), right[..., :whole].reshape(shape)).sum(axis=-1)
    if whole < left.shape[-1]:
        found = found + np.vecdot(left[..., whole:], right[..., whole:])
    return np.asarray(found)


def _row_energies(error: Array, width: int) -> Array:
    """The sum of squares of each row of `width` elements."""
    rows = error.reshape(-1, width)
    return np.asarray(np.vecdot(rows, rows) if NARROW <= width <= PIECE else np.einsum("ij,ij->i", rows, rows))
