"""Requests and results as JSON and back, by the types of their fields: the one codec between a driver and a worker.

A value is a frozen dataclass of plain values, paths, tuples, mappings and such dataclasses, whose annotations can be
resolved at run time. The library is msgspec (docs/decisions/0001-dependencies.md). JSON has no NaN and no infinities
(RFC 8259, section 6): a float that is none of JSON's numbers becomes {"float": "nan"}.
"""

import importlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

import msgspec

from builders.errors import IntegrityError

if TYPE_CHECKING:
    from builders.jobs import Request

T = TypeVar("T")
Json = dict[str, Any]
_FLOAT = "float"


def encode(value: object) -> Any:
    """A value as what `json.dumps` takes: dicts, lists, strings, numbers, booleans and None.

    Raises TypeError for a value that is not made of such.
    """
    return _map_leaves(msgspec.to_builtins(value, enc_hook=_encode_other), _encode_leaf)


def decode(data: Any, kind: type[T]) -> T:
    """The value of type `kind` that `encode` was given. Raises IntegrityError, with the field's path."""
    try:
        return msgspec.convert(_map_leaves(data, _decode_leaf), kind, dec_hook=_decode_other)
    except msgspec.ValidationError as error:
        raise IntegrityError(f"this is no {kind.__name__}: {error}") from error


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
    kind: type[T] = get_type_hints(type(request).run)["return"]
    return kind


def _encode_other(value: object) -> str:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"a {type(value).__name__} cannot be written as JSON: {value!r:.80}")


def _decode_other(kind: type[Any], value: Any) -> Path:
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise msgspec.ValidationError(f"Expected `{kind.__name__}`, got `{type(value).__name__}`")


def _map_leaves(data: Any, change: Callable[[Any], Any]) -> Any:
    """The same structure with `change` done to dicts and what is no container, from the leaves up."""
    if isinstance(data, dict):
        return change({name: _map_leaves(item, change) for name, item in data.items()})
    if isinstance(data, list | tuple):
        return [_map_leaves(item, change) for item in data]
    return change(data)


def _encode_leaf(data: Any) -> Any:
    return {_FLOAT: str(data)} if isinstance(data, float) and not math.isfinite(data) else data


def _decode_leaf(data: Any) -> Any:
    return float(data[_FLOAT]) if isinstance(data, dict) and data.keys() == {_FLOAT} else data
