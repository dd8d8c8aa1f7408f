"""Garbage marks: which names shall be deleted, in shards that are each changed by compare-and-swap only.

A name is a blob's digest or `model@version`. Its mark lies in the shard of the first two digits of the digest (of a
version: of the digest of its name), so that a writer reads only the shards of the names that it secures. It is
*waiting* until its grace period is over; then a collection makes it *going*, and only what is going is deleted.

One small document, the state, says which shards may hold marks, which collection works, and which generations count.
Every collection that marks has a generation of its own, which is *published* when all of its marks are written. A mark
of a collection that was killed before that, or was counted as dead, counts for nothing; the next collection writes it
anew. So whoever reads generation n finds every mark of it and of those before in its shard, and none is added later.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime

from enginesmith.core import parsing
from enginesmith.core.digest import canonical_json, digest_of_bytes, is_digest
from enginesmith.core.errors import ConflictError, IntegrityError
from enginesmith.core.moments import read_stamp, stamp
from enginesmith.core.parsing import Malformed
from enginesmith.registry.store import base
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.layout import MARKS, mark_shard_key
from enginesmith.registry.store.parallel import side_by_side

FORMAT = 2
STATE_MAX_BYTES = 1 << 20
SHARD_MAX_BYTES = 48 << 20
# The most names that are marked in a shard, so that it stays below what a store takes; the rest waits for the next run.
MOST_IN_SHARD = 50_000


@dataclass(frozen=True)
class Tombstone:
    """The mark of one name: since when it is marked as garbage, by the store's clock, and the generation of the
    collection that did it."""

    since: datetime
    generation: int


@dataclass(frozen=True)
class MarkShard:
    """The marks of the names of one shard."""

    waiting: Mapping[str, Tombstone] = field(default_factory=dict)
    going: Mapping[str, Tombstone] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """The document as it is stored."""
        marks = {
            kind: {name: [stamp(item.since), item.generation] for name, item in found.items()}
            for kind, found in (("waiting", self.waiting), ("going", self.going))
        }
        return canonical_json({"format": FORMAT, **marks})

    def without(self, names: frozenset[str]) -> "MarkShard":
        """The marks without those of waiting `names`. Raises ConflictError if one of `names` is going."""
        if going := sorted(names & self.going.keys()):
            raise ConflictError(
                f"{going[0]} is being deleted this moment by `enginesmith registry gc`; run again when that is done "
                "(`enginesmith registry gc --delete` also ends one that was killed)"
            )
        if names.isdisjoint(self.waiting):
            return self
        return replace(self, waiting={name: item for name, item in self.waiting.items() if name not in names})


@dataclass(frozen=True)
class Sweeper:
    """The collection at work. by: host and process number.  expires: it counts as dead after it, by the store's
    clock.  generation: of the marks that it writes, published when all of them are written; 0 before it writes any."""

    id: str
    by: str
    expires: datetime
    generation: int = 0


@dataclass(frozen=True)
class MarkState:
    """Which marks count. generation: the newest that is published.  latest: the newest that was given to a collection.

    abandoned: generations that were given and never published; marks of these count for nothing.
    shards: those that may hold marks.  sweeper: the collection at work, or None.
    """

    generation: int = 0
    latest: int = 0
    abandoned: tuple[int, ...] = ()
    shards: tuple[str, ...] = ()
    sweeper: Sweeper | None = None

    def counts(self, mark: Tombstone) -> bool:
        """Whether a mark was written by a collection that published its generation."""
        return mark.generation <= self.generation and mark.generation not in self.abandoned

    def to_bytes(self) -> bytes:
        """The document as it is stored."""
        sweeper = self.sweeper and {**vars(self.sweeper), "expires": stamp(self.sweeper.expires)}
        return canonical_json({"format": FORMAT, **vars(self), "sweeper": sweeper})


def shard_of(name: str) -> str:
    """The shard that holds a name's mark: two hexadecimal digits."""
    return (name if is_digest(name) else digest_of_bytes(name.encode()))[:2]


def by_shard(names: Iterable[str]) -> dict[str, frozenset[str]]:
    """Shard -> those of the names whose marks it holds."""
    found: dict[str, set[str]] = {}
    for name in names:
        found.setdefault(shard_of(name), set()).add(name)
    return {shard: frozenset(here) for shard, here in sorted(found.items())}


def read_state(store: Store) -> MarkState:
    """Read the state of the marks. Raises IntegrityError when it is damaged, or of an earlier enginesmith: nothing may
    be deleted or published then."""
    return _parse_state(store.read(MARKS))


