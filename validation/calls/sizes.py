"""Sizes inside the dims that no case of the golden set has, each compared with the graph.

The order is drawn once per seed. First a Latin hypercube, so that each size of each dim comes before any comes often
(McKay, Beckman and Conover, "A Comparison of Three Methods for Selecting Values of Input Variables", 1979); then the
rest of the grid where it is small, and random points of a large one.
"""

import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from enginery.arrays.arrays import Array
from enginery.core.reports.proof import Check
from enginery.core.types import Dim, Tensors, TensorSpec
from validation.calls.allowance import Allowance
from validation.fuzz.cases import FuzzCase
from validation.fuzz.outcome import FuzzOutcome, FuzzSides, try_case
from validation.fuzz.values import make
from validation.golden.golden_set import edge_sizes

# Grids up to so many sizes are enumerated, as far as the time goes; of larger ones about so many can be drawn.
MOST_ENUMERATED = 1 << 12
# Wrong sizes that a report names.
MOST_NAMED = 4
# The seed of the values: that of `enginery fuzz` where nothing else is asked for, which then repeats a case.
VALUES_SEED = 0

Sizes = dict[str, int]


def size_checks(
    pair: FuzzSides,
    shapes: tuple[Sequence[TensorSpec], Sequence[Dim]],
    groups: Sequence[Tensors],
    seed: int,
    allowance: Allowance,
) -> Iterator[Check]:
    """One check over the sizes that were tried; none where the golden set has all of them. groups: real inputs."""
    specs, dims = shapes
    known = {tuple(sizes.items()) for sizes in edge_sizes(specs, dims)}
    of = math.prod(len(_span(dim)) for dim in dims) - len(known) if dims else 0
    start, more, outcomes = allowance.clock(), allowance.sizes(of), list[FuzzOutcome]()
    for sizes in inner_sizes(dims, known, seed):
        if not more(len(outcomes)):
            break
        case = FuzzCase(tuple(sizes.items()))
        outcomes.append(try_case(case, make(case, specs, groups, VALUES_SEED, pair.precision), pair))
    if outcomes:
        yield _check(outcomes, dims, of, allowance.clock() - start)


def inner_sizes(dims: Sequence[Dim], known: Iterable[tuple[tuple[str, int], ...]], seed: int) -> Iterator[Sizes]:
    """Sizes within the dims but those that are known, each once, in an order that follows from the seed.

    All of them where the dims combine to MOST_ENUMERATED or fewer.
    """
    generator = np.random.default_rng(seed)
    seen = {tuple(size for _, size in sizes) for sizes in known}
    for block in (_latin, _rest):
        for row in block(dims, generator).tolist():
            if (point := tuple(row)) not in seen:
                seen.add(point)
                yield {dim.name: size for dim, size in zip(dims, point, strict=True)}


def _span(dim: Dim) -> range:
    return range(dim.min, dim.max + 1)


def _latin(dims: Sequence[Dim], generator: np.random.Generator) -> Array:
    """A row per size of the longest dim, and a column per dim, which goes through that dim's sizes in a drawn order."""
    rows = min(max((len(_span(dim)) for dim in dims), default=0), MOST_ENUMERATED)
    columns = [_column(dim, rows, generator) for dim in dims]
    return np.stack(columns, axis=1) if columns else np.empty((0, 0), np.int64)


def _column(dim: Dim, rows: int, generator: np.random.Generator) -> Array:
    length = len(_span(dim))
    if length > rows:
        return np.asarray(dim.min + generator.choice(length, rows, replace=False))
    rounds = [generator.permutation(length) for _ in range(-(-rows // length))]
    return np.asarray(dim.min + np.concatenate(rounds)[:rows])


def _rest(dims: Sequence[Dim], generator: np.random.Generator) -> Array:
    """The whole grid in a drawn order; of a large one, as many random points."""
    lengths = [len(_span(dim)) for dim in dims]
    if (total := math.prod(lengths)) > MOST_ENUMERATED:
        columns = [generator.integers(dim.min, dim.max + 1, MOST_ENUMERATED) for dim in dims]
        return np.stack(columns, axis=1)
    places = np.unravel_index(generator.permutation(total), lengths) if dims else ()
    columns = [np.asarray(dim.min + place) for dim, place in zip(dims, places, strict=True)]
    return np.stack(columns, axis=1) if columns else np.empty((0, 0), np.int64)


def _check(outcomes: Sequence[FuzzOutcome], dims: Sequence[Dim], of: int, seconds: float) -> Check:
    failed = [item for item in outcomes if item.verdict == "failed"]
    summary = [f"{len(outcomes)} of {of} sizes in {seconds:.2g} s"]
    if len(outcomes) < of and len(dims) > 1:
        summary += [f"{_count_tried(dim, outcomes)} of {len(_span(dim))} of {dim.name}" for dim in dims]
    if skipped := sum(item.verdict == "not judged" for item in outcomes):
        summary.append(f"{skipped} of them not judged: the graph itself does not run")
    note = ", ".join(summary)
    if failed:
        others = ", ".join(_words(item.case) for item in failed[1:MOST_NAMED])
        note = "; ".join(filter(None, (failed[0].reason, others and f"also {others}", note)))
    case = str(failed[0].case) if failed else "inner sizes"
    return Check("engine", "sizes", "", case, float(len(failed)), 0.0, not failed, note)


def _count_tried(dim: Dim, outcomes: Iterable[FuzzOutcome]) -> int:
    return len({dict(item.case.sizes)[dim.name] for item in outcomes})


def _words(case: FuzzCase) -> str:
    return " ".join(f"{name}={size}" for name, size in case.sizes)
