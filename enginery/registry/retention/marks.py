"""What is kept: versions by rule, and every blob that a document of theirs names.

Which blobs a version needs is not asked of the fields that this release knows. Every 64 hexadecimal digits in a
document of a kept version count as a digest, so that what a later release adds beside a manifest (a signature, a bill
of materials) is kept by this one too. Keeping a blob too many costs space; one too few costs an engine.
"""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from enginery.core.errors import IntegrityError
from enginery.core.names import is_name, version_order
from enginery.registry.manifest import parse
from enginery.registry.store.base import Store, place_of
from enginery.registry.store.keys import MODELS, RUNS, TIMING, manifest_key
from enginery.registry.versions import channels
from enginery.registry.versions.channels import Channel
from enginery.registry.writers.guard import digests_in

_AT_ONCE = 16
Version = tuple[str, str]


@dataclass(frozen=True)
class Rules:
    """Which versions are kept. versions: the newest so many of each model.  moves: of each channel, where it points,
    where its last so many moves led, and where so many rollbacks would lead."""

    versions: int = 10
    moves: int = 5


@dataclass(frozen=True)
class Inventory:
    """The documents of a registry, from one listing. folders: each version's documents, a manifest among them or not.

    others: the remaining documents under models/: channels, policies, pins.  loose: documents elsewhere that name
    blobs: runs name their logs, and GPUs their timing caches."""

    folders: dict[Version, tuple[str, ...]]
    others: tuple[str, ...]
    loose: tuple[str, ...] = ()

    @property
    def versions(self) -> list[Version]:
        """Versions that have a manifest."""
        return [version for version, keys in self.folders.items() if manifest_key(*version) in keys]


def inventory(store: Store) -> Inventory:
    """What lies under models/, and what else names blobs. Lists keys, and reads nothing."""
    folders: dict[Version, list[str]] = {}
    others: list[str] = []
    for key in store.list(MODELS):
        match key.removeprefix(MODELS).split("/"):
            case [model, "versions", version, _, *_] if is_name(model) and is_name(version):
                folders.setdefault((model, version), []).append(key)
            case _:
                others.append(key)
    loose = (*store.list(RUNS), *store.list(TIMING))
    return Inventory({version: tuple(keys) for version, keys in folders.items()}, tuple(others), loose)


def kept(store: Store, known: Inventory, rules: Rules) -> dict[Version, tuple[str, ...]]:
    """The versions that stay, each with why. Raises IntegrityError for a channel that cannot be read."""
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
                channel = channels.read(store, model, name.removesuffix(".json"))
                for version in served(channel, rules.moves) if channel else ():
                    reasons.setdefault((model, version), []).append(f"channel {name.removesuffix('.json')}")
    there = set(known.versions)
    return {version: tuple(why) for version, why in sorted(reasons.items()) if version in there}


def served(channel: Channel, moves: int) -> set[str]:
    """The versions a channel points to, was at in its last moves, and would come back to by rolling back."""
    recent = [move.version for move in channel.history[-(moves + 1) :]]
    return {*recent, *[move.version for move in channel.standing()[-(moves + 1) :]]}


def marked(store: Store, known: Inventory, versions: Iterable[Version], *, damaged: bool = False) -> set[str]:
    """The digests that documents of these versions name, or have in their keys, and those in channels (their canaries),
    policies, pins, runs (their logs) and timing caches.

    Raises IntegrityError for a manifest that cannot be read, as it may have named anything; with `damaged`, the digests
    that are left in it are among them.
    """
    manifests = {manifest_key(*version): version for version in versions}
    keys = [*(key for version in manifests.values() for key in known.folders[version]), *known.others, *known.loose]
    named = {digest for key in keys for digest in digests_in(key.encode())}
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        documents = [key for key in keys if key.endswith(".json")]
        for key, data in zip(documents, pool.map(store.read, documents), strict=True):
            if data is not None:
                if key in manifests and not damaged:
                    _check(place_of(store, key), data, manifests[key])
                named.update(digests_in(data))
    return named


def _check(place: str, data: bytes, version: Version) -> None:
    try:
        parse(data, model=version[0], version=version[1], place=place)
    except IntegrityError as error:
        raise IntegrityError(f"{error}; nothing is collected while it is there") from error


def _newest(versions: list[str], count: int) -> set[str]:
    """The newest by name, and the highest number: the next version's number is counted from it, so that no number is
    ever given twice."""
    found = sorted(versions, key=version_order)
    numbers = sorted((version for version in versions if version.isdecimal()), key=int)
    return {*found[max(0, len(found) - count) :], *numbers[-1:]}
