"""Finds blobs that are missing, truncated, or links out of the registry, with one stat or HEAD request per blob.

Other bytes of the same size are found when they are read: by a pull, and by `verify`.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from enginery.registry.manifest import EngineEntry, Manifest
from enginery.registry.store.base import Store

# Concurrent requests to a remote registry.
_AT_ONCE = 16


@dataclass(frozen=True)
class Loss:
    """A problem of a blob. kind: 'missing' or 'size', as in `verify`.  detail: the problem in words."""

    kind: str
    detail: str

    def __str__(self) -> str:
        return self.detail


MISSING = Loss("missing", "published, and no file of this registry: it is not there, or a link that leads out of it")


def find_lost(store: Store, sizes: Mapping[str, int | None]) -> dict[str, Loss]:
    """Missing or truncated blobs by digest. sizes: digest -> expected size in bytes, None where it is unknown."""
    if store.near or len(sizes) < 2:
        found = [store.stored_size(digest) for digest in sizes]
    else:
        with ThreadPoolExecutor(min(_AT_ONCE, len(sizes))) as pool:
            found = list(pool.map(store.stored_size, sizes))
    lost: dict[str, Loss] = {}
    for (digest, size), stored in zip(sizes.items(), found, strict=True):
        if stored is None:
            lost[digest] = MISSING
        elif size not in (None, stored):
            lost[digest] = Loss("size", f"{stored} bytes; the manifest says {size}")
    return lost


def find_lost_of(store: Store, manifest: Manifest) -> dict[str, Loss]:
    """Missing or truncated blobs of a version by digest. Only the engines' sizes are compared."""
    sizes = engine_sizes(manifest)
    return find_lost(store, {digest: sizes.get(digest) for digest in manifest.blobs()})


def find_lost_engines(store: Store, entries: Sequence[EngineEntry]) -> dict[str, Loss]:
    """Missing or truncated engines, or models with their weights, by the engine's digest."""
    sizes: dict[str, int | None] = {str(entry.digest): entry.size_bytes for entry in entries}
    models = {str(entry.digest): entry.graph for entry in entries if entry.is_stripped}
    lost = find_lost(store, {**{model: None for model in models.values() if model}, **sizes})
    found = {digest: lost.get(digest) or lost.get(models.get(digest) or "") for digest in sizes}
    return {digest: loss for digest, loss in found.items() if loss}


def engine_sizes(manifest: Manifest) -> dict[str, int | None]:
    """The sizes of a version's engines in bytes, by digest."""
    return {entry.digest: entry.size_bytes for entry in manifest.engines if entry.digest}
