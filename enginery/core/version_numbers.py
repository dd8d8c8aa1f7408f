"""Versions as people and packages write them, compared as far as both are given: 10.16 stands for every 10.16.x."""

from itertools import takewhile

_MOST_DIGITS = 18


def numbers(version: str) -> tuple[int, ...]:
    """The leading numeric parts of a version: '10.16.1rc2' gives (10, 16). Parts of over 18 digits end it, too."""
    plain = takewhile(lambda part: part.isdecimal() and len(part) <= _MOST_DIGITS, version.split("."))
    return tuple(map(int, plain))


def same_version(built: str, here: str) -> bool:
    """Whether two versions are equal in the parts that both have ('10.16' and '10.16.1'); other text must be equal."""
    plain = all(part.isdecimal() for part in f"{built}.{here}".split("."))
    return built == here or (plain and all(a == b for a, b in zip(numbers(built), numbers(here), strict=False)))


def is_within(here: str, first: str, below: str) -> bool:
    """Whether a version is in [first, below), compared in the parts that both have; '' as `below` has no limit."""
    (low, above), (under, high) = _cut(first, here), _cut(here, below)
    return low <= above and (not below or under < high)


def _cut(one: str, other: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two versions' numbers, as many as both have."""
    found = numbers(one), numbers(other)
    count = min(map(len, found))
    return found[0][:count], found[1][:count]
