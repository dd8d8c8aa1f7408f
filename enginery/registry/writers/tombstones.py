"""Garbage marks: one document that lists what shall be deleted, changed by compare-and-swap only.

A name on it is a blob's digest or `model@version`. It is *waiting* until its grace period is over; then the sweep makes
it *going*, and only what is going is deleted. A writer that needs a waiting name removes its mark
(`guard.Guard.secure`); one that needs a name that is going must run again later.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from enginery.core import parsing
from enginery.core.digest import canonical_json
from enginery.core.errors import IntegrityError
from enginery.core.parsing import Malformed
from enginery.registry.store import documents
from enginery.registry.store.base import Store
from enginery.registry.store.keys import TOMBSTONES
from enginery.registry.writers.clock import read_stamp, stamp

FORMAT = 1
MAX_BYTES = 48 << 20
# The rest waits for the next run, so that the document stays below what a store takes.
MOST = 200_000


@dataclass(frozen=True)
class Tombstone:
    """The mark of one name: since when it is marked as garbage, and the list's generation at that time."""

    since: datetime
    generation: int


@dataclass(frozen=True)
class Sweeper:
    """The collection that deletes what is going. by: host and process number.  expires: it counts as dead after it."""

    id: str
    by: str
    expires: datetime


@dataclass(frozen=True)
class Tombstones:
    """The garbage marks by name. generation: increases whenever names are added.  sweeper: who deletes, if anybody."""

    generation: int = 0
    waiting: Mapping[str, Tombstone] = field(default_factory=dict)
    going: Mapping[str, Tombstone] = field(default_factory=dict)
    sweeper: Sweeper | None = None

    def to_bytes(self) -> bytes:
        """The document as it is stored."""
        sweeper = self.sweeper and {**vars(self.sweeper), "expires": stamp(self.sweeper.expires)}
        return canonical_json(
            {
                "format": FORMAT,
                "generation": self.generation,
                "waiting": _names(self.waiting),
                "going": _names(self.going),
                "sweeper": sweeper,
            }
        )


def read(store: Store) -> Tombstones:
    """Read the garbage marks. Raises IntegrityError when they cannot be read; then nobody may delete or publish."""
    return _parse(store.read(TOMBSTONES))


def update(store: Store, change: Callable[[Tombstones], Tombstones]) -> Tombstones:
    """Change the garbage marks by compare-and-swap, and return them; `change` may be called several times.

    Raises ConflictError when the document keeps changing, and whatever `change` raises.
    """

    def make(data: bytes | None) -> bytes | None:
        known = _parse(data)
        after = change(known)
        return None if after == known else after.to_bytes()

    return _parse(documents.change(store, TOMBSTONES, make))


def _names(found: Mapping[str, Tombstone]) -> dict[str, list[object]]:
    return {name: [stamp(tombstone.since), tombstone.generation] for name, tombstone in found.items()}


def _parse(data: bytes | None) -> Tombstones:
    if data is None:
        return Tombstones()
    try:
        document = parsing.parse_json(data, MAX_BYTES)
        if (found := parsing.field(document, "format", parsing.count)) != FORMAT:
            raise Malformed(f"format is {found}; this enginery reads {FORMAT}: upgrade enginery")
        return Tombstones(
            parsing.field(document, "generation", parsing.count),
            parsing.field(document, "waiting", _tombstones),
            parsing.field(document, "going", _tombstones),
            parsing.field(document, "sweeper", parsing.optional(_sweeper)),
        )
    except Malformed as error:
        raise IntegrityError(
            f"{TOMBSTONES}: {error}; restore it, or stop all writers, delete it and run `enginery gc`"
        ) from error


def _tombstones(value: object, path: str) -> dict[str, Tombstone]:
    if not isinstance(value, dict):
        raise Malformed(f"{path} is {str(value)[:80]!r}; it must be an object")
    return {name: _tombstone(item, f"{path}.{name[:80]}") for name, item in value.items()}


def _tombstone(value: object, path: str) -> Tombstone:
    if not (isinstance(value, list) and len(value) == 2):
        raise Malformed(f"{path} is {str(value)[:80]!r}; it must be a time and a generation")
    return Tombstone(read_stamp(value[0], path), parsing.count(value[1], path))


def _sweeper(value: object, path: str) -> Sweeper:
    data = parsing.mapping(value, path)
    return Sweeper(
        parsing.field(data, "id", parsing.text, path),
        parsing.field(data, "by", parsing.text, path),
        parsing.field(data, "expires", read_stamp, path),
    )
