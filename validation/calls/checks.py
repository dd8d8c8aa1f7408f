"""The calls that every engine is proven with beside its golden set: sizes that it lacks, and repeated calls.

They get a share of the time that the comparison with the graph took. Time decides where they end, and never their
order. What takes an engine a fraction of a second is always done: all sizes of a small grid, and the first calls. So a
busy machine tries as much of a fast engine as a quiet one does.

Sizes are drawn once per seed. First a Latin hypercube, so that each size of each dim comes before any comes often
(McKay, Beckman and Conover, "A Comparison of Three Methods for Selecting Values of Input Variables", 1979); then the
rest of the grid where it is small, and random points of a large one.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core.reports.proof import Check, unmeasured
from enginesmith.core.types import Dim, Tensors, TensorSpec
from validation.calls.repeated import RepeatedCalls, pool_of
from validation.comparison.outputs import golden_drifts
from validation.fuzz.cases import FuzzCase, Groups, make
from validation.fuzz.run import FuzzOutcome, FuzzSides, try_case
from validation.golden.golden_set import GoldenSet, edge_sizes

# The share of the comparison's time for sizes and repeated calls together, and of that the sizes' share.
SHARE = 0.1
SIZES_SHARE = 0.5
# Where the share is less, grids of up to SMALL_GRID sizes get GRID_S seconds, and the first FEW_CALLS calls FEW_S.
SMALL_GRID, GRID_S = 256, 0.2
FEW_CALLS, FEW_S = 160, 0.15
# What is done whatever time it takes.
LEAST_SIZES, LEAST_CALLS = 1, 16
# Grids of up to so many sizes are enumerated; of larger ones, about as many points can be drawn.
MOST_ENUMERATED = 1 << 12
# Wrong sizes that a check's note names.
MOST_NAMED = 4
# The seed of the values: the default of `enginesmith debug fuzz`, which then repeats a case.
VALUES_SEED = 0


@dataclass(frozen=True)
class Allowance:
    """Seconds for sizes and calls together, for the sizes of a small grid (grid_s), and for FEW_CALLS calls (few_s)."""

    seconds: float
    grid_s: float
    few_s: float
    clock: Callable[[], float] = time.perf_counter

    @classmethod
    def of(cls, seconds: float | None, compared_s: float) -> "Allowance":
        """An allowance of `seconds`, as a spec asks for; None: the share of the comparison, which took `compared_s`."""
        if seconds is not None:
            return cls(seconds, SIZES_SHARE * seconds, 0.0)
        share = SHARE * compared_s
        return cls(share, max(SIZES_SHARE * share, GRID_S), FEW_S)

    def sizes(self, count: int) -> Callable[[int], bool]:
        """A function of how many sizes were tried: whether to try another of all `count`, as time goes on from now."""
        now = self.clock()
        end = now + (self.grid_s if count <= SMALL_GRID else SIZES_SHARE * self.seconds)
        return self._more(LEAST_SIZES, now, end)

    def calls(self, start: float) -> Callable[[int], bool]:
        """A function of how many calls were made: whether to make another. start: when sizes were begun, in seconds."""
        now = self.clock()
        enough, few = self._more(LEAST_CALLS, now, start + self.seconds), self._more(LEAST_CALLS, now, now + self.few_s)
        return lambda done: enough(done) or (done < FEW_CALLS and few(done))

    def _more(self, least: int, start: float, end: float) -> Callable[[int], bool]:
        """Whether one more, if it takes as long as those before it on average, is over by `end`."""
        return lambda done: done < least or (now := self.clock()) + (now - start) / done <= end


def size_checks(
    pair: FuzzSides,
    shapes: tuple[Sequence[TensorSpec], Sequence[Dim]],
    groups: Sequence[Tensors],
    seed: int,
    allowance: Allowance,
) -> Iterator[Check]:
    """One check over sizes that the golden set lacks; none where it has all. groups: real inputs for their values."""
    specs, dims = shapes
    known = {tuple(sizes.items()) for sizes in edge_sizes(specs, dims)}
    of = math.prod(_lengths(dims)) - len(known) if dims else 0
    start, more, outcomes = allowance.clock(), allowance.sizes(of), list[FuzzOutcome]()
    for sizes in inner_sizes(dims, known, seed):
        if not more(len(outcomes)):
            break
        case = FuzzCase(tuple(sizes.items()))
        outcomes.append(try_case(case, make(case, specs, groups, VALUES_SEED, pair.precision), pair))
    if outcomes:
        yield _check(outcomes, dims, of, allowance.clock() - start)


def inner_sizes(
    dims: Sequence[Dim], known: Iterable[tuple[tuple[str, int], ...]], seed: int
) -> Iterator[dict[str, int]]:
    """Sizes within the dims except the known ones, each once, in an order that follows from the seed.

    All of them where the dims combine to MOST_ENUMERATED or fewer.
    """
    generator = np.random.default_rng(seed)
    seen = {tuple(size for _, size in sizes) for sizes in known}
    for block in (_latin, _rest):
        for row in block(_lengths(dims), generator).tolist():
            point = tuple(dim.sizes[place] for dim, place in zip(dims, row, strict=True))
            if point not in seen:
                seen.add(point)
                yield {dim.name: size for dim, size in zip(dims, point, strict=True)}


def _lengths(dims: Sequence[Dim]) -> list[int]:
    """How many sizes each dim can have."""
    return [len(dim.sizes) for dim in dims]


def _latin(lengths: Sequence[int], generator: np.random.Generator) -> Array:
    """A Latin hypercube (longest dim, dims): each column goes through the places of its dim in a drawn order."""
    rows = min(max(lengths, default=0), MOST_ENUMERATED)
    columns = []
    for length in lengths:
        if length > rows:
            columns.append(generator.choice(length, rows, replace=False))
        else:
            columns.append(np.concatenate([generator.permutation(length) for _ in range(-(-rows // length))])[:rows])
    return np.stack(columns, axis=1) if columns else np.empty((0, 0), np.int64)


def _rest(lengths: Sequence[int], generator: np.random.Generator) -> Array:
    """The places of the whole grid (sizes, dims) in a drawn order; of a large one, MOST_ENUMERATED random ones."""
    if not lengths:
        return np.empty((0, 0), np.int64)
    if (total := math.prod(lengths)) > MOST_ENUMERATED:
        return np.stack([generator.integers(0, length, MOST_ENUMERATED) for length in lengths], axis=1)
    return np.stack(np.unravel_index(generator.permutation(total), lengths), axis=1)


def _check(outcomes: Sequence[FuzzOutcome], dims: Sequence[Dim], of: int, seconds: float) -> Check:
    """The check that none of the sizes failed. of: how many there are."""
    failed = [item for item in outcomes if item.verdict == "failed"]
    summary = [f"{len(outcomes)} of {of} sizes in {seconds:.2g} s"]
    if len(outcomes) < of and len(dims) > 1:
        for dim, length in zip(dims, _lengths(dims), strict=True):
            tried = {dict(item.case.sizes)[dim.name] for item in outcomes}
            summary.append(f"{len(tried)} of {length} of {dim.name}")
    skipped = sum(item.verdict == "not judged" for item in outcomes)
    if skipped == len(outcomes):
        return unmeasured(
            "engine", "", "inner sizes", f"the graph itself runs at none of the {skipped} that were tried"
        )
    if skipped:
        summary.append(f"{skipped} of them not judged: the graph itself does not run")
    note = ", ".join(summary)
    if failed:
        words = (" ".join(f"{name}={size}" for name, size in item.case.sizes) for item in failed[1:MOST_NAMED])
        others = ", ".join(words)
        note = "; ".join(filter(None, (failed[0].reason, others and f"also {others}", note)))
    case = str(failed[0].case) if failed else "inner sizes"
    return Check("engine", "sizes", "", case, float(len(failed)), 0.0, not failed, note)


def call_checks(
    pair: FuzzSides,
    shapes: tuple[Sequence[TensorSpec], Sequence[Dim]],
    golden: GoldenSet,
    seed: int,
    allowance: Allowance,
    bits: Callable[[], bool],
    sizes: bool = True,
) -> Iterator[Check]:
    """Checks of sizes that the golden set lacks, and of repeated calls. shapes: inputs and dims of the model.

    bits: whether equal inputs must have outputs of equal bits; called only where bits differ.  sizes: whether to try
    sizes. An error of the engine is a failed check.
    """
    specs, dims = shapes
    groups, start = Groups(golden), allowance.clock()
    if sizes and dims:
        judged = replace(pair, usual=pair.usual or golden_drifts(golden), limits=pair.elsewhere or pair.limits)
        yield from size_checks(judged, shapes, groups, seed, allowance)
    pool = pool_of(pair.candidate, specs, dims, groups, pair.precision)
    repeats = RepeatedCalls(pair.candidate, pair.limits, bits)
    began = allowance.clock()
    repeats.run(pool, seed, allowance.calls(start))
    yield from repeats.checks(pool, allowance.clock() - began)
