"""Collecting garbage in two phases: condemn it now, and delete after a grace period what still is garbage.

Sound at every interleaving with writers that hold a `guard`; see docs/retention.md for the argument.
"""

import os
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from enginery.core.errors import ConflictError
from enginery.registry import build_lock
from enginery.registry.records import read_record
from enginery.registry.retention import marks
from enginery.registry.retention.garbage import Garbage, find
from enginery.registry.retention.marks import Rules
from enginery.registry.runs import journal
from enginery.registry.store.base import Store
from enginery.registry.store.keys import BLOBS, RECORDS, blob_key, lease_key, manifest_key, version_prefix
from enginery.registry.writers import clock, leases, tombstones
from enginery.registry.writers.tombstones import Condemned, Sentence, Sweeper

GRACE = timedelta(days=7)
# What one sweep may take before another collection counts it as dead.
SWEEPING = timedelta(hours=1)
BATCH = 1000


@dataclass(frozen=True)
class Item:
    """One thing to go. name: `model@version`, a digest or a key.  state: 'new' (not condemned yet), 'waiting' (until
    `due`), 'due', 'held' (by a lease) or 'deleted'.  size_bytes: of a blob."""

    kind: str
    name: str
    why: str
    size_bytes: int
    state: str
    due: datetime | None = None


@dataclass(frozen=True)
class Collected:
    """What a collection found and did. kept: each version that stays, with why.  leases: who was writing."""

    items: tuple[Item, ...]
    kept: Mapping[str, tuple[str, ...]]
    leases: tuple[str, ...]
    acted: bool

    def size_bytes(self, *states: str) -> int:
        """Bytes of the blobs in these states."""
        return sum(item.size_bytes for item in self.items if item.state in states)


