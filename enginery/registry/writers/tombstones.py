"""The list of what shall be deleted: one document, compared and swapped, so that each change of mind has its moment.

A name on it is a blob's digest or `model@version`. It is *waiting* until its grace period is over; then the sweep
makes it *going*, and only what is going is deleted. Whoever needs a waiting name takes it off (`guard.Guard.secure`);
who needs one that is going must come again.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from enginery.core import parsing
from enginery.core.digest import canonical_json
from enginery.core.errors import IntegrityError
from enginery.core.parsing import Malformed
from enginery.registry.store import documents
from enginery.registry.store.base import Store
from enginery.registry.store.keys import CONDEMNED
from enginery.registry.writers.clock import read_stamp, stamp

FORMAT = 1
MAX_BYTES = 48 << 20
# The rest waits for the next run, so that the document stays below what a store takes.
MOST = 200_000


@dataclass(frozen=True)
class Sentence:
    """Since when a name is on the list, and the list's generation when it came."""

    since: datetime
    generation: int


@dataclass(frozen=True)
class Sweeper:
    """The collection that deletes what is going. It may be taken for dead after `expires`."""

    id: str
    by: str
    expires: datetime


@dataclass(frozen=True)
class Condemned:
    """The list. generation: grows whenever names were added."""

    generation: int = 0
    waiting: Mapping[str, Sentence] = field(default_factory=dict)
    going: Mapping[str, Sentence] = field(default_factory=dict)
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


def read(store: Store) -> Condemned:
    """The list. Raises IntegrityError when it cannot be read: then nobody deletes, and nobody publishes."""
    return _parse(store.read(CONDEMNED))


def update(store: Store, change: Callable[[Condemned], Condemned]) -> Condemned:
    """Change the list by compare-and-swap, and return it; `change` may be called often and must bear being repeated.

    Raises ConflictError when it never stands still, and whatever `change` raises.
    """

    def make(data: bytes | None) -> bytes | None:
        known = _parse(data)
        after = change(known)
        return None if after == known else after.to_bytes()

    return _parse(documents.change(store, CONDEMNED, make))


def _names(found: Mapping[str, Sentence]) -> dict[str, list[Any]]:
    return {name: [stamp(sentence.since), sentence.generation] for name, sentence in found.items()}


def _parse(data: bytes | None) -> Condemned:
    if data is None:
        return Condemned()
    try:
        document = parsing.parse_json(data, MAX_BYTES)
        if (found := parsing.field(document, "format", parsing.count)) != FORMAT:
            raise Malformed(f"format is {found}; this enginery reads {FORMAT}: upgrade enginery")
        return Condemned(
            parsing.field(document, "generation", parsing.count),
            parsing.field(document, "waiting", _sentences),
            parsing.field(document, "going", _sentences),
            parsing.field(document, "sweeper", parsing.optional(_sweeper)),
        )
    except Malformed as error:
        raise IntegrityError(
            f"{CONDEMNED}: {error}; restore it, or stop all writers, delete it and run `enginery gc`"
        ) from error


def _sentences(value: Any, path: str) -> dict[str, Sentence]:
    if not isinstance(value, dict):
        raise Malformed(f"{path} is {str(value)[:80]!r}; it must be an object")
    return {name: _sentence(item, f"{path}.{name[:80]}") for name, item in value.items()}


def _sentence(value: Any, path: str) -> Sentence:
    if not (isinstance(value, list) and len(value) == 2):
        raise Malformed(f"{path} is {str(value)[:80]!r}; it must be a time and a generation")
    return Sentence(read_stamp(value[0], path), parsing.count(value[1], path))


def _sweeper(value: Any, path: str) -> Sweeper:
    data = parsing.mapping(value, path)
    return Sweeper(
        parsing.field(data, "id", parsing.text, path),
        parsing.field(data, "by", parsing.text, path),
        parsing.field(data, "expires", read_stamp, path),
    )
