"""What a registry can delete: versions and blobs that nothing needs, found by one mark, and records without blobs."""

from collections.abc import Iterator
from dataclasses import dataclass

from enginesmith.core.digest import digests_in
from enginesmith.core.names import version_order
from enginesmith.registry.builds.record_copies import KIND as COPIES
from enginesmith.registry.builds.records import read_record
from enginesmith.registry.collection.inventory import Version, inventory, keys_below, stored_blobs
from enginesmith.registry.collection.references import Rules, find_references
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.layout import RECORDS
from enginesmith.registry.store.parallel import side_by_side
from enginesmith.registry.versions.index import ListedModel


@dataclass(frozen=True)
class Garbage:
    """What a registry can delete. kept: versions that stay -> reasons.  versions: to be deleted.  remains: versions'
    folders without a manifest.  blobs: digests to be deleted -> (reason, size in bytes).

    named: digest -> names of the versions to be deleted whose documents name it.  records: key of a record -> those of
    its blobs that are garbage or missing, if any; None for a document that is no record.  listed: all models that have
    a version.
    """

    kept: dict[Version, tuple[str, ...]]
    versions: tuple[Version, ...]
    remains: tuple[Version, ...]
    blobs: dict[str, tuple[str, int]]
    named: dict[str, tuple[str, ...]]
    records: dict[str, tuple[str, ...] | None]
    listed: tuple[ListedModel, ...]

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


def find_garbage(store: Store, rules: Rules) -> Garbage:
    """Find the garbage of a registry: every document is listed and read once, side by side.

    Raises IntegrityError for a channel or a kept manifest that cannot be read.
    """
    stored = stored_blobs(store)
    known = inventory(store)
    found = find_references(store, known, stored, rules)
    there = set(known.versions)
    versions = tuple(version for version in known.folders if version in there and version not in found.kept)
    remains = tuple(version for version in known.folders if version not in there)
    orphans = found.orphans
    why, records = _read_records(store, stored, orphans)
    named: dict[str, tuple[str, ...]] = {}
    only = {version: (f"{version[0]}@{version[1]}",) for version in versions}  # one tuple for all blobs of a version
    documents = ((key, only[version]) for version in versions for key in known.folders[version])
    folders = {key: name for key, name in documents if key.endswith(".json")}
    for key, data in side_by_side(store.read, list(folders)):
        for digest in orphans.intersection(digests_in(data or b"")):
            before = named.setdefault(digest, folders[key])
            if folders[key][0] not in before:
                named[digest] = (*before, *folders[key])
    goes = {names: f"of {names[-1]}, which goes" for names in set(named.values())}
    why |= {digest: goes[names] for digest, names in named.items()}
    blobs = {digest: (why.get(digest, "nothing refers to it"), stored[digest]) for digest in sorted(orphans)}
    return Garbage(found.kept, versions, remains, blobs, named, records, _list_models(known.versions, found.channels))


def _list_models(versions: list[Version], channels: dict[str, dict[str, str]]) -> tuple[ListedModel, ...]:
    by_model: dict[str, list[str]] = {}
    for model, version in versions:
        by_model.setdefault(model, []).append(version)
    return tuple(
        ListedModel(model, tuple(sorted(found, key=version_order)), channels.get(model, {}))
        for model, found in by_model.items()
    )


def _read_records(
    store: Store, stored: dict[str, int], orphans: set[str]
) -> tuple[dict[str, str], dict[str, tuple[str, ...] | None]]:
    """Orphan -> reason, of those that records name; and `Garbage.records`. Copies of records name no blobs."""
    why: dict[str, str] = {}
    found: dict[str, tuple[str, ...] | None] = {}
    reasons: dict[str, str] = {}
    keys = [key for key in keys_below(store, RECORDS) if not key.startswith(f"{RECORDS}{COPIES}/")]
    for key, data in side_by_side(store.read, keys):
        record = read_record(data)
        if record is None:
            found[key] = None
        elif going := [digest for digest in record.blobs if digest in orphans or digest not in stored]:
            found[key] = tuple(going)
            kind = key.removeprefix(RECORDS).partition("/")[0]
            why |= dict.fromkeys(going, reasons.setdefault(kind, f"only the memory of a step ({kind}) refers to it"))
    return why, found
