"""Leases of writers and the marks of garbage collection."""

import os
import re
import secrets
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from threading import Event, Thread
from typing import Annotated, NamedTuple, TypeVar

from annotated_types import Predicate, doc

from enginesmith.core import parsing
from enginesmith.core.codec import Complete, document_error, encode, explain_damage, parse_as
from enginesmith.core.errors import (
    ConflictError,
    EnginesmithError,
    IntegrityError,
    UnavailableError,
    canonical_json,
    digest_of_bytes,
    digests_in,
    is_digest,
)
from enginesmith.core.names import Name
from enginesmith.core.parsing import Malformed, stamp
from enginesmith.core.requirements import Count, Format
from enginesmith.registry.manifest import Manifest, load_pinned, parse
from enginesmith.registry.store import base, layout
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.parallel import side_by_side

Document = TypeVar("Document")

# Garbage marks: the names that are to be deleted, in shards that are each changed by compare-and-swap only.
#
# A name is a blob's digest or `model@version`. Its mark lies in the shard of the first two digits of the digest (of a
# version: of the digest of its name), so that a writer reads only the shards of the names that it secures. A mark is
# *waiting* until its grace period is over. Then a collection makes it *going*, and only going names are deleted.
#
# One small document, the state, lists the shards that may hold marks, the running collection, and the generations that
# count. Every collection that marks has its own generation, which is *published* when all of its marks are written.
# Marks of a collection that was killed or counted as dead before that do not count; the next collection writes them
# anew. So a reader of generation n finds all marks of it and of earlier ones in their shards, and none is added later.

FORMAT = 1
STATE_MAX_BYTES = 1 << 20
SHARD_MAX_BYTES = 48 << 20
# The maximum number of marks in a shard, which keeps it below a store's size limit; others wait for the next run.
MOST_IN_SHARD = 50_000


class Tombstone(NamedTuple):
    """The mark of one name: since when it is marked as garbage, on the store's clock, and the generation of the
    collection that marked it."""

    since: datetime
    generation: Count


@dataclass(frozen=True)
class MarkShard(Complete):
    """The marks of the names in one shard."""

    waiting: Mapping[str, Tombstone] = field(default_factory=dict)
    going: Mapping[str, Tombstone] = field(default_factory=dict)
    format: Annotated[int, Format(FORMAT)] = FORMAT

    def without(self, names: frozenset[str]) -> "MarkShard":
        """The shard without the waiting marks of `names`. Raises ConflictError if one of `names` is going."""
        if going_names := sorted(names & self.going.keys()):
            raise ConflictError(
                f"{going_names[0]} is being deleted this moment by `enginesmith registry gc`; run again when that is "
                "done (`enginesmith registry gc --delete` also ends one that was killed)"
            )
        if names.isdisjoint(self.waiting):
            return self
        return replace(self, waiting={name: mark for name, mark in self.waiting.items() if name not in names})


@dataclass(frozen=True)
class Sweeper(Complete):
    """The running collection. by: host and process number.  expires: when it counts as dead, on the store's clock.
    generation: of the marks that it writes, published when all of them are written; 0 before it writes any."""

    id: str
    by: str
    expires: datetime
    generation: Count = 0


_ShardName = Annotated[str, Predicate(re.compile("[0-9a-f]{2}").fullmatch), doc("two hexadecimal digits")]


@dataclass(frozen=True)
class MarkState(Complete):
    """Which marks count. generation: the newest published one.  latest: the newest one that a collection reserved.

    abandoned: generations that were reserved and never published; their marks do not count.
    shards: those that may hold marks.  sweeper: the running collection, or None.
    """

    generation: Count = 0
    latest: Count = 0
    abandoned: tuple[Count, ...] = ()
    shards: tuple[_ShardName, ...] = ()
    sweeper: Sweeper | None = None
    format: Annotated[int, Format(FORMAT)] = FORMAT

    def counts(self, mark: Tombstone) -> bool:
        """Whether a mark counts: its collection published its generation."""
        return mark.generation <= self.generation and mark.generation not in self.abandoned


def shard_of(name: str) -> str:
    """The shard that holds a name's mark: two hexadecimal digits."""
    return (name if is_digest(name) else digest_of_bytes(name.encode()))[:2]


def by_shard(names: Iterable[str]) -> dict[str, frozenset[str]]:
    """Shard -> the names whose marks it holds."""
    shard_names: dict[str, set[str]] = {}
    for name in names:
        shard_names.setdefault(shard_of(name), set()).add(name)
    return {shard: frozenset(names_in_shard) for shard, names_in_shard in sorted(shard_names.items())}


def read_state(store: Store) -> MarkState:
    """Read the state of the marks. Raises IntegrityError if it is damaged, or of an earlier enginesmith: then nothing
    may be deleted or published."""
    return _parse_state(store.read(layout.MARK_STATE))


