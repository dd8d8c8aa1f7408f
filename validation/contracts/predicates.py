"""Predicates over one output: each measures by how much it is broken, so that a report shows how far it was from it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from enginery.arrays.arrays import Array
from enginery.core.types import Tensors
from validation.contracts.boxes import BoxLimits
from validation.contracts.sequences import SequenceEnd, SequenceLimits, rows_of, up_to

Order = Literal["ascending", "descending", "strictly ascending", "strictly descending"]


@dataclass(frozen=True)
class StructureLimits:
    """What one output must be, in every case. What is None is not asked for.

    finite: no NaN, no infinity.  range: least and greatest value; None leaves an end open.  sums_to_one, unit_norm: how
    far the sum, or the Euclidean norm, over the last axis may be from 1.  sorted: along the last axis.  shape: sizes,
    and names of dims.  dtype: numpy's name of it.  equal_until: a token: sequences equal the graph's up to it, what
    follows is free.  sequence, eos, boxes: of what is no more than nearly the graph's.
    """

    finite: bool | None = None
    range: tuple[float | None, float | None] | None = None
    sums_to_one: float | None = None
    unit_norm: float | None = None
    sorted: Order | None = None
    shape: tuple[int | str, ...] | None = None
    dtype: str | None = None
    equal_until: int | None = None
    sequence: SequenceLimits | None = None
    eos: SequenceEnd | None = None
    boxes: BoxLimits | None = None

    def broken(
        self,
        expected: Array,
        actual: Array,
        sizes: Mapping[str, int],
        beside: tuple[Tensors, Tensors] = ({}, {}),
    ) -> list[tuple[str, float, float]]:
        """(predicate, by how much it is broken, the limit) for each that is asked for.

        expected: the graph's own output, for what compares with it.  sizes: of the named dims in this case.
        beside: all outputs of the graph and of the engine, for `boxes`.
        """
        asked: list[tuple[str, Callable[[], float], float]] = []
        if self.finite:
            asked.append(("finite", lambda: float(np.size(actual) - np.isfinite(actual).sum()), 0.0))
        if (ends := self.range) is not None:
            asked.append(("range", lambda: _outside(actual, ends), 0.0))
        if self.sums_to_one is not None:
            asked.append(("sums_to_one", lambda: _from_one(_wide(actual).sum(-1)), self.sums_to_one))
        if self.unit_norm is not None:
            asked.append(("unit_norm", lambda: _from_one(np.linalg.norm(_wide(actual), axis=-1)), self.unit_norm))
        if (order := self.sorted) is not None:
            asked.append(("sorted", lambda: _count_unsorted(actual, order), 0.0))
        if (shape := self.shape) is not None:
            asked.append(("shape", lambda: _other_sizes(actual, shape, sizes), 0.0))
        if (token := self.equal_until) is not None:
            asked.append(("equal_until", lambda: _share_differing(expected, actual, token), 0.0))
        if (dtype := self.dtype) is not None:
            asked.append(("dtype", lambda: float(actual.dtype.name != dtype), 0.0))
        found = [(name, measure(), limit) for name, measure, limit in asked]
        found += self.sequence.broken(expected, actual) if self.sequence else []
        found += self.eos.broken(expected, actual) if self.eos else []
        return found + (self.boxes.broken(expected, actual, beside) if self.boxes else [])


def _wide(array: Array) -> Array:
    return np.asarray(array, np.float64)


def _outside(array: Array, ends: tuple[float | None, float | None]) -> float:
    """The greatest distance of a value from the range."""
    low, high = ends
    wide = _wide(array)
    if wide.size == 0:
        return 0.0
    if np.isnan(wide).any():
        return np.nan
    below = 0.0 if low is None else low - wide.min()
    above = 0.0 if high is None else wide.max() - high
    return float(max(below, above, 0.0))


def _from_one(values: Array) -> float:
    return float(np.abs(values - 1).max()) if values.size else 0.0


def _count_unsorted(array: Array, order: Order) -> float:
    """Neighbours along the last axis that are out of order; one with NaN is."""
    wide = _wide(array)
    left, right = wide[..., :-1], wide[..., 1:]
    if order.endswith("descending"):
        left, right = right, left
    good = left < right if order.startswith("strictly") else left <= right
    return float(good.size - good.sum())


def _other_sizes(array: Array, shape: tuple[int | str, ...], sizes: Mapping[str, int]) -> float:
    """Axes of another size than declared; all of them for another rank. A dim that no input has may be any size."""
    if array.ndim != len(shape):
        return float(max(array.ndim, len(shape)))
    wanted = [
        sizes.get(dim, length) if isinstance(dim, str) else dim for dim, length in zip(shape, array.shape, strict=True)
    ]
    return float(sum(size != length for size, length in zip(wanted, array.shape, strict=True)))


def _share_differing(expected: Array, actual: Array, token: int) -> float:
    """Share of sequences (last axis) that differ before or at the first `token` of the reference."""
    if expected.shape[:-1] != actual.shape[:-1] or not expected.ndim:
        return np.nan
    pairs = list(zip(rows_of(expected), rows_of(actual), strict=True))
    differing = sum(not np.array_equal(up_to(left, token), up_to(right, token)) for left, right in pairs)
    return differing / len(pairs) if pairs else 0.0
