"""Leases and garbage marks: nothing that a writer to a registry refers to is deleted by garbage collection meanwhile.

Garbage marks are one document that lists what shall be deleted, changed by compare-and-swap only. A name on it is a
blob's digest or `model@version`. It is *waiting* until its grace period is over; then a collection makes it *going*,
and only what is going is deleted.

A lease is a document of a running writer. It records the generation of the garbage marks when the writer began: what
was marked later is kept while the lease is held, and of what was marked before the writer removes the marks. So a
writer does this, in this order: `hold_lease`; `Guard.secure` the names; check that they exist; write what refers to
them. One that needs a name that is going must run again later. docs/guides/retention.md ("Why a collection never hurts
a publication") has the argument why this is enough.

Only leases and grace periods compare times of two machines, whose clocks may differ by `SKEW`: others take a lease as
held for that much longer than it says, and its holder relies on it for that much shorter.
"""

import os
import re
import secrets
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

from enginery.core import parsing
from enginery.core.digest import canonical_json
from enginery.core.errors import ConflictError, IntegrityError, UnavailableError
from enginery.core.parsing import Malformed, text
from enginery.registry.ensembles import load_pinned
from enginery.registry.manifest import Manifest, parse
from enginery.registry.store import base
from enginery.registry.store.base import Store
from enginery.registry.store.layout import LEASES, TOMBSTONES, lease_key, manifest_key, version_prefix

SKEW = timedelta(minutes=5)
FORMAT = 1
TOMBSTONES_MAX_BYTES = 48 << 20
# The most names that are marked, so that the document stays below what a store takes; the rest waits for the next run.
MOST_TOMBSTONES = 200_000
LEASE_MAX_BYTES = 1 << 16
# Duration of a publication's lease: far longer than its requests take; a killed one delays collections for so long.
PUBLISHING = timedelta(hours=1)
# Of a whole build's lease, in which compilers run for hours.
BUILDING = timedelta(hours=24)

_DIGEST = re.compile(rb"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")


def now() -> datetime:
    """The current time in UTC; tests replace this function."""
    return datetime.now(UTC)


def stamp(moment: datetime) -> str:
    """A time as text: ISO 8601 in UTC, with microseconds."""
    return moment.astimezone(UTC).isoformat(timespec="microseconds")


def read_stamp(value: object, path: str) -> datetime:
    """Read a time that `stamp` wrote. Raises Malformed, also for a time without a time zone."""
    try:
        found = datetime.fromisoformat(text(value, path))
    except ValueError:
        raise Malformed(f"{path} is {str(value)[:80]!r}; it must be a time in ISO 8601") from None
    if found.tzinfo is None:
        raise Malformed(f"{path} is {str(value)[:80]!r}; it must say its time zone")
    return found


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
    """The garbage marks by name. generation: increases whenever names are added.

    sweeper: the collection that is deleting, or None.
    """

    generation: int = 0
    waiting: Mapping[str, Tombstone] = field(default_factory=dict)
    going: Mapping[str, Tombstone] = field(default_factory=dict)
    sweeper: Sweeper | None = None

    def to_bytes(self) -> bytes:
        """The document as it is stored."""
        marks = {
            kind: {name: [stamp(item.since), item.generation] for name, item in found.items()}
            for kind, found in (("waiting", self.waiting), ("going", self.going))
        }
        sweeper = self.sweeper and {**vars(self.sweeper), "expires": stamp(self.sweeper.expires)}
        return canonical_json({"format": FORMAT, "generation": self.generation, **marks, "sweeper": sweeper})

    def without(self, names: frozenset[str]) -> "Tombstones":
        """The marks without those of waiting `names`. Raises ConflictError if one of `names` is going."""
        if going := sorted(names & self.going.keys()):
            raise ConflictError(
                f"{going[0]} is being deleted this moment by `enginery gc` "
                f"({self.sweeper.by if self.sweeper else '?'}); run again when that is done (`enginery gc --delete` "
                "also ends one that was killed)"
            )
        if names.isdisjoint(self.waiting):
            return self
        return replace(self, waiting={name: item for name, item in self.waiting.items() if name not in names})


def read_tombstones(store: Store) -> Tombstones:
    """Read the garbage marks. Raises IntegrityError when they are damaged: nothing may be deleted or published then."""
    return _parse_tombstones(store.read(TOMBSTONES))


def update_tombstones(store: Store, change: Callable[[Tombstones], Tombstones]) -> Tombstones:
    """Change the garbage marks by compare-and-swap, and return them; `change` may be called several times.

    Raises ConflictError when the document keeps changing, and whatever `change` raises.
    """

    def make(data: bytes | None) -> bytes | None:
        known = _parse_tombstones(data)
        after = change(known)
        return None if after == known else after.to_bytes()

    return _parse_tombstones(base.change(store, TOMBSTONES, make))


def _parse_tombstones(data: bytes | None) -> Tombstones:
    if data is None:
        return Tombstones()
    try:
        document = parsing.parse_json(data, TOMBSTONES_MAX_BYTES)
        if (found := parsing.field(document, "format", parsing.count)) != FORMAT:
            raise Malformed(f"format is {found}; this enginery reads {FORMAT}: upgrade enginery")
        return Tombstones(
            parsing.field(document, "generation", parsing.count),
            parsing.field(document, "waiting", _read_marks),
            parsing.field(document, "going", _read_marks),
            parsing.field(document, "sweeper", parsing.optional(_read_sweeper)),
        )
    except Malformed as error:
        raise IntegrityError(
            f"{TOMBSTONES}: {error}; restore it, or stop all writers, delete it and run `enginery gc`"
        ) from error


