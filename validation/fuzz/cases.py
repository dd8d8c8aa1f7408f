"""Which shapes and which values are tried. A case is its sizes, its kind of values and the seed: nothing else is drawn.

Sizes are boundary values first (each edge of a bucket and its neighbours: Myers, "The Art of Software Testing", 1979,
chapter 4), then interior ones at random, by a histogram of real traffic where there is one.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, get_args

import numpy as np

from enginery.core.errors import InputError
from enginery.core.types import Dim, sizes_product

Values = Literal["realistic", "zeros", "ones", "extreme", "denormal", "nan"]
VALUES: tuple[Values, ...] = get_args(Values)
Histogram = Mapping[str, Mapping[int, float]]

# Corners of all dims at once grow as 2^dims; beyond this many the first ones stand for the rest.
MOST_CORNERS = 16
_ONLY = re.compile(r"(\w+)=(\w+)")


@dataclass(frozen=True)
class FuzzCase:
    """The size of each dim, the kind of values, and which draw of them. outside: no profile covers the sizes."""

    sizes: tuple[tuple[str, int], ...]
    values: Values = "realistic"
    outside: bool = False
    draw: int = 0

    def __str__(self) -> str:
        words = [*(f"{name}={size}" for name, size in self.sizes), f"values={self.values}"]
        return " ".join([*words, f"draw={self.draw}"] if self.draw else words)


def draw(
    dims: Sequence[Dim], seed: int, count: int, histogram: Histogram | None = None, values: Sequence[Values] = VALUES
) -> list[FuzzCase]:
    """Every boundary with real values, every kind of values at each dim's opt, `count` at random, and one step outside.

    The same arguments give the same cases. Raises InputError for a histogram that does not fit the dims.
    """
    weights = check_histogram(histogram or {}, dims)
    generator = np.random.default_rng(seed)
    inner = [FuzzCase(tuple(sizes.items())) for sizes in boundaries(dims)]
    inner += [FuzzCase(_opt(dims), kind) for kind in values]
    for index in range(count):
        sizes = tuple((dim.name, _size(generator, dim, weights.get(dim.name, {}))) for dim in dims)
        kind = values[index % len(values)]
        inner.append(FuzzCase(sizes, kind, draw=0 if kind in ("zeros", "ones") else index + 1))
    outer = [FuzzCase(tuple(sizes.items()), outside=True) for sizes in just_outside(dims)]
    return list(dict.fromkeys([*inner, *outer]))


def boundaries(dims: Sequence[Dim]) -> Iterator[dict[str, int]]:
    """Corners of all dims; then each dim at its buckets' ends, beside them, and at opt, with the others at opt."""
    yield from islice(sizes_product(dims, {dim.name: sorted({dim.min, dim.max}) for dim in dims}), MOST_CORNERS)
    middle = dict(_opt(dims))
    for dim in dims:
        near = {size + step for size in dim.test_sizes() for step in (-1, 0, 1)}
        for size in sorted(near):
            if dim.min <= size <= dim.max:
                yield middle | {dim.name: size}


def just_outside(dims: Sequence[Dim]) -> Iterator[dict[str, int]]:
    """One step beyond each end of each dim, the others at opt."""
    middle = dict(_opt(dims))
    for dim in dims:
        yield middle | {dim.name: dim.max + 1}
        if dim.min > 1:
            yield middle | {dim.name: dim.min - 1}


def parse_only(text: str, dims: Sequence[Dim]) -> FuzzCase:
    """A case as a report writes it: 'batch=5 values=ones'. Raises InputError for anything else."""
    given = dict(_ONLY.findall(text))
    rest = _ONLY.sub("", text).replace(",", " ").strip()
    values, nth = given.pop("values", "realistic"), given.pop("draw", "0")
    if rest or values not in VALUES or set(given) != {dim.name for dim in dims}:
        wanted = " ".join([*(f"{dim.name}={dim.opt}" for dim in dims), f"values={'|'.join(VALUES)}"])
        raise InputError(f"case {text!r} is not one of this model; write it as '{wanted}'")
    if not (nth.isdecimal() and all(size.isdecimal() and int(size) > 0 for size in given.values())):
        raise InputError(f"case {text!r}: sizes are whole numbers from 1 up, and a draw is one from 0")
    sizes = tuple((dim.name, int(given[dim.name])) for dim in dims)
    outside = any(not dim.min <= size <= dim.max for dim, (_, size) in zip(dims, sizes, strict=True))
    return FuzzCase(sizes, values, outside, int(nth))


def histogram_from_json(data: Any) -> dict[str, dict[int, float]]:
    """A histogram of traffic: {dim: {size: count}}. Raises InputError for anything else."""
    try:
        return {str(name): {int(size): float(count) for size, count in counts.items()} for name, counts in data.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise InputError(
            f"a histogram is {{dim: {{size: count}}}}, such as {{'batch': {{'8': 120}}}}: {error}"
        ) from error


def check_histogram(histogram: Histogram, dims: Sequence[Dim]) -> Histogram:
    """The histogram, when it names dims of the model and sizes within them. Raises InputError."""
    known = {dim.name: dim for dim in dims}
    for name, counts in histogram.items():
        if name not in known:
            raise InputError(f"histogram: dim {name!r} is not one of the model's: {', '.join(known) or 'it has none'}")
        dim = known[name]
        wrong = [size for size in counts if not dim.min <= size <= dim.max]
        if wrong:
            raise InputError(f"histogram: {name} = {wrong[0]} is outside {dim.min}..{dim.max}; widen dims.{name}")
        if not all(np.isfinite(count) and count >= 0 for count in counts.values()) or not sum(counts.values()) > 0:
            raise InputError(f"histogram: the counts of {name} must be finite, not negative, and not all 0")
    return histogram


def _opt(dims: Sequence[Dim]) -> tuple[tuple[str, int], ...]:
    return tuple((dim.name, dim.opt) for dim in dims)


def _size(generator: np.random.Generator, dim: Dim, counts: Mapping[int, float]) -> int:
    if not counts:
        return int(generator.integers(dim.min, dim.max + 1))
    sizes = sorted(counts)
    weights = np.array([counts[size] for size in sizes])
    return int(generator.choice(sizes, p=weights / weights.sum()))
