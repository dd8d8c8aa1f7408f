"""Reading JSON that somebody else may have written: every field has its type, and a wrong one is named with its path.

Small on purpose, and standard library only: a serving node that pulls an engine needs nothing more than this.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from enginery.core.digest import is_digest
from enginery.core.errors import IntegrityError
from enginery.core.names import is_name
from enginery.core.types import Scalar

T = TypeVar("T")

MAX_ITEMS = 10_000
MAX_DEPTH = 64
MAX_TEXT = 1 << 20
MAX_COUNT = (1 << 63) - 1


class Malformed(IntegrityError):  # noqa: N818 - says what the document is
    """A document that is not what its key says; the message starts with the path of the field."""


def parse_json(data: bytes, limit: int) -> dict[str, Any]:
    """A JSON object of at most `limit` bytes, in UTF-8.

    Raises Malformed; also for what JSON readers disagree about (a key given twice, NaN, a number beyond a double, half
    a surrogate pair): such a document could say one thing here and another elsewhere.
    """
    if len(data) > limit:
        raise Malformed(f"is {len(data)} bytes long; the limit is {limit}")
    try:
        value = json.loads(
            data.decode(), parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_without_twins
        )
        _check_surrogates(data, value)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"is not JSON ({error})") from error
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH:  # else it cannot be so deep, and looking takes a while
        _check_depth(value)
    return mapping(value, "document")


def _check_depth(value: Any) -> None:
    """Raise Malformed for what is nested so deeply that digesting or copying it would overflow the stack."""
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = (item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list))
        level = [item for items in inner for item in items]
    if level:
        raise Malformed(f"is nested more than {MAX_DEPTH} levels deep")


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twin = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {twin[:80]!r} is given twice")
    return found


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is too large a number")
    return value


def _check_surrogates(data: bytes, value: Any) -> None:
    """Half a surrogate pair can only come from an escape, and cannot be written as UTF-8 again: UnicodeEncodeError."""
    if rb"\ud" in data.lower():
        json.dumps(value, ensure_ascii=False).encode()


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def field(data: Mapping[str, Any], name: str, read: Callable[[Any, str], T], path: str = "") -> T:
    """The field `name`, read by `read`. Raises Malformed if it is missing or wrong."""
    where = f"{path}.{name}" if path else name
    if name not in data:
        raise Malformed(f"{where} is missing")
    return read(data[name], where)


def optional(read: Callable[[Any, str], T]) -> Callable[[Any, str], T | None]:
    """A reader that also takes null."""
    return lambda value, path: None if value is None else read(value, path)


def many(read: Callable[[Any, str], T]) -> Callable[[Any, str], tuple[T, ...]]:
    """A reader of lists."""

    def read_list(value: Any, path: str) -> tuple[T, ...]:
        _need(isinstance(value, list) and len(value) <= MAX_ITEMS, value, path, f"a list of at most {MAX_ITEMS}")
        return tuple(read(item, f"{path}[{index}]") for index, item in enumerate(value))

    return read_list


def mapping(value: Any, path: str) -> dict[str, Any]:
    """An object."""
    _need(isinstance(value, dict) and len(value) <= MAX_ITEMS, value, path, f"an object of at most {MAX_ITEMS} keys")
    return dict(value)


def mapping_of(read: Callable[[Any, str], T]) -> Callable[[Any, str], dict[str, T]]:
    """A reader of objects whose values `read` reads."""
    return lambda value, path: {key: read(item, f"{path}.{key}") for key, item in mapping(value, path).items()}


def text(value: Any, path: str) -> str:
    """A string."""
    _need(isinstance(value, str) and len(value) <= MAX_TEXT, value, path, "a string")
    return str(value)


def name(value: Any, path: str) -> str:
    """A name that may become part of a path."""
    _need(isinstance(value, str) and is_name(value), value, path, "a name (lower case, no separators)")
    return str(value)


def digest(value: Any, path: str) -> str:
    """A digest."""
    _need(isinstance(value, str) and is_digest(value), value, path, "a SHA-256 in hexadecimal")
    return str(value)


def count(value: Any, path: str) -> int:
    """A whole number, zero or more."""
    _need(type(value) is int and 0 <= value <= MAX_COUNT, value, path, "a whole number, zero or more")
    return int(value)


def quantity(value: Any, path: str) -> float:
    """A number, zero or more."""
    _need(type(value) in (int, float) and value >= 0, value, path, "a number, zero or more")
    return float(value)


def truth(value: Any, path: str) -> bool:
    """True or false."""
    _need(isinstance(value, bool), value, path, "true or false")
    return bool(value)


def scalar(value: Any, path: str) -> Scalar:
    """A string, number or truth value."""
    _need(isinstance(value, str | int | float), value, path, "a string, a number, true or false")
    result: Scalar = value
    return result


def one_of(*allowed: str) -> Callable[[Any, str], str]:
    """A reader of one of these words."""

    def read_word(value: Any, path: str) -> str:
        _need(value in allowed, value, path, f"one of {', '.join(allowed)}")
        return str(value)

    return read_word


def pair(value: Any, path: str) -> tuple[int, int]:
    """Two whole numbers."""
    found: Sequence[int] = many(count)(value, path)
    _need(len(found) == 2, value, path, "two whole numbers")
    return found[0], found[1]


def _need(condition: bool, value: Any, path: str, wanted: str) -> None:
    if not condition:
        raise Malformed(f"{path} is {str(value)[:80]!r}; it must be {wanted}")
