"""Resolves references to versions, also during a rollout, and detects whether the version changed."""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Predicate, doc

from enginesmith.core.codec import NewerFormatError, encode, parse_as
from enginesmith.core.errors import InputError, IntegrityError, UnavailableError, UnknownNameError, canonical_json
from enginesmith.core.names import STABLE, Name, Reference, is_name, version_order
from enginesmith.core.parsing import Malformed
from enginesmith.core.requirements import Format
from enginesmith.core.text import suggest
from enginesmith.registry.manifest import EngineEntry, Manifest, parse
from enginesmith.registry.store.base import Documents, Store, place_of
from enginesmith.registry.store.layout import (
    MANIFEST,
    MAX_DOCUMENT_BYTES,
    MODELS,
    is_key,
    manifest_key,
    model_prefix,
    version_prefix,
)
from enginesmith.registry.versions.channel_state import Channel, read_channel

# Finds models, versions and channels, resolves a reference to a version's manifest, and finds lost blobs.
#
# A blob is lost if it is missing, truncated, or a link out of the registry, which one stat or HEAD request shows. Wrong
# bytes of the same size are found when they are read: by a pull, and by `verify`.

DEFAULT_CHANNELS = (STABLE, "candidate")


@dataclass(frozen=True)
class Located:
    """The manifest that a reference resolves to, and the channel that it was found through, or None.

    signed_by: the trust policy's names of its signers, after the check; empty if no signature is required.
    documents: the version's documents from a snapshot; None if they are read from the registry.
    """

    reference: Reference
    manifest: Manifest
    channel: Channel | None = None
    signed_by: tuple[str, ...] = ()
    documents: Documents | None = field(default=None, repr=False, compare=False)

    @property
    def proven_only(self) -> bool:
        """Whether the channel serves only proven engines."""
        return self.channel is not None and self.channel.proven_only


@dataclass(frozen=True)
class Listed:
    """A model, its versions sorted by name, and the names of its channels."""

    model: str
    versions: tuple[str, ...]
    channels: tuple[str, ...]


def catalogue(store: Documents, prefix: str = MODELS) -> list[Listed]:
    """The models with a version, sorted, below 'models/' or 'models/<model>/'. Lists keys, and reads no document."""
    versions: dict[str, list[str]] = {}
    channels: dict[str, list[str]] = {}
    for key in store.list(prefix):
        match key.removeprefix(MODELS).split("/"):
            case [model, "versions", version, name] if name == MANIFEST and is_name(model) and is_name(version):
                versions.setdefault(model, []).append(version)
            case [model, "channels", name] if name.endswith(".json") and is_name(name.removesuffix(".json")):
                channels.setdefault(model, []).append(name.removesuffix(".json"))
    return [
        Listed(model, tuple(sorted(model_versions, key=version_order)), tuple(channels.get(model, ())))
        for model, model_versions in sorted(versions.items())
    ]


def page(store: Store, limit: int, last_name: str | None = None) -> list[Listed]:
    """At most `limit` models that have a version, sorted, with names after `last_name`. Lists the names of all models,
    and the keys of only these."""
    from enginesmith.registry.store.parallel import side_by_side

    model_names = [name for name in folder_names(store) if is_name(name) and (last_name is None or name > last_name)]
    listings: list[Listed] = []
    # Models without a version are left out, so more names may be needed.
    while model_names and len(listings) < limit:
        count = limit - len(listings)
        for _, model_listings in side_by_side(lambda name: catalogue(store, f"{MODELS}{name}/"), model_names[:count]):
            listings += model_listings
        model_names = model_names[count:]
    return listings


def folder_names(store: Documents) -> list[str]:
    """The names of models with any document, sorted. Lists names, and no keys below them."""
    return [name.removesuffix("/") for name in store.children(MODELS) if name.endswith("/")]


def models(store: Documents) -> list[str]:
    """The models that have a version, sorted."""
    return [listing.model for listing in catalogue(store)]


