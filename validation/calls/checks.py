"""The calls that every engine is proven with beside its golden set, within a budget of time (`allowance`)."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from enginery.core.reports.proof import Check
from enginery.core.types import Dim, TensorSpec
from validation.calls.allowance import Allowance
from validation.calls.pool import pool_of
from validation.calls.repeated import RepeatedCalls
from validation.calls.sizes import size_checks
from validation.comparison.outputs import golden_drifts
from validation.fuzz.groups import Groups
from validation.fuzz.outcome import FuzzSides
from validation.golden.golden_set import GoldenSet


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
