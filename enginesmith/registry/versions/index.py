"""The index of a registry's models and versions, and versions as views."""

import re
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated

from annotated_types import Predicate, doc

from enginesmith.core.codec import encode, parse_as
from enginesmith.core.errors import EnginesmithError, IntegrityError, UnknownNameError, canonical_json, digest_of_bytes
from enginesmith.core.names import Name, Reference, version_order
from enginesmith.core.parsing import Malformed
from enginesmith.core.requirements import Count, Format
from enginesmith.registry.evidence.attachments import Attachment, attachments
from enginesmith.registry.evidence.attestations import JudgedEntry, judge_entries
from enginesmith.registry.evidence.canaries import CanaryVerdict, canaries
from enginesmith.registry.evidence.latencies import latencies
from enginesmith.registry.leases import PUBLISHING, Guard, hold_lease, list_leases, version_name
from enginesmith.registry.manifest import Manifest, pinned_engines
from enginesmith.registry.store import base
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.layout import MODELS, index_key, page_key
from enginesmith.registry.store.parallel import AT_ONCE, side_by_side
from enginesmith.registry.versions import lookup
from enginesmith.registry.versions.channel_state import Move, read_channel, read_history
from enginesmith.registry.versions.lookup import Listed, catalogue, channel_names

if TYPE_CHECKING:
    from enginesmith.core.reports.latency import LatencyReport

# The index of all models: versions and channels' versions, in 16 documents, so that a listing reads few of them.
#
# It is a copy of facts under `models/`, created when a listing had to read many models, and complete from then on. A
# writer that changes a model holds a lease that names it, and rewrites the model's entry before the lease ends. So an
# entry is up to date unless a lease names its model; such models are read directly. A listing reads the leases first: a
# later writer had changed nothing when the listing began. A writer that dies leaves its lease, which stays until a
# collection has written the entry; a collection also rewrites every entry that differs from its findings. The index may
# be deleted at any time.
#
# An entry is written by compare-and-swap from the registry's content after the document was read, and every write
# increments the document's serial number. So of two writers of one model the later one has seen the other's change.

FORMAT = 1
MAX_BYTES = 48 << 20
# The first digits of the digests of models' names.
SHARDS = "0123456789abcdef"
# A listing that reads this many models creates the index.
WORTH_AN_INDEX = 100
_VERSIONS = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}( [a-z0-9][a-z0-9._-]{0,62})*")
# Replaces the version of an unreadable channel, so that the other channels are still listed.
UNREADABLE = "(unreadable)"


@dataclass(frozen=True)
class ListedModel:
    """A model, its versions sorted by name, and the version that each of its channels points to."""

    model: str
    versions: tuple[str, ...]
    channels: Mapping[str, str]

    def without(self, deleted_names: Container[str]) -> "ListedModel":
        """A copy without the versions in `deleted_names`, which are names such as 'model@version'."""
        return replace(
            self, versions=tuple(v for v in self.versions if version_name(self.model, v) not in deleted_names)
        )


@dataclass(frozen=True)
class IndexShard:
    """The entries of the models of a shard. serial: number of writes.  complete: whether it has all of its models."""

    serial: int = 0
    complete: bool = False
    models: Mapping[str, ListedModel] | None = None

    def to_bytes(self) -> bytes:
        """The document as it is stored."""
        models = {
            name: _IndexEntry(" ".join(model.versions), model.channels) for name, model in (self.models or {}).items()
        }
        return canonical_json(encode(_IndexDocument(self.serial, self.complete, models)))

    def updated(self, changes: Mapping[str, ListedModel | None], *, complete: bool = False) -> "IndexShard":
        """A copy with changed entries; None removes a model, which has no version any more."""
        models = {**(self.models or {}), **changes}
        entries = {name: entry for name, entry in models.items() if entry is not None}
        return IndexShard(self.serial + 1, self.complete or complete, entries)


@dataclass(frozen=True)
class _IndexEntry:
    """The entry of a model. versions: one text, not a list: 200,000 values in JSON take a second to parse."""

    versions: Annotated[str, Predicate(_VERSIONS.fullmatch), doc("versions with a space between them")]
    channels: Mapping[str, str]


@dataclass(frozen=True)
class _IndexDocument:
    serial: Count
    complete: bool
    models: Mapping[Name, _IndexEntry]
    format: Annotated[int, Format(FORMAT)] = FORMAT


