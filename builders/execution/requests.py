"""Requests as JSON and back: the class by the name under which it is imported, its fields by `enginery.core.codec`."""

import importlib
from typing import Any, TypeVar, get_type_hints

from builders.execution.jobs import Request
from enginery.core.codec import Json, decode, encode

T = TypeVar("T")


def encode_request(request: Request[Any]) -> Json:
    """A request with the name of its class, as JSON: {"type": "package.module:Class", "fields": {...}}."""
    kind = type(request)
    return {"type": f"{kind.__module__}:{kind.__qualname__}", "fields": encode(request)}


def decode_request(data: Json) -> Request[Any]:
    """The request that `encode_request` wrote; imports the module of its class. Raises IntegrityError."""
    module, _, name = str(data["type"]).partition(":")
    kind: type[Request[Any]] = getattr(importlib.import_module(module), name)
    return decode(data["fields"], kind)


def result_type(request: Request[T]) -> type[T]:
    """The type that the request's `run` is declared to return."""
    kind: type[T] = get_type_hints(type(request).run)["return"]
    return kind
