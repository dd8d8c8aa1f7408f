"""The passes over two arrays that a drift is summed up from: chunks in float64 that stay in the cache, on threads.

Each part is a mapping of fields of `drift.Drift`. Parts come and are added up in order, so that the result does not
depend on the number of threads.
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from enginesmith.arrays import Array
from validation.metrics.chunk_sums import PIECE, ChunkSums, Part
from validation.metrics.pairs import Block, blocks_of, pairs_of
from validation.metrics.slice_sums import FeatureSums, SliceSums

# Elements: a chunk of both arrays and its float64 copies take 0.8 MB, which a core's own cache holds.
CHUNK = 4 * PIECE
# Elements that one thread takes at a time.
SPAN = 128 * CHUNK
# Features that are summed up together where a sample is larger than a chunk: their sums stay in the cache too.
BLOCK = PIECE // 2
MOST_THREADS = 4
# Elements of a thread, at least: with fewer it takes as long to start one as to sum them up.
LEAST = SPAN // 8
# Powers of two between which a float64 can be squared and added up without overflow or underflow.
_SQUARABLE = 450

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
        tally.take_span(e[start : start + SPAN], a[start : start + SPAN], CHUNK)
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
        tally = ChunkSums(exponent, features, shift.size)
        step = max(
            1, 2 * CHUNK // max(shift.size, 1)
        )  # more calls a chunk than without features, which larger ones pay
        for at in range(start, min(start + rows, len(e)), step):
            index = (slice(at, min(at + step, start + rows)), *block)
            tally.take(e[index], a[index])
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


def _unravel(position: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(at) for at in np.unravel_index(position, shape))
