"""Garbage collection in two phases: mark garbage now, and after a grace period delete what still is garbage.

`garbage` decides what is kept and what is garbage. Nothing that a writer with a lease needs is deleted, at whatever
moment (`leases`); docs/guides/retention.md ("Why a collection never hurts a publication") has the argument.
"""

import os
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from enginery.core.errors import ConflictError
from enginery.registry import build_lock, leases, retention
from enginery.registry.latency_series import models_with_series
from enginery.registry.leases import Sweeper, Tombstone, Tombstones
from enginery.registry.records import read_record
from enginery.registry.retention import Garbage, Rules, find_garbage
from enginery.registry.runs import prune, surplus
from enginery.registry.store.base import Store
from enginery.registry.store.layout import BLOBS, RECORDS, SERIES, blob_key, lease_key, manifest_key, version_prefix
from enginery.registry.versions.lookup import versions

GRACE = timedelta(days=7)
# The longest time of one sweep; after it another collection counts it as dead.
SWEEPING = timedelta(hours=1)
BATCH = 1000


@dataclass(frozen=True)
class GarbageItem:
    """One item of garbage. name: `model@version`, a digest or a key.  state: 'new' (not marked yet), 'waiting' (until
    `due`), 'due', 'held' (by a lease) or 'deleted'.  size_bytes: of a blob."""

    kind: str
    name: str
    why: str
    size_bytes: int
    state: str
    due: datetime | None = None


@dataclass(frozen=True)
class Collected:
    """The result of a collection. kept: version that stays -> reasons.  leases: running writers in words.  acted:
    whether garbage was marked and deleted."""

    items: tuple[GarbageItem, ...]
    kept: Mapping[str, tuple[str, ...]]
    leases: tuple[str, ...]
    acted: bool

    def size_bytes(self, *states: str) -> int:
        """Total size in bytes of the blobs in these states."""
        return sum(item.size_bytes for item in self.items if item.state in states)