def list_all(store: Store) -> list[ListedModel]:
    """Every model that has a version, by name. Reads the index if there is one; otherwise reads every model, and
    creates the index if there are many and this user may write."""
    if (index_models := read_index(store)) is not None:
        return index_models
    models = look_at(store, catalogue(store))
    if len(models) >= WORTH_AN_INDEX:
        with suppress(EnginesmithError):  # the registry is read-only, or others write: the next listing tries again
            make_index(store)
    return models


def read_index(store: Store) -> list[ListedModel] | None:
    """Every model in the index, by name; None without a complete index. Raises UnavailableError."""
    if store.read(index_key(SHARDS[0])) is None:
        return None
    changing_models = {model for lease in list_leases(store) for model in lease.changes}
    models_by_name: dict[str, ListedModel] = {}
    for _, shard_bytes in side_by_side(store.read, [index_key(shard) for shard in SHARDS]):
        shard = _parse(shard_bytes)
        if shard is None or not shard.complete:
            return None
        models_by_name |= shard.models or {}
    models_by_name |= {entry.model: entry for entry in _look(store, sorted(changing_models))}
    return [models_by_name[name] for name in sorted(models_by_name) if models_by_name[name].versions]


def make_index(store: Store) -> None:
    """Write the index anew from the registry's content. Raises EnginesmithError while others write it."""
    for shard in SHARDS:  # from now on writers update it
        base.change(store, index_key(shard), lambda data: None if data else IndexShard().to_bytes())
    documents = dict(side_by_side(store.read, [index_key(shard) for shard in SHARDS]))
    models_by_name = {entry.model: entry for entry in look_at(store, catalogue(store))}
    for key, shard_bytes in documents.items():
        index_shard = _parse(shard_bytes) or IndexShard()
        models = {name: entry for name, entry in models_by_name.items() if index_key(_shard_of(name)) == key}
        deleted_models: dict[str, ListedModel | None] = dict.fromkeys((index_shard.models or {}).keys() - models.keys())
        store.replace(key, index_shard.updated({**deleted_models, **models}, complete=True).to_bytes(), shard_bytes)


def refresh_index(store: Store, models: Iterable[str]) -> None:
    """Rewrite the entries of models if there is an index. Call it after a model was changed, while the lease that names
    it is still held."""
    shards: dict[str, list[str]] = {}
    for model in sorted(set(models)):
        shards.setdefault(_shard_of(model), []).append(model)
    for _ in side_by_side(lambda shard: _refresh(store, index_key(shard), shards[shard]), list(shards)):
        pass


def heal_index(store: Store, listed_models: Sequence[ListedModel], changed_models: Iterable[str] = ()) -> list[str]:
    """Rewrite the entries that differ from the findings of a collection, and those of `changed_models`, whose leases
    are over; return their names. Unreadable documents are deleted, so that a listing creates them again."""
    if store.read(index_key(SHARDS[0])) is None:
        return []  # there is no index
    wrong_models, entries = set(changed_models), {m.model: m for m in listed_models if m.versions}
    for key, shard_bytes in side_by_side(store.read, [index_key(shard) for shard in SHARDS]):
        if shard_bytes is None:
            continue
        if (shard := _parse(shard_bytes)) is None:
            store.remove(key)
            continue
        models = shard.models or {}
        names = {name for name in entries if index_key(_shard_of(name)) == key} if shard.complete else models.keys()
        wrong_models |= {name for name in {*names, *models} if models.get(name) != entries.get(name)}
    refresh_index(store, wrong_models)
    return sorted(wrong_models)


def hold_change(
    store: Store, models: Iterable[str], what: str, lasts: timedelta = PUBLISHING
) -> AbstractContextManager[Guard]:
    """`leases.hold_lease` for a block that changes versions or channels of these models; their entries are rewritten
    when it ends. If that fails the lease stays, so that nobody trusts the entries."""
    model_names = tuple(sorted(set(models)))
    return hold_lease(store, what, lasts, model_names, lambda: refresh_index(store, model_names))


def look_at(store: Store, models: Sequence[Listed]) -> list[ListedModel]:
    """Models with the versions that their channels point to. Reads the channels, in parallel."""
    channel_pairs = [(entry.model, name) for entry in models for name in entry.channels]
    pointers: dict[str, dict[str, str]] = {}
    for (model, _), pointer in side_by_side(lambda pair: _read_pointers(store, pair[0], [pair[1]]), channel_pairs):
        pointers.setdefault(model, {}).update(pointer)
    return [ListedModel(entry.model, tuple(entry.versions), pointers.get(entry.model, {})) for entry in models]


