"""One collection: its claim, the search for garbage, marking and deleting."""

import os
import secrets
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import islice
from threading import Lock

from enginesmith.core import parsing
from enginesmith.core.errors import ConflictError, EnginesmithError, InputError, IntegrityError, digests_in
from enginesmith.core.names import version_order
from enginesmith.core.parsing import stamp
from enginesmith.registry import leases
from enginesmith.registry.builds.runs import KIND as COPIES
from enginesmith.registry.builds.runs import read_record
from enginesmith.registry.collection.references import (
    Rules,
    Version,
    find_references,
    inventory,
    keys_below,
    stored_blobs,
)
from enginesmith.registry.manifest import parse
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.layout import MANIFEST, RECORDS, blob_key, manifest_key, version_prefix
from enginesmith.registry.store.parallel import side_by_side
from enginesmith.registry.versions.index import ListedModel

# The claim of a collection: only one collection works on a registry at a time, with its own generation of marks.
#
# A thread renews the claim during the collection, so that a killed collection delays the next one only for minutes.

# A collection that did not renew its claim for this long, on the store's clock, counts as dead.
SWEEPING = timedelta(minutes=8)
RENEW_S = 60.0


@dataclass
class Claim:
    """The claim of this process. state: the marks' state when it was last written.  begun: `steady_s` before the store
    was asked for the time in that write."""

    store: Store
    sweeper: leases.Sweeper
    state: leases.MarkState
    begun: float
    _lock: Lock = field(default_factory=Lock)

    def renew(self) -> None:
        """Renew the claim. Raises ConflictError if another collection took it."""
        self._write(lambda state: state)

    def check(self) -> None:
        """Raise ConflictError if another collection may count this one as dead; called before each deletion."""
        if parsing.steady_s() > leases.end_of(self.begun, SWEEPING):
            raise ConflictError("this collection stopped for so long that another may count it as dead; run it again")

    def begin_generation(self, shards: Iterable[str]) -> int:
        """Reserve a generation for new marks in these shards, and return it. Called before the first is written."""

        def change(state: leases.MarkState) -> leases.MarkState:
            return replace(state, latest=state.latest + 1, shards=tuple(sorted({*state.shards, *shards})))

        self._write(change, own_generation=True)
        return self.sweeper.generation

    def publish_generation(self) -> None:
        """Publish the marks of this generation, so that they count. Call it when all of them are written."""
        self._write(lambda state: replace(state, generation=self.sweeper.generation))

    def release(self, empty: Iterable[str]) -> None:
        """Release the claim. empty: shards without marks."""

        def change(state: leases.MarkState) -> leases.MarkState:
            if state.sweeper is None or state.sweeper.id != self.sweeper.id:
                return state
            shards = tuple(shard for shard in state.shards if shard not in set(empty))
            return replace(without_sweeper(state), shards=shards)

        leases.update_state(self.store, change)

    def _write(self, change: Callable[[leases.MarkState], leases.MarkState], *, own_generation: bool = False) -> None:
        def make(state: leases.MarkState) -> leases.MarkState:
            if state.sweeper is None or state.sweeper.id != self.sweeper.id:
                raise ConflictError("another collection counted this one as dead and took over; run it again")
            new_state = change(state)
            generation = new_state.latest if own_generation else state.sweeper.generation
            return replace(new_state, sweeper=replace(state.sweeper, expires=now + SWEEPING, generation=generation))

        with self._lock:
            start_s, now = parsing.steady_s(), self.store.now()
            self.state = leases.update_state(self.store, make)
            self.sweeper, self.begun = self.state.sweeper or self.sweeper, start_s


def without_sweeper(state: leases.MarkState) -> leases.MarkState:
    """The state after a collection ended or died; a generation that it did not publish is abandoned."""
    generation = state.sweeper.generation if state.sweeper else 0
    abandoned_generations = (generation,) if generation > state.generation else ()
    return replace(state, sweeper=None, abandoned=(*state.abandoned, *abandoned_generations))


@contextmanager
def hold_claim(store: Store) -> Iterator[Claim]:
    """Hold the claim to collect while the block runs. Raises ConflictError if another collection holds it."""
    start_s, now = parsing.steady_s(), store.now()
    own_sweeper = leases.Sweeper(secrets.token_hex(16), f"{socket.gethostname()} {os.getpid()}", now + SWEEPING)

    def change(state: leases.MarkState) -> leases.MarkState:
        other_sweeper = state.sweeper
        if other_sweeper is not None and other_sweeper.id != own_sweeper.id and now < other_sweeper.expires:
            raise ConflictError(
                f"another collection ({other_sweeper.by}) is running; run again when it has ended (if it was killed, "
                f"its claim ends at {stamp(other_sweeper.expires)})"
            )
        return replace(without_sweeper(state), sweeper=own_sweeper)

    claim = Claim(store, own_sweeper, leases.update_state(store, change), start_s)
    try:
        with leases.keep_renewing(claim.renew, RENEW_S):
            yield claim
    except BaseException:
        with suppress(EnginesmithError):  # the claim expires
            claim.release(())
        raise


