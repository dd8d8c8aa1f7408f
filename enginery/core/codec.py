"""Requests and results as JSON and back, by the types of their fields: the one codec between a driver and a worker.

A value is a frozen dataclass of plain values, paths, tuples, mappings and such dataclasses, whose annotations can be
resolved at run time. Standard library only: workers on bare GPU machines have no more
(docs/decisions/0012-work-as-types.md). JSON has no NaN and no infinities (RFC 8259, section 6): a float that is none
of JSON's numbers becomes {"float": "nan"}.
"""

import dataclasses
import importlib
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from enginery.core.errors import IntegrityError

if TYPE_CHECKING:
    from builders.execution.jobs import Request

T = TypeVar("T")
Json = dict[str, Any]
_FLOAT = "float"


class _Mismatch(Exception):  # noqa: N818 - what `decode` says as an IntegrityError
    """Data that is not of the type; the text names the field."""


def encode(value: object) -> Any:
    """A value as what `json.dumps` takes: dicts, lists, strings, numbers, booleans and None.

    Raises TypeError for a value that is not made of such.
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
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
    raise TypeError(f"{type(value).__name__} cannot be written as JSON: {value!r:.80}")


def decode(data: Any, kind: type[T]) -> T:
    """The value of type `kind` that `encode` was given. Raises IntegrityError, with the field's name."""
    try:
        value: T = _decode(data, kind, _name(kind))
    except _Mismatch as error:
        raise IntegrityError(str(error)) from error
    return value


def encode_request(request: "Request[Any]") -> Json:
    """A request with the name of its class, as JSON: {"type": "package.module:Class", "fields": {...}}."""
    kind = type(request)
    return {"type": f"{kind.__module__}:{kind.__qualname__}", "fields": encode(request)}


def decode_request(data: Json) -> "Request[Any]":
    """The request that `encode_request` wrote; imports the module of its class. Raises IntegrityError."""
    module, _, name = str(data["type"]).partition(":")
    kind: type[Request[Any]] = getattr(importlib.import_module(module), name)
    return decode(data["fields"], kind)


def result_type(request: "Request[T]") -> type[T]:
    """The type that the request's `run` is declared to return."""
    kind: type[T] = _hints(type(request).run)["return"]
    return kind


@cache
def _hints(what: Any) -> dict[str, Any]:
    return get_type_hints(what)


def _decode(data: Any, kind: Any, where: str) -> Any:
    origin = get_origin(kind)
    if kind is Any:
        return _unmark(data)
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
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(data, kind, where)
    return _decode_plain(data, kind, where)


def _decode_plain(data: Any, kind: Any, where: str) -> Any:
    if kind is float:
        found = _unmark(data)
        return float(found) if type(found) in (int, float) else _refuse(data, kind, where)
    if kind is Path:
        return Path(_as(str, data, kind, where))
    return _as(NoneType if kind is None else kind, data, kind, where)


def _decode_union(data: Any, kind: Any, where: str) -> Any:
    """The value by the first of the types that it is of; of a dataclass or None, the error names the field."""
    kinds = [each for each in get_args(kind) if each is not NoneType or data is None]
    if len(kinds) == 1:
        return _decode(data, kinds[0], where)
    for each in kinds:
        with suppress(_Mismatch):
            return _decode(data, each, where)
    return _refuse(data, kind, where)


def _decode_tuple(data: Any, kind: Any, where: str) -> Any:
    items = _as(list, data, kind, where)
    kinds = list(_hints(kind).values()) if _is_named_tuple(kind) else list(get_args(kind))
    if kinds[-1:] == [...]:
        kinds = kinds[:1] * len(items)
    if len(kinds) != len(items):
        _refuse(data, kind, where)
    found = [_decode(*pair, f"{where}[{index}]") for index, pair in enumerate(zip(items, kinds, strict=True))]
    return kind(*found) if _is_named_tuple(kind) else tuple(found)


def _decode_dataclass(data: Any, kind: Any, where: str) -> Any:
    given, hints = _as(dict, data, kind, where), _hints(kind)
    known = {field.name for field in dataclasses.fields(kind)}
    if unknown := sorted(given.keys() - known):
        raise _Mismatch(f"{where} has no field {unknown[0]!r}")
    found = {name: _decode(item, hints[name], f"{where}.{name}") for name, item in given.items()}
    try:
        return kind(**found)
    except TypeError as error:  # a field without a default is missing
        raise _Mismatch(f"{where}: {error}") from error


def _as(kind: Any, data: Any, wanted: Any, where: str) -> Any:
    """The data, which must be of this very type: True is no number."""
    return data if type(data) is kind else _refuse(data, wanted, where)


def _refuse(data: Any, kind: Any, where: str) -> Any:
    raise _Mismatch(f"{where} is {data!r:.80}, which is no {_name(kind)}")


def _name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind).replace("typing.", "")


def _is_named_tuple(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")


def _unmark(data: Any) -> Any:
    """The data with the floats that JSON does not have."""
    if isinstance(data, dict):
        if data.keys() == {_FLOAT}:
            return float(data[_FLOAT])
        return {name: _unmark(item) for name, item in data.items()}
    return [_unmark(item) for item in data] if isinstance(data, list) else data