def _look(store: Store, models: Sequence[str]) -> list[ListedModel]:
    """The entries of models; without versions if they have none."""
    listings = []
    for model, model_listings in side_by_side(lambda model: catalogue(store, f"{MODELS}{model}/"), models):
        listings += model_listings or [Listed(model, (), ())]
    return look_at(store, listings)


def _refresh(store: Store, key: str, models: list[str]) -> None:
    def make(data: bytes | None) -> bytes | None:
        if data is None:
            return None  # there is no index
        entries = {entry.model: entry if entry.versions else None for entry in _look(store, models)}
        # An unreadable one is replaced too, so that a process that rebuilds the index notices the change.
        return (_parse(data) or IndexShard()).updated(entries).to_bytes()

    base.change(store, key, make)


def _shard_of(model: str) -> str:
    return digest_of_bytes(model.encode())[0]


def _parse(data: bytes | None) -> IndexShard | None:
    """Parse a document of the index; None if this release cannot."""
    try:
        document = parse_as(data or b"", MAX_BYTES, _IndexDocument)
    except Malformed:
        return None
    models = {
        name: ListedModel(name, tuple(entry.versions.split(" ")), entry.channels)
        for name, entry in document.models.items()
    }
    return IndexShard(document.serial, document.complete, models)


@dataclass(frozen=True)
class ListedVersion:
    """A version, the number of its engines by current status, and the channels that point to it.

    created_at: ISO 8601, UTC.  damage: the reason why it is unreadable, else None; such a version has no time and no
    engines.
    """

    model: str
    version: str
    created_at: str | None
    engines: Mapping[str, int]
    channels: Mapping[str, str]
    damage: str | None = None

    def to_json(self) -> dict[str, object]:
        """The JSON that `enginesmith list --json` prints; without `damage` if there is none."""
        return {name: value for name, value in vars(self).items() if name != "damage" or value}


@dataclass(frozen=True)
class VersionStatus:
    """A version with everything that was added since it was published.

    engines: with their current status; those of an ensemble with the total size of their graphs' engines.
    channels: that point to it.  latencies: reports by the engine's digest. page: URI of its HTML report; None without
    one.
    """

    manifest: Manifest
    engines: tuple[JudgedEntry, ...]
    channels: tuple[str, ...]
    latencies: Mapping[str, Sequence["LatencyReport"]]
    canaries: tuple[CanaryVerdict, ...]
    page: str | None
    attachments: tuple[Attachment, ...]

    def to_json(self) -> dict[str, object]:
        """The JSON that `enginesmith show --json` prints: the manifest's fields, and these."""
        return {
            **encode(self.manifest),
            "manifest": self.manifest.digest,
            "engines": [asdict(entry) for entry in self.engines],
            "channels": list(self.channels),
            "latencies": encode(self.latencies),
            "canaries": [asdict(verdict) for verdict in self.canaries],
            "page": self.page,
            "attachments": encode(self.attachments),
        }


def list_models(store: Store, *, limit: int | None = None, after: str | None = None) -> list[ListedModel]:
    """Models by name, each with its versions and its channels' versions: from the index, or by reading channels.

    limit: the maximum number of models.  after: only models after this name, for paging.
    """
    models = list_all(store) if limit is None else read_index(store) or look_at(store, lookup.page(store, limit, after))
    models = [entry for entry in models if after is None or entry.model > after]
    return models[:limit]


def list_versions(
    store: Store, model: str, *, limit: int | None = None, before: str | None = None, after: str | None = None
) -> list[ListedVersion]:
    """Versions of a model, oldest first, each with its number of engines by status. Reads only their manifests.

    limit: only this many of the newest.  before: only versions older than this one, for paging backward.
    after: only versions newer than this one, of which `limit` takes the oldest, for paging forward.
    Raises UnknownNameError for an unknown model.
    """
    all_versions = lookup.versions(store, model)
    if not all_versions:
        raise UnknownNameError(f"no model {model!r} in {store.uri}; `enginesmith list` shows what there is")
    pointers = _read_pointers(store, model, channel_names(store, model))
    range_versions = [
        version
        for version in all_versions
        if (before is None or version_order(version) < version_order(before))
        and (after is None or version_order(version) > version_order(after))
    ]
    count = len(range_versions) if limit is None else limit
    first_index = 0 if after is not None else max(0, len(range_versions) - count)
    page_versions = range_versions[first_index : first_index + count]
    rows = side_by_side(
        lambda version: _listed_version(store, model, version, pointers), page_versions, 1 if store.near else AT_ONCE
    )
    return [row for _, row in rows]


