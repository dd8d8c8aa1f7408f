"""What `list` and `show` say, as JSON values."""

from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from enginery.core.errors import IntegrityError, UnknownNameError
from enginery.core.names import Reference, version_order
from enginery.registry.evidence.attestations import judged
from enginery.registry.evidence.canaries import canaries
from enginery.registry.evidence.latencies import latencies
from enginery.registry.store.base import Store
from enginery.registry.store.keys import page_key
from enginery.registry.versions import channels, lookup

# Requests on their way at once, for a registry that is far away.
_AT_ONCE = 16
# No version's name, so that one damaged channel does not keep a listing from all others.
UNREADABLE = "(unreadable)"


def listed_models(store: Store, *, limit: int | None = None, after: str | None = None) -> list[dict[str, Any]]:
    """Models by name, each with its versions and where its channels point. Reads their channels and no manifest.

    limit: at most so many.  after: only those after this name, which pages through all of them.
    """
    found = lookup.catalogue(store) if limit is None else lookup.page(store, limit, after)
    found = [listed for listed in found if after is None or listed.model > after]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        pointing = pool.map(lambda listed: _pointing(store, listed.model, listed.channels), found)
        return [
            {"model": listed.model, "versions": list(listed.versions), "channels": channels}
            for listed, channels in zip(found, pointing, strict=True)
        ]


def listed_versions(
    store: Store, model: str, *, limit: int | None = None, before: str | None = None, after: str | None = None
) -> list[dict[str, Any]]:
    """Versions of a model, oldest first, each with how many engines have which status. Reads the manifests of these.

    limit: at most so many, the newest.  before: only versions older than this one, which pages through all of them.
    after: only versions newer than this one; then `limit` takes the oldest, which pages the other way.
    A version that cannot be read has its `damage` in words.
    Raises UnknownNameError for no such model.
    """
    known = lookup.versions(store, model)
    if not known:
        raise UnknownNameError(f"no model {model!r} in {store.uri}; `enginery list` shows what there is")
    pointing = _channels(store, model)
    found = [version for version in known if before is None or version_order(version) < version_order(before)]
    found = [version for version in found if after is None or version_order(version) > version_order(after)]
    count = len(found) if limit is None else limit
    wanted = found[:count] if after is not None else found[max(0, len(found) - count) :]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(lambda version: _listed_version(store, model, version, pointing), wanted))


def shown(store: Store, reference: Reference) -> dict[str, Any]:
    """Everything about one version: its manifest, its engines' status of today, the channels that point to it."""
    manifest = lookup.locate(store, reference).manifest
    key = page_key(manifest.model, manifest.version)
    pointing = _channels(store, manifest.model)
    return {
        **manifest.to_json(),
        "manifest": manifest.digest,
        "engines": [asdict(entry) for entry in judged(store, manifest)],
        "channels": [name for name, version in pointing.items() if version == manifest.version],
        "latencies": latencies(store, manifest),
        "canaries": [asdict(found) for found in canaries(store, manifest)],
        "page": store.locator(key) if _exists(store, key) else None,
    }


def _exists(store: Store, key: str) -> bool:
    """Whether a document is there, without reading it: pages are long."""
    folder, _, name = key.rpartition("/")
    return name in store.children(f"{folder}/")


def _listed_version(store: Store, model: str, version: str, pointing: dict[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "model": model,
        "version": version,
        "created_at": None,
        "engines": {},
        "channels": {name: version for name, target in pointing.items() if target == version},
    }
    try:
        manifest = lookup.load(store, model, version)
        statuses = Counter(entry.status for entry in judged(store, manifest))
    except IntegrityError as error:
        return found | {"damage": str(error)}
    return found | {"created_at": manifest.created_at, "engines": dict(sorted(statuses.items()))}


def _channels(store: Store, model: str) -> dict[str, str]:
    return _pointing(store, model, channels.names(store, model))


def _pointing(store: Store, model: str, names: Iterable[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in names:
        try:
            channel = channels.read(store, model, name)
        except IntegrityError:
            found[name] = UNREADABLE
        else:
            found |= {name: channel.version} if channel is not None else {}
    return found
