"""Two arrays read side by side in pieces, whatever their layout."""

from collections.abc import Iterator

import numpy as np

from validation.npz import Array


def pairs_of(left: Array, right: Array, size: int) -> Iterator[tuple[Array, Array]]:
    """Flat pieces of two arrays of one shape, in C order, of at most `size` elements; overwritten by the next piece."""
    flags = ["external_loop", "buffered", "zerosize_ok"]
    for pair in np.nditer([left, right], flags, buffersize=size, order="C"):  # type: ignore[call-overload]
        if left.size:
            yield pair[0], pair[1]