def versions(store: Documents, model: str) -> list[str]:
    """A model's versions sorted by name ('2' before '10'). Lists keys, and reads no manifest."""
    prefix = model_prefix("versions", model)
    key_parts = (key.removeprefix(prefix).split("/") for key in store.list(prefix))
    complete_versions = [
        segments[0] for segments in key_parts if len(segments) == 2 and segments[1] == MANIFEST and is_name(segments[0])
    ]
    return sorted(complete_versions, key=version_order)


def channel_names(store: Store, model: str) -> list[str]:
    """The names of a model's channels, sorted."""
    file_names = (name for name in store.children(model_prefix("channels", model)) if name.endswith(".json"))
    return [name for name in (file.removesuffix(".json") for file in file_names) if is_name(name)]


def load(store: Documents, model: str, version: str) -> Manifest:
    """Read a version's manifest. Raises UnknownNameError if there is none, IntegrityError if it is damaged."""
    if manifest := load_if_there(store, model, version):
        return manifest
    if all_versions := versions(store, model):
        raise _unknown(store, f"version of {model}", version, all_versions)
    raise _unknown(store, "model", model, folder_names(store))


def load_if_there(store: Documents, model: str, version: str) -> Manifest | None:
    """Read a version's manifest; None if there is none. Raises IntegrityError if it is damaged."""
    key = manifest_key(model, version)
    manifest_bytes = store.read(key)
    return (
        None
        if manifest_bytes is None
        else parse(manifest_bytes, model=model, version=version, place=place_of(store, key))
    )


def locate(store: Store, reference: Reference) -> Located:
    """Resolve a reference. A name alone means the channel `stable`, else `candidate`, else the newest version.

    Raises UnknownNameError if the model, version or channel does not exist, IntegrityError if the channel's digest and
    the manifest disagree.
    """
    model = reference.model
    if reference.version is not None:
        return Located(reference, load(store, model, reference.version))
    for name in (reference.channel,) if reference.channel else DEFAULT_CHANNELS:
        if channel := read_channel(store, model, name):
            return Located(reference, load_served(store, channel), channel)
    all_versions = versions(store, model)
    if not all_versions:
        raise _unknown(store, "model", model, folder_names(store))
    if reference.channel:
        raise _unknown(store, f"channel of {model}", reference.channel, channel_names(store, model))
    return Located(reference, load(store, model, all_versions[-1]))


def load_served(store: Documents, channel: Channel) -> Manifest:
    """The manifest of the version that a channel points to. Raises IntegrityError if it is missing, or another one."""
    try:
        manifest = load(store, channel.model, channel.version)
    except UnknownNameError as error:
        raise IntegrityError(
            f"channel {channel.model}:{channel.name} points nowhere: {error}; promote an existing version to it"
        ) from error
    if manifest.digest != channel.manifest:
        raise IntegrityError(
            f"channel {channel.model}:{channel.name} was promoted to manifest {channel.manifest} of version "
            f"{channel.version}, whose manifest is now {manifest.digest}: it was replaced by hand; restore it, or "
            "promote a version again"
        )
    return manifest


def _unknown(store: Documents, kind: str, name: str, names: list[str]) -> UnknownNameError:
    if kind == "model" and name in names:
        return UnknownNameError(f"model {name!r} in {store.uri} has no version; `enginesmith build` publishes one")
    known_text = f"known: {', '.join(names[-10:])}" if names else "there is none yet; `enginesmith build` publishes one"
    return UnknownNameError(f"no {kind} {name!r} in {store.uri}; {suggest(name, names, known_text)}")


@dataclass(frozen=True)
class Loss:
    """A problem of a blob. kind: 'missing' or 'size', as in `verify`.  detail: describes the problem."""

    kind: str
    detail: str

    def __str__(self) -> str:
        return self.detail


MISSING = Loss("missing", "published, but its file is missing, or a link to a file outside this registry")