def update_state(store: Store, change: Callable[[MarkState], MarkState]) -> MarkState:
    """Change the state by compare-and-swap, and return it; `change` may be called several times.

    Raises ConflictError when the document keeps changing, and whatever `change` raises.
    """

    def make(data: bytes | None) -> bytes | None:
        known = _parse_state(data)
        after = change(known)
        return None if after == known else after.to_bytes()

    return _parse_state(base.change(store, MARKS, make))


def read_shards(store: Store, shards: Iterable[str]) -> dict[str, MarkShard]:
    """Read shards of marks, side by side. Raises IntegrityError when one is damaged."""
    keys = {mark_shard_key(shard): shard for shard in shards}
    return {keys[key]: _parse_shard(key, data) for key, data in side_by_side(store.read, list(keys))}


def update_shard(store: Store, shard: str, change: Callable[[MarkShard], MarkShard]) -> MarkShard:
    """Change a shard of marks by compare-and-swap; see `update_state`."""
    key = mark_shard_key(shard)

    def make(data: bytes | None) -> bytes | None:
        known = _parse_shard(key, data)
        after = change(known)
        return None if after == known else after.to_bytes()

    return _parse_shard(key, base.change(store, key, make))


def unmark(store: Store, names: Iterable[str]) -> None:
    """Remove the marks of names, reading only the shards that may hold them.

    Raises ConflictError when one of the names is going.
    """
    marked = read_state(store).shards
    wanted = {shard: here for shard, here in by_shard(names).items() if shard in marked}
    for _ in side_by_side(
        lambda shard: update_shard(store, shard, lambda known: known.without(wanted[shard])), list(wanted)
    ):
        pass


def _parse_state(data: bytes | None) -> MarkState:
    if data is None:
        return MarkState()
    try:
        document = parsing.parse_json(data, STATE_MAX_BYTES)
        _check_format(document)
        return MarkState(
            parsing.field(document, "generation", parsing.count),
            parsing.field(document, "latest", parsing.count),
            parsing.field(document, "abandoned", parsing.many(parsing.count)),
            parsing.field(document, "shards", parsing.many(_read_shard_name)),
            parsing.field(document, "sweeper", parsing.optional(_read_sweeper)),
        )
    except Malformed as error:
        raise IntegrityError(
            f"{MARKS}: {error}; restore it, or stop all writers, delete it and run `enginesmith registry gc`"
        ) from error


def _parse_shard(key: str, data: bytes | None) -> MarkShard:
    if data is None:
        return MarkShard()
    try:
        document = parsing.parse_json(data, SHARD_MAX_BYTES)
        _check_format(document)
        return MarkShard(parsing.field(document, "waiting", _read_marks), parsing.field(document, "going", _read_marks))
    except Malformed as error:
        raise IntegrityError(
            f"{key}: {error}; restore it, or stop all writers, delete it and run `enginesmith registry gc`"
        ) from error


def _check_format(document: object) -> None:
    """Raise Malformed for another format than this one. Format 1 had all marks in one document."""
    found = parsing.field(parsing.mapping(document, "document"), "format", parsing.count)
    if found > FORMAT:
        raise Malformed(f"format is {found}; this enginesmith reads {FORMAT}: upgrade enginesmith")
    if found < FORMAT:
        raise Malformed(
            f"format is {found}, of an earlier enginesmith, which must not write here beside this one (format "
            f"{FORMAT}); "
            "the names it lists are marked again when it is gone"
        )


def _read_shard_name(value: object, path: str) -> str:
    name = parsing.text(value, path)
    if len(name) != 2 or not set(name) <= set("0123456789abcdef"):
        raise Malformed(f"{path} is {name[:80]!r}; it must be two hexadecimal digits")
    return name


def _read_marks(value: object, path: str) -> dict[str, Tombstone]:
    if not isinstance(value, dict):
        raise Malformed(f"{path} is {str(value)[:80]!r}; it must be an object")
    found: dict[str, Tombstone] = {}
    same: dict[tuple[object, object], Tombstone] = {}  # one for all names that a collection marked
    for name, item in value.items():
        where = f"{path}.{name[:80]}"
        if not (isinstance(item, list) and len(item) == 2):
            raise Malformed(f"{where} is {str(item)[:80]!r}; it must be a time and a generation")
        mark = Tombstone(read_stamp(item[0], where), parsing.count(item[1], where))
        found[name] = same.setdefault((mark.since, mark.generation), mark)
    return found


def _read_sweeper(value: object, path: str) -> Sweeper:
    data = parsing.mapping(value, path)
    return Sweeper(
        parsing.field(data, "id", parsing.text, path),
        parsing.field(data, "by", parsing.text, path),
        parsing.field(data, "expires", read_stamp, path),
        parsing.field(data, "generation", parsing.count, path),
    )
