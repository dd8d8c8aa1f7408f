"""The one rule that orders engines of a version that fit a machine equally well: for pulls, routers and all that shows
what they give.

An engine comes before another where it was shown to be faster: the 95 % intervals of their times do not overlap.
Without that evidence the more accurate one comes first. A busy machine makes intervals wide, and so shows less; what it
shows holds.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from enginesmith.core.types import TRAITS

Item = TypeVar("Item")
# Least and most seconds: a 95 % interval.
Interval = tuple[float, float]


def accuracy_order(precision: str) -> int:
    """The place of a precision, from the most to the least accurate; behind all of them for an unknown one."""
    return next((traits.error for name, traits in TRAITS.items() if name == precision), len(TRAITS))


def is_shorter(one: Interval | None, other: Interval | None) -> bool:
    """Whether one engine's times were shown to be less than the other's; None is a time without an interval."""
    return one is not None and other is not None and one[1] < other[0]


def order_by_evidence(items: Sequence[Item], is_faster: Callable[[Item, Item], bool]) -> list[Item]:
    """The items, each time the first that none of those left was shown to be faster than.

    items: the preferred (more accurate) first.  is_faster: as `is_shorter` says of the intervals of two.
    """
    left, found = list(items), list[Item]()
    while left:
        best = next((item for item in left if not any(is_faster(other, item) for other in left)), left[0])
        left.remove(best)
        found.append(best)
    return found
