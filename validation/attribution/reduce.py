"""Delta debugging: a small subset of items for which a test still passes.

ddmin of Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input" (IEEE Transactions on Software
Engineering 28(2), 2002): try each of n subsets, then each complement, then twice as many subsets. The result is
1-minimal: without any one of its items the test fails. It need not be the smallest of all such sets.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True)
class Reduction(Generic[Item]):
    """The subset found. items: None where not even all items pass.  runs: how often the test was run.

    minimal: whether each item was shown to be needed.  spent: whether the runs or the time were over first.
    """

    items: tuple[Item, ...] | None
    runs: int
    minimal: bool
    spent: bool = False


class _Spent(Exception):  # noqa: N818 - no error: it ends the search
    """No run of the test is left."""


def reduce(
    items: Sequence[Item],
    passes: Callable[[Sequence[Item]], bool],
    most_runs: int,
    stop: Callable[[], bool] = lambda: False,
) -> Reduction[Item]:
    """A 1-minimal subset of `items` for which `passes` holds. items: the likeliest first, each once.

    The empty set is known to fail. The first 1, 2, 4, ... items are tried before the search, so that a good order saves
    most of its runs; the same subset is tested once. After `most_runs` runs, or once `stop` returns true, the result is
    the smallest set so far.
    """
    known: dict[tuple[int, ...], bool] = {}

    def test(chosen: Sequence[int]) -> bool:
        key = tuple(sorted(chosen))
        if key not in known:
            if len(known) >= most_runs or stop():
                raise _Spent
            known[key] = passes([items[index] for index in key])
        return known[key]

    best: list[int] | None = None
    minimal, spent, parts = False, False, 2
    try:
        best = _first_that_passes(len(items), test)
        while best and len(best) > 1:
            parts = min(parts, len(best))
            if found := _smaller(best, parts, test):
                best, parts = found
            elif parts == len(best):
                break
            else:
                parts *= 2
        minimal = best is not None
    except _Spent:
        spent = True
    return Reduction(None if best is None else tuple(items[index] for index in best), len(known), minimal, spent)


def _first_that_passes(count: int, test: Callable[[Sequence[int]], bool]) -> list[int] | None:
    length = 1
    while length < count:
        if test(range(length)):
            return [*range(length)]
        length *= 2
    return [*range(count)] if count and test(range(count)) else None


def _smaller(best: Sequence[int], parts: int, test: Callable[[Sequence[int]], bool]) -> tuple[list[int], int] | None:
    """A part of `best`, or the rest without one, that passes, with the number of parts to go on with."""
    edges = [index * len(best) // parts for index in range(parts + 1)]
    subsets = [best[low:high] for low, high in pairwise(edges)]
    for subset in subsets:
        if test(subset):
            return [*subset], 2
    for subset in subsets if parts > 2 else ():
        rest = [index for index in best if index not in subset]
        if test(rest):
            return rest, max(parts - 1, 2)
    return None
