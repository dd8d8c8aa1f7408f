"""What is garbage now: versions that no rule keeps, remains of versions, and blobs that nothing kept names."""

from collections.abc import Iterator
from dataclasses import dataclass

from enginery.core.digest import is_digest
from enginery.core.errors import IntegrityError
from enginery.registry.records import read_record
from enginery.registry.retention import marks
from enginery.registry.retention.marks import Inventory, Rules, Version
from enginery.registry.store.base import Store
from enginery.registry.store.keys import BLOBS, RECORDS
from enginery.registry.writers.guard import digests_in


@dataclass(frozen=True)
class Garbage:
    """kept: versions that stay, with why.  versions: those that go.  remains: folders without a manifest.
    blobs: digests that go -> (why, size in bytes)."""

    kept: dict[Version, tuple[str, ...]]
    versions: tuple[Version, ...]
    remains: tuple[Version, ...]
    blobs: dict[str, tuple[str, int]]

    @property
    def names(self) -> list[str]:
        """As the list of condemned names has them."""
        return [*(f"{model}@{version}" for model, version in (*self.versions, *self.remains)), *self.blobs]

    def rows(self) -> Iterator[tuple[str, str, str, int]]:
        """Kind, name, why, and bytes of each."""
        for model, version in self.versions:
            yield "version", f"{model}@{version}", "no channel, pin or rule keeps it", 0
        for model, version in self.remains:
            yield "remains", f"{model}@{version}", "documents beside a manifest that is not there", 0
        for digest, (why, size) in self.blobs.items():
            yield "blob", digest, why, size


def find(store: Store, rules: Rules) -> Garbage:
    """Look through a registry. Raises IntegrityError for a channel or a kept manifest that cannot be read."""
    stored = [key.rpartition("/")[2] for key in store.list(BLOBS)]
    known = marks.inventory(store)
    kept = marks.kept(store, known, rules)
    there = set(known.versions)
    versions = tuple(version for version in known.folders if version in there and version not in kept)
    remains = tuple(version for version in known.folders if version not in there)
    needed = marks.marked(store, known, kept)
    loose = [digest for digest in stored if is_digest(digest) and digest not in needed]
    why = _reasons(store, known, versions) if loose else {}
    blobs = {digest: (why.get(digest, "nothing refers to it"), _size(store, digest)) for digest in loose}
    return Garbage(kept, versions, remains, blobs)


def _reasons(store: Store, known: Inventory, versions: tuple[Version, ...]) -> dict[str, str]:
    """Of what each loose blob was a part."""
    found: dict[str, str] = {}
    for key in store.list(RECORDS):
        record = read_record(store.read(key))
        kind = key.removeprefix(RECORDS).partition("/")[0]
        found |= dict.fromkeys(record["blobs"], f"only the memory of a step ({kind}) refers to it") if record else {}
    for version in versions:
        for key in known.folders[version]:
            data = store.read(key) if key.endswith(".json") else None
            found |= dict.fromkeys(digests_in(data or b""), f"of {version[0]}@{version[1]}, which goes")
    return found


def _size(store: Store, digest: str) -> int:
    """A blob's size; 0 when it went meanwhile."""
    try:
        return store.size(digest)
    except IntegrityError:
        return 0
