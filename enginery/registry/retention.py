"""What garbage collection keeps, and what is garbage: versions by rule and by pin, and blobs by reference.

Any 64 hexadecimal digits in a document of a kept version count as a digest, whatever the field, so that blobs of
documents that a later release adds beside a manifest (a signature, a bill of materials) are kept, too. A blob kept
needlessly costs space; one deleted wrongly costs an engine.
"""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from enginery.core.digest import canonical_json, is_digest
from enginery.core.errors import IntegrityError, UnknownNameError
from enginery.core.names import is_name, version_order
from enginery.registry import leases
from enginery.registry.leases import digests_in, hold_lease, secure_version, stamp
from enginery.registry.manifest import Manifest, parse
from enginery.registry.records import read_record
from enginery.registry.rollouts.state import read_rollout
from enginery.registry.store.base import Store, place_of
from enginery.registry.store.layout import BLOBS, MODELS, RECORDS, RUNS, TIMING, manifest_key, model_prefix, pin_key
from enginery.registry.versions import lookup
from enginery.registry.versions.lookup import Channel
from enginery.registry.versions.pointers import read_pointer

_AT_ONCE = 16
Version = tuple[str, str]


@dataclass(frozen=True)
class Rules:
    """Which versions are kept. versions: number of newest versions of each model.  moves: of each channel its version,
    those of its last `moves` moves, and those that `moves` rollbacks would lead to."""

    versions: int = 10
    moves: int = 5


@dataclass(frozen=True)
class RegistryInventory:
    """The documents of a registry, from one listing. folders: each version's documents, a manifest among them or not.

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
    for key in store.list(MODELS):
        match key.removeprefix(MODELS).split("/"):
            case [model, "versions", version, _, *_] if is_name(model) and is_name(version):
                folders.setdefault((model, version), []).append(key)
            case _:
                others.append(key)
    outside = (*store.list(RUNS), *store.list(TIMING))
    return RegistryInventory({version: tuple(keys) for version, keys in folders.items()}, tuple(others), outside)


def find_kept_versions(store: Store, known: RegistryInventory, rules: Rules) -> dict[Version, tuple[str, ...]]:
    """Version to keep -> reasons, in words.

    Raises IntegrityError for a channel that cannot be read, InputError for a pointer of a newer format."""
    reasons: dict[Version, list[str]] = {}
    by_model: dict[str, list[str]] = {}
    for model, version in known.versions:
        by_model.setdefault(model, []).append(version)
    for model, found in by_model.items():
        for version in _newest(found, rules.versions):
            reasons.setdefault((model, version), []).append("among the newest")
    for key in known.others:
        match key.removeprefix(MODELS).split("/"):
            case [model, "pins", name] if name.endswith(".json"):
                reasons.setdefault((model, name.removesuffix(".json")), []).append("pinned")
            case [model, "channels", name] if name.endswith(".json"):
                channel = lookup.read_channel(store, model, name.removesuffix(".json"))
                for version in find_served_versions(channel, rules.moves) if channel else ():
                    reasons.setdefault((model, version), []).append(f"channel {name.removesuffix('.json')}")
            case [model, "pointers" | "rollouts" as kind, name] if name.endswith(".json"):
                for version in _find_brought_versions(store, model, name.removesuffix(".json"), kind):
                    why = f"{kind.removesuffix('s')} {name.removesuffix('.json')}"
                    reasons.setdefault((model, version), []).append(why)
    there = set(known.versions)
    _keep_graphs(store, reasons, there)
    return {version: tuple(why) for version, why in sorted(reasons.items()) if version in there}


def _find_brought_versions(store: Store, model: str, channel: str, kind: str) -> list[str]:
    """The versions that a channel's pointer leads nodes to, or that its rollout brings, if it is not finished."""
    if kind == "rollouts":
        rollout = read_rollout(store, model, channel)
        return [rollout.version] if rollout and not rollout.is_finished else []
    # One that a dead writer left behind may lead clients to an older version still.
    with suppress(IntegrityError):  # its channel keeps what it leads to; `verify --repair` writes it anew
        if pointer := read_pointer(store, model, channel):
            return [served.version for served in pointer.versions]
    return []


