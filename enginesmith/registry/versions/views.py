"""The data that `enginesmith list`, `enginesmith show` and `enginesmith registry history` print."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from enginesmith.core.codec import encode
from enginesmith.core.errors import IntegrityError, UnknownNameError
from enginesmith.core.names import Reference, version_order
from enginesmith.registry.ensembles import pinned_engines
from enginesmith.registry.evidence.attestations import JudgedEntry, judge_entries
from enginesmith.registry.evidence.canaries import CanaryVerdict, canaries
from enginesmith.registry.evidence.latencies import latencies
from enginesmith.registry.manifest import Manifest
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.layout import page_key
from enginesmith.registry.versions import lookup
from enginesmith.registry.versions.index import UNREADABLE, ListedModel, list_all, look_at, read_index
from enginesmith.registry.versions.lookup import channel_names
from enginesmith.registry.versions.state import Move, read_channel, read_history

if TYPE_CHECKING:
    from enginesmith.core.reports.latency import LatencyReport


# Concurrent requests to a remote registry.
_AT_ONCE = 16


@dataclass(frozen=True)
class ListedVersion:
    """A version, the number of its engines by current status, and the channels that point to it.

    created_at: ISO 8601, UTC.  damage: the reason why it cannot be read, else None; such a version has no time and no
    engines.
    """

    model: str
    version: str
    created_at: str | None
    engines: Mapping[str, int]
    channels: Mapping[str, str]
    damage: str | None = None

    def to_json(self) -> dict[str, object]:
        """The JSON that `enginesmith list --json` prints; `damage` is left out where there is none."""
        return {name: value for name, value in vars(self).items() if name != "damage" or value}


@dataclass(frozen=True)
class VersionStatus:
    """A version with everything that was added since it was published.

    engines, caches: with their current status; engines of an ensemble with the size of all that each stands for.
    channels: that point to it.  latencies: reports by the engine's digest.  page: URI of its HTML report; None without
    one.
    """

    manifest: Manifest
    engines: tuple[JudgedEntry, ...]
    channels: tuple[str, ...]
    latencies: Mapping[str, Sequence["LatencyReport"]]
    canaries: tuple[CanaryVerdict, ...]
    page: str | None
    caches: tuple[JudgedEntry, ...] = ()

    def to_json(self) -> dict[str, object]:
        """The JSON that `enginesmith show --json` prints: the manifest's fields, and these."""
        return {
            **encode(self.manifest),
            "manifest": self.manifest.digest,
            "engines": [asdict(entry) for entry in self.engines],
            "channels": list(self.channels),
            "latencies": encode(self.latencies),
            "canaries": [asdict(found) for found in self.canaries],
            "page": self.page,
            **({"caches": [asdict(entry) for entry in self.caches]} if self.caches else {}),
        }


def list_models(store: Store, *, limit: int | None = None, after: str | None = None) -> list[ListedModel]:
    """Models by name, each with its versions and its channels' versions: from the index, or by reading channels.

    limit: the largest number of models.  after: only models after this name, for paging.
    """
    found = list_all(store) if limit is None else read_index(store) or look_at(store, lookup.page(store, limit, after))
    found = [listed for listed in found if after is None or listed.model > after]
    return found[:limit]


def list_versions(
    store: Store, model: str, *, limit: int | None = None, before: str | None = None, after: str | None = None
) -> list[ListedVersion]:
    """Versions of a model, oldest first, each with its number of engines by status. Reads only their manifests.

    limit: only the newest so many.  before: only versions older than this one, for paging backward.
    after: only versions newer than this one, of which `limit` takes the oldest, for paging forward.
    Raises UnknownNameError for an unknown model.
    """
    known = lookup.versions(store, model)
    if not known:
        raise UnknownNameError(f"no model {model!r} in {store.uri}; `enginesmith list` shows what there is")
    pointing = _read_pointers(store, model, channel_names(store, model))
    found = [version for version in known if before is None or version_order(version) < version_order(before)]
    found = [version for version in found if after is None or version_order(version) > version_order(after)]
    count = len(found) if limit is None else limit
    wanted = found[:count] if after is not None else found[max(0, len(found) - count) :]
    if store.near or len(wanted) < 2:  # nothing to wait for
        return [_listed_version(store, model, version, pointing) for version in wanted]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(lambda version: _listed_version(store, model, version, pointing), wanted))


