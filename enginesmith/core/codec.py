"""Values as JSON and back, by the types of their fields: the one codec between a driver and a worker.

A value is a frozen dataclass of plain values, paths, tuples, mappings and such dataclasses, whose annotations can be
resolved at run time. A field with `init=False`, which `__post_init__` sets, is written, and computed again when it is
read. Standard library only: workers on bare GPU machines have no more (docs/decisions/0012-work-as-types.md). JSON has
no NaN and no infinities (RFC 8259, section 6): such a float becomes {"float": "nan"}, and in documents that people read
(`encode_document`) "nan". A field whose JSON name is a Python keyword has that name and "_" in the class.
"""

import dataclasses
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
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
    cast,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)

from enginesmith.core.errors import IntegrityError

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
# Types whose values are read as they are.
_PLAIN = frozenset[object]({str, int, float, bool})
# Metadata of a dataclass's field, default None, that is left out of the JSON while it is None.
OMIT_NONE: Mapping[str, object] = {"omit_none": True}
# The same of a field with another default, for fields that came after documents had been written.
OMIT_DEFAULT: Mapping[str, object] = {"omit_default": True}


class _Mismatch(Exception):  # noqa: N818 - `decode` raises it as an IntegrityError
    """Data that is not of the type; the text begins with the field's path, as seen from the value that is read."""


_Reader: TypeAlias = Callable[[object], Any]


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
        value: T = _reader(cast("Hashable", kind))(data)
    except _Mismatch as error:
        raise IntegrityError(f"{_name(kind)}{error}") from error
    return value


@cache
def _hints(what: object) -> Mapping[str, object]:
    return get_type_hints(what)


@cache
def _reader(kind: object) -> _Reader:
    """The function that reads JSON as a value of this type. Made once per type: looking a type's parts up takes most of
    the time of reading a small value."""
    origin = get_origin(kind)
    if kind is object or kind is Any:
        return _unmark
    if origin in (Union, UnionType):
        return _union_reader(kind)
    if origin is Literal:
        words = get_args(kind)
        return lambda data: data if data in words else _refuse(data, kind)
    if origin is tuple or _is_named_tuple(kind):
        return _tuple_reader(kind)
    if origin in (list, Sequence):
        return _list_reader(kind, get_args(kind)[0])
    if origin in (dict, Mapping):
        return _mapping_reader(kind, get_args(kind)[1])
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _dataclass_reader(kind)
    return _plain_reader(kind)


def _plain_reader(kind: object) -> _Reader:
    if kind is float:
        return _read_float
    if kind is Path:
        return lambda data: Path(_as(str, data, kind))
    exact = NoneType if kind is None else kind
    return lambda data: data if type(data) is exact else _refuse(data, kind)


def _read_float(data: object) -> float:
    if type(data) is float:
        return data
    found = float(data) if isinstance(data, str) and data in _NOT_JSON else _unmark(data)
    if isinstance(found, bool) or not isinstance(found, int | float):
        return _refuse(data, float)
    with suppress(OverflowError):
        return float(found)
    return _refuse("a huge number", float)


def _union_reader(kind: object) -> _Reader:
    """Reads the value by the first of the union's types that fits; for `X | None` errors are those of X."""
    kinds = [each for each in get_args(kind) if each is not NoneType]
    readers = [_reader(each) for each in kinds]
    optional = len(kinds) < len(get_args(kind))
    if optional and len(readers) == 1:
        only = readers[0]
        return lambda data: None if data is None else only(data)

    def read(data: object) -> object:
        if data is None and optional:
            return None
        for each in readers:
            with suppress(_Mismatch):
                return each(data)
        return _refuse(data, kind)

    return read


def _list_reader(kind: object, item: object) -> _Reader:
    def read(data: object) -> list[object]:
        given, reader, found = _as(list, data, kind), _reader(item), list[object]()
        if item in _PLAIN and all(type(each) is item for each in given):
            return list(given)
        try:
            for each in given:
                found.append(reader(each))
        except _Mismatch as error:
            raise _Mismatch(f"[{len(found)}]{error}") from error
        return found

    return read


def _tuple_reader(kind: object) -> _Reader:
    named = _is_named_tuple(kind)
    kinds = list(_hints(kind).values()) if named else list(get_args(kind))
    if kinds[-1:] == [...]:
        items = _list_reader(kind, kinds[0])
        return lambda data: tuple(items(data))
    readers, make = [_reader(each) for each in kinds], kind if callable(kind) and named else lambda *found: found

    def read(data: object) -> object:
        found, given = list[object](), _as(list, data, kind)
        if len(given) != len(readers):
            _refuse(data, kind)
        try:
            for reader, each in zip(readers, given, strict=True):
                found.append(reader(each))
        except _Mismatch as error:
            raise _Mismatch(f"[{len(found)}]{error}") from error
        return make(*found)

    return read


def _mapping_reader(kind: object, item: object) -> _Reader:
    def read(data: object) -> dict[str, object]:
        found, reader = dict[str, object](), _reader(item)
        for name, each in _as(dict, data, kind).items():
            try:
                found[name] = reader(each)
            except _Mismatch as error:
                raise _Mismatch(f".{name}{error}") from error
        return found

    return read


def _dataclass_reader(kind: "type[DataclassInstance]") -> _Reader:
    known = {_key(field): field for field in dataclasses.fields(kind)}
    missing = dataclasses.MISSING
    needed = [key for key, item in known.items() if item.init and item.default is item.default_factory is missing]
    names = {key: item.name for key, item in known.items() if item.init}
    make: Callable[..., object] = kind

    readers: dict[str, _Reader] | None = None

    def read(data: object) -> object:
        nonlocal readers
        if readers is None:  # not before the first value: a dataclass may have a field of its own type
            readers = {key: _reader(_hints(kind)[name]) for key, name in names.items()}
        given, found, key = _as(dict, data, kind), dict[str, object](), ""
        if not given.keys() <= known.keys():
            raise _Mismatch(f" has no field {min(given.keys() - known.keys())!r}")
        if len(given) < len(known) and (lacking := [key for key in needed if key not in given]):
            raise _Mismatch(f".{lacking[0]} is missing")
        try:
            for key, item in given.items():
                if key in names:
                    found[names[key]] = readers[key](item)
        except _Mismatch as error:
            raise _Mismatch(f".{key}{error}") from error
        try:
            return make(**found)
        except (TypeError, ValueError, LookupError, ArithmeticError) as error:  # they do not fit
            raise _Mismatch(f": {error}") from error

    return read


def _as(kind: type[T], data: object, wanted: object) -> T:
    """The data, which must be of this very type: True is no number."""
    return data if isinstance(data, kind) and type(data) is kind else _refuse(data, wanted)


def _refuse(data: object, kind: object) -> NoReturn:
    raise _Mismatch(f" is {data!r:.80}, which is no {_name(kind)}")


def _name(kind: object) -> str:
    return kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind).replace("typing.", "")


def _is_named_tuple(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")


def _unmark(data: object) -> object:
    """The data with {"float": "nan"} and the like as floats."""
    if isinstance(data, list):
        return [_unmark(item) for item in data]
    if not isinstance(data, dict):
        return data
    if data.keys() != {_FLOAT}:
        return {name: _unmark(item) for name, item in data.items()}
    text = data.get(_FLOAT)
    return float(text) if text in _NOT_JSON else _refuse(data, float)