def find_lost(store: Store, sizes: Mapping[str, int | None]) -> dict[str, Loss]:
    """Missing or truncated blobs by digest. sizes: digest -> expected size in bytes, None if unknown."""
    if store.near:
        stored_sizes = {digest: store.stored_size(digest) for digest in sizes}
    else:
        from enginesmith.registry.store.parallel import side_by_side

        stored_sizes = dict(side_by_side(store.stored_size, list(sizes)))
    losses: dict[str, Loss] = {}
    for digest, stored_size in stored_sizes.items():
        size = sizes[digest]
        if stored_size is None:
            losses[digest] = MISSING
        elif size not in (None, stored_size):
            losses[digest] = Loss("size", f"{stored_size} bytes; the manifest says {size}")
    # In a list of places, the next one may have the whole blob.
    rest = next(iter(getattr(store, "list_rests", tuple)()), None)
    if losses and rest:
        try:
            return find_lost(rest, {digest: sizes[digest] for digest in losses})
        except UnavailableError:
            if len(losses) == len(sizes):  # otherwise the blobs that are intact here can be served without it
                raise
    return losses


def find_lost_of(store: Store, manifest: Manifest) -> dict[str, Loss]:
    """Missing or truncated blobs of a version by digest. Only the engines' sizes are compared."""
    sizes = engine_sizes(manifest)
    return find_lost(store, {digest: sizes.get(digest) for digest in manifest.blobs()})


def find_lost_engines(store: Store, entries: Sequence[EngineEntry]) -> dict[str, Loss]:
    """Missing or truncated engines, or models with their weights, by the engine's digest."""
    sizes: dict[str, int | None] = {str(entry.digest): entry.size_bytes for entry in entries}
    graph_digests = {str(entry.digest): entry.graph for entry in entries if entry.is_stripped}
    lost_blobs = find_lost(store, {**{model: None for model in graph_digests.values() if model}, **sizes})
    losses = {digest: lost_blobs.get(digest) or lost_blobs.get(graph_digests.get(digest) or "") for digest in sizes}
    return {digest: loss for digest, loss in losses.items() if loss}


def engine_sizes(manifest: Manifest) -> dict[str, int | None]:
    """The sizes of a version's engines and shards in bytes, by digest."""
    sizes_by_digest: dict[str, int | None] = {
        entry.digest: entry.size_bytes for entry in manifest.engines if entry.digest
    }
    return sizes_by_digest | {shard: size for shards in manifest.shards.values() for shard, size in shards.items()}


# Snapshots: all documents that resolving a version reads, in one blob, so that a client reads one object instead of
# dozens.
#
# A snapshot contains documents as they lie beside the version, byte for byte: the manifest, attestations, signatures,
# and the latency reports that rank. A client checks digests and signatures, judges and ranks with the same functions as
# on the registry itself (`SnapshotDocuments`). So a snapshot needs no trust and no signature of its own: a person who
# can forge one could also delete or add documents in the registry, and the documents contain the signatures that a
# trust policy requires. There is one per version, not one per kind of machine: docs/scale.md has the sizes.

SNAPSHOT_FORMAT = 1
# Maximum sizes: of the blob, and of the documents in it. A version with more evidence has no snapshot.
SNAPSHOT_MAX_BYTES = 8 << 20
MAX_DOCUMENTS_BYTES = 64 << 20
_KINDS = ("attachments/", "attestations/", "latency/", "signatures/")


@dataclass(frozen=True)
class Snapshot:
    """The documents of a version, by key."""

    model: str
    version: str
    documents: Mapping[str, bytes]

    @property
    def prefix(self) -> str:
        """Prefix of the version's documents."""
        return version_prefix(self.model, self.version)

    def to_bytes(self) -> bytes:
        """The blob. Raises UnicodeDecodeError for a document that is no text, and so no document of a registry."""
        texts = {key.removeprefix(self.prefix): document.decode() for key, document in self.documents.items()}
        return zlib.compress(canonical_json(encode(_SnapshotDocument(self.model, self.version, texts))), 9)


def is_needed(name: str) -> bool:
    """Whether a client reads a document of a version. name: its key below the version's prefix."""
    return name == MANIFEST or (name.startswith(_KINDS) and name.endswith(".json"))


