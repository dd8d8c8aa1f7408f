"""What plain JSON a type takes as it is, by annotated-types, and what a type asks for in words.

`Annotated[float, Ge(0)]` limits a value; `Annotated[str, Predicate(is_digest), doc("a SHA-256 in hexadecimal")]` says
by its `doc` what errors ask for (docs/decisions/0028-annotated-types.md).
"""

import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, get_args, get_origin

import annotated_types
from annotated_types import Ge, Interval, Le, doc

# JSON values for what has no fixed fields, which the codec takes as they are; and an object whose keys are data.
if TYPE_CHECKING:
    Json: TypeAlias = bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"] | None
else:
    Json = Annotated[Any, "as it is"]
JsonObject: TypeAlias = Mapping[str, Json]
# A whole number that other programs hold, too; and a number of seconds, bytes or the like.
MAX_COUNT = (1 << 63) - 1
Count = Annotated[int, Interval(ge=0, le=MAX_COUNT), doc(f"a whole number from 0 to {MAX_COUNT}")]
Amount = Annotated[float, Ge(0.0), Le(float(MAX_COUNT)), doc(f"a number from 0 to {MAX_COUNT}")]
UNIONS = (typing.Union, UnionType)
Accepts: TypeAlias = Callable[[Any], bool]


@dataclass(frozen=True)
class Format:
    """Metadata of the field with a document's format: it is required and read first, so that a document of a newer
    format than `newest` is a NewerFormatError, whatever else is in it."""

    newest: int


@cache
def acceptor(kind: object) -> Accepts | None:
    """Whether data is a value of the type as it is; None for a type whose values are not their own JSON."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind in (str, int, bool, None, NoneType):
        exact = NoneType if kind is None else kind
        return lambda data: type(data) is exact
    if kind == Json:
        return lambda _: True
    if kind == Count:  # which most of the numbers in documents are
        return lambda data: type(data) is int and 0 <= data <= MAX_COUNT
    if origin is Literal:
        words = {(type(word), word) for word in arguments}
        return lambda data: isinstance(data, str | int | None) and (type(data), data) in words
    if origin is Annotated and (inner := acceptor(arguments[0])):
        return _both(inner, [rule for rule, _ in rules(kind)])
    members = [acceptor(each) for each in arguments] if origin in UNIONS else []
    known = [accepts for accepts in members if accepts]
    return (lambda data: any(accepts(data) for accepts in known)) if known and len(known) == len(members) else None


def _both(first: Accepts, rules: Sequence[Accepts]) -> Accepts:
    """Whether data keeps all of them, the first one first."""
    if not rules:
        return first
    second, *rest = rules
    return _both(lambda data: first(data) and second(data), rest)


# Constraint -> its limit's name, what gives for a limit whether a value keeps it, words for it.
_LIMITS: Mapping[object, tuple[str, Callable[[Any], Accepts], str]] = {
    annotated_types.Ge: ("ge", lambda limit: lambda value: value >= limit, "at least {}"),
    annotated_types.Gt: ("gt", lambda limit: lambda value: value > limit, "above {}"),
    annotated_types.Le: ("le", lambda limit: lambda value: value <= limit, "at most {}"),
    annotated_types.Lt: ("lt", lambda limit: lambda value: value < limit, "below {}"),
    annotated_types.MinLen: ("min_length", lambda limit: lambda value: len(value) >= limit, "of at least {}"),
    annotated_types.MaxLen: ("max_length", lambda limit: lambda value: len(value) <= limit, "of at most {}"),
    annotated_types.Predicate: ("func", lambda accepts: accepts, "as {0.__name__} says"),
    Format: ("newest", lambda limit: lambda value: value == limit, "equal to {}"),
}


def rules(kind: object) -> Iterator[tuple[Accepts, str]]:
    """Each constraint of an Annotated type, with words. Raises TypeError for one that would not be kept."""
    for note in get_args(kind)[1:]:
        for part in note if isinstance(note, annotated_types.GroupedMetadata) else (note,):
            if type(part) in _LIMITS:
                name, make, words = _LIMITS[type(part)]
                limit = getattr(part, name)
                yield make(limit), words.format(limit)
            elif isinstance(part, annotated_types.BaseMetadata):
                raise TypeError(f"the codec has no constraint {part}")


_WORDS: Mapping[object, str] = {
    str: "a string",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    NoneType: "null",
}


def describe(kind: object) -> str:
    """What a value of a type is in JSON, for people: 'a number, at least 0'."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return ("one of " if len(arguments) > 1 else "") + ", ".join(map(str, arguments))
    if origin in UNIONS:
        return " or ".join(dict.fromkeys(map(describe, arguments)))
    if origin is Annotated:
        said = [note.documentation for note in arguments if hasattr(note, "documentation")]
        return said[0] if said else ", ".join([describe(arguments[0]), *(words for _, words in rules(kind))])
    if origin in (tuple, list, Sequence) or kind is list:
        return "a list" if origin is not tuple or arguments[-1] is ... else f"a list of {len(arguments)}"
    return _WORDS.get(kind, "an object")
