"""Arrays read in pieces, whatever their layout in memory, without copying them whole."""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from enginesmith.arrays import Array

# A piece of an array: an index of each of its first axes, and a range of the next one.
Block = tuple[int | slice, ...]


def pairs_of(left: Array, right: Array, size: int) -> Iterator[tuple[Array, Array]]:
    """Flat pieces of two arrays of one shape, in C order, of at most `size` elements; overwritten by the next piece."""
    flags = ["external_loop", "buffered", "zerosize_ok"]
    for pair in np.nditer([left, right], flags, buffersize=size, order="C"):  # type: ignore[call-overload]
        if left.size:
            yield pair[0], pair[1]


def blocks_of(shape: Sequence[int], size: int) -> list[Block]:
    """Indices that cut an array into pieces of at most `size` elements that lie together in C order."""
    if not shape:
        return [()]
    inner = math.prod(shape[1:])
    if inner <= size:
        step = max(1, size // max(inner, 1))
        return [(slice(start, min(start + step, shape[0])),) for start in range(0, shape[0], step)]
    return [(index, *rest) for index in range(shape[0]) for rest in blocks_of(shape[1:], size)]
