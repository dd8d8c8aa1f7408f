"""Whether the blobs that somebody is about to vouch for are there, at the price of one stat or one HEAD for each.

It finds what is missing, cut, or a link that leads out of the registry. Other bytes of the same size are found when
they are read: by a pull, and by `verify`.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from enginery.registry.manifest import EngineEntry, Manifest
from enginery.registry.store.base import Store

# Requests on their way at once, for a registry that is far away.
_AT_ONCE = 16


@dataclass(frozen=True)
class Loss:
    """What is wrong with a blob, in words; kind: 'missing' or 'size', as `verify` calls it."""

    kind: str
    detail: str

    def __str__(self) -> str:
        return self.detail


MISSING = Loss("missing", "published, and no file of this registry: it is not there, or a link that leads out of it")


def find_lost(store: Store, sizes: Mapping[str, int | None]) -> dict[str, Loss]:
    """What is wrong with blobs, by digest; sound ones are left out. sizes: in bytes, None where it is not known."""
    if store.near or len(sizes) < 2:
        found = [store.stored_size(digest) for digest in sizes]
    else:
        with ThreadPoolExecutor(min(_AT_ONCE, len(sizes))) as pool:
            found = list(pool.map(store.stored_size, sizes))
    losses = ((digest, _loss(found, size)) for (digest, size), found in zip(sizes.items(), found, strict=True))
    return {digest: loss for digest, loss in losses if loss}


def find_lost_of(store: Store, manifest: Manifest) -> dict[str, Loss]:
    """What is wrong with the blobs of a version, by digest. Sizes are known of engines."""
    sizes = engine_sizes(manifest)
    return find_lost(store, {digest: sizes.get(digest) for digest in manifest.blobs()})


def find_lost_engines(store: Store, entries: Sequence[EngineEntry]) -> dict[str, Loss]:
    """What is wrong with engines and the models that hold their weights, by the engine's digest."""
    sizes: dict[str, int | None] = {str(entry.digest): entry.size_bytes for entry in entries}
    models = {str(entry.digest): entry.graph for entry in entries if entry.options.get("strip_weights") is True}
    lost = find_lost(store, {**{model: None for model in models.values() if model}, **sizes})
    found = {digest: lost.get(digest) or lost.get(models.get(digest) or "") for digest in sizes}
    return {digest: loss for digest, loss in found.items() if loss}


def engine_sizes(manifest: Manifest) -> dict[str, int | None]:
    """The sizes of a version's engines in bytes, by digest."""
    return {entry.digest: entry.size_bytes for entry in manifest.engines if entry.digest}


def _loss(found: int | None, size: int | None) -> Loss | None:
    if found is None:
        return MISSING
    return None if size in (None, found) else Loss("size", f"{found} bytes; the manifest says {size}")
