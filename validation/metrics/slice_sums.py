"""Sums over slices of outputs, in passes over chunks."""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from enginesmith.arrays import Array
from validation.metrics.slices import AxisSums, Block, Marginals, Slices, blocks_of, pairs_of

# Running sums over the samples of an output, in blocks of features; the sums over slices are computed from them.

# Narrow rows are folded to this width, because a loop over ten columns costs more than its sums.
FOLD = 512


class FeatureSums:
    """Running sums over samples for each feature of a block: of d, d^2, (a - e)^2 and |e|, with d = e - shift; and
    the greatest -e and e.

    shift: the first sample, flat.  rows: the total number of samples.
    """

    def __init__(self, shift: Array, rows: int) -> None:
        self._width, self._rows = shift.size, rows
        fold_rows = max(1, min(FOLD // max(shift.size, 1), rows))
        self._shift = np.concatenate([shift] * fold_rows) if fold_rows > 1 else shift
        self._sums = np.zeros((4, len(self._shift)))
        self._reach = np.array([-self._shift, self._shift])

    def add(self, values_64: Array, error: Array, values: Array) -> tuple[float, float]:
        """Add whole rows and return the least and the greatest value. values_64, error: flat float64, overwritten.

        values: the numbers of `values_64` again, flat, of any type.
        """
        row_end = len(values_64) // len(self._shift) * len(self._shift)
        spans = [slice(0, row_end), slice(row_end, len(values_64))]
        bounds = [self._add(values_64[span], error[span], values[span]) for span in spans if span.start < span.stop]
        return min(low for low, _ in bounds), max(high for _, high in bounds)

    def _add(self, values_64: Array, error: Array, values: Array) -> tuple[float, float]:
        length = min(len(values_64), len(self._shift))
        value_rows, error_rows, rows = (array.reshape(-1, length) for array in (values_64, error, values))
        total, (minima, maxima) = self._sums[:, :length], self._reach[:, :length]
        total[2] += np.einsum("ij,ij->j", error_rows, error_rows)
        np.absolute(value_rows, out=error_rows)
        total[3] += np.add.reduce(error_rows, axis=0)
        low, high = np.minimum.reduce(rows, axis=0), np.maximum.reduce(rows, axis=0)
        if self._rows > 1:
            np.maximum(minima, -low, out=minima)
            np.maximum(maxima, high, out=maxima)
            np.subtract(value_rows, self._shift[:length], out=value_rows)
            total[0] += np.add.reduce(value_rows, axis=0)
            total[1] += np.einsum("ij,ij->j", value_rows, value_rows)
        return float(low.min()), float(high.max())

    def merge(self, other: "FeatureSums") -> None:
        """Add the sums of another `FeatureSums` with the same shift."""
        self._sums = self._fold_sums() + other._fold_sums()
        self._reach = np.maximum(self.reach(), other.reach())
        self._shift = self._shift[: self._width]

    def _fold_sums(self) -> Array:
        feature_sums = self._sums
        if feature_sums.shape[1] > self._width:
            feature_sums = feature_sums.reshape(4, -1, self._width).sum(axis=1)
        return np.asarray(feature_sums)

    def reach(self) -> Array:
        """The greatest -e and the greatest e of each feature: an array of (2, features)."""
        return np.asarray(self._reach.reshape(2, -1, self._width).max(axis=1))

    def finish(self) -> tuple[Array, Array]:
        """The mean of each feature, and its sums of e^2, (e - m)^2, (a - e)^2 and |e|: an array of (4, features)."""
        shift, sums = self._shift[: self._width], self._fold_sums()
        if self._rows == 1:
            np.square(shift, out=sums[0])
            return shift, sums
        total, square_sums = sums[:2]
        mean = total / self._rows
        centered_sq = square_sums - total * mean
        np.maximum(centered_sq, 0.0, out=centered_sq)
        mean += shift
        # sum e^2 = sum (e - m)^2 + n m^2
        np.multiply(mean, mean, out=total)
        total *= self._rows
        total += centered_sq
        square_sums[...] = centered_sq
        return mean, sums


class SliceSums:
    """Computes the slices of an output from blocks of features.

    samples: the length of axis 0 if its entries are samples; with any other number the whole output is one sample.
    """

    def __init__(self, shape: Sequence[int], samples: int) -> None:
        self.batched = bool(shape) and samples == shape[0]
        self.shape = tuple(shape[1:] if self.batched else shape)
        self.samples = samples if self.batched else 1
        self._mean, self._reach = np.zeros(self.shape), np.zeros((2, *self.shape))
        self._energies = Marginals(self.shape, 4)

    def add(self, block: Block, sums: FeatureSums) -> None:
        """Add a block of features, summed over all samples."""
        shape = np.shape(self._mean[block])
        self._reach[:, *block] = sums.reach().reshape(2, *shape)
        mean, energies = sums.finish()
        self._mean[block] = mean.reshape(shape)
        self._energies.add(block, energies.reshape(4, *shape))

    def slices(self) -> Slices:
        """The slices of all blocks."""
        axes = {}
        for axis, size in enumerate(self.shape):
            other_count = self.samples * self._mean.size // max(size, 1)
            count = np.full(size, float(other_count))
            expected_sq, centered_sq, error_sq, magnitude = self._energies.over(axis, size)
            axes[axis + self.batched] = AxisSums(expected_sq, centered_sq, error_sq, magnitude, count)
        mean, reach = (self._mean[None], self._reach[:, None]) if self.batched else (self._mean, self._reach)
        return Slices(axes, float(self._energies.total[1]), self.samples, mean, float(self.samples), reach)


# Running sums over chunks of two arrays, in float64 buffers that stay in the cache.

# Elements per sum of products in BLAS: for more than 10,000, BLAS starts threads, which cost more than they save.
PIECE = 1 << 13
# Rows narrower than this are summed without BLAS, whose call for each row costs more than it saves.
NARROW = 128
# sum a^2 is computed from the other sums by a = e + (a - e), unless it is less than this share of sum e^2, where too
# many digits cancel.
CANCELLED = 1e-4

Part = dict[str, Any]


class ChunkSums:
    """Running sums over chunks, in units of 2^exponent. Two buffers store a chunk in float64.

    features: also receives the chunks, in whole rows of `width` elements; `energies` has the squared error of each row.
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
        """Add two flat, contiguous arrays: like `take` for each `chunk` elements, in a quarter less time."""
        chunk_end = len(e) // chunk * chunk
        chunk_pairs = list(zip(e[:chunk_end].reshape(-1, chunk), a[:chunk_end].reshape(-1, chunk), strict=True))
        if not chunk_pairs or e.dtype.kind in "biu" or self._exponent or not self._add_chunks(chunk_pairs, chunk):
            chunk_end = 0
        for start in range(chunk_end, len(e), chunk):
            self.take(e[start : start + chunk], a[start : start + chunk])

    def _add_chunks(self, parts: list[tuple[Array, Array]], chunk: int) -> bool:
        """Add chunks of one size and return True; return False and add nothing if a chunk needs `take`.

        A call of numpy costs as much as a pass over a thousand elements: therefore sums of pieces and extremes of
        chunks are stored in arrays, and evaluated once for all chunks.
        """
        piece = math.gcd(PIECE, chunk)
        squares, products = np.empty((len(parts), 2, chunk // piece)), np.empty((len(parts), chunk // piece))
        low, high = np.empty((2, len(parts), 2))
        pair = self._buffer(chunk)
        (expected_64, error), pieces = pair, pair.reshape(2, -1, piece)
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            for index, (reference, candidate) in enumerate(parts):
                expected_64[...], error[...] = reference, candidate
                np.subtract(error, expected_64, out=error)
                np.vecdot(pieces, pieces, out=squares[index])
                np.vecdot(pieces[0], pieces[1], out=products[index])
                np.minimum.reduce(pair, axis=1, out=low[index])
                np.maximum.reduce(pair, axis=1, out=high[index])
            (expected_sq, error_sq), cross = squares.sum(axis=-1).T, products.sum(axis=-1)
            actual_sq = expected_sq + 2 * cross + error_sq
            if not (np.isfinite(actual_sq + error_sq) & (actual_sq > CANCELLED * expected_sq)).all():
                return False
        sums = (error_sq, expected_sq, actual_sq, expected_sq + cross)
        self._add_sums(chunk * len(parts), *(float(reference.sum()) for reference in sums))
        peaks, errors = np.maximum(high, -low).T
        self.peak = max(self.peak, float(peaks.max()))
        index = int(np.argmax(errors))
        self._note_greatest(
            float(errors[index]), index * chunk, lambda: np.subtract(*parts[index][::-1], dtype=np.float64)
        )
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
        """Add a chunk of finite elements and return True; return False and add nothing if it has NaN or infinities."""
        pair = self._widen(e, a)
        rows, error = pair
        np.subtract(error, rows, out=error)
        if self._features is None:
            (expected_sq, error_sq), cross = _dots(pair, pair).tolist(), float(_dots(rows, error))
        else:
            energies = _row_energies(error, self._width)
            expected_sq, error_sq, cross = float(_dots(rows, rows)), float(energies.sum()), float(_dots(rows, error))
        actual_sq, dot = expected_sq + 2 * cross + error_sq, expected_sq + cross  # a = e + (a - e) saves a pass
        if not actual_sq > CANCELLED * expected_sq:
            answers = np.ldexp(a.astype(np.float64).reshape(-1), -self._exponent)
            actual_sq, dot = float(_dots(answers, answers)), float(_dots(rows, answers))
        if not math.isfinite(error_sq + expected_sq + actual_sq):
            return False
        self._add_sums(e.size, error_sq, expected_sq, actual_sq, dot)
        max_error = max(float(np.maximum.reduce(error)), -float(np.minimum.reduce(error)))
        self._note_greatest(max_error, 0, lambda: error)
        values = e.reshape(-1) if e.dtype == np.float32 else rows  # half the bytes to read again
        if self._features is None:
            low, high = np.minimum.reduce(values), np.maximum.reduce(values)
        else:
            self.energies.append(energies)
            low, high = self._features.add(rows, error, values)
        self.peak = max(self.peak, -float(low), float(high))
        return True

    def _widen(self, e: Array, a: Array) -> Array:
        """Both arrays in float64, flat, in units of 2^exponent: a buffer (2, elements), reused by the next call."""
        pair = self._buffer(e.size)
        for row, values in zip(pair, (e, a), strict=True):
            row.reshape(e.shape)[...] = values
        return np.ldexp(pair, -self._exponent, out=pair) if self._exponent else pair

    def _buffer(self, elements: int) -> Array:
        if elements > self._buffers.shape[1]:
            self._buffers = np.empty((2, elements))
        return self._buffers[:, :elements]

    def _add_sums(self, elements: int, *sums: float) -> None:
        self.sums = [total + value for total, value in zip(self.sums, sums, strict=True)]
        self.count += elements

    def _note_greatest(self, greatest: float, start: int, errors: Callable[[], Array]) -> None:
        """Record the greatest error so far, and its position unless that of a non-finite element is recorded.

        errors: returns the errors that contain it; the first is `start` elements after the elements added so far.
        """
        if greatest > self.max_abs:
            self.max_abs = greatest
            if not self.nonfinite:
                self.worst = self.taken + start + int(np.argmax(np.absolute(errors())))

    def _add_masked(self, e: Array, a: Array) -> None:
        """Add any chunk. NaN and infinities are left out of the sums; pairs of them are counted, by equality."""
        finite_mask = np.isfinite(e) & np.isfinite(a)
        bad_indices = np.flatnonzero(~finite_mask & (e != a))
        if not self._add(np.where(finite_mask, e, 0), np.where(finite_mask, a, 0)):
            self.sums = [math.inf] * 4  # finite, but their squares are not
            self.energies.append(np.full(len(e) // self._width, math.inf))
        masked_count = len(e) - int(finite_mask.sum())
        self.count -= masked_count
        if len(bad_indices) and not self.nonfinite:
            self.worst = self.taken + int(bad_indices[0])
        self.nonfinite += len(bad_indices)
        self.infinite += masked_count - len(bad_indices)

    def part(self, place: Callable[[int], tuple[int, ...]]) -> Part:
        """The sums as fields of `Drift`. place: returns the index in the output of the n-th added element."""
        names = ("error_sq", "expected_sq", "actual_sq", "dot")
        with np.errstate(over="ignore"):
            max_abs, peak = np.ldexp([max(self.max_abs, 0.0), self.peak], self._exponent).tolist()
        counts = {name: getattr(self, name) for name in ("count", "nonfinite", "infinite", "mismatches")}
        index = None if self.worst is None else place(self.worst)
        sums = dict(zip(names, self.sums, strict=True))
        return {**counts, **sums, "max_abs": max_abs, "peak": peak, "exponent": self._exponent, "worst_index": index}


def _dots(left: Array, right: Array) -> Array:
    """The sums of products along the last axis, computed in pieces of PIECE elements."""
    piece_end = left.shape[-1] // PIECE * PIECE
    shape = (*left.shape[:-1], -1, PIECE)
    dot_products = np.vecdot(left[..., :piece_end].reshape(shape), right[..., :piece_end].reshape(shape)).sum(axis=-1)
    if piece_end < left.shape[-1]:
        dot_products = dot_products + np.vecdot(left[..., piece_end:], right[..., piece_end:])
    return np.asarray(dot_products)


def _row_energies(error: Array, width: int) -> Array:
    """The sum of squares of each row of `width` elements."""
    rows = error.reshape(-1, width)
    return np.asarray(np.vecdot(rows, rows) if NARROW <= width <= PIECE else np.einsum("ij,ij->i", rows, rows))


# The passes over two arrays that compute a drift: chunks in float64 that stay in the cache, on several threads.
#
# Each part is a mapping of fields of `drift.Drift`. Parts are added up in order, and the result does not depend on the
# number of threads.

# Elements of a chunk: a chunk of both arrays and its float64 copies have 0.8 MB, which fits into a core's own cache.
CHUNK = 4 * PIECE
# The number of elements that one thread processes at a time.
SPAN = 128 * CHUNK
# The number of features that are summed together if a sample is larger than a chunk; their sums stay in the cache too.
BLOCK = PIECE // 2
MOST_THREADS = 4
# The least elements per thread: starting a thread takes as long as summing fewer.
LEAST = SPAN // 8
# Powers of two between which a float64 can be squared and added up without overflow or underflow.
_SQUARABLE = 450

T = TypeVar("T")
R = TypeVar("R")


def exponent_of(*arrays: Array) -> int:
    """The exponent n of the unit 2^n in which arrays are squared: 0 if float64 squares cannot over- or underflow."""
    wide_arrays = [array for array in arrays if array.dtype.kind == "f" and array.dtype.itemsize > 4]
    peak = max((_peak(array[block]) for array in wide_arrays for block in blocks_of(array.shape, CHUNK)), default=0.0)
    exponent = math.frexp(peak)[1]
    return exponent if abs(exponent) > _SQUARABLE else 0


def _peak(values: Array) -> float:
    """The greatest magnitude of the finite elements; 0 without any."""
    values = np.asarray(values)
    if not values.size:
        return 0.0
    peak = max(float(values.max()), -float(values.min()))
    return peak if math.isfinite(peak) else float(np.abs(values[np.isfinite(values)]).max(initial=0.0))


def flat_parts(expected: Array, actual: Array, exponent: int, threads: int) -> Iterator[Part]:
    """The sums over spans of the flattened arrays, which have one shape, in units of 2^exponent."""
    shape, offset = expected.shape, 0
    if not (expected.flags.c_contiguous and actual.flags.c_contiguous):  # a flat view would copy them whole
        for e, a in pairs_of(expected, actual, CHUNK):
            tally = ChunkSums(exponent)
            tally.take(e, a)
            yield tally.part(lambda place, start=offset: _unravel(start + place, shape))  # type: ignore[misc]
            offset += len(e)
        return
    e, a = expected.reshape(-1), actual.reshape(-1)

    def measure(start: int) -> Part:
        chunk_sums = ChunkSums(exponent)
        chunk_sums.take_span(e[start : start + SPAN], a[start : start + SPAN], CHUNK)
        return chunk_sums.part(lambda place: _unravel(start + place, shape))

    yield from _in_threads(measure, range(0, len(e), SPAN), threads, len(e))


def sampled_parts(
    expected: Array, actual: Array, exponent: int, threads: int, into: SliceSums, energies: Array
) -> Iterator[Part]:
    """The sums over blocks of features for all samples. `into` receives the sums of the slices, and `energies`
    (samples,) the squared error of each sample.

    expected, actual, exponent, threads: as in `flat_parts`, with samples along axis 0.
    """
    e, a = (expected, actual) if into.batched else (expected[None], actual[None])
    is_whole = math.prod(into.shape) <= CHUNK
    blocks = blocks_of(into.shape, CHUNK if is_whole else BLOCK) if e.size else []
    row_count = len(e) if len(blocks) > 1 else max(1, SPAN // max(math.prod(into.shape), 1))
    tasks = [(block, start) for block in blocks for start in range(0, len(e), row_count)]

    def measure(task: tuple[Block, int]) -> tuple[Block, Part, FeatureSums, Array]:
        block, start = task
        sample_64 = np.asarray(e[0][block]).astype(np.float64)
        if not math.isfinite(float(sample_64.sum())):
            sample_64 = np.where(np.isfinite(sample_64), sample_64, 0.0)
        shift = np.ldexp(sample_64, -exponent) if exponent else sample_64
        features = FeatureSums(shift.reshape(-1), len(e))
        chunk_sums = ChunkSums(exponent, features, shift.size)
        step = max(1, 2 * CHUNK // max(shift.size, 1))  # more calls per chunk than without features: larger steps
        for start_row in range(start, min(start + row_count, len(e)), step):
            index = (slice(start_row, min(start_row + step, start + row_count)), *block)
            chunk_sums.take(e[index], a[index])
        block_fields = chunk_sums.part(lambda place: _place(place, start, block, shift.shape, into.batched))
        return block, block_fields, features, np.concatenate(chunk_sums.energies)

    feature_sums: FeatureSums | None = None
    results = _in_threads(measure, tasks, threads, e.size)
    for (_, start), (block, part_fields, features, errors) in zip(tasks, results, strict=True):
        energies[start : start + row_count] += errors
        if feature_sums is None:
            feature_sums = features
        else:
            feature_sums.merge(features)
        if start + row_count >= len(e):
            into.add(block, feature_sums)
            feature_sums = None
        yield part_fields


def _place(place: int, start: int, block: Block, shape: Sequence[int], is_batched: bool) -> tuple[int, ...]:
    """The index of an element in the output, from its position `place` in the rows of a block."""
    row, offset = divmod(place, math.prod(shape))
    index = list(_unravel(offset, tuple(shape)))
    if block:
        *lead_axes, flat_index = block
        index[0] += flat_index.start if isinstance(flat_index, slice) else 0
        index = [*(int(position) for position in lead_axes if isinstance(position, int)), *index]
    return (start + row, *index) if is_batched else tuple(index)


def _in_threads(work: Callable[[T], R], tasks: Sequence[T], threads: int, elements: int) -> Iterator[R]:
    """The results of all tasks in order. threads: 0: as many as save time.  elements: total number over all tasks."""
    worker_count = min(threads or min(MOST_THREADS, elements // LEAST), len(tasks))
    if worker_count > 1 and not threads:  # counting the cores takes as long as summing a thousand elements
        worker_count = min(os.cpu_count() or 1, worker_count)
    if worker_count <= 1:
        yield from map(work, tasks)
        return
    with ThreadPoolExecutor(worker_count) as pool:
        yield from pool.map(work, tasks)


def _unravel(position: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(index) for index in np.unravel_index(position, shape))