@dataclass(frozen=True)
class Garbage:
    """The deletable content of a registry. reasons: kept version -> reasons.  versions: to be deleted.  remains:
    versions' folders without a manifest.  blobs: digests to be deleted -> (reason, size in bytes).

    named: digest, or version that an ensemble pins -> names of the versions to be deleted that name it.  records: key
    of a record -> its blobs that are garbage or missing, if any; None for a document that is no record.
    listed: all models that have a version.
    """

    reasons: dict[Version, tuple[str, ...]]
    versions: tuple[Version, ...]
    remains: tuple[Version, ...]
    blobs: dict[str, tuple[str, int]]
    named: dict[str, tuple[str, ...]]
    records: dict[str, tuple[str, ...] | None]
    listed: tuple[ListedModel, ...]

    @property
    def names(self) -> list[str]:
        """All names to be deleted, in the form of the garbage marks."""
        return [*(f"{model}@{version}" for model, version in (*self.versions, *self.remains)), *self.blobs]

    def rows(self) -> Iterator[tuple[str, str, str, int]]:
        """Kind, name, reason, and size in bytes of each item."""
        for model, version in self.versions:
            yield "version", f"{model}@{version}", "no channel, pin or rule keeps it", 0
        for model, version in self.remains:
            yield "remains", f"{model}@{version}", "documents of a version without a manifest", 0
        for digest, (reason, size) in self.blobs.items():
            yield "blob", digest, reason, size


def find_garbage(store: Store, rules: Rules) -> Garbage:
    """Find the garbage of a registry: every document is listed and read once, in parallel.

    Raises IntegrityError for an unreadable channel or kept manifest.
    """
    sizes = stored_blobs(store)
    contents = inventory(store)
    references = find_references(store, contents, sizes, rules)
    existing_versions = set(contents.versions)
    versions = tuple(
        version for version in contents.folders if version in existing_versions and version not in references.reasons
    )
    orphan_versions = tuple(version for version in contents.folders if version not in existing_versions)
    orphans = references.orphans
    blob_reasons, records = _read_records(store, sizes, orphans)
    labels_by_name: dict[str, tuple[str, ...]] = {}
    labels = {version: (f"{version[0]}@{version[1]}",) for version in versions}  # one tuple for all blobs of a version
    documents = ((key, labels[version]) for version in versions for key in contents.folders[version])
    document_labels = {key: version_labels for key, version_labels in documents if key.endswith(".json")}
    for key, document in side_by_side(store.read, list(document_labels)):
        for name in (*orphans.intersection(digests_in(document or b"")), *_list_graphs(key, document)):
            earlier_labels = labels_by_name.setdefault(name, document_labels[key])
            if document_labels[key][0] not in earlier_labels:
                labels_by_name[name] = (*earlier_labels, *document_labels[key])
    delete_reasons = {labels: f"belongs to {labels[-1]}, which is garbage" for labels in set(labels_by_name.values())}
    blob_reasons |= {digest: delete_reasons[labels] for digest, labels in labels_by_name.items()}
    blobs = {digest: (blob_reasons.get(digest, "nothing refers to it"), sizes[digest]) for digest in sorted(orphans)}
    return Garbage(
        references.reasons,
        versions,
        orphan_versions,
        blobs,
        labels_by_name,
        records,
        _list_models(contents.versions, references.channels),
    )


def _list_graphs(key: str, data: bytes | None) -> list[str]:
    """The names of the versions that an ensemble pins; empty for other and for damaged documents."""
    # Parsing takes a millisecond, and nearly all manifests have no graphs.
    if data is None or not key.endswith(f"/{MANIFEST}") or b'"graphs":[]' in data:
        return []
    with suppress(IntegrityError, InputError):
        return [leases.version_name(graph.model, graph.version) for graph in parse(data).graphs]
    return []


def _list_models(versions: list[Version], channels: dict[str, dict[str, str]]) -> tuple[ListedModel, ...]:
    versions_by_model: dict[str, list[str]] = {}
    for model, version in versions:
        versions_by_model.setdefault(model, []).append(version)
    return tuple(
        ListedModel(model, tuple(sorted(model_versions, key=version_order)), channels.get(model, {}))
        for model, model_versions in versions_by_model.items()
    )


