"""Valid documents made hostile: one place in them changed to what a parser may stumble over, or their bytes damaged."""

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import deepcopy
from typing import Any

from hypothesis import strategies as st

from enginesmith.core.errors import EnginesmithError

Path = tuple[str | int, ...]


class Raw(str):
    """Text that goes into the JSON as it is."""


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


NAMES = (
    "../../../escaped", "/escaped", "..", ".", "", "a/b", "a\\b", "C:\\escaped", "con", "nul.txt", "a\x00b", "a\nb",
    "A", "a.", "\uff41", "e\u0301", "\u212a", "\u202e", "x" * 300, "%2e%2e%2f", "$(touch escaped)", "{0}", "%s", "-rf",
    "~", "0" * 63,
)  # fmt: skip
VALUES = (
    None, True, False, 0, -1, 1.5, 2**31, 2**63, 2**64, 10**400, -(10**30), 1e308, [], {}, [[]], [None], {"": None},
    "1", _nested(63), _nested(70), [0] * 10_001, {"a": {"b": []}}, Raw("NaN"), Raw("-Infinity"), Raw("1e999"),
    Raw('"\\ud800"'), Raw('{"a": 1, "a": 2}'), Raw("[" * 3000 + "]" * 3000), Raw("1" * 5000), Raw('"\\u0000"'),
    "y" * 20_000,
)  # fmt: skip


def places(value: Any, at: Path = ()) -> Iterator[Path]:
    """The path of every value inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*at, key)
        yield from places(item, (*at, key))


def _replace(document: Any, place: Path, value: Any, how: str) -> Any:
    changed_document = deepcopy(document)
    inner_document = changed_document
    for part in place[:-1]:
        inner_document = inner_document[part]
    last_name = place[-1]
    if how == "drop":
        del inner_document[last_name]
    elif how == "rename" and isinstance(inner_document, dict):
        inner_document[str(value)[:400]] = inner_document.pop(last_name)
    elif how == "add" and isinstance(inner_document, list):
        inner_document.append(value)
    elif how == "add":
        inner_document["unknown"] = value
    else:
        inner_document[last_name] = value
    return changed_document


def encoded(value: Any) -> bytes:
    """JSON with `Raw` texts as they are."""
    raw_fields: dict[str, str] = {}

    def marked(item: Any) -> Any:
        if isinstance(item, Raw):
            raw_fields[mark := f"@raw{len(raw_fields)}@"] = item
            return mark
        if isinstance(item, dict):
            return {str(key): marked(inner_value) for key, inner_value in item.items()}
        return [marked(inner_value) for inner_value in item] if isinstance(item, list) else item

    text = json.dumps(marked(value), ensure_ascii=False)
    for mark, inputs in raw_fields.items():
        text = text.replace(f'"{mark}"', inputs)
    return text.encode()


@st.composite
def documents(draw: st.DrawFn, valid: dict[str, Any], sealed: Callable[[dict[str, Any]], dict[str, Any]]) -> bytes:
    """Bytes like those of `valid` with one or two things wrong. sealed: corrects the digest of what can be digested."""
    document: Any = valid
    for _ in range(draw(st.integers(1, 2))):
        actual = list(places(document))
        if not actual or not isinstance(document, dict):
            break
        place = draw(st.sampled_from(actual))
        value = draw(st.sampled_from(NAMES + VALUES))
        document = _replace(
            document, place, value, draw(st.sampled_from(["set", "set", "set", "drop", "rename", "add"]))
        )
    with suppress(ValueError, TypeError, RecursionError, KeyError, AttributeError):
        document = sealed(document)
    return encoded(document)


@st.composite
def damaged(draw: st.DrawFn, valid: bytes) -> bytes:
    """Bytes with bits flipped, a part cut out, repeated or put in."""
    data = bytearray(valid)
    for _ in range(draw(st.integers(1, 4))):
        offset = draw(st.integers(0, max(0, len(data) - 1)))
        mutation = draw(st.sampled_from(["flip", "cut", "put", "repeat", "end"]))
        if mutation == "flip" and data:
            data[offset] ^= 1 << draw(st.integers(0, 7))
        elif mutation == "cut":
            del data[offset : offset + draw(st.integers(1, 50))]
        elif mutation == "put":
            data[offset:offset] = draw(st.binary(min_size=1, max_size=20))
        elif mutation == "repeat":
            data[offset:offset] = data[offset : offset + 40]
        else:
            del data[offset:]
    return bytes(data)


def either(valid: dict[str, Any], sealed: Callable[[dict[str, Any]], dict[str, Any]] = lambda it: it) -> Any:
    return st.one_of(documents(valid, sealed), damaged(encoded(valid)))


def calm(work: Callable[[], object]) -> object:
    """What it gives, or None after an error of this project that says something."""
    try:
        return work()
    except EnginesmithError as error:
        assert 0 < len(str(error)) < 20_000
        return None
