"""How long an engine is tried beside its golden set: a share of what the comparison took, and a little in any case.

Time decides where sizes and calls end, and never their order. What cheap engines need is done for them whatever the
share is: all sizes of a small grid, and the first calls, as long as that is a fraction of a second. So a busy machine
sees of them what a quiet one sees.

Sizes inside the dims that no case of the golden set has, each compared with the graph.

The order is drawn once per seed. First a Latin hypercube, so that each size of each dim comes before any comes often
(McKay, Beckman and Conover, "A Comparison of Three Methods for Selecting Values of Input Variables", 1979); then the
rest of the grid where it is small, and random points of a large one.

The calls that every engine is proven with beside its golden set, within a budget of time (`allowance`).
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from enginery.arrays import Array
from enginery.core.reports.proof import Check
from enginery.core.types import Dim, Tensors, TensorSpec
from validation.calls.repeated import RepeatedCalls, pool_of
from validation.comparison.outputs import golden_drifts
from validation.fuzz.cases import FuzzCase, Groups, make
from validation.fuzz.run import FuzzOutcome, FuzzSides, try_case
from validation.golden.golden_set import GoldenSet, edge_sizes

# Of the time that the comparison with the graph took.
SHARE = 0.1
# Of that, for sizes; what they leave is for repeated calls.
SIZES_SHARE = 0.5
# So many sizes are tried in GRID_S seconds, and so many calls made in FEW_S, where the share is less.
SMALL_GRID, GRID_S = 256, 0.2
FEW_CALLS, FEW_S = 160, 0.15
# Done whatever the time.
LEAST_SIZES, LEAST_CALLS = 1, 16


@dataclass(frozen=True)
class Allowance:
    """Seconds for sizes and calls together; for the sizes of a small grid; and for the first FEW_CALLS."""

    seconds: float
    grid_s: float
    few_s: float
    clock: Callable[[], float] = time.perf_counter

    @classmethod
    def of(cls, seconds: float | None, compared_s: float) -> "Allowance":
        """What a spec asks for; None for a share of the seconds of the comparison."""
        if seconds is not None:
            return cls(seconds, SIZES_SHARE * seconds, 0.0)
        share = SHARE * compared_s
        return cls(share, max(SIZES_SHARE * share, GRID_S), FEW_S)

    def sizes(self, count: int) -> Callable[[int], bool]:
        """From now on: whether another size of so many is tried, after some."""
        now = self.clock()
        end = now + (self.grid_s if count <= SMALL_GRID else SIZES_SHARE * self.seconds)
        return self._more(LEAST_SIZES, now, end)

    def calls(self, start: float) -> Callable[[int], bool]:
        """From now on: whether another call is made, after some. start: when sizes were begun."""
        now = self.clock()
        enough, few = self._more(LEAST_CALLS, now, start + self.seconds), self._more(LEAST_CALLS, now, now + self.few_s)
        return lambda done: enough(done) or (done < FEW_CALLS and few(done))

    def _more(self, least: int, start: float, end: float) -> Callable[[int], bool]:
        """Whether one more, which takes as long as those before it took on average, ends in time."""

        def more(done: int) -> bool:
            return done < least or (now := self.clock()) + (now - start) / done <= end

        return more


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


def call_checks(
    pair: FuzzSides,
    shapes: tuple[Sequence[TensorSpec], Sequence[Dim]],
    golden: GoldenSet,
    seed: int,
    allowance: Allowance,
    bits: Callable[[], bool],
    sizes: bool = True,
) -> Iterator[Check]:
    """Checks of sizes that the golden set does not have, and of repeated calls. shapes: inputs and dims of the model.

    bits: whether equal inputs must have equal bits; asked when bits differ.  sizes: whether to try sizes at all.
    What the engine raises is a failed check.
    """
    specs, dims = shapes
    groups, start = Groups(golden), allowance.clock()
    if sizes and dims:
        judged = pair if pair.usual else replace(pair, usual=golden_drifts(golden))
        yield from size_checks(judged, shapes, groups, seed, allowance)
    pool = pool_of(pair.candidate, specs, dims, groups, pair.precision)
    repeats = RepeatedCalls(pair.candidate, pair.limits, bits)
    began = allowance.clock()
    repeats.run(pool, seed, allowance.calls(start))
    yield from repeats.checks(pool, allowance.clock() - began)