def _read_records(
    store: Store, stored_sizes: dict[str, int], orphans: set[str]
) -> tuple[dict[str, str], dict[str, tuple[str, ...] | None]]:
    """Orphan -> reason, for those that records name; and `Garbage.records`. Copies of records name no blobs."""
    orphan_reasons: dict[str, str] = {}
    record_blobs: dict[str, tuple[str, ...] | None] = {}
    reasons: dict[str, str] = {}
    keys = [key for key in keys_below(store, RECORDS) if not key.startswith(f"{RECORDS}{COPIES}/")]
    for key, record_bytes in side_by_side(store.read, keys):
        record = read_record(record_bytes)
        if record is None:
            record_blobs[key] = None
        elif losses := [digest for digest in record.blobs if digest in orphans or digest not in stored_sizes]:
            record_blobs[key] = tuple(losses)
            kind = key.removeprefix(RECORDS).partition("/")[0]
            orphan_reasons |= dict.fromkeys(
                losses, reasons.setdefault(kind, f"only a step record ({kind}) refers to it")
            )
    return orphan_reasons, record_blobs


# One sweep: mark new garbage, and delete names that were marked before, are due, and still are garbage.
#
# Its order makes it safe (docs/concepts/registry-protocol.md has the argument): it reads the marks, then the leases,
# then the references, once. A deleted name was marked before the sweep began, is due, is garbage by these references,
# and was not marked during a lease that was held when the leases were read. When the mark is changed to going by a
# swap, it must still lie unchanged in its shard: a writer that needed the name meanwhile has removed the mark, and the
# swap leaves that name out.

# Names per shard that are going at a time: a writer that needs one of them is refused until they are deleted.
BATCH = 1000
# Shards that have going names at a time.
_SHARDS_AT_ONCE = 16


