"""The calls that every engine is proven with beside its golden set, within a budget of time.

The order of sizes and of calls follows from the seed; time decides only where it ends, so that a rerun on a machine as
fast repeats it, and one on a slower machine sees a first part of it.
"""

import time
from collections.abc import Callable, Iterator, Sequence

from builders.types import Dim, TensorSpec
from validation.calls.pool import pool_of
from validation.calls.repeated import Repeats
from validation.calls.sizes import size_checks
from validation.fuzz.groups import Groups
from validation.fuzz.outcome import Pair
from validation.golden import GoldenSet
from validation.report import Check

# Of the time that the comparison with the graph took.
SHARE = 0.1
# Of the budget, for sizes; what they leave is for repeated calls.
SIZES_SHARE = 0.5


def call_checks(
    pair: Pair,
    shapes: tuple[Sequence[TensorSpec], Sequence[Dim]],
    golden: GoldenSet,
    seed: int,
    seconds: float,
    bits: Callable[[], bool],
    sizes: bool = True,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[Check]:
    """Checks of sizes that the golden set does not have, and of repeated calls. shapes: inputs and dims of the model.

    bits: whether equal inputs must have equal bits; asked when bits differ.  sizes: whether to try sizes at all.
    Errors of the reference raise where the engine answers; what the engine raises is a failed check.
    """
    specs, dims = shapes
    groups, start = Groups(golden), clock()
    if sizes:
        yield from size_checks(pair, specs, dims, groups, seed, lambda: start + SIZES_SHARE * seconds - clock())
    began = clock()
    repeats = Repeats(pair.candidate, pair.budgets, bits)
    pool = pool_of(pair.candidate, specs, dims, groups, pair.precision)
    repeats.run(pool, seed, lambda: start + seconds - clock())
    yield from repeats.checks(pool, clock() - began)