def _keep_graphs(store: Store, reasons: dict[Version, list[str]], there: set[Version]) -> None:
    """In place: with the versions that kept ensembles pin. A manifest that cannot be read is left to those who read its
    digests."""
    kept = [version for version in reasons if version in there]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for (model, version), data in zip(
            kept, pool.map(lambda each: store.read(manifest_key(*each)), kept), strict=True
        ):
            with suppress(IntegrityError):
                for graph in parse(data or b"").graphs:
                    reasons.setdefault((graph.model, graph.version), []).append(f"graph of {model}@{version}")


def find_served_versions(channel: Channel, moves: int) -> set[str]:
    """The versions that a channel points to, that its last `moves` moves led to, and that rollbacks would lead to."""
    recent = [move.version for move in channel.history[-(moves + 1) :]]
    return {*recent, *[move.version for move in channel.active_promotions()[-(moves + 1) :]]}


def find_needed_digests(
    store: Store, known: RegistryInventory, versions: Iterable[Version], *, damaged: bool = False
) -> set[str]:
    """The digests in the documents of these versions and in their keys, and those in channels (canary reports),
    policies, pins, runs (logs) and timing documents.

    damaged: whether to accept a manifest that cannot be read, and use the digests that are left in it. Otherwise it
    raises IntegrityError, as it may have named anything.
    """
    manifests = {manifest_key(*version): version for version in versions}
    keys = [*(key for version in manifests.values() for key in known.folders[version]), *known.others, *known.outside]
    named = {digest for key in keys for digest in digests_in(key.encode())}
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        documents = [key for key in keys if key.endswith(".json")]
        for key, data in zip(documents, pool.map(store.read, documents), strict=True):
            if data is not None:
                if key in manifests and not damaged:
                    model, version = manifests[key]
                    try:
                        parse(data, model=model, version=version, place=place_of(store, key))
                    except IntegrityError as error:
                        raise IntegrityError(f"{error}; nothing is collected while it is there") from error
                named.update(digests_in(data))
    return named


def _newest(versions: list[str], count: int) -> set[str]:
    """The `count` newest versions by name, and the highest number: the next version's number is derived from it, so
    that no number is used twice."""
    found = sorted(versions, key=version_order)
    numbers = sorted((version for version in versions if version.isdecimal()), key=int)
    return {*found[max(0, len(found) - count) :], *numbers[-1:]}


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


def find_garbage(store: Store, rules: Rules) -> Garbage:
    """Find the garbage of a registry. Raises IntegrityError for a channel or a kept manifest that cannot be read."""
    stored = [key.rpartition("/")[2] for key in store.list(BLOBS)]
    known = inventory(store)
    kept = find_kept_versions(store, known, rules)
    there = set(known.versions)
    versions = tuple(version for version in known.folders if version in there and version not in kept)
    remains = tuple(version for version in known.folders if version not in there)
    needed = find_needed_digests(store, known, kept)
    orphans = [digest for digest in stored if is_digest(digest) and digest not in needed]
    why = _reasons(store, known, versions) if orphans else {}
    # A blob that was deleted meanwhile has size 0.
    blobs = {d: (why.get(d, "nothing refers to it"), store.stored_size(d) or 0) for d in orphans}
    return Garbage(kept, versions, remains, blobs)


def _reasons(store: Store, known: RegistryInventory, versions: tuple[Version, ...]) -> dict[str, str]:
    """Digest -> what refers to it, of blobs that records or the given versions, which are to be deleted, name."""
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


def list_pinned(store: Store, model: str) -> list[str]:
    """A model's pinned versions in the order of their names. Lists keys, and reads no pin."""
    prefix = model_prefix("pins", model)
    names = (name.removesuffix(".json") for name in store.children(prefix) if name.endswith(".json"))
    return sorted(filter(is_name, names), key=version_order)


def pin(store: Store, manifest: Manifest, *, by: str = "", why: str = "") -> bool:
    """Pin a version and return whether it was not pinned before. Raises IntegrityError if it was deleted meanwhile."""
    document = canonical_json({"at": stamp(leases.now()), "by": by, "why": why})
    with hold_lease(store, f"pinning {manifest.model}@{manifest.version}") as guard:
        secure_version(guard, manifest)
        return store.create(pin_key(manifest.model, manifest.version), document)


def unpin(store: Store, model: str, version: str) -> None:
    """Remove a version's pin. Raises UnknownNameError when there is none."""
    if store.read(pin_key(model, version)) is None:
        raise UnknownNameError(
            f"{model}@{version} is not pinned; pinned: {', '.join(list_pinned(store, model)) or 'nothing'}"
        )
    store.remove(pin_key(model, version))
