"""Values at a path ('spec.suspend') of a document that somebody else wrote, and copies with another value there."""

from collections.abc import Mapping
from typing import TypeVar

from enginery.core.errors import DataError

T = TypeVar("T")
D = TypeVar("D")
# No float is larger.
_LARGEST = 1 << 1023


def find(item: object, path: str, kind: type[T], default: D) -> T | D:
    """The value at the path; `default` where there is none, or null. Raises DataError for one of another type.

    A whole number is a float, too.
    """
    value = item
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    if value is None:
        return default
    if kind is float and isinstance(value, int) and abs(value) < _LARGEST:
        value = float(value)
    if not isinstance(value, kind):
        raise DataError(f"{path} is {value!r:.80}; {kind.__name__} is needed")
    return value


def read(item: object, path: str, kind: type[T]) -> T:
    """The value at the path. Raises DataError for one that is missing or of another type."""
    value = find(item, path, kind, None)
    if value is None:
        raise DataError(f"{path} is missing from {str(item)[:80]}")
    return value


def put(item: Mapping[str, object], path: str, value: object) -> dict[str, object]:
    """A copy of the document with another value at the path."""
    name, _, rest = path.partition(".")
    return {**item, name: put(find(item, name, dict, {}), rest, value) if rest else value}
