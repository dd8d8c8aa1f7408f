"""Weights that hold NaN or infinities, by name: otherwise the first sample that they spoil is blamed."""

from collections.abc import Iterable

import numpy as np

from enginery.arrays.arrays import Array
from enginery.core.errors import ModelError


def check_finite(weights: Iterable[tuple[str, Array]]) -> None:
    """Raise ModelError for the first of these that holds NaN or an infinity."""
    told = next((f"weight {name!r} holds {held}" for name, array in weights if (held := describe(array))), None)
    if told:
        raise ModelError(f"{told}; repair it, or train or export the model again")


def describe(array: Array) -> str:
    """'nan at [0, 3], and 2 more such values'; '' for finite values."""
    wrong = np.argwhere(~np.isfinite(array))
    if not len(wrong):
        return ""
    more = f", and {len(wrong) - 1} more such values" if len(wrong) > 1 else ""
    return f"{array[tuple(wrong[0])]} at {wrong[0].tolist()}{more}"
