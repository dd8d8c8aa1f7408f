"""One sweep: mark new garbage, and delete what was marked before, is due, and still is garbage.

The order is what makes it safe (docs/concepts/registry-protocol.md has the argument): the marks are read, then the
leases, then the references, once. What is deleted was marked before the sweep began, is due, is garbage by these
references, and was not marked under a lease that was held when the leases were read; and its mark still lies in its
shard, unchanged, at the swap that makes it going. A writer that came in between took the mark away, so that the swap
does not find it.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import islice

from enginesmith.registry import leases
from enginesmith.registry.builds.records import read_record
from enginesmith.registry.collection.claim import Claim
from enginesmith.registry.collection.garbage import Garbage, find_garbage
from enginesmith.registry.collection.references import Rules
from enginesmith.registry.marks import (
    MOST_IN_SHARD,
    MarkShard,
    Tombstone,
    by_shard,
    read_shards,
    update_shard,
)
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.layout import blob_key, manifest_key, version_prefix
from enginesmith.registry.store.parallel import side_by_side

# Names that are going in a shard at a time: a writer that needs one of them is refused until they are deleted.
BATCH = 1000
# Shards whose names are going at a time.
_SHARDS_AT_ONCE = 16


@dataclass
class Sweep:
    """A sweep under a claim. shards: the marks, as they were last read or written.  gone: what was deleted -> kind."""

    claim: Claim
    rules: Rules
    grace: timedelta
    say: Callable[[str], None]
    shards: dict[str, MarkShard] = field(default_factory=dict)
    gone: dict[str, str] = field(default_factory=dict)

    @property
    def store(self) -> Store:
        """The store that is swept."""
        return self.claim.store

    def run(self) -> Garbage:
        """Sweep once, and return what was found to be garbage."""
        state = self.claim.state
        self.shards = read_shards(self.store, state.shards)
        before = {
            name: mark
            for shard in self.shards.values()
            for name, mark in (*shard.waiting.items(), *shard.going.items())
            if state.counts(mark)
        }
        now = self.store.now()
        oldest = min((lease.seen for lease in leases.list_leases(self.store) if lease.is_held(now)), default=None)
        found = find_garbage(self.store, self.rules)
        self._mark(found)
        garbage, latest = set(found.names), self.store.now() - self.grace
        due = {
            name: mark
            for name, mark in before.items()
            if name in garbage and mark.since <= latest and (oldest is None or mark.generation <= oldest)
        }
        self._delete_due({name: mark for name, mark in due.items() if "@" in name})
        # While a version exists, so do its blobs: a version that cannot go keeps what it names.
        blobs = {name: mark for name, mark in due.items() if "@" not in name}
        self._delete_due(
            {name: mark for name, mark in blobs.items() if self.gone.keys() >= set(found.named.get(name, ()))}
        )
        return found

    def _mark(self, found: Garbage) -> None:
        """Mark new garbage, unmark what is needed again, and take over what a dead collection left."""
        garbage, state, now = by_shard(found.names), self.claim.state, self.store.now()
        fresh = any(
            here - _counted(self.shards.get(shard, MarkShard()), state.counts).keys() for shard, here in garbage.items()
        )
        generation = self.claim.begin_generation(garbage) if fresh else None
        tombstone = Tombstone(now, generation or 0)

        def mark(shard: str) -> MarkShard:
            here = garbage.get(shard, frozenset())

            def change(known: MarkShard) -> MarkShard:
                kept = {name: item for name, item in _counted(known, state.counts).items() if name in here}
                new = () if generation is None else sorted(here - kept.keys())[: max(0, MOST_IN_SHARD - len(kept))]
                return MarkShard(kept | dict.fromkeys(new, tombstone))

            self.claim.check()
            return update_shard(self.store, shard, change)

        for shard, marks in side_by_side(mark, sorted({*self.shards, *garbage})):
            self.shards[shard] = marks
        if fresh:
            self.claim.publish_generation()

    def _delete_due(self, due: Mapping[str, Tombstone]) -> None:
        """Delete what is due, a batch of each of some shards at a time."""
        left = {shard: sorted(names) for shard, names in by_shard(due).items()}
        while left:
            batch = {shard: names[:BATCH] for shard, names in islice(left.items(), _SHARDS_AT_ONCE)}
            self._delete_batch({shard: {name: due[name] for name in names} for shard, names in batch.items()})
            left = {shard: rest for shard, names in left.items() if (rest := names[len(batch.get(shard, ())) :])}

    def _delete_batch(self, batch: Mapping[str, Mapping[str, Tombstone]]) -> None:
        taken: list[str] = []
        for shard, marks in self._change(batch, lambda known, names: _take(known, names)):
            taken += (name for name in batch[shard] if name in marks.going)
        for name, _ in side_by_side(self._delete, taken):
            self.gone[name] = "version" if "@" in name else "blob"
        for _ in self._change(batch, lambda known, _: replace(known, going={})):
            pass

    def _change(
        self,
        batch: Mapping[str, Mapping[str, Tombstone]],
        change: Callable[[MarkShard, Mapping[str, Tombstone]], MarkShard],
    ) -> Iterable[tuple[str, MarkShard]]:
        def work(shard: str) -> MarkShard:
            self.claim.check()
            return update_shard(self.store, shard, lambda known: change(known, batch[shard]))

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
        # The manifest first: without it the version does not exist.
        self.store.remove(manifest_key(model, version))
        for key in list(self.store.list(version_prefix(model, version))):
            self.store.remove(key)

    def delete_dead_records(self, found: Garbage) -> None:
        """Delete the records that count for nothing, since a blob of theirs is gone or they cannot be read."""
        suspects = [
            key
            for key, blobs in found.records.items()
            if blobs is None or any(digest in self.gone or digest not in found.blobs for digest in blobs)
        ]
        for key, dead in side_by_side(self._delete_if_dead, suspects):
            if dead:
                self.gone[key] = "record"

    def _delete_if_dead(self, key: str) -> bool:
        """Whether a record was deleted. It is read again, as its step may have run since. (One being written may
        be deleted too: then its step runs once more.)"""
        if (data := self.store.read(key)) is None:
            return False
        record = read_record(data)
        if record is not None and all(map(self.store.has, record.blobs)):
            return False
        self.store.remove(key)
        return True


def _counted(known: MarkShard, counts: Callable[[Tombstone], bool]) -> dict[str, Tombstone]:
    return {name: item for name, item in (*known.waiting.items(), *known.going.items()) if counts(item)}


def _take(known: MarkShard, names: Mapping[str, Tombstone]) -> MarkShard:
    """The marks with those of `names` going that are still what they were."""
    going = {name: mark for name, mark in names.items() if known.waiting.get(name) == mark}
    return MarkShard(
        {name: mark for name, mark in known.waiting.items() if name not in going}, {**known.going, **going}
    )
