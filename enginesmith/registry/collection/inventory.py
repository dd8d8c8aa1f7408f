"""What lies in a registry, by its keys alone: versions' documents, what else names blobs, blobs with their sizes.

A remote store lists a thousand keys a request, one request after another; so a prefix with more of them than that is
listed folder by folder, side by side.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from enginesmith.core.digest import is_digest
from enginesmith.core.names import is_name
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.layout import BLOBS, MODELS, RUNS, TIMING, blob_key, manifest_key
from enginesmith.registry.store.parallel import side_by_side

Version = tuple[str, str]
# A page of a remote store's listing.
_PAGE = 1000


@dataclass(frozen=True)
class RegistryInventory:
    """The documents of a registry. folders: each version's documents, a manifest among them or not.

    others: the remaining documents under models/: channels, policies, pins.  outside: documents not under models/ that
    name blobs: runs name their logs, timing documents the timing caches."""

    folders: dict[Version, tuple[str, ...]]
    others: tuple[str, ...]
    outside: tuple[str, ...] = ()

    @property
    def versions(self) -> list[Version]:
        """Versions that have a manifest."""
        return [version for version, keys in self.folders.items() if manifest_key(*version) in keys]


def inventory(store: Store) -> RegistryInventory:
    """The keys of a registry's documents that may name blobs. Lists keys, and reads no document."""
    folders: dict[Version, list[str]] = {}
    others: list[str] = []
    for key in keys_below(store, MODELS):
        match key.removeprefix(MODELS).split("/"):
            case [model, "versions", version, _, *_] if is_name(model) and is_name(version):
                folders.setdefault((model, version), []).append(key)
            case _:
                others.append(key)
    outside = (*store.list(RUNS), *store.list(TIMING))
    return RegistryInventory(
        {version: tuple(keys) for version, keys in sorted(folders.items())}, tuple(others), outside
    )


def stored_blobs(store: Store) -> dict[str, int]:
    """Digest of each blob -> its size in bytes; 0 of what is a link out of the registry."""
    found: Iterator[tuple[str, int | None]]
    found = ((key, None) for key in store.list(BLOBS)) if store.near else _sizes_below(store, BLOBS)
    named = ((key.rpartition("/")[2], key, size) for key, size in found)
    stored = {digest: size for digest, key, size in named if is_digest(digest) and key == blob_key(digest)}
    return {digest: size if size is not None else store.stored_size(digest) or 0 for digest, size in stored.items()}


def keys_below(store: Store, prefix: str) -> list[str]:
    """`Store.list`, in any order; of a remote store folder by folder, side by side, where that is more than a page."""
    return list(store.list(prefix)) if store.near else [key for key, _ in _sizes_below(store, prefix)]


def _sizes_below(store: Store, prefix: str) -> Iterator[tuple[str, int]]:
    first = list(islice(store.sizes(prefix), _PAGE))
    if len(first) < _PAGE:
        yield from first
        return
    names = list(store.children(prefix))
    folders = [f"{prefix}{name}" for name in names if name.endswith("/")]
    for _, found in side_by_side(lambda folder: list(store.sizes(folder)), folders):
        yield from found
    if beside := {f"{prefix}{name}" for name in names if not name.endswith("/")}:  # no listing of a folder has them
        yield from (item for item in store.sizes(prefix) if item[0] in beside)