@dataclass(frozen=True)
class _SnapshotDocument:
    """A snapshot's blob. documents: by their keys below the version's prefix."""

    model: Name
    version: Name
    documents: Mapping[Annotated[str, Predicate(is_key), Predicate(is_needed), doc("a document of a version")], str]
    format: Annotated[int, Format(SNAPSHOT_FORMAT)] = SNAPSHOT_FORMAT


def parse_snapshot(data: bytes) -> Snapshot:
    """Parse a snapshot's blob. Raises Malformed if it is no snapshot, InputError for a newer format."""
    try:
        document = parse_as(_decompress(data), 2 * MAX_DOCUMENTS_BYTES, _SnapshotDocument)
    except NewerFormatError as error:
        raise InputError(f"a snapshot: {error}") from error
    prefix = version_prefix(document.model, document.version)
    return Snapshot(
        document.model, document.version, {f"{prefix}{name}": t.encode() for name, t in document.documents.items()}
    )


def is_snapshot(store: Store, digest: str) -> bool:
    """Whether a blob is a snapshot: a snapshot that a newer one replaced is an expected orphan."""
    if not 0 < (store.stored_size(digest) or 0) <= SNAPSHOT_MAX_BYTES:
        return False
    try:
        parse_snapshot(store.read_blob(digest, SNAPSHOT_MAX_BYTES))
    except (IntegrityError, InputError):
        return False
    return True


def _decompress(data: bytes) -> bytes:
    decompressor = zlib.decompressobj()
    try:
        content = decompressor.decompress(data[: SNAPSHOT_MAX_BYTES + 1], 2 * MAX_DOCUMENTS_BYTES)
    except zlib.error as error:
        raise Malformed(f"a snapshot cannot be decompressed ({error})") from error
    if not decompressor.eof or decompressor.unused_data:
        raise Malformed(f"a snapshot is cut, or over {SNAPSHOT_MAX_BYTES} bytes")
    return content


def manifest_of(snapshot: Snapshot, digest: str) -> Manifest:
    """The manifest in a snapshot. digest: the expected one. Raises IntegrityError for another."""
    manifest_bytes = snapshot.documents.get(manifest_key(snapshot.model, snapshot.version), b"")
    manifest = parse(manifest_bytes, model=snapshot.model, version=snapshot.version)
    if manifest.digest != digest:
        raise IntegrityError(
            f"the snapshot of {snapshot.model}@{snapshot.version} holds manifest {manifest.digest}, not {digest}; "
            "run `enginesmith registry fsck --repair`"
        )
    return manifest


@dataclass(frozen=True)
class SnapshotDocuments:
    """`Documents` of a version from its snapshot; others, such as versions that an ensemble pins, from `store`."""

    snapshot: Snapshot
    store: Store | None = None

    @property
    def uri(self) -> str:
        """See `Store.uri`."""
        return self.store.uri if self.store else f"a snapshot of {self.snapshot.model}@{self.snapshot.version}"

    def locator(self, key: str) -> str:
        """See `Store.locator`."""
        return self.store.locator(key) if self.store else key

    def read_blob(self, digest: str, max_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:
        """See `Store.read_blob`."""
        return self._beyond.read_blob(digest, max_bytes)

    def read(self, key: str) -> bytes | None:
        """See `Store.read`."""
        return self.snapshot.documents.get(key) if key.startswith(self.snapshot.prefix) else self._beyond.read(key)

    def list(self, prefix: str = "") -> Iterator[str]:
        """See `Store.list`."""
        if not prefix.startswith(self.snapshot.prefix):
            return self._beyond.list(prefix)
        keys = (key for key in self.snapshot.documents if key.startswith(prefix))
        return iter(sorted(keys, key=lambda key: key.split("/")))

    def children(self, prefix: str = "") -> Iterator[str]:
        """See `Store.children`."""
        if not prefix.startswith(self.snapshot.prefix):
            return self._beyond.children(prefix)
        key_parts = (key.removeprefix(prefix).partition("/") for key in self.list(prefix))
        return iter(sorted({f"{name}{separator}" for name, separator, _ in key_parts}))

    @property
    def _beyond(self) -> Store:
        if self.store is None:
            raise IntegrityError(f"{self.uri} holds only that version")
        return self.store
