"""Locates the version that a reference means, in as few requests as possible, and lists its usable engines: trusted,
proven, compatible with a machine, not lost.

For a channel, its state is read (one request, conditional if it was read before), and its snapshot, a blob that the
machine's cache keeps. If the snapshot is lost or damaged, the version's documents are read one by one from the
registry, with the same result.

During a rollout (`registry.rollouts`), only some nodes get the new version: the result depends on the node.
"""

import json
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from enginesmith.client.resolve import FALLBACK, EngineRanking, Policy, rank_engines
from enginesmith.core.errors import IntegrityError, UnavailableError, UntrustedError, digest_of_bytes
from enginesmith.core.hardware.machine import Machine
from enginesmith.core.names import TRUST_VARIABLE, Reference
from enginesmith.core.requirements import Library
from enginesmith.registry.evidence.attestations import Attestation, judge_entries
from enginesmith.registry.manifest import EngineEntry, Manifest, pinned_engines
from enginesmith.registry.rollouts.rollout_state import ServingNode
from enginesmith.registry.store.base import Store, place_of
from enginesmith.registry.store.files import make_folder
from enginesmith.registry.store.layout import MARKER, channel_key, check_format
from enginesmith.registry.versions import lookup
from enginesmith.registry.versions.channel_state import Channel, parse_channel

if TYPE_CHECKING:
    from enginesmith.registry.evidence.latencies import MeasuredSpeed
    from enginesmith.registry.store.cache import BlobCache


@dataclass
class DocumentMemory:
    """The last content and tag of documents that change, for conditional requests; also in files of `folder`, if it is
    not None, for the next process."""

    folder: Path | None = None
    documents: dict[str, tuple[str, bytes]] = field(default_factory=dict)

    def read(self, store: Store, key: str) -> bytes | None:
        """A document's content, None if it is absent; sends one conditional request."""
        file_name = digest_of_bytes(f"{store.uri} {key}".encode())
        tag, old_content = self.documents.get(file_name) or self._load(file_name)
        content, new_tag = store.read_if_changed(key, tag)
        if new_tag and content is None:
            self.documents[file_name] = tag, old_content
            return old_content
        if content is None:
            self.documents.pop(file_name, None)
            return None
        self.documents[file_name] = new_tag, content
        if self.folder is not None:
            new_path = self.folder / f".{secrets.token_hex(8)}"
            with suppress(OSError, UnicodeDecodeError):  # then the next process sends no condition
                make_folder(self.folder)
                new_path.write_text(json.dumps([new_tag, content.decode()]))
                new_path.replace(self.folder / file_name)
        return content

    def _load(self, name: str) -> tuple[str, bytes]:
        if self.folder is not None:
            with suppress(OSError, ValueError, TypeError, RecursionError):
                tag, content = json.loads((self.folder / name).read_bytes())
                return str(tag), str(content).encode()
        return "", b""


@dataclass
class VersionLocator:
    """Locates versions in one registry. cache: of snapshots; None: no cache.  memory: of channels' states.

    node: this node; None means a node that no rollout reaches, which gets the channel's version.
    """

    store: Store
    cache: "BlobCache | None" = None
    memory: DocumentMemory = field(default_factory=DocumentMemory)
    node: ServingNode | None = None
    checked: bool = False

    @classmethod
    def for_store(cls, store: Store, cache: "BlobCache | None", node: ServingNode | None = None) -> "VersionLocator":
        """The locator with a machine's cache; without a cache for a registry on this machine."""
        if cache is None or store.near:
            return cls(store, node=node)
        return cls(store, cache, DocumentMemory(cache.folder / "channels"), node)

    def read_channel(self, model: str, channel: str) -> Channel | None:
        """The state of a channel, by a conditional request; None if it is absent. Raises as `parse_channel`."""
        key = channel_key(model, channel)
        return parse_channel(self.memory.read(self.store, key), model, channel, place_of(self.store, key))

    def locate(self, reference: Reference) -> lookup.Located:
        """Locate a version like `lookup.locate`, for this node. `Located.documents` come from the snapshot, if any.

        Raises as `lookup.locate`, and UnavailableError if there is no registry.
        """
        if reference.version is None:
            for name in (reference.channel,) if reference.channel else lookup.DEFAULT_CHANNELS:
                if channel := self.read_channel(reference.model, name):
                    return self.locate_in(channel, reference)
        self.check_registry()
        return lookup.locate(self.store, reference)

    def locate_in(self, channel: Channel, reference: Reference) -> lookup.Located:
        """The version that a channel's state gives this node. Raises IntegrityError as `lookup.locate`."""
        channel_state = replace(channel, move=channel.served_to(self.node))
        if digest := channel.snapshots.get(channel_state.manifest):
            with suppress(IntegrityError):  # lost or damaged: its documents are read one by one
                snapshot = lookup.parse_snapshot(self.read_blob(digest, lookup.SNAPSHOT_MAX_BYTES))
                manifest = lookup.manifest_of(snapshot, channel_state.manifest)
                if (manifest.model, manifest.version) == (channel.model, channel_state.version):
                    documents = lookup.SnapshotDocuments(snapshot, self.store)
                    return lookup.Located(reference, manifest, channel_state, documents=documents)
        return lookup.Located(reference, lookup.load_served(self.store, channel_state), channel_state)

    def check_registry(self) -> None:
        """Raise UnavailableError if there is no registry. Checks only once; readers of a channel need no check."""
        if not self.checked:
            marker = self.store.read(MARKER)
            if marker is None:
                raise UnavailableError(
                    f"there is no registry at {self.store.uri}; `enginesmith build` makes one, or set --registry"
                )
            check_format(marker, self.store.uri)
            self.checked = True

    def read_blob(self, digest: str, max_bytes: int) -> bytes:
        """The verified bytes of a small blob, from or through the cache. max_bytes, errors: as in `Store.read_blob`."""
        if self.cache is None:
            return self.store.read_blob(digest, max_bytes)

        def bring(sink: BinaryIO) -> str:
            sink.write(blob_bytes := self.store.read_blob(digest, max_bytes))
            return digest_of_bytes(blob_bytes)

        try:
            with self.cache.hold(digest, bring) as path:
                content = path.read_bytes()
            if digest_of_bytes(content) == digest:
                return content
            self.cache.drop(digest)
        except OSError:  # a cache that is full, read-only or another user's
            pass
        return self.store.read_blob(digest, max_bytes)