def collect(
    store: Store,
    rules: Rules | None = None,
    grace: timedelta = GRACE,
    *,
    delete: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> Collected:
    """Find garbage; with `delete`, condemn what is new and delete what was condemned longer than `grace` ago.

    Raises ConflictError while another collection deletes, IntegrityError for a channel, lease, manifest that stays or
    list of condemned names that cannot be read: what cannot be read may need anything.
    """
    found = find(store, rules or Rules())
    if not delete:
        told = _told(store, found, tombstones.read(store), grace, {}, acted=False)
        return _with_runs(told, journal.surplus(store), "due")
    sweep = _Sweep(store, rules or Rules(), grace, say)
    sweep.condemn(found)
    sweep.run()
    store.sweep()
    told = _told(store, found, tombstones.read(store), grace, sweep.gone, acted=True)
    return _with_runs(told, journal.prune(store), "deleted")


@dataclass
class _Sweep:
    store: Store
    rules: Rules
    grace: timedelta
    say: Callable[[str], None]
    id: str = field(default_factory=lambda: secrets.token_hex(16))
    gone: dict[str, str] = field(default_factory=dict)
    until: datetime = field(default_factory=clock.now)

    def condemn(self, found: Garbage) -> None:
        """Phase 1: put new garbage on the list, take off what is needed again; take over what a dead sweep left."""
        names, now = set(found.names), clock.now()

        def change(known: Condemned) -> Condemned:
            self._refuse_if_swept(known)
            before = {**known.waiting, **known.going}
            room = max(0, tombstones.MOST - len(before))
            fresh = sorted(names - before.keys())[:room]
            generation = known.generation + bool(fresh)
            waiting = {name: item for name, item in before.items() if name in names}
            return Condemned(generation, waiting | dict.fromkeys(fresh, Sentence(now, generation)))

        tombstones.update(self.store, change)

    def run(self) -> None:
        """Phase 2, in batches: make them going, look again who needs them, delete the rest, and say so."""
        held: set[str] = set()
        while batch := sorted(name for name in self._due() if name not in held)[:BATCH]:
            taken = self._take(batch)
            doomed = self._doomed(taken)
            for name in doomed:
                self._delete(name)
            held.update(taken.keys() - doomed)
            self._close(taken, doomed)
        self._forget()
        for lease in leases.leases(self.store):
            if not lease.held(clock.now()):
                self.store.remove(lease_key(lease.id))
        build_lock.forget_litter(self.store)

    def _due(self) -> Iterator[str]:
        latest = clock.now() - self.grace
        return (name for name, item in tombstones.read(self.store).waiting.items() if item.since <= latest)

    def _take(self, batch: list[str]) -> dict[str, Sentence]:
        sweeper = Sweeper(self.id, f"{socket.gethostname()} {os.getpid()}", clock.now() + SWEEPING)
        self.until = sweeper.expires

        def change(known: Condemned) -> Condemned:
            self._refuse_if_swept(known)
            going = {name: known.waiting[name] for name in batch if name in known.waiting} | dict(known.going)
            waiting = {name: item for name, item in known.waiting.items() if name not in going}
            return replace(known, waiting=waiting, going=going, sweeper=sweeper)

        return dict(tombstones.update(self.store, change).going)

    def _doomed(self, taken: Mapping[str, Sentence]) -> list[str]:
        """What no lease holds and nothing needs. First the leases are read and then the marks: a writer whose lease is
        over by then has written what it wanted to, and the marks show it. Versions first."""
        now = clock.now()
        oldest = min((lease.seen for lease in leases.leases(self.store) if lease.held(now)), default=None)
        known = marks.inventory(self.store)
        kept = marks.kept(self.store, known, self.rules)
        needed = {f"{model}@{version}" for model, version in kept} | marks.marked(self.store, known, kept)
        free = (name for name, item in taken.items() if oldest is None or item.generation <= oldest)
        return sorted((name for name in free if name not in needed), key=lambda name: ("@" not in name, name))

    def _delete(self, name: str) -> None:
        if clock.now() > self.until - clock.SKEW:
            raise ConflictError("this collection took so long that another may count it as dead; run it again")
        self.say(name)
        if "@" not in name:
            self.store.remove(blob_key(name))
        else:
            model, _, version = name.partition("@")
            # The manifest first: a version that is half deleted is no version.
            self.store.remove(manifest_key(model, version))
            for key in list(self.store.list(version_prefix(model, version))):
                self.store.remove(key)
        self.gone[name] = "version" if "@" in name else "blob"

    def _close(self, taken: Mapping[str, Sentence], doomed: list[str]) -> None:
        spared = {name: item for name, item in taken.items() if name not in set(doomed)}

        def change(known: Condemned) -> Condemned:
            if known.sweeper is None or known.sweeper.id != self.id:
                return known
            return replace(known, waiting={**known.waiting, **spared}, going={}, sweeper=None)

        tombstones.update(self.store, change)

    def _forget(self) -> None:
        """Delete the records of which a blob is gone: they count for nothing. (One that is written this very moment
        may go with them: then a step runs again.)"""
        stored = {key.rpartition("/")[2] for key in self.store.list(BLOBS)}
        for key in self.store.list(RECORDS):
            record = read_record(self.store.read(key))
            if record is None or not stored.issuperset(record["blobs"]):
                self.store.remove(key)
                self.gone[key] = "record"

    def _refuse_if_swept(self, known: Condemned) -> None:
        other = known.sweeper
        if other is not None and other.id != self.id and clock.now() < other.expires + clock.SKEW:
            raise ConflictError(
                f"another collection ({other.by}) deletes until {clock.stamp(other.expires)} at the latest; run again "
                "when it is done"
            )


def _with_runs(told: Collected, runs: list[str], state: str) -> Collected:
    """Also the old runs: documents that nothing refers to, which need no sentence. Their logs are blobs, and garbage
    from the next collection on."""
    return replace(told, items=(*told.items, *(Item("run", run, "newer runs are kept", 0, state) for run in runs)))


def _told(
    store: Store, found: Garbage, known: Condemned, grace: timedelta, gone: Mapping[str, str], *, acted: bool
) -> Collected:
    now, held = clock.now(), [lease for lease in leases.leases(store) if lease.held(clock.now())]
    oldest = min((lease.seen for lease in held), default=None)

    def item(kind: str, name: str, why: str, size: int) -> Item:
        sentence = known.waiting.get(name) or known.going.get(name)
        if name in gone:
            return Item(kind, name, why, size, "deleted")
        if sentence is None:
            return Item(kind, name, why, size, "new")
        due = sentence.since + grace
        blocked = oldest is not None and sentence.generation > oldest
        return Item(kind, name, why, size, "waiting" if due > now else "held" if blocked else "due", due)

    items = [item(*row) for row in found.rows()]
    items += [
        Item("record", key, "a blob it speaks of is deleted", 0, "deleted") for key in gone if gone[key] == "record"
    ]
    kept = {f"{model}@{version}": why for (model, version), why in found.kept.items()}
    writers = tuple(f"{lease.what} ({lease.holder}, until {clock.stamp(lease.expires)})" for lease in held)
    return Collected(tuple(items), kept, writers, acted)
