"""The contents of a registry, and the names that garbage collection keeps."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from enginesmith.core.errors import IntegrityError, digests_in, is_digest
from enginesmith.core.names import is_name, number_of, version_order
from enginesmith.registry.manifest import parse
from enginesmith.registry.store.base import Store, place_of
from enginesmith.registry.store.layout import BLOBS, MODELS, RUNS, TIMING, blob_key, channel_history_key, manifest_key
from enginesmith.registry.store.parallel import side_by_side
from enginesmith.registry.versions.channel_state import (
    Channel,
    ChannelHistory,
    parse_channel,
    parse_history,
    with_state,
)

# The contents of a registry, from its keys only: versions' documents, other documents that name blobs, blobs' sizes.
#
# A remote store lists a thousand keys per request, one request after another. So a prefix with more keys is listed
# folder by folder, in parallel.

Version = tuple[str, str]
# The number of keys in a page of a remote store's listing.
_PAGE = 1000


@dataclass(frozen=True)
class RegistryInventory:
    """The documents of a registry. folders: each version's documents, with or without a manifest.

    others: the other documents under models/: channels, policies, pins.  outside: other documents that name blobs: runs
    (logs) and timing documents.
    """

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
    other_keys: list[str] = []
    for key in keys_below(store, MODELS):
        match key.removeprefix(MODELS).split("/"):
            case [model, "versions", version, _, *_] if is_name(model) and is_name(version):
                folders.setdefault((model, version), []).append(key)
            case _:
                other_keys.append(key)
    outside_keys = (*store.list(RUNS), *store.list(TIMING))
    return RegistryInventory(
        {version: tuple(keys) for version, keys in sorted(folders.items())}, tuple(other_keys), outside_keys
    )


def stored_blobs(store: Store) -> dict[str, int]:
    """Digest of each blob -> its size in bytes; 0 for a link that leads out of the registry."""
    key_sizes: Iterator[tuple[str, int | None]]
    key_sizes = ((key, None) for key in store.list(BLOBS)) if store.near else _sizes_below(store, BLOBS)
    rows = ((key.rpartition("/")[2], key, size) for key, size in key_sizes)
    sizes = {digest: size for digest, key, size in rows if is_digest(digest) and key == blob_key(digest)}
    return {digest: size if size is not None else store.stored_size(digest) or 0 for digest, size in sizes.items()}


def keys_below(store: Store, prefix: str) -> list[str]:
    """`Store.list`, in any order; a remote store with more than a page of keys is listed by folders, in parallel."""
    return list(store.list(prefix)) if store.near else [key for key, _ in _sizes_below(store, prefix)]


def _sizes_below(store: Store, prefix: str) -> Iterator[tuple[str, int]]:
    page = list(islice(store.sizes(prefix), _PAGE))
    if len(page) < _PAGE:
        yield from page
        return
    children = list(store.children(prefix))
    folders = [f"{prefix}{name}" for name in children if name.endswith("/")]
    for _, folder_sizes in side_by_side(lambda folder: list(store.sizes(folder)), folders):
        yield from folder_sizes
    if keys := {f"{prefix}{name}" for name in children if not name.endswith("/")}:  # folders' listings lack them
        yield from (row for row in store.sizes(prefix) if row[0] in keys)


# The names that garbage collection keeps: versions by rule, channel and pin, and blobs by reference. Each document is
# read once.
#
# Any 64 hexadecimal digits in a document of a kept version count as a digest, so that blobs which only documents of a
# later release name (a signature, a bill of materials) are kept too. A blob kept needlessly costs space; one deleted
# wrongly costs an engine.


@dataclass(frozen=True)
class Rules:
    """The rules which versions are kept. versions: number of newest versions of each model.  moves: for each channel
    its version, those of its last `moves` moves, and those that `moves` rollbacks would lead to."""

    versions: int = 10
    moves: int = 5


@dataclass(frozen=True)
class References:
    """The names that a registry needs. reasons: kept version -> reasons as text.  orphans: stored blobs that no
    document names.  channels: model -> channel -> its version."""

    reasons: dict[Version, tuple[str, ...]]
    orphans: set[str]
    channels: dict[str, dict[str, str]]


def find_references(store: Store, contents: RegistryInventory, digests: Iterable[str], rules: Rules) -> References:
    """Read the documents that name blobs: those of kept versions, channels (canary reports), policies, pins, runs
    (logs) and timing documents. digests: digests of the blobs.

    Raises IntegrityError for an unreadable channel or manifest of a kept version, as it may have named any blob, and
    InputError for a channel of a newer format.
    """
    orphans = set(digests)
    marker = _Marking(store, contents, orphans.difference_update)
    marker.keep_newest(rules.versions)
    marker.read_others(rules.moves)
    marker.read_kept()
    for _ in marker.read(contents.outside):
        pass
    versions = set(contents.versions)
    keep_reasons = {
        version: tuple(version_reasons)
        for version, version_reasons in sorted(marker.reasons.items())
        if version in versions
    }
    return References(keep_reasons, orphans, marker.channels)


def find_named_digests(store: Store, contents: RegistryInventory) -> set[str]:
    """The digests in all documents that may name blobs, and in their keys; in a damaged one, those still readable."""
    digests: set[str] = set()
    marker = _Marking(store, contents, digests.update)
    keys = [key for version in contents.versions for key in contents.folders[version]]
    for _ in marker.read([*keys, *contents.others, *contents.outside]):
        pass
    return digests


@dataclass
class _Marking:
    store: Store
    contents: RegistryInventory
    note: Callable[[Iterable[str]], None]  # called with the digests that documents name; a set of them would be large
    reasons: dict[Version, list[str]] = field(default_factory=dict)
    channels: dict[str, dict[str, str]] = field(default_factory=dict)

    def keep(self, version: Version, why: str) -> None:
        self.reasons.setdefault(version, []).append(why)

    def keep_newest(self, count: int) -> None:
        versions_by_model: dict[str, list[str]] = {}
        for model, version in self.contents.versions:
            versions_by_model.setdefault(model, []).append(version)
        for model, model_versions in versions_by_model.items():
            for version in _newest(model_versions, count):
                self.keep((model, version), "among the newest")

    def read(self, keys: Iterable[str]) -> Iterator[tuple[str, bytes]]:
        """Read documents, and collect the digests in them and their keys. Yields the existing ones with their bytes."""
        documents = []
        for key in keys:
            self.note(digests_in(key.encode()))
            if key.endswith(".json"):
                documents.append(key)
        for key, document in side_by_side(self.store.read, documents):
            if document is not None:
                self.note(digests_in(document))
                yield key, document

    def read_others(self, moves: int) -> None:
        for key in self.contents.others:
            match key.removeprefix(MODELS).split("/"):
                case [model, "pins", name] if name.endswith(".json"):
                    self.keep((model, name.removesuffix(".json")), "pinned")
        history_keys = {
            key for key in self.contents.others if key.removeprefix(MODELS).split("/")[1:2] == ["histories"]
        }
        states: dict[str, Channel] = {}
        for key, history_bytes in self.read(key for key in self.contents.others if key not in history_keys):
            match key.removeprefix(MODELS).removesuffix(".json").split("/"):
                case [model, "channels", name] if state := parse_channel(
                    history_bytes, model, name, place_of(self.store, key)
                ):
                    states[channel_history_key(model, name)] = state
        # After the channels: a history read later contains all moves before the state that was read.
        histories = {
            key: parse_history(history_bytes, place_of(self.store, key))
            for key, history_bytes in self.read(sorted({*history_keys, *states}))
        }
        for key, state in states.items():
            self._keep_served(state, with_state(self.store, histories.get(key, ChannelHistory()), state), moves)

    def _keep_served(self, state: Channel, history: ChannelHistory, moves: int) -> None:
        """Keep the versions that a channel points to, that its last `moves` moves led to, that rollbacks would lead to,
        and that its rollout brings."""
        self.channels.setdefault(state.model, {})[state.name] = state.version
        recent_moves = (*history.moves[-(moves + 1) :], *history.active_promotions()[-(moves + 1) :])
        for version in {move.version for move in recent_moves}:
            self.keep((state.model, version), f"channel {state.name}")
        if rollout := state.active_rollout:
            self.keep((state.model, rollout.version), f"rollout {state.name}")

    def read_kept(self) -> None:
        """Read the documents of the versions that are kept, and of those that kept ensembles pin."""
        versions, read_versions = set(self.contents.versions), set[Version]()
        while new_versions := sorted((self.reasons.keys() & versions) - read_versions):
            read_versions.update(new_versions)
            manifests = {manifest_key(*version): version for version in new_versions}
            for key, manifest_bytes in self.read(
                key for version in new_versions for key in self.contents.folders[version]
            ):
                if key in manifests:
                    self._read_graphs(key, manifest_bytes, *manifests[key])

    def _read_graphs(self, key: str, data: bytes, model: str, version: str) -> None:
        try:
            manifest = parse(data, model=model, version=version, place=place_of(self.store, key))
        except IntegrityError as error:
            raise type(error)(f"{error}; no collection runs while this document exists") from error
        for graph in manifest.graphs:
            self.keep((graph.model, graph.version), f"graph of {model}@{version}")


def _newest(versions: list[str], count: int) -> set[str]:
    """The `count` newest versions by name, and the highest number. The next version's number is derived from it, so
    that no number is used twice."""
    sorted_versions = sorted(versions, key=version_order)
    highest = max(versions, key=number_of)
    return {*sorted_versions[max(0, len(sorted_versions) - count) :], *([highest] if number_of(highest) else [])}