@dataclass
class Sweep:
    """A sweep under a claim. shards: the marks, as last read or written.  gone: deleted name -> kind."""

    claim: Claim
    rules: Rules
    grace: timedelta
    say: Callable[[str], None]
    shards: dict[str, leases.MarkShard] = field(default_factory=dict)
    gone: dict[str, str] = field(default_factory=dict)

    @property
    def store(self) -> Store:
        """The store that is swept."""
        return self.claim.store

    def run(self) -> Garbage:
        """Sweep once, and return the garbage that was found."""
        state = self.claim.state
        self.shards = leases.read_shards(self.store, state.shards)
        marks = {
            name: mark
            for shard in self.shards.values()
            for name, mark in (*shard.waiting.items(), *shard.going.items())
            if state.counts(mark)
        }
        now = self.store.now()
        oldest_generation = min(
            (lease.seen for lease in leases.list_leases(self.store) if lease.is_held(now)), default=None
        )
        sweep_garbage = find_garbage(self.store, self.rules)
        self._mark(sweep_garbage)
        garbage_names, deadline = set(sweep_garbage.names), self.store.now() - self.grace
        due_marks = {
            name: mark
            for name, mark in marks.items()
            if name in garbage_names
            and mark.since <= deadline
            and (oldest_generation is None or mark.generation <= oldest_generation)
        }
        # While a version exists, so do the blobs and graphs that it names: a version that cannot be deleted keeps them.
        users = sweep_garbage.named
        due_versions = {name: mark for name, mark in due_marks.items() if "@" in name}
        self._delete_due({name: mark for name, mark in due_versions.items() if name not in users})
        for names in (users.keys() & due_versions.keys(), due_marks.keys() - due_versions.keys()):
            self._delete_due({name: due_marks[name] for name in names if self.gone.keys() >= set(users.get(name, ()))})
        return sweep_garbage

    def _mark(self, found_garbage: Garbage) -> None:
        """Mark new garbage, unmark names that are needed again, and adopt the marks of a dead collection."""
        garbage, state = leases.by_shard(found_garbage.names), self.claim.state
        has_new = any(
            shard_names - _counted(self.shards.get(shard, leases.MarkShard()), state.counts).keys()
            for shard, shard_names in garbage.items()
        )
        # Only collections add marks. So a shard that had marks only of current garbage still has no others.
        wrong_shards = [
            shard
            for shard in sorted({*self.shards, *garbage})
            if not _marks_exactly(self.shards.get(shard), garbage.get(shard), state.counts)
        ]
        generation = self.claim.begin_generation(garbage) if has_new else None

        def mark(shard: str) -> leases.MarkShard:
            names = garbage.get(shard, frozenset())

            def change(marks: leases.MarkShard) -> leases.MarkShard:
                current_marks = {name: mark for name, mark in _counted(marks, state.counts).items() if name in names}
                new_names = sorted(names - current_marks.keys())[: max(0, leases.MOST_IN_SHARD - len(current_marks))]
                if generation is None or not new_names:
                    return leases.MarkShard(current_marks)
                # Dated at the write: a channel may have led to the name since the references were read.
                return leases.MarkShard(
                    current_marks | dict.fromkeys(new_names, leases.Tombstone(self.store.now(), generation))
                )

            self.claim.check()
            return leases.update_shard(self.store, shard, change)

        for shard, marks in side_by_side(mark, wrong_shards):
            self.shards[shard] = marks
        if has_new:
            self.claim.publish_generation()

    def _delete_due(self, due: Mapping[str, leases.Tombstone]) -> None:
        """Delete due names, in batches of several shards at a time."""
        pending_names = {shard: sorted(names) for shard, names in leases.by_shard(due).items()}
        while pending_names:
            batch = {shard: names[:BATCH] for shard, names in islice(pending_names.items(), _SHARDS_AT_ONCE)}
            self._delete_batch({shard: {name: due[name] for name in names} for shard, names in batch.items()})
            pending_names = {
                shard: remaining_names
                for shard, names in pending_names.items()
                if (remaining_names := names[len(batch.get(shard, ())) :])
            }

    def _delete_batch(self, batch: Mapping[str, Mapping[str, leases.Tombstone]]) -> None:
        deletable_names: list[str] = []
        for shard, marks in self._change(batch, _take):
            deletable_names += (name for name in batch[shard] if name in marks.going)
        for name, _ in side_by_side(self._delete, deletable_names):
            self.gone[name] = "version" if "@" in name else "blob"
        for _ in self._change(batch, lambda marks, _: replace(marks, going={})):
            pass

    def _change(
        self,
        batch: Mapping[str, Mapping[str, leases.Tombstone]],
        change: Callable[[leases.MarkShard, Mapping[str, leases.Tombstone]], leases.MarkShard],
    ) -> Iterable[tuple[str, leases.MarkShard]]:
        def work(shard: str) -> leases.MarkShard:
            self.claim.check()
            return leases.update_shard(self.store, shard, lambda marks: change(marks, batch[shard]))

        for shard, marks in side_by_side(work, list(batch)):
            self.shards[shard] = marks
            yield shard, marks

    def _delete(self, name: str) -> None:
        self.claim.check()
        self.say(name)
        if "@" not in name:
            self.store.remove(blob_key(name))
            return
        model, _, version = name.partition("@")
        # The manifest first: a version without a manifest does not exist.
        self.store.remove(manifest_key(model, version))
        for key in list(self.store.list(version_prefix(model, version))):
            self.claim.check()  # by now another version may have this name, if this collection counted as dead
            self.store.remove(key)

    def delete_dead_records(self, garbage: Garbage) -> None:
        """Delete the records that are unusable: a blob of theirs is missing, or they are unreadable."""
        candidate_keys = [
            key
            for key, blobs in garbage.records.items()
            if blobs is None or any(digest in self.gone or digest not in garbage.blobs for digest in blobs)
        ]
        for key, is_deleted in side_by_side(self._delete_if_dead, candidate_keys):
            if is_deleted:
                self.gone[key] = "record"

    def _delete_if_dead(self, key: str) -> bool:
        """Delete a record if it is unusable, and return whether it was deleted. It is read again, because its step may
        have run meanwhile. (A record that is written at this moment may be deleted too; its step then runs again.)"""
        if (record_bytes := self.store.read(key)) is None:
            return False
        record = read_record(record_bytes)
        if record is not None and all(map(self.store.has, record.blobs)):
            return False
        self.store.remove(key)
        return True


def _counted(marks: leases.MarkShard, counts: Callable[[leases.Tombstone], bool]) -> dict[str, leases.Tombstone]:
    return {name: mark for name, mark in (*marks.waiting.items(), *marks.going.items()) if counts(mark)}


def _marks_exactly(
    marks: leases.MarkShard | None, garbage: frozenset[str] | None, counts: Callable[[leases.Tombstone], bool]
) -> bool:
    """Whether a shard has a waiting mark that counts for each of these names, and no other marks."""
    waiting_marks = marks.waiting if marks else {}
    return (
        waiting_marks.keys() == (garbage or frozenset())
        and not (marks and marks.going)
        and all(map(counts, waiting_marks.values()))
    )


def _take(marks: leases.MarkShard, tombstones: Mapping[str, leases.Tombstone]) -> leases.MarkShard:
    """The marks of a shard, with those `tombstones` changed to going that are unchanged in it."""
    going_marks = {name: mark for name, mark in tombstones.items() if marks.waiting.get(name) == mark}
    return leases.MarkShard(
        {name: mark for name, mark in marks.waiting.items() if name not in going_marks}, {**marks.going, **going_marks}
    )
