"""Fuzzing one engine: draw, try, and make what fails as small as it gets.

Shrinking is greedy over sizes, then over kinds of values (Hughes and Claessen's QuickCheck, 2000, does the same): it
ends at a case of which no single smaller size that was tried fails.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from enginery.core.types import Dim, Tensors, TensorSpec
from validation.data.batches import leading_dim
from validation.fuzz.cases import FuzzCase, Values
from validation.fuzz.outcome import Outcome, Pair, try_case
from validation.fuzz.values import make

# Runs that one failure may cost to shrink, and failures that are shrunk: the rest is most likely the same fault.
MOST_TRIES, MOST_SHRUNK = 100, 3


@dataclass(frozen=True)
class Fuzzed:
    """All outcomes in order, and the smallest failing case of the first failures, by the case that it came from."""

    seed: int
    outcomes: tuple[Outcome, ...]
    smallest: tuple[tuple[FuzzCase, Outcome], ...]

    @property
    def failed(self) -> tuple[Outcome, ...]:
        """The cases that the engine did not answer rightly."""
        return tuple(item for item in self.outcomes if item.word == "failed")

    def to_json(self, command: Callable[[FuzzCase], str]) -> dict[str, Any]:
        """The report as JSON. command: the words that try one case again."""
        words = [item.word for item in self.outcomes]
        return {
            "seed": self.seed,
            "passed": not self.failed,
            "counts": {word: words.count(word) for word in dict.fromkeys(words)},
            "cases": [item.to_json() for item in self.outcomes],
            "smallest": [
                {**item.to_json(), "from": str(origin), "reproduce": command(item.case)}
                for origin, item in self.smallest
            ],
        }


def fuzz(
    cases: Sequence[FuzzCase],
    specs: Sequence[TensorSpec],
    dims: Sequence[Dim],
    golden: Sequence[Tensors],
    pair: Pair,
    seed: int,
) -> Fuzzed:
    """Try every case. specs: inputs of the model.  golden: groups of its real inputs."""

    def attempt(case: FuzzCase) -> Outcome:
        return try_case(case, make(case, specs, golden, seed, pair.precision), pair)

    outcomes = tuple(attempt(case) for case in cases)
    firsts: dict[tuple[Values, bool], Outcome] = {}
    for item in outcomes:
        if item.word == "failed":
            firsts.setdefault((item.case.values, item.case.outside), item)
    chosen = list(firsts.values())[:MOST_SHRUNK]
    return Fuzzed(seed, outcomes, tuple((item.case, shrink(item, specs, dims, attempt)) for item in chosen))


def shrink(
    failing: Outcome, specs: Sequence[TensorSpec], dims: Sequence[Dim], attempt: Callable[[FuzzCase], Outcome]
) -> Outcome:
    """The smallest case that was found to fail as well; a case outside every profile stays as it is."""
    if failing.case.outside:
        return failing
    tries = iter(range(MOST_TRIES))
    smallest, before = failing, None
    while smallest is not before:
        before = smallest
        for case in _smaller(smallest.case, specs, dims):
            if next(tries, None) is None:
                return smallest
            if (found := attempt(case)).word == "failed":
                smallest = found
                break
    return smallest


def _smaller(case: FuzzCase, specs: Sequence[TensorSpec], dims: Sequence[Dim]) -> Iterator[FuzzCase]:
    """Cases that are simpler by one step: each dim from its least size up, then plainer values."""
    sizes = dict(case.sizes)
    for dim in dims:
        least = max(dim.min, 2) if case.values == "nan" and dim.name == leading_dim(specs) else dim.min
        for size in _sizes_below(least, sizes[dim.name]):
            yield replace(case, sizes=tuple((sizes | {dim.name: size}).items()))
    if case.values == "realistic":
        return
    yield replace(case, values="realistic")


def _sizes_below(least: int, size: int) -> Iterator[int]:
    """All of them when they are few; else the least, and ever closer to the size."""
    if size - least <= 16:
        yield from range(least, size)
        return
    gap = size - least
    while gap:
        yield size - gap
        gap //= 2
