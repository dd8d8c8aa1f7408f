"""Values as JSON and back, by the types of their fields: the one codec between a driver and a worker.

A value is a frozen dataclass of plain values, paths, tuples, mappings and such dataclasses, whose annotations can be
resolved at run time. A field with `init=False`, which `__post_init__` sets, is written, and computed again when it is
read. Standard library only: workers on bare GPU machines have no more (docs/decisions/0012-work-as-types.md). JSON has
no NaN and no infinities (RFC 8259, section 6): such a float becomes {"float": "nan"}, and in documents that people read
(`encode_document`) "nan". A field whose JSON name is a Python keyword has that name and "_" in the class.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    NoReturn,
    TypeAlias,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)

from enginery.core.errors import IntegrityError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")
# JSON values for what has no fixed fields, which the codec takes unread; and an object whose keys are data.
if TYPE_CHECKING:
    Json: TypeAlias = bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"] | None
else:
    Json = Any
JsonObject: TypeAlias = Mapping[str, Json]
_FLOAT, _NOT_JSON = "float", ("nan", "inf", "-inf")
_COMMON = (str, float, int, bool)
# Metadata of a dataclass's field, default None, that is left out of the JSON while it is None.
OMIT_NONE: Mapping[str, object] = {"omit_none": True}
# The same of a field with another default, for fields that came after documents had been written.
OMIT_DEFAULT: Mapping[str, object] = {"omit_default": True}


class _Mismatch(Exception):  # noqa: N818 - `decode` raises it as an IntegrityError
    """Data that is not of the type; the text names the field."""


@overload
def encode(value: "DataclassInstance") -> dict[str, object]: ...
@overload
def encode(value: object) -> object: ...
def encode(value: object) -> object:
    """A value as what `json.dumps` takes: dicts, lists, strings, numbers, booleans and None.

    Raises TypeError for a value of another type.
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_FLOAT: str(value)}
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {name: encode(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    return encode_fields(value)


def encode_fields(value: object) -> dict[str, object]:
    """A dataclass instance as a JSON object: its fields by name. Raises TypeError for anything else."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        raise TypeError(f"{type(value).__name__} cannot be written as JSON: {value!r:.80}")
    found = ((field, getattr(value, field.name)) for field in dataclasses.fields(value))
    return {_key(field): encode(item) for field, item in found if not _is_omitted(field, item)}


def _is_omitted(field: "dataclasses.Field[object]", value: object) -> bool:
    if value is None and OMIT_NONE.items() <= field.metadata.items():
        return True
    return value == field.default and OMIT_DEFAULT.items() <= field.metadata.items()


def encode_document(value: "DataclassInstance") -> dict[str, object]:
    """A dataclass instance as `encode` writes it, but NaN and infinities as 'nan', 'inf' and '-inf'."""
    return {name: _unwrap(item) for name, item in encode(value).items()}


def _unwrap(data: object) -> object:
    if isinstance(data, list):
        return [_unwrap(item) for item in data]
    if not isinstance(data, dict):
        return data
    return data[_FLOAT] if data.keys() == {_FLOAT} else {name: _unwrap(item) for name, item in data.items()}


def _key(field: "dataclasses.Field[object]") -> str:
    return field.name.removesuffix("_")


def decode(data: object, kind: type[T]) -> T:
    """The value of type `kind` that `encode` was given; a field typed `object` or `Any` keeps its JSON.

    Raises IntegrityError, with the field's name.
    """
    try:
        value: T = _decode(data, kind, _name(kind))  # type: ignore[assignment]  # what `_decode` checked
    except _Mismatch as error:
        raise IntegrityError(str(error)) from error
    return value


@cache
def _hints(what: object) -> Mapping[str, object]:
    return get_type_hints(what)


def _decode(data: object, kind: object, where: str) -> object:
    if kind in _COMMON:  # most of every document
        return _decode_plain(data, kind, where)
    origin = get_origin(kind)
    if kind is object or kind is Any:
        return _unmark(data, where)
    if origin in (Union, UnionType):
        return _decode_union(data, kind, where)
    if origin is Literal:
        return data if data in get_args(kind) else _refuse(data, kind, where)
    if origin is tuple or _is_named_tuple(kind):
        return _decode_tuple(data, kind, where)
    if origin in (list, Sequence):
        (item,) = get_args(kind)
        return [_decode(each, item, where) for each in _as(list, data, kind, where)]
    if origin in (dict, Mapping):
        _, item = get_args(kind)
        return {name: _decode(each, item, f"{where}.{name}") for name, each in _as(dict, data, kind, where).items()}
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _decode_dataclass(data, kind, where)
    return _decode_plain(data, kind, where)


def _decode_plain(data: object, kind: object, where: str) -> object:
    if kind is float:
        found = float(data) if isinstance(data, str) and data in _NOT_JSON else _unmark(data, where)
        if isinstance(found, bool) or not isinstance(found, int | float):
            _refuse(data, kind, where)
        with suppress(OverflowError):
            return float(found)
        _refuse("a huge number", kind, where)
    if kind is Path:
        return Path(_as(str, data, kind, where))
    return data if type(data) is (NoneType if kind is None else kind) else _refuse(data, kind, where)


def _decode_union(data: object, kind: object, where: str) -> object:
    """The value by the first of the union's types that fits; for `X | None` errors are those of X, with the field."""
    kinds = [each for each in get_args(kind) if each is not NoneType or data is None]
    if len(kinds) == 1:
        return _decode(data, kinds[0], where)
    for each in kinds:
        with suppress(_Mismatch):
            return _decode(data, each, where)
    return _refuse(data, kind, where)


def _decode_tuple(data: object, kind: object, where: str) -> object:
    items = _as(list, data, kind, where)
    named = _is_named_tuple(kind)
    kinds = list(_hints(kind).values()) if named else list(get_args(kind))
    if kinds[-1:] == [...]:
        kinds = kinds[:1] * len(items)
    if len(kinds) != len(items):
        _refuse(data, kind, where)
    found = [_decode(*pair, f"{where}[{index}]") for index, pair in enumerate(zip(items, kinds, strict=True))]
    return kind(*found) if callable(kind) and named else tuple(found)


def _decode_dataclass(data: object, kind: "type[DataclassInstance]", where: str) -> object:
    given, hints = _as(dict, data, kind, where), _hints(kind)
    known = {_key(field): field for field in dataclasses.fields(kind)}
    if unknown := sorted(given.keys() - known.keys()):
        raise _Mismatch(f"{where} has no field {unknown[0]!r}")
    for key, field in known.items():
        if field.init and key not in given and field.default is field.default_factory is dataclasses.MISSING:
            raise _Mismatch(f"{where}.{key} is missing")
    named = ((known[key].name, key, item) for key, item in given.items() if known[key].init)
    found = {name: _decode(item, hints[name], f"{where}.{key}") for name, key, item in named}
    make: Callable[..., object] = kind
    try:
        return make(**found)
    except (TypeError, ValueError, LookupError, ArithmeticError) as error:  # they do not fit
        raise _Mismatch(f"{where}: {error}") from error


def _as(kind: type[T], data: object, wanted: object, where: str) -> T:
    """The data, which must be of this very type: True is no number."""
    return data if isinstance(data, kind) and type(data) is kind else _refuse(data, wanted, where)


def _refuse(data: object, kind: object, where: str) -> NoReturn:
    raise _Mismatch(f"{where} is {data!r:.80}, which is no {_name(kind)}")


def _name(kind: object) -> str:
    return kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind).replace("typing.", "")


def _is_named_tuple(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")


def _unmark(data: object, where: str) -> object:
    """The data with {"float": "nan"} and the like as floats."""
    if isinstance(data, list):
        return [_unmark(item, where) for item in data]
    if not isinstance(data, dict):
        return data
    if data.keys() != {_FLOAT}:
        return {name: _unmark(item, where) for name, item in data.items()}
    text = data.get(_FLOAT)
    return float(text) if text in _NOT_JSON else _refuse(data, float, where)