def rank_located(
    store: Store, located: lookup.Located, machine: Machine, policy: Policy, *, sure: bool = True
) -> tuple[lookup.Located, EngineRanking]:
    """The version with its signers, and its engines ranked for a machine; engines whose blobs are lost are rejected.
    Reads no engine.

    sure: whether to check all blobs, one request each; otherwise only a download of the best engine detects a lost
    blob. Blobs in a folder, where a check costs nothing, and of ensembles are always checked.
    Raises IntegrityError, and UntrustedError without the signatures that the trust policy requires.
    """
    located, entries = judge_located(store, located, policy)
    documents = located.documents or store
    policy = replace(policy, proven_only=policy.proven_only or located.proven_only)

    def timed(unmeasured: Sequence[EngineEntry]) -> "Mapping[str, MeasuredSpeed]":
        from enginesmith.registry.evidence.latencies import measured_speeds

        return measured_speeds(documents, located.manifest, machine, unmeasured)

    ranking = rank_engines(entries, machine, policy, located.manifest.reference, timed)
    if not (sure or store.near or located.manifest.graphs):
        return located, ranking
    losses = lookup.find_lost_engines(store, [candidate.entry for candidate in ranking.candidates])
    reasons = {digest: str(loss) for digest, loss in losses.items()}
    if located.manifest.graphs:
        intact_entries = [candidate.entry for candidate in ranking.candidates if candidate.entry.digest not in losses]
        reasons |= _find_lost_graphs(store, located.manifest, intact_entries)
    return located, ranking.without(reasons)


def _find_lost_graphs(store: Store, manifest: Manifest, entries: Sequence[EngineEntry]) -> dict[str, str]:
    """Engines of an ensemble that lack a graph's engine: digest -> the lost engine and the reason."""
    loss_reasons: dict[str, str] = {}
    for entry in entries:
        engines_by_digest = {
            str(engine.digest): (graph.name, engine) for graph, _, engine in pinned_engines(store, manifest, entry)
        }
        for digest, loss in lookup.find_lost_engines(
            store, [engine for _, engine in engines_by_digest.values()]
        ).items():
            loss_reasons[str(entry.digest)] = f"graph {engines_by_digest[digest][0]!r}: {loss}"
    return loss_reasons


def judge_located(
    store: Store, located: lookup.Located, policy: Policy
) -> tuple[lookup.Located, tuple[EngineEntry, ...]]:
    """A located version with its signers, and its engines with their current status.

    If a snapshot lacks the signatures that the trust policy requires, newer ones are read from the registry.
    """
    try:
        return _judge(store, located, policy)
    except UntrustedError:
        if located.documents is None:
            raise
        return _judge(store, replace(located, documents=None), policy)


def _judge(store: Store, located: lookup.Located, policy: Policy) -> tuple[lookup.Located, tuple[EngineEntry, ...]]:
    documents = located.documents or store
    signers: tuple[str, ...] = ()
    is_counted: Callable[[Attestation], bool] | None = None
    if policy.trust or os.environ.get(TRUST_VARIABLE):
        from enginesmith.registry.trust import require

        trust_result = require(documents, located.manifest, policy.trust)
        signers, is_counted = trust_result.signers, trust_result.counts
    entries: tuple[EngineEntry, ...] = judge_entries(documents, located.manifest, is_counted)
    if policy.fallback == "onnx":
        entries = (*entries, *_fallback(store, located.manifest))
    return replace(located, signed_by=signers), entries


def _fallback(store: Store, manifest: Manifest) -> tuple[EngineEntry, ...]:
    """The entry of the version's ONNX model, as an engine."""
    digest = manifest.sources.get("onnx")
    if digest is None:
        return ()
    recorded_entry = next((entry for entry in manifest.engines if entry.inputs), None)
    return (
        EngineEntry(
            target=FALLBACK,
            precision="fp32",
            backend="onnxruntime",
            status="unproven",
            reason="the model as it was exported; no engine, and not tried on this machine",
            digest=digest,
            size_bytes=store.stored_size(digest),
            suffix=".onnx",
            inputs=recorded_entry.inputs if recorded_entry else (),
            outputs=recorded_entry.outputs if recorded_entry else (),
            requires=tuple(
                dict.fromkeys(
                    library
                    for engine in manifest.engines
                    for library in engine.requires
                    if isinstance(library, Library)
                )
            ),
        ),
    )
