"""The marker: the one document that says that a place is a registry, and of which format."""

from collections.abc import Collection
from typing import NoReturn

from enginery.core import parsing
from enginery.core.digest import canonical_json
from enginery.core.errors import InputError, IntegrityError
from enginery.registry.store.keys import FORMAT, MARKER

MAX_BYTES = 64 << 10
CONTENT = canonical_json({"format": FORMAT})


def refuse_other(names: Collection[str], where: str, remedy: str) -> NoReturn:
    """Raise InputError for a place without a marker that holds other things; for a registry that has lost its marker,
    say how it gets it back. names: what lies there.  remedy: for a place that is no registry."""
    if {"blobs", "models"} & set(names):
        raise InputError(
            f"{where} looks like a registry that has lost its marker; if it is one, write {CONTENT.decode()} into "
            f"{where}/{MARKER}"
        )
    raise InputError(f"{where} holds {min(names)!r} and is no registry (no {MARKER}); {remedy}")


def check_format(marker: bytes, where: str) -> None:
    """Raise IntegrityError for a marker that cannot be read, InputError for a format this release does not know."""
    try:
        found = parsing.field(parsing.parse_json(marker, MAX_BYTES), "format", parsing.count)
    except parsing.Malformed as error:
        raise IntegrityError(f"{where}/{MARKER} is damaged; write {CONTENT.decode()} into it") from error
    if found != FORMAT:
        raise InputError(f"registry {where} has format {found}; this enginery reads {FORMAT}: upgrade enginery")