def _read_marks(value: object, path: str) -> dict[str, Tombstone]:
    if not isinstance(value, dict):
        raise Malformed(f"{path} is {str(value)[:80]!r}; it must be an object")
    found: dict[str, Tombstone] = {}
    for name, item in value.items():
        where = f"{path}.{name[:80]}"
        if not (isinstance(item, list) and len(item) == 2):
            raise Malformed(f"{where} is {str(item)[:80]!r}; it must be a time and a generation")
        found[name] = Tombstone(read_stamp(item[0], where), parsing.count(item[1], where))
    return found


def _read_sweeper(value: object, path: str) -> Sweeper:
    data = parsing.mapping(value, path)
    return Sweeper(
        parsing.field(data, "id", parsing.text, path),
        parsing.field(data, "by", parsing.text, path),
        parsing.field(data, "expires", read_stamp, path),
    )


@dataclass(frozen=True)
class Lease:
    """A writer's lease. what: the work, for messages.  holder: host and process number.  at, expires: its time.

    seen: the generation of the garbage marks that was read before.
    """

    id: str
    what: str
    holder: str
    at: datetime
    expires: datetime
    seen: int

    def is_held(self, now: datetime) -> bool:
        """Whether its holder may still rely on it at the time `now` of the caller's clock."""
        return now < self.expires + SKEW


def take_lease(store: Store, what: str, lasts: timedelta = PUBLISHING) -> Lease:
    """Write a lease and return it. The generation is read first: one that is too low is safe, one too high is not."""
    seen, began = read_tombstones(store).generation, now()
    holder = f"{socket.gethostname()} {os.getpid()}"
    lease = Lease(secrets.token_hex(16), what, holder, began, began + lasts, seen)
    document = {**vars(lease), "at": stamp(lease.at), "expires": stamp(lease.expires)}
    store.create(lease_key(lease.id), canonical_json(document))
    return lease


def list_leases(store: Store) -> list[Lease]:
    """All leases, held or expired. Raises IntegrityError for one that cannot be read, as it may protect anything."""
    found: list[Lease] = []
    for key in store.list(LEASES):
        if (data := store.read(key)) is None:
            continue
        try:
            document = parsing.parse_json(data, LEASE_MAX_BYTES)
            found.append(
                Lease(
                    key.removeprefix(LEASES).removesuffix(".json"),
                    parsing.field(document, "what", parsing.text),
                    parsing.field(document, "holder", parsing.text),
                    parsing.field(document, "at", read_stamp),
                    parsing.field(document, "expires", read_stamp),
                    parsing.field(document, "seen", parsing.count),
                )
            )
        except Malformed as error:
            raise IntegrityError(f"{key}: {error}; delete it when nobody publishes") from error
    return found


@dataclass(frozen=True)
class Guard:
    """A writer's lease on a store."""

    store: Store
    lease: Lease

    def secure(self, names: Iterable[str]) -> None:
        """Remove the garbage marks of names (digests, `model@version`); check only afterwards that they exist.

        Raises ConflictError when one is being deleted at this moment, or the lease has expired.
        """
        wanted = frozenset(names)
        if now() > self.lease.expires - SKEW:
            raise ConflictError(
                f"{self.lease.what} took longer than its lease, until {stamp(self.lease.expires)}; run again"
            )
        update_tombstones(self.store, lambda known: known.without(wanted))


@contextmanager
def hold_lease(store: Store, what: str, lasts: timedelta = PUBLISHING) -> Iterator[Guard]:
    """Hold a lease on a store while the block writes something that refers to its content."""
    lease = take_lease(store, what, lasts)
    try:
        yield Guard(store, lease)
    finally:
        with suppress(UnavailableError):  # it expires by itself
            store.remove(lease_key(lease.id))


def secure_version(guard: Guard, manifest: Manifest) -> None:
    """Keep an existing version and its blobs, and those of its graphs, from being deleted while the guard's lease is
    held.

    Raises ConflictError as `Guard.secure`, and IntegrityError if the version was deleted or replaced.
    """
    model, version = manifest.model, manifest.version
    keys = list(guard.store.list(version_prefix(model, version)))
    documents = (guard.store.read(key) for key in keys if key.endswith(".json"))
    named = (digest for data in (*documents, "\n".join(keys).encode()) if data for digest in digests_in(data))
    guard.secure([version_name(model, version), *named])
    data = guard.store.read(manifest_key(model, version))
    if data is None or parse(data, model=model, version=version).digest != manifest.digest:
        raise IntegrityError(f"{model}@{version} was deleted or replaced while it was looked at; run again")
    secure_graphs(guard, manifest)


def secure_graphs(guard: Guard, manifest: Manifest) -> None:
    """`secure_version` of each version that an ensemble pins; nothing of another version."""
    for graph in manifest.graphs:
        secure_version(guard, load_pinned(guard.store, graph))


def digests_in(data: bytes) -> Iterator[str]:
    """Every run of exactly 64 hexadecimal digits in a document: each may be a digest."""
    return (found.decode() for found in _DIGEST.findall(data))


def version_name(model: str, version: str) -> str:
    """The name of a version among the garbage marks: 'model@version'."""
    return f"{model}@{version}"