def show_version(store: Store, reference: Reference) -> VersionStatus:
    """All data of the registry about one version. Raises UnknownNameError, and IntegrityError for damage."""
    manifest = lookup.locate(store, reference).manifest
    key = page_key(manifest.model, manifest.version)
    pointers = _read_pointers(store, manifest.model, channel_names(store, manifest.model))
    return VersionStatus(
        manifest,
        tuple(_with_size(store, manifest, entry) for entry in judge_entries(store, manifest)),
        tuple(name for name, version in pointers.items() if version == manifest.version),
        latencies(store, manifest),
        tuple(canaries(store, manifest)),
        # The page is long, so its folder is listed instead of reading it.
        store.locator(key) if key.rpartition("/")[2] in store.children(f"{key.rpartition('/')[0]}/") else None,
        tuple(attachment for attachment, _ in attachments(store, manifest)),
    )


def _with_size(store: Store, manifest: Manifest, entry: JudgedEntry) -> JudgedEntry:
    """An engine; for an ensemble, with the total size of its graphs' engines instead of its document's."""
    if not manifest.graphs or not entry.usable:
        return entry
    pinned_graphs = pinned_engines(store, manifest, entry)
    return replace(
        entry, size_bytes=sum(pinned_entry.size_of(engine) or 0 for _, pinned_entry, engine in pinned_graphs)
    )


def _listed_version(store: Store, model: str, version: str, pointers: dict[str, str]) -> ListedVersion:
    channels = {name: version for name, target in pointers.items() if target == version}
    try:
        manifest = lookup.load(store, model, version)
        status_counts = Counter(entry.status for entry in judge_entries(store, manifest))
    except IntegrityError as error:
        return ListedVersion(model, version, None, {}, channels, str(error))
    return ListedVersion(model, version, manifest.created_at, dict(sorted(status_counts.items())), channels)


def _read_pointers(store: Store, model: str, channels: Iterable[str]) -> dict[str, str]:
    """The version that each of a model's channels points to; a channel that was deleted meanwhile is left out."""
    pointers: dict[str, str] = {}
    for name in channels:
        try:
            channel = read_channel(store, model, name)
        except IntegrityError:
            pointers[name] = UNREADABLE
        else:
            pointers |= {name: channel.version} if channel is not None else {}
    return pointers


@dataclass(frozen=True)
class ChannelMove:
    """A move of a channel. report: digest of the version's report; None if that was deleted or is damaged."""

    channel: str
    move: Move
    report: str | None

    def to_json(self) -> dict[str, object]:
        """The JSON of the move that `enginesmith registry history --json` prints."""
        return {"channel": self.channel, **encode(self.move), "report": self.report}


def history(store: Store, reference: Reference, limit: int | None = None) -> list[ChannelMove]:
    """The moves of a channel, or of all channels of a model, oldest first; at most the newest `limit` of each channel.

    Raises UnknownNameError for an unknown model or channel, and for a reference to a version.
    """
    if reference.version is not None:
        raise UnknownNameError(f"only channels have a history; {str(reference)!r} is a version: give {reference.model}")
    named_channels = [reference.channel] if reference.channel else channel_names(store, reference.model)
    channels = [channel for name in named_channels if (channel := read_channel(store, reference.model, name))]
    if not channels:
        channel_list = ", ".join(channel_names(store, reference.model)) or "none"
        raise UnknownNameError(
            f"no channel {str(reference)!r} in {store.uri}; channels of {reference.model}: {channel_list}"
        )
    reports: dict[str, str | None] = {}
    rows = []
    for channel in channels:
        moves = read_history(store, channel).moves
        for move in moves if limit is None else moves[max(0, len(moves) - limit) :]:
            if move.manifest not in reports:
                reports[move.manifest] = None
                with suppress(UnknownNameError, IntegrityError):
                    manifest = lookup.load(store, channel.model, move.version)
                    reports[move.manifest] = manifest.report if manifest.digest == move.manifest else None
            rows.append(ChannelMove(channel.name, move, reports[move.manifest]))
    return sorted(rows, key=lambda row: row.move.at)