def show_version(store: Store, reference: Reference) -> VersionStatus:
    """Everything that the registry has about one version. Raises UnknownNameError, and IntegrityError for damage."""
    manifest = lookup.locate(store, reference).manifest
    key = page_key(manifest.model, manifest.version)
    pointing = _read_pointers(store, manifest.model, channel_names(store, manifest.model))
    return VersionStatus(
        manifest,
        tuple(_with_size(store, manifest, entry) for entry in judge_entries(store, manifest)),
        tuple(name for name, version in pointing.items() if version == manifest.version),
        latencies(store, manifest),
        tuple(canaries(store, manifest)),
        # The page is long, so its folder is listed in place of reading it.
        store.locator(key) if key.rpartition("/")[2] in store.children(f"{key.rpartition('/')[0]}/") else None,
        judge_entries(store, replace(manifest, engines=manifest.caches, graphs=())),
    )


def _with_size(store: Store, manifest: Manifest, entry: JudgedEntry) -> JudgedEntry:
    """An engine; one of an ensemble with the size of what it stands for in place of its document's."""
    if not manifest.graphs or not entry.usable:
        return entry
    parts = pinned_engines(store, manifest, entry)
    return replace(entry, size_bytes=sum(pinned.size_of(engine) or 0 for _, pinned, engine in parts))


def _listed_version(store: Store, model: str, version: str, pointing: dict[str, str]) -> ListedVersion:
    here = {name: version for name, target in pointing.items() if target == version}
    try:
        manifest = lookup.load(store, model, version)
        statuses = Counter(entry.status for entry in judge_entries(store, manifest))
    except IntegrityError as error:
        return ListedVersion(model, version, None, {}, here, str(error))
    return ListedVersion(model, version, manifest.created_at, dict(sorted(statuses.items())), here)


def _read_pointers(store: Store, model: str, names: Iterable[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in names:
        try:
            channel = read_channel(store, model, name)
        except IntegrityError:
            found[name] = UNREADABLE
        else:
            found |= {name: channel.version} if channel is not None else {}
    return found


@dataclass(frozen=True)
class ChannelMove:
    """A move of a channel.

    report: digest of the version's report, None when the version was deleted or is damaged since.
    """

    channel: str
    move: Move
    report: str | None

    def to_json(self) -> dict[str, object]:
        """What `enginesmith registry history --json` prints of it."""
        return {"channel": self.channel, **encode(self.move), "report": self.report}


def history(store: Store, reference: Reference, limit: int | None = None) -> list[ChannelMove]:
    """The moves of a channel, or of all channels of a model, oldest first; at most the newest `limit` of each channel.

    Raises UnknownNameError for an unknown model or channel, and for a reference to a version.
    """
    if reference.version is not None:
        raise UnknownNameError(f"only channels have a history; {str(reference)!r} is a version: give {reference.model}")
    names = [reference.channel] if reference.channel else channel_names(store, reference.model)
    found = [channel for name in names if (channel := read_channel(store, reference.model, name))]
    if not found:
        known = ", ".join(channel_names(store, reference.model)) or "none"
        raise UnknownNameError(f"no channel {str(reference)!r} in {store.uri}; channels of {reference.model}: {known}")
    reports: dict[str, str | None] = {}
    rows = []
    for channel in found:
        moves = read_history(store, channel).moves
        for move in moves if limit is None else moves[max(0, len(moves) - limit) :]:
            if move.manifest not in reports:
                reports[move.manifest] = None
                with suppress(UnknownNameError, IntegrityError):
                    manifest = lookup.load(store, channel.model, move.version)
                    reports[move.manifest] = manifest.report if manifest.digest == move.manifest else None
            rows.append(ChannelMove(channel.name, move, reports[move.manifest]))
    return sorted(rows, key=lambda row: row.move.at)
