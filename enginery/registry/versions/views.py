"""What `list` and `show` say."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from enginery.core.codec import encode
from enginery.core.errors import IntegrityError, UnknownNameError
from enginery.core.names import Reference, version_order
from enginery.registry.evidence.attestations import JudgedEntry, judged
from enginery.registry.evidence.canaries import CanaryVerdict, canaries
from enginery.registry.evidence.latencies import latencies
from enginery.registry.manifest import Manifest
from enginery.registry.store.base import Store
from enginery.registry.store.keys import page_key
from enginery.registry.versions import channels
from enginery.registry.versions import lookup as versions

if TYPE_CHECKING:
    from enginery.core.reports.latency import LatencyReport

# Requests on their way at once, for a registry that is far away.
_AT_ONCE = 16
# No version's name, so that one damaged channel does not keep a listing from all others.
UNREADABLE = "(unreadable)"


@dataclass(frozen=True)
class ListedModel:
    """A model with its versions, oldest first, and the version that each of its channels points to."""

    model: str
    versions: tuple[str, ...]
    channels: Mapping[str, str]


@dataclass(frozen=True)
class ListedVersion:
    """A version, how many of its engines have which status today, and the channels that point to it.

    damage: why it cannot be read; such a version has no time (ISO 8601, UTC) and no engines.
    """

    model: str
    version: str
    created_at: str | None
    engines: Mapping[str, int]
    channels: Mapping[str, str]
    damage: str | None = None

    def to_json(self) -> dict[str, object]:
        """What `enginery list --json` prints: without `damage` where there is none."""
        return {name: value for name, value in vars(self).items() if name != "damage" or value}


@dataclass(frozen=True)
class VersionStatus:
    """A version with what became known since it was published.

    engines: with their status of today.  channels: that point to it.  latencies: reports by the engine's digest.
    page: where its HTML report lies; None without one.
    """

    manifest: Manifest
    engines: tuple[JudgedEntry, ...]
    channels: tuple[str, ...]
    latencies: Mapping[str, Sequence["LatencyReport"]]
    canaries: tuple[CanaryVerdict, ...]
    page: str | None

    def to_json(self) -> dict[str, object]:
        """What `enginery show --json` prints: the manifest's fields, and these."""
        return {
            **self.manifest.to_json(),
            "manifest": self.manifest.digest,
            "engines": [asdict(entry) for entry in self.engines],
            "channels": list(self.channels),
            "latencies": encode(self.latencies),
            "canaries": [asdict(found) for found in self.canaries],
            "page": self.page,
        }


def listed_models(store: Store, *, limit: int | None = None, after: str | None = None) -> list[ListedModel]:
    """Models by name, each with its versions and where its channels point. Reads their channels and no manifest.

    limit: at most so many.  after: only those after this name, which pages through all of them.
    """
    found = versions.catalogue(store) if limit is None else versions.page(store, limit, after)
    found = [listed for listed in found if after is None or listed.model > after]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        pointing = pool.map(lambda listed: _pointing(store, listed.model, listed.channels), found)
        return [
            ListedModel(listed.model, tuple(listed.versions), channels)
            for listed, channels in zip(found, pointing, strict=True)
        ]


def listed_versions(
    store: Store, model: str, *, limit: int | None = None, before: str | None = None, after: str | None = None
) -> list[ListedVersion]:
    """Versions of a model, oldest first, each with how many engines have which status. Reads the manifests of these.

    limit: at most so many, the newest.  before: only versions older than this one, which pages through all of them.
    after: only versions newer than this one; then `limit` takes the oldest, which pages the other way.
    Raises UnknownNameError for no such model.
    """
    known = versions.versions(store, model)
    if not known:
        raise UnknownNameError(f"no model {model!r} in {store.uri}; `enginery list` shows what there is")
    pointing = _channels(store, model)
    found = [version for version in known if before is None or version_order(version) < version_order(before)]
    found = [version for version in found if after is None or version_order(version) > version_order(after)]
    count = len(found) if limit is None else limit
    wanted = found[:count] if after is not None else found[max(0, len(found) - count) :]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(lambda version: _listed_version(store, model, version, pointing), wanted))


def shown(store: Store, reference: Reference) -> VersionStatus:
    """Everything about one version. Raises UnknownNameError, and IntegrityError for what is damaged."""
    manifest = versions.locate(store, reference).manifest
    key = page_key(manifest.model, manifest.version)
    pointing = _channels(store, manifest.model)
    return VersionStatus(
        manifest,
        judged(store, manifest),
        tuple(name for name, version in pointing.items() if version == manifest.version),
        latencies(store, manifest),
        tuple(canaries(store, manifest)),
        store.locator(key) if _exists(store, key) else None,
    )


def _exists(store: Store, key: str) -> bool:
    """Whether a document is there, without reading it: pages are long."""
    folder, _, name = key.rpartition("/")
    return name in store.children(f"{folder}/")


def _listed_version(store: Store, model: str, version: str, pointing: dict[str, str]) -> ListedVersion:
    here = {name: version for name, target in pointing.items() if target == version}
    try:
        manifest = versions.load(store, model, version)
        statuses = Counter(entry.status for entry in judged(store, manifest))
    except IntegrityError as error:
        return ListedVersion(model, version, None, {}, here, str(error))
    return ListedVersion(model, version, manifest.created_at, dict(sorted(statuses.items())), here)


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
