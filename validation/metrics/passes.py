"""The passes over two arrays that a drift is summed up from: chunks in float64 that stay in the cache, on threads.

Each part is a mapping of fields of `drift.Drift`. Parts come and are added up in order, so that the result does not
depend on the number of threads.
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from enginery.arrays import Array
from validation.metrics.pairs import Block, blocks_of, pairs_of
from validation.metrics.slices import FeatureSums, SliceSums

# Elements of one sum of products in BLAS, which wakes other threads for more than 10,000; that does not pay.
PIECE = 1 << 13
# Elements: float64 copies of a chunk stay in the cache, and threads seldom wait for the interpreter's lock.
CHUNK = 6 * PIECE
# Elements that one thread takes at a time.
SPAN = 64 * CHUNK
# Features that are summed up together where a sample is larger than a chunk: their sums stay in the cache too.
BLOCK = CHUNK // 3
MOST_THREADS = 4
# Elements of a thread, at least: with fewer it takes as long to start one as to sum them up.
LEAST = SPAN // 8
# Powers of two between which a float64 can be squared and added up without overflow or underflow.
_SQUARABLE = 450

Part = dict[str, Any]
T = TypeVar("T")
R = TypeVar("R")


def exponent_of(*arrays: Array) -> int:
    """The power of two in whose units arrays are squared: 0, but for float64 whose squares overflow or underflow."""
    wide = [array for array in arrays if array.dtype.kind == "f" and array.dtype.itemsize > 4]
    peak = max((_peak(array[block]) for array in wide for block in blocks_of(array.shape, CHUNK)), default=0.0)
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
    """The sums over spans of the flattened arrays."""
    shape, at = expected.shape, 0
    if not (expected.flags.c_contiguous and actual.flags.c_contiguous):  # a flat view would copy them whole
        for e, a in pairs_of(expected, actual, CHUNK):
            tally = ChunkSums(exponent)
            tally.take(e, a)
            yield tally.part(lambda place, start=at: _unravel(start + place, shape))  # type: ignore[misc]
            at += len(e)
        return
    e, a = expected.reshape(-1), actual.reshape(-1)

    def measure(start: int) -> Part:
        tally = ChunkSums(exponent)
        for at in range(start, min(start + SPAN, len(e)), CHUNK):
            tally.take(e[at : min(at + CHUNK, start + SPAN)], a[at : min(at + CHUNK, start + SPAN)])
        return tally.part(lambda place: _unravel(start + place, shape))

    yield from _in_threads(measure, range(0, len(e), SPAN), threads, len(e))


def sampled_parts(
    expected: Array, actual: Array, exponent: int, threads: int, into: SliceSums, energies: Array
) -> Iterator[Part]:
    """The sums over blocks of features for all samples. `into` takes the sums of the slices, and `energies` (samples,)
    the squared error of each sample."""
    e, a = (expected, actual) if into.batched else (expected[None], actual[None])
    whole_rows = math.prod(into.shape) <= CHUNK
    blocks = blocks_of(into.shape, CHUNK if whole_rows else BLOCK) if e.size else []
    rows = len(e) if len(blocks) > 1 else max(1, SPAN // max(math.prod(into.shape), 1))
    tasks = [(block, start) for block in blocks for start in range(0, len(e), rows)]

    def measure(task: tuple[Block, int]) -> tuple[Block, Part, FeatureSums, Array]:
        block, start = task
        shift = _first(np.asarray(e[0][block]), exponent)
        features = FeatureSums(shift.reshape(-1), len(e))
        tally, step = ChunkSums(exponent, features, shift.size), max(1, CHUNK // max(shift.size, 1))
        for at in range(start, min(start + rows, len(e)), step):
            index = (slice(at, min(at + step, start + rows)), *block)
            tally.take(e[index].reshape(-1), a[index].reshape(-1))
        part = tally.part(lambda place: _place(place, start, block, shift.shape, into.batched))
        return block, part, features, np.concatenate(tally.energies)

    whole: FeatureSums | None = None
    for (_, start), (block, part, features, errors) in zip(
        tasks, _in_threads(measure, tasks, threads, e.size), strict=True
    ):
        energies[start : start + rows] += errors
        if whole is None:
            whole = features
        else:
            whole.merge(features)
        if start + rows >= len(e):
            into.add(block, whole)
            whole = None
        yield part


def _first(values: Array, exponent: int) -> Array:
    """A sample in float64 and in units of 2^exponent, with 0 where it is not finite."""
    wide = values.astype(np.float64)
    if not math.isfinite(float(wide.sum())):
        wide = np.where(np.isfinite(wide), wide, 0.0)
    return np.ldexp(wide, -exponent) if exponent else wide


def _place(place: int, start: int, block: Block, shape: Sequence[int], batched: bool) -> tuple[int, ...]:
    """The index of an element in the output, from its place among the rows of a block."""
    row, inside = divmod(place, math.prod(shape))
    index = list(_unravel(inside, tuple(shape)))
    if block:
        *fixed, last = block
        index[0] += last.start if isinstance(last, slice) else 0
        index = [*(int(at) for at in fixed if isinstance(at, int)), *index]
    return (start + row, *index) if batched else tuple(index)


def _in_threads(work: Callable[[T], R], tasks: Sequence[T], threads: int, elements: int) -> Iterator[R]:
    """The results of all tasks in order. threads: 0 for as many as pay with so many elements in all."""
    workers = min(threads or min(os.cpu_count() or 1, MOST_THREADS, elements // LEAST), len(tasks))
    if workers <= 1:
        yield from map(work, tasks)
        return
    with ThreadPoolExecutor(workers) as pool:
        yield from pool.map(work, tasks)


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

    def take(self, e: Array, a: Array) -> None:
        """Add a flat chunk of both arrays."""
        if e.dtype.kind in "biu":
            self.mismatches = (self.mismatches or 0) + int(np.count_nonzero(e != a))
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            if not self._add(e, a):
                self._add_masked(e, a)
        self.taken += len(e)

    def _add(self, e: Array, a: Array) -> bool:
        """Add a chunk of finite elements; False, and nothing is added, when it holds NaN or infinities."""
        if len(e) > self._buffers.shape[1]:
            self._buffers = np.empty((2, len(e)))
        wide, error = self._buffers[:, : len(e)]
        wide[...], error[...] = e, a
        if self._exponent:
            np.ldexp(wide, -self._exponent, out=wide)
            np.ldexp(error, -self._exponent, out=error)
        np.subtract(error, wide, out=error)
        expected_sq, cross, error_sq = _dot(wide, wide), _dot(wide, error), _dot(error, error)
        actual_sq, dot = expected_sq + 2 * cross + error_sq, expected_sq + cross  # a = e + (a - e): a pass less
        if not actual_sq > 1e-4 * expected_sq:  # too much cancels
            narrow = np.ldexp(a.astype(np.float64), -self._exponent)
            actual_sq, dot = _dot(narrow, narrow), _dot(wide, narrow)
        if not math.isfinite(error_sq + expected_sq + actual_sq):
            return False
        if self._features is not None:
            rows = error.reshape(-1, self._width)
            self.energies.append(np.einsum("ij,ij->i", rows, rows))
            self._features.add(wide, error)
        np.absolute(error, out=error)
        found = error_sq, expected_sq, actual_sq, dot
        self.sums = [total + value for total, value in zip(self.sums, found, strict=True)]
        self.peak = max(self.peak, float(np.maximum.reduce(e)), -float(np.minimum.reduce(e)))
        self.count += len(e)
        if (largest := float(np.maximum.reduce(error))) > self.max_abs:
            self.max_abs = largest
            if not self.nonfinite:
                self.worst = self.taken + int(np.argmax(error))
        return True

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
            max_abs = float(np.ldexp(max(self.max_abs, 0.0), self._exponent))
        counts = {name: getattr(self, name) for name in ("count", "nonfinite", "infinite", "peak", "mismatches")}
        at = None if self.worst is None else place(self.worst)
        sums = dict(zip(names, self.sums, strict=True))
        return {**counts, **sums, "max_abs": max_abs, "exponent": self._exponent, "worst_index": at}


def _dot(left: Array, right: Array) -> float:
    if rest := len(left) % PIECE:
        whole = len(left) - rest
        return _dot(left[:whole], right[:whole]) + float(np.dot(left[whole:], right[whole:]))
    return float(np.add.reduce(np.vecdot(left.reshape(-1, PIECE), right.reshape(-1, PIECE))))


def _unravel(position: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(at) for at in np.unravel_index(position, shape))
