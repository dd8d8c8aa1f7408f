"""Versions as people and packages write them, compared as far as both are given: 10.16 stands for every 10.16.x."""

from itertools import takewhile

_MOST_DIGITS = 18


def numbers(version: str) -> tuple[int, ...]:
    """'10.16.1' as (10, 16, 1); what is no number of at most 18 digits ends it."""
    plain = takewhile(lambda part: part.isdecimal() and len(part) <= _MOST_DIGITS, version.split("."))
    return tuple(map(int, plain))


def same_version(built: str, here: str) -> bool:
    """Whether two versions are equal as far as both are given; what is not all numbers is compared as it stands."""
    plain = all(part.isdecimal() for part in f"{built}.{here}".split("."))
    return built == here or (plain and all(a == b for a, b in zip(numbers(built), numbers(here), strict=False)))


def is_within(here: str, first: str, below: str) -> bool:
    """Whether a version is in [first, below), each compared as far as both are given."""
    (low, above), (under, high) = _cut(first, here), _cut(here, below)
    return low <= above and (not below or under < high)


def _cut(one: str, other: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two versions' numbers, as many as both have."""
    found = numbers(one), numbers(other)
    count = min(map(len, found))
    return found[0][:count], found[1][:count]
