"""The clock of leases and of the grace period, in one place so that tests can replace it.

Only these compare times of two machines, whose clocks may differ by `SKEW`: others treat a lease as held for that much
longer than it says, and its holder relies on it for that much shorter.

Garbage marks: one document that lists what shall be deleted, changed by compare-and-swap only.

A name on it is a blob's digest or `model@version`. It is *waiting* until its grace period is over; then the sweep makes
it *going*, and only what is going is deleted. A writer that needs a waiting name removes its mark
(`guard.Guard.secure`); one that needs a name that is going must run again later.

Leases: documents of running writers. Garbage collection deletes nothing that their holders may refer to.

A lease records the generation of the garbage marks that its holder had read. What was marked later is kept as long as
the lease is held; for what was marked before, the holder removes the marks (`guard.Guard.secure`) before it refers to
it.

The protocol by which a writer keeps garbage collection from deleting what it refers to.

In this order: take a lease; `secure` the names; check that they exist; write what refers to them; release the lease.

Protects writers to a registry from garbage collection: nothing that they refer to is deleted meanwhile.

Writers call `guard`; `leases` record who writes, `tombstones` what is marked as garbage, `clock` gives the time.
The argument for why this is enough is in docs/guides/retention.md ("Why a collection never hurts a publication").
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
from enginery.registry.manifest import Manifest, parse
from enginery.registry.store import base
from enginery.registry.store.base import Store
from enginery.registry.store.layout import LEASES, TOMBSTONES, lease_key, manifest_key, version_prefix

SKEW = timedelta(minutes=5)


def now() -> datetime:
    """The current time in UTC."""
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


FORMAT = 1
TOMBSTONES_MAX_BYTES = 48 << 20
# The rest waits for the next run, so that the document stays below what a store takes.
MOST_TOMBSTONES = 200_000


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


def read_tombstones(store: Store) -> Tombstones:
    """Read the garbage marks. Raises IntegrityError when they cannot be read; then nobody may delete or publish."""
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


def _names(found: Mapping[str, Tombstone]) -> dict[str, list[object]]:
    return {name: [stamp(tombstone.since), tombstone.generation] for name, tombstone in found.items()}


def _parse_tombstones(data: bytes | None) -> Tombstones:
    if data is None:
        return Tombstones()
    try:
        document = parsing.parse_json(data, TOMBSTONES_MAX_BYTES)
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


LEASE_MAX_BYTES = 1 << 16
# Of one publication: far longer than its requests take; a killed one delays collections for so long.
PUBLISHING = timedelta(hours=1)
# Of a whole build, in which compilers run for hours.
BUILDING = timedelta(hours=24)


@dataclass(frozen=True)
class Lease:
    """A writer's lease. what: the work, for messages.  holder: host and process number.  at, expires: its time.  seen:
    the generation of the garbage marks that was read before."""

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


def release_lease(store: Store, lease: Lease) -> None:
    """Delete a lease."""
    store.remove(lease_key(lease.id))


def list_leases(store: Store) -> list[Lease]:
    """All leases, held or expired. Raises IntegrityError for one that cannot be read, as it may protect anything."""
    found = ((key, store.read(key)) for key in store.list(LEASES))
    return [_parse_lease(key, data) for key, data in found if data is not None]


def _parse_lease(key: str, data: bytes) -> Lease:
    try:
        document = parsing.parse_json(data, LEASE_MAX_BYTES)
        return Lease(
            key.removeprefix(LEASES).removesuffix(".json"),
            parsing.field(document, "what", parsing.text),
            parsing.field(document, "holder", parsing.text),
            parsing.field(document, "at", read_stamp),
            parsing.field(document, "expires", read_stamp),
            parsing.field(document, "seen", parsing.count),
        )
    except Malformed as error:
        raise IntegrityError(f"{key}: {error}; delete it when nobody publishes") from error


_DIGEST = re.compile(rb"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")


@dataclass(frozen=True)
class Guard:
    """A writer's lease on a store."""

    store: Store
    lease: Lease

    def secure(self, names: Iterable[str]) -> None:
        """Remove the garbage marks of names (digests, `model@version`). Check that they exist after this call, not
        before.

        Raises ConflictError when one is being deleted at this moment, or the lease has expired.
        """
        wanted = frozenset(names)
        if now() > self.lease.expires - SKEW:
            raise ConflictError(
                f"{self.lease.what} took longer than its lease, until {stamp(self.lease.expires)}; run again"
            )
        update_tombstones(self.store, lambda known: _without(known, wanted))


@contextmanager
def hold_lease(store: Store, what: str, lasts: timedelta = PUBLISHING) -> Iterator[Guard]:
    """Hold a lease on a store while the block writes something that refers to its content."""
    lease = take_lease(store, what, lasts)
    try:
        yield Guard(store, lease)
    finally:
        with suppress(UnavailableError):  # it ends by itself
            release_lease(store, lease)


def secure_version(guard: Guard, manifest: Manifest) -> None:
    """Keep an existing version and its blobs from being deleted while the guard's lease is held.

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


def digests_in(data: bytes) -> Iterator[str]:
    """Every run of exactly 64 hexadecimal digits in a document: each may be a digest."""
    return (found.decode() for found in _DIGEST.findall(data))


def version_name(model: str, version: str) -> str:
    """The name of a version among the garbage marks: 'model@version'."""
    return f"{model}@{version}"


def _without(known: Tombstones, names: frozenset[str]) -> Tombstones:
    if going := sorted(names & known.going.keys()):
        raise ConflictError(
            f"{going[0]} is being deleted this moment by `enginery gc` ({known.sweeper.by if known.sweeper else '?'}); "
            "run again when that is done (`enginery gc --delete` also ends one that was killed)"
        )
    if names.isdisjoint(known.waiting):
        return known
    return replace(known, waiting={name: item for name, item in known.waiting.items() if name not in names})
