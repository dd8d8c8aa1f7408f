"""Values at a path ('spec.suspend') of a document that somebody else wrote, and copies with another value there."""

from collections.abc import Mapping
from typing import TypeVar

from enginery.core.errors import DataError

T = TypeVar("T")
D = TypeVar("D")
# No float is larger.
_LARGEST = 1 << 1023


def find(item: object, path: str, kind: type[T], default: D) -> T | D:
    """The value at a dotted path of a document; `default` where it is absent or null.

    Where `kind` is float, an int is converted. Raises DataError for a value of another type.
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
    """The value at a dotted path of a document. Raises DataError if it is missing or of another type."""
    value = find(item, path, kind, None)
    if value is None:
        raise DataError(f"{path} is missing from {str(item)[:80]}")
    return value


def put(item: Mapping[str, object], path: str, value: object) -> dict[str, object]:
    """A copy of the document with `value` at the dotted path; the input is not changed. Raises DataError."""
    name, _, rest = path.partition(".")
    return {**item, name: put(find(item, name, dict, {}), rest, value) if rest else value}
