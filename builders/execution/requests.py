"""Requests as JSON and back: the class by the name under which it is imported, its fields by `enginery.core.codec`."""

import importlib
from dataclasses import dataclass
from typing import TypeVar, get_type_hints

from builders.execution.jobs import Request
from enginery.core.codec import decode, encode

T = TypeVar("T")


@dataclass(frozen=True)
class ChildTask:
    """What job.json holds. request: as `encode_request` writes it.  parent: its pid.  lifeline: a pipe's end."""

    request: object
    store: str
    parent: int
    lifeline: int


def encode_request(request: Request[object]) -> dict[str, object]:
    """A request with the name of its class, as JSON: {"type": "package.module:Class", "fields": {...}}."""
    kind = type(request)
    return {"type": f"{kind.__module__}:{kind.__qualname__}", "fields": encode(request)}


def decode_request(data: object) -> Request[object]:
    """The request that `encode_request` wrote; imports the module of its class. Raises IntegrityError."""
    given = decode(data, _Named)
    module, _, name = given.type.partition(":")
    kind: type[Request[object]] = getattr(importlib.import_module(module), name)
    return decode(given.fields, kind)


@dataclass(frozen=True)
class _Named:
    type: str
    fields: object


def result_type(request: Request[T]) -> type[T]:
    """The type that the request's `run` is declared to return."""
    kind: type[T] = get_type_hints(type(request).run)["return"]
    return kind