def update_state(store: Store, change: Callable[[MarkState], MarkState]) -> MarkState:
    """Change the state by compare-and-swap, and return it; `change` may be called several times.

    Raises ConflictError if the document keeps changing, and whatever `change` raises.
    """

    return _update(store, layout.MARK_STATE, _parse_state, change)


def read_shards(store: Store, shards: Iterable[str]) -> dict[str, MarkShard]:
    """Read shards of marks, in parallel. Raises IntegrityError if one is damaged."""
    keys = {layout.mark_shard_key(shard): shard for shard in shards}
    return {keys[key]: _parse_shard(key, shard_bytes) for key, shard_bytes in side_by_side(store.read, list(keys))}


def update_shard(store: Store, shard: str, change: Callable[[MarkShard], MarkShard]) -> MarkShard:
    """Change a shard of marks by compare-and-swap; see `update_state`."""
    key = layout.mark_shard_key(shard)
    return _update(store, key, lambda data: _parse_shard(key, data), change)


def _update(
    store: Store, key: str, parse: Callable[[bytes | None], Document], change: Callable[[Document], Document]
) -> Document:
    def make(data: bytes | None) -> bytes | None:
        old_document = parse(data)
        new_document = change(old_document)
        return None if new_document == old_document else canonical_json(encode(new_document))

    return parse(base.change(store, key, make))


def unmark(store: Store, names: Iterable[str]) -> None:
    """Remove the marks of names, reading only shards that may hold them. Raises ConflictError if a name is going."""
    shard_names = by_shard(names)
    marked_shards = read_state(store).shards if shard_names else ()
    shard_names = {shard: names_in_shard for shard, names_in_shard in shard_names.items() if shard in marked_shards}
    for _ in side_by_side(
        lambda shard: update_shard(store, shard, lambda marks: marks.without(shard_names[shard])), list(shard_names)
    ):
        pass


def _parse_state(data: bytes | None) -> MarkState:
    return MarkState() if data is None else _parse(layout.MARK_STATE, data, STATE_MAX_BYTES, MarkState)


def _parse_shard(key: str, data: bytes | None) -> MarkShard:
    if data is None:
        return MarkShard()
    shard_marks, unique_marks = _parse(key, data, SHARD_MAX_BYTES, MarkShard), dict[Tombstone, Tombstone]()
    # One object shared by all names that a collection marked: a registry may have millions of them.
    return MarkShard(
        {name: unique_marks.setdefault(mark, mark) for name, mark in shard_marks.waiting.items()},
        {name: unique_marks.setdefault(mark, mark) for name, mark in shard_marks.going.items()},
    )


def _parse(key: str, data: bytes, limit: int, kind: type[Document]) -> Document:
    with explain_damage(key, "restore it, or stop all writers, delete it and run `enginesmith registry gc`"):
        return parse_as(data, limit, kind)


# Leases protect the names that a running writer refers to from garbage collection.
#
# A lease is a document of a running writer. It records the generation of the garbage marks when the writer began. Names
# that were marked later are kept while the lease is held; the writer removes the marks of names that were marked
# before. So a writer must do this, in this order: `hold_lease`; `Guard.secure` the names; check that they exist; write
# documents that refer to them. A writer that needs a going name must run again later.
# docs/concepts/registry-protocol.md#why-no-needed-blob-is-deleted has the argument why this suffices.
#
# The times in a lease, like all times that one machine writes and another judges, are of the store's clock
# (`Store.now`). The holder measures the remaining time with a clock of its own machine that cannot be set, from before
# it asked the store for the time, and stops `MARGIN` early.

LEASE_MAX_BYTES = 1 << 16
# Duration of a publication's lease: far longer than its requests take; a killed publication delays collections so long.
PUBLISHING = timedelta(hours=1)
# Of a whole build's lease, in which compilers run for hours.
BUILDING = timedelta(hours=24)
# A holder stops this much early. It exceeds the errors: a store's clock counts whole seconds, two clocks differ in
# their rates, and a store's servers in their times.
MARGIN = timedelta(minutes=1)


@dataclass(frozen=True)
class Lease(Complete):
    """A writer's lease. what: the work, for messages.  holder: host and process number.  at, expires: its start and
    end, on the store's clock.

    seen: the generation of the garbage marks, read before the lease was written.  changes: models whose versions or
    channels the holder may change (`versions.index`).
    """

    id: str
    what: str
    holder: str
    at: datetime
    expires: datetime
    seen: Count
    changes: tuple[Name, ...] = ()

    def is_held(self, now: datetime) -> bool:
        """Whether its holder may still rely on it. now: the time on the store's clock."""
        return now < self.expires


def take_lease(store: Store, what: str, lasts: timedelta = PUBLISHING, changes: tuple[str, ...] = ()) -> Lease:
    """Write a lease and return it. The generation is read first: too low a number is safe, too high a number is not."""
    generation, start = read_state(store).generation, store.now()
    holder = f"{socket.gethostname()} {os.getpid()}"
    lease = Lease(secrets.token_hex(16), what, holder, start, start + lasts, generation, changes)
    _create(store, lease)
    return lease


