"""Finds garbage: versions that no rule keeps, remains of versions, and blobs that nothing kept refers to."""

from collections.abc import Iterator
from dataclasses import dataclass

from enginery.core.digest import is_digest
from enginery.core.errors import IntegrityError
from enginery.registry.records import read_record
from enginery.registry.retention import marks
from enginery.registry.retention.marks import RegistryInventory, Rules, Version
from enginery.registry.store.base import Store
from enginery.registry.store.keys import BLOBS, RECORDS
from enginery.registry.writers.guard import digests_in


@dataclass(frozen=True)
class Garbage:
    """What a registry can delete. kept: versions that stay -> reasons.  versions: to be deleted.  remains: versions'
    folders without a manifest.  blobs: digests to be deleted -> (reason, size in bytes)."""

    kept: dict[Version, tuple[str, ...]]
    versions: tuple[Version, ...]
    remains: tuple[Version, ...]
    blobs: dict[str, tuple[str, int]]

    @property
    def names(self) -> list[str]:
        """All names to be deleted, as the garbage marks have them."""
        return [*(f"{model}@{version}" for model, version in (*self.versions, *self.remains)), *self.blobs]

    def rows(self) -> Iterator[tuple[str, str, str, int]]:
        """Kind, name, reason, and size in bytes of each item."""
        for model, version in self.versions:
            yield "version", f"{model}@{version}", "no channel, pin or rule keeps it", 0
        for model, version in self.remains:
            yield "remains", f"{model}@{version}", "documents beside a manifest that is not there", 0
        for digest, (why, size) in self.blobs.items():
            yield "blob", digest, why, size


def find(store: Store, rules: Rules) -> Garbage:
    """Find the garbage of a registry. Raises IntegrityError for a channel or a kept manifest that cannot be read."""
    stored = [key.rpartition("/")[2] for key in store.list(BLOBS)]
    known = marks.inventory(store)
    kept = marks.find_kept_versions(store, known, rules)
    there = set(known.versions)
    versions = tuple(version for version in known.folders if version in there and version not in kept)
    remains = tuple(version for version in known.folders if version not in there)
    needed = marks.find_needed_digests(store, known, kept)
    orphans = [digest for digest in stored if is_digest(digest) and digest not in needed]
    why = _reasons(store, known, versions) if orphans else {}
    blobs = {digest: (why.get(digest, "nothing refers to it"), _size(store, digest)) for digest in orphans}
    return Garbage(kept, versions, remains, blobs)


def _reasons(store: Store, known: RegistryInventory, versions: tuple[Version, ...]) -> dict[str, str]:
    """The reason why each orphaned blob is one: what it was a part of."""
    found: dict[str, str] = {}
    for key in store.list(RECORDS):
        record = read_record(store.read(key))
        kind = key.removeprefix(RECORDS).partition("/")[0]
        found |= dict.fromkeys(record.blobs, f"only the memory of a step ({kind}) refers to it") if record else {}
    for version in versions:
        for key in known.folders[version]:
            data = store.read(key) if key.endswith(".json") else None
            found |= dict.fromkeys(digests_in(data or b""), f"of {version[0]}@{version[1]}, which goes")
    return found


def _size(store: Store, digest: str) -> int:
    """A blob's size in bytes; 0 if it was deleted meanwhile."""
    try:
        return store.size(digest)
    except IntegrityError:
        return 0
