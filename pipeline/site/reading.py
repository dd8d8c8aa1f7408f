"""Reads what a model's pages show: its channels with their histories, and its versions with all that was measured."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from enginesmith.core.digest import digest_of_bytes, is_digest
from enginesmith.core.errors import EnginesmithError, IntegrityError, UnavailableError, UnknownNameError
from enginesmith.core.reports.latency import LatencyReport
from enginesmith.registry.ensembles import pinned_engines
from enginesmith.registry.evidence.attestations import judge_entries
from enginesmith.registry.evidence.canaries import CanaryVerdict, canaries
from enginesmith.registry.evidence.latencies import latencies
from enginesmith.registry.manifest import EngineEntry, Manifest
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.layout import evidence_prefix
from enginesmith.registry.versions import lookup, policies
from enginesmith.registry.versions.policies import ChannelPolicy
from enginesmith.registry.versions.state import Channel, ChannelHistory, read_history
from pipeline.compile.publication.pages import published_document
from validation.reporting.overview import VersionPage, overview
from validation.reporting.version_document import VersionDocument

T = TypeVar("T")


@dataclass(frozen=True)
class Signatures:
    """The signatures of a version's manifest. keys: ids of the keys that signed, shortened.  signed_by: the trust
    policy's names of signers whose signature holds; None where no policy was given.  refusal: why it is not trusted."""

    keys: tuple[str, ...] = ()
    signed_by: tuple[str, ...] | None = None
    refusal: str = ""


@dataclass(frozen=True)
class ReadVersion:
    """A version as it is now. document: None where its manifest cannot be read; `page` is what its page shows, and
    `manifest` the manifest's digest, then.
    problems: what could not be read, each in words.  sizes: of each engine by its unit, in bytes, with all that one of
    an ensemble stands for.  pinned: the graphs of an ensemble whose versions are there."""

    model: str
    version: str
    document: VersionDocument | None
    page: VersionPage | None = None
    problems: tuple[str, ...] = ()
    manifest: str = ""
    signatures: Signatures = field(default_factory=Signatures)
    sizes: Mapping[str, int | None] = field(default_factory=dict)
    pinned: tuple[str, ...] = ()


@dataclass(frozen=True)
class ReadChannel:
    """A channel. channel: None where it cannot be read, and `problem` says why.  policy: what it asks.  history: its
    moves and rollouts; empty where they cannot be read."""

    name: str
    channel: Channel | None
    policy: ChannelPolicy
    history: ChannelHistory
    problem: str = ""

    @property
    def version(self) -> str | None:
        """The version that it serves; None where it cannot be read."""
        return self.channel.version if self.channel else None


def read_channels(store: Store, model: str, names: tuple[str, ...]) -> tuple[ReadChannel, ...]:
    """The channels of a model, in this order; those that were deleted meanwhile are left out."""
    found = []
    for name in names:
        problems: list[str] = []
        channel = _try(partial(lookup.read_channel, store, model, name), None, problems)
        history = (
            _try(partial(read_history, store, channel), ChannelHistory(), problems) if channel else ChannelHistory()
        )
        policy = _try(partial(policies.of_channel, store, model, name), ChannelPolicy(), problems)
        if channel or problems:
            found.append(ReadChannel(name, channel, policy, history, "; ".join(problems)))
    return tuple(found)


def read_version(store: Store, model: str, version: str, trust: Path | None = None) -> ReadVersion:
    """A version with its statuses and measurements of today. trust: a trust policy to check its signatures by.

    What cannot be read is said in `problems`. Raises UnavailableError when the registry is out of reach.
    """
    problems: list[str] = []
    manifest = _try(lambda: lookup.load(store, model, version), None, problems)
    if manifest is None:
        return ReadVersion(model, version, None, problems=tuple(problems))
    whole = _try(lambda: _view(published_document(store, manifest)), None, problems)
    document, page = whole or _view(_bare_document(store, manifest, problems))
    signatures = _try(lambda: _signatures(store, manifest, trust), Signatures(), problems)
    sizes = {
        entry.unit: _try(partial(_size, store, document, entry), entry.size_bytes, problems)
        for entry in document.engines
    }
    there = tuple(pin.name for pin in document.graphs if lookup.load_if_there(store, pin.model, pin.version))
    problems = list(dict.fromkeys(problems))
    return ReadVersion(model, version, document, page, tuple(problems), manifest.digest, signatures, sizes, there)


def _size(store: Store, document: VersionDocument, entry: EngineEntry) -> int | None:
    """Size of an engine in bytes; of one of an ensemble that of its graphs' engines. Raises IntegrityError."""
    if not (document.graphs and entry.usable):
        return document.size_of(entry)
    return sum(pinned.size_of(engine) or 0 for _, pinned, engine in pinned_engines(store, document, entry))


def _view(document: VersionDocument) -> tuple[VersionDocument, VersionPage]:
    """The document, and what its page shows. Raises IntegrityError for a document that lacks what that needs."""
    try:
        return document, overview(document, pictures=False)
    except (KeyError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        raise IntegrityError(f"report.json of {document.reference} is not whole ({error!r})") from error


def _bare_document(store: Store, manifest: Manifest, problems: list[str]) -> VersionDocument:
    """What can be read beside a manifest whose report.json is lost or damaged."""
    known = {item.name: getattr(manifest, item.name) for item in dataclasses.fields(Manifest)}
    document = VersionDocument(**known)
    document = replace(document, engines=_try(lambda: judge_entries(store, manifest), manifest.engines, problems))
    timed: dict[str, list[LatencyReport]] = _try(lambda: latencies(store, manifest), {}, problems)
    seen: tuple[CanaryVerdict, ...] = _try(lambda: tuple(canaries(store, manifest)), (), problems)
    return replace(
        document,
        latencies={engine: tuple(found) for engine, found in timed.items()},
        canaries=seen,
    )


def _signatures(store: Store, manifest: Manifest, trust: Path | None) -> Signatures:
    prefix = evidence_prefix("signatures", manifest.model, manifest.version)
    signed = next(iter(store.children(prefix)), None) is not None
    names = store.children(f"{prefix}{digest_of_bytes(manifest.to_bytes())}/") if signed else ()
    keys = (name.removesuffix(".sig.json") for name in names if name.endswith(".sig.json"))
    found = Signatures(tuple(key[:16] for key in keys if is_digest(key)))
    if trust is None:
        return found
    from enginesmith.registry.trust import require

    try:
        return replace(found, signed_by=require(store, manifest, trust).signers)
    except UnavailableError:
        raise
    except EnginesmithError as error:
        return replace(found, signed_by=(), refusal=str(error))


def _try(read: Callable[[], T], otherwise: T, problems: list[str]) -> T:
    try:
        return read()
    except (IntegrityError, UnknownNameError) as error:
        problems.append(str(error))
        return otherwise