def collect(
    store: Store,
    rules: Rules | None = None,
    grace: timedelta = GRACE,
    *,
    delete: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> Collected:
    """Find garbage; with `delete`, mark new garbage and delete what was marked longer than `grace` ago.

    rules: which versions are kept.  say: called with each name that is deleted.
    Raises ConflictError while another collection deletes, IntegrityError for a channel, a lease, a kept manifest or the
    garbage marks that cannot be read, since these may refer to anything.
    """
    found = find_garbage(store, rules or Rules())
    sweep = _Sweep(store, rules or Rules(), grace, say)
    if delete:
        sweep.mark_garbage(found)
        sweep.run()
        store.sweep()
    return _summarize(store, found, grace, sweep.gone, acted=delete)


@dataclass
class _Sweep:
    store: Store
    rules: Rules
    grace: timedelta
    say: Callable[[str], None]
    id: str = field(default_factory=lambda: secrets.token_hex(16))
    gone: dict[str, str] = field(default_factory=dict)
    until: datetime = field(default_factory=leases.now)

    def mark_garbage(self, found: Garbage) -> None:
        """Phase 1: mark new garbage, unmark what is needed again, and take over what a dead sweep left."""
        names, now = set(found.names), leases.now()

        def change(known: Tombstones) -> Tombstones:
            self._refuse_if_swept(known)
            before = {**known.waiting, **known.going}
            room = max(0, leases.MOST_TOMBSTONES - len(before))
            fresh = sorted(names - before.keys())[:room]
            generation = known.generation + bool(fresh)
            waiting = {name: item for name, item in before.items() if name in names}
            return Tombstones(generation, waiting | dict.fromkeys(fresh, Tombstone(now, generation)))

        leases.update_tombstones(self.store, change)

    def run(self) -> None:
        """Phase 2, in batches: set names to going, find again what is needed, delete the rest, update the marks."""
        held: set[str] = set()
        while True:
            marked, latest = leases.read_tombstones(self.store).waiting, leases.now() - self.grace
            due = (name for name, item in marked.items() if item.since <= latest and name not in held)
            if not (batch := sorted(due)[:BATCH]):
                break
            taken = self._take(batch)
            deletable = self._find_deletable(taken)
            for name in deletable:
                self._delete(name)
            held.update(taken.keys() - deletable)
            self._close(taken, deletable)
        self._delete_dead_records()
        self._delete_series_without_versions()
        for lease in leases.list_leases(self.store):
            if not lease.is_held(leases.now()):
                self.store.remove(lease_key(lease.id))
        build_lock.remove_stale_locks(self.store)

    def _take(self, batch: list[str]) -> dict[str, Tombstone]:
        sweeper = Sweeper(self.id, f"{socket.gethostname()} {os.getpid()}", leases.now() + SWEEPING)
        self.until = sweeper.expires

        def change(known: Tombstones) -> Tombstones:
            self._refuse_if_swept(known)
            going = {name: known.waiting[name] for name in batch if name in known.waiting} | dict(known.going)
            waiting = {name: item for name, item in known.waiting.items() if name not in going}
            return replace(known, waiting=waiting, going=going, sweeper=sweeper)

        return dict(leases.update_tombstones(self.store, change).going)

    def _find_deletable(self, taken: Mapping[str, Tombstone]) -> list[str]:
        """Names that no lease protects and nothing refers to, versions first. The leases are read before the
        references: a writer whose lease is over by then has written its references, which are then found."""
        now = leases.now()
        oldest = min((lease.seen for lease in leases.list_leases(self.store) if lease.is_held(now)), default=None)
        known = retention.inventory(self.store)
        kept = retention.find_kept_versions(self.store, known, self.rules)
        needed = {f"{model}@{version}" for model, version in kept} | retention.find_needed_digests(
            self.store, known, kept
        )
        free = (name for name, item in taken.items() if oldest is None or item.generation <= oldest)
        return sorted((name for name in free if name not in needed), key=lambda name: ("@" not in name, name))

    def _delete(self, name: str) -> None:
        if leases.now() > self.until - leases.SKEW:
            raise ConflictError("this collection took so long that another may count it as dead; run it again")
        self.say(name)
        if "@" not in name:
            self.store.remove(blob_key(name))
        else:
            model, _, version = name.partition("@")
            # The manifest first: without it the version does not exist.
            self.store.remove(manifest_key(model, version))
            for key in list(self.store.list(version_prefix(model, version))):
                self.store.remove(key)
        self.gone[name] = "version" if "@" in name else "blob"

    def _close(self, taken: Mapping[str, Tombstone], deletable: list[str]) -> None:
        spared = {name: item for name, item in taken.items() if name not in set(deletable)}

        def change(known: Tombstones) -> Tombstones:
            if known.sweeper is None or known.sweeper.id != self.id:
                return known
            return replace(known, waiting={**known.waiting, **spared}, going={}, sweeper=None)

        leases.update_tombstones(self.store, change)

    def _delete_dead_records(self) -> None:
        """Delete the records that count for nothing, since a blob of theirs is gone. (One that is being written may be
        deleted too: then its step runs again.)"""
        stored = {key.rpartition("/")[2] for key in self.store.list(BLOBS)}
        for key in self.store.list(RECORDS):
            record = read_record(self.store.read(key))
            if record is None or not stored.issuperset(record.blobs):
                self.store.remove(key)
                self.gone[key] = "record"

    def _delete_series_without_versions(self) -> None:
        """Delete the series of latencies of models that have no version left; nothing refers to them."""
        for model in models_with_series(self.store):
            if not versions(self.store, model):
                for key in list(self.store.list(f"{SERIES}{model}/")):
                    self.store.remove(key)
                    self.gone[key] = "series"

    def _refuse_if_swept(self, known: Tombstones) -> None:
        other = known.sweeper
        if other is not None and other.id != self.id and leases.now() < other.expires + leases.SKEW:
            raise ConflictError(
                f"another collection ({other.by}) deletes until {leases.stamp(other.expires)} at the latest; run again "
                "when it is done"
            )


def _summarize(store: Store, found: Garbage, grace: timedelta, gone: Mapping[str, str], *, acted: bool) -> Collected:
    """The result of a collection, which also deletes the old runs if it acted. gone: name -> kind of what was deleted.

    Nothing refers to a run's document, so that it needs no tombstone. Its logs are blobs, and garbage from then on.
    """
    known, now = leases.read_tombstones(store), leases.now()
    held = [lease for lease in leases.list_leases(store) if lease.is_held(now)]
    oldest = min((lease.seen for lease in held), default=None)

    def item(kind: str, name: str, why: str, size: int) -> GarbageItem:
        tombstone = known.waiting.get(name) or known.going.get(name)
        if name in gone:
            return GarbageItem(kind, name, why, size, "deleted")
        if tombstone is None:
            return GarbageItem(kind, name, why, size, "new")
        due = tombstone.since + grace
        blocked = oldest is not None and tombstone.generation > oldest
        return GarbageItem(kind, name, why, size, "waiting" if due > now else "held" if blocked else "due", due)

    items = [item(*row) for row in found.rows()]
    records = (key for key, kind in gone.items() if kind == "record")
    items += [GarbageItem("record", key, "a blob it speaks of is deleted", 0, "deleted") for key in records]
    series = (key for key, kind in gone.items() if kind == "series")
    items += [GarbageItem("series", key, "its model has no version left", 0, "deleted") for key in series]
    old, state = (prune(store), "deleted") if acted else (surplus(store), "due")
    items += [GarbageItem("run", run, "newer runs are kept", 0, state) for run in old]
    kept = {f"{model}@{version}": why for (model, version), why in found.kept.items()}
    writers = tuple(f"{lease.what} ({lease.holder}, until {leases.stamp(lease.expires)})" for lease in held)
    return Collected(tuple(items), kept, writers, acted)