def _create(store: Store, lease: Lease) -> None:
    """Write a lease unless it exists."""
    store.create(layout.lease_key(lease.id), canonical_json(encode(lease)))


def list_leases(store: Store) -> list[Lease]:
    """All leases, held or expired. Raises IntegrityError for an unreadable one, as it may protect anything."""
    leases: list[Lease] = []
    for key, lease_bytes in side_by_side(store.read, list(store.list(layout.LEASES))):
        try:
            if lease_bytes is not None:
                leases.append(lease := parse_as(lease_bytes, LEASE_MAX_BYTES, Lease))
                if layout.lease_key(lease.id) != key:
                    raise Malformed(f"belongs to lease {lease.id[:80]!r}: it was moved by hand")
        except EnginesmithError as error:
            raise document_error(key, error, "delete it when nobody publishes") from error
    return leases


@dataclass(frozen=True)
class Guard:
    """A writer's lease on a store. begun: `steady_s` before the lease was taken."""

    store: Store
    lease: Lease
    begun: float

    def secure(self, names: Iterable[str]) -> None:
        """Remove the garbage marks of names (digests, `model@version`). Check only afterwards that they exist.

        Raises ConflictError if one is being deleted at this moment, and as `check`.
        """
        self.check()
        unmark(self.store, names)

    def check(self) -> None:
        """Raise ConflictError if the lease is over, as secured names may then be deleted. Call it before the write that
        refers to them."""
        if parsing.steady_s() > end_of(self.begun, self.lease.expires - self.lease.at):
            raise ConflictError(
                f"{self.lease.what} took longer than its lease, which ends at {stamp(self.lease.expires)}; run again"
            )


def end_of(begun: float, lasts: timedelta) -> float:
    """Until when, on `steady_s`, a writer may rely on a duration that it wrote: `MARGIN` before its end. begun: before
    it asked the store for the time."""
    return begun + (lasts - MARGIN).total_seconds()


@contextmanager
def hold_lease(
    store: Store,
    what: str,
    lasts: timedelta = PUBLISHING,
    changes: tuple[str, ...] = (),
    finish: Callable[[], None] = lambda: None,
) -> Iterator[Guard]:
    """Hold a lease on a store while the block writes documents that refer to its content. finish: called before the
    lease is removed.

    The lease stays until it expires if `finish` fails. It also stays if the block changes models and is interrupted, or
    ends with UnavailableError or with a ConflictError after a write: the block may have written evidence without a
    snapshot. The collection that finds the expired lease writes that snapshot. If a collection removed the lease before
    the block wrote, the lease is written again.
    """
    start_s = parsing.steady_s()
    lease = take_lease(store, what, lasts, changes)
    try:
        yield Guard(store, lease, start_s)
    finally:
        with suppress(EnginesmithError):
            finish()
            error = sys.exception()
            is_refused = isinstance(error, ConflictError) and not error.nothing_written
            is_interrupted = error is not None and not isinstance(error, EnginesmithError)
            if changes and is_refused:
                _create(store, lease)
            elif not (changes and (is_interrupted or isinstance(error, UnavailableError))):
                store.remove(layout.lease_key(lease.id))


@contextmanager
def keep_renewing(renew: Callable[[], object], every_s: float) -> Iterator[None]:
    """Call `renew` in a thread every `every_s` seconds while the block runs; errors are ignored until the next call."""
    stop_event = Event()

    def work() -> None:
        while not stop_event.wait(every_s):
            with suppress(EnginesmithError):
                renew()

    thread = Thread(target=work, name="enginesmith-renew", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop_event.set()
        thread.join()


def secure_version(guard: Guard, manifest: Manifest) -> None:
    """Protect an existing version, its blobs and its graphs from deletion while the guard's lease is held.

    Raises ConflictError as `Guard.secure`, and IntegrityError if the version was deleted or replaced.
    """
    model, version = manifest.model, manifest.version
    keys = list(guard.store.list(layout.version_prefix(model, version)))
    documents = (
        document for _, document in side_by_side(guard.store.read, [key for key in keys if key.endswith(".json")])
    )
    digests = (
        digest for document in (*documents, "\n".join(keys).encode()) if document for digest in digests_in(document)
    )
    guard.secure([version_name(model, version), *digests])
    document = guard.store.read(layout.manifest_key(model, version))
    if document is None or parse(document, model=model, version=version).digest != manifest.digest:
        raise IntegrityError(f"{model}@{version} was deleted or replaced while it was read; run again")
    secure_graphs(guard, manifest)


def secure_graphs(guard: Guard, manifest: Manifest) -> None:
    """`secure_version` of each version that an ensemble pins; does nothing for other versions."""
    for graph in manifest.graphs:
        secure_version(guard, load_pinned(guard.store, graph))


def version_name(model: str, version: str) -> str:
    """The name of a version among the garbage marks: 'model@version'."""
    return f"{model}@{version}"
