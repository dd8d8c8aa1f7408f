"""Snapshots: all that resolving a version reads, as one blob, so that a client reads one object in place of dozens.

A snapshot holds documents as they lie beside the version, byte for byte: the manifest, attestations, signatures, and
the latency reports that rank. A client checks digests and signatures, judges and ranks by the same functions as over
the registry itself (`SnapshotDocuments`). So a snapshot needs no trust and no signature of its own: whoever could forge
one could as well delete or add documents in the registry, and what a trust policy asks is signed in the documents.

There is one for a version, not one for each kind of machine: docs/scale.md has the sizes.
"""

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Predicate, doc

from enginesmith.core.codec import NewerFormatError, encode, parse_as
from enginesmith.core.errors import InputError, IntegrityError, canonical_json
from enginesmith.core.names import Name
from enginesmith.core.parsing import Malformed
from enginesmith.core.requirements import Format
from enginesmith.registry.manifest import Manifest, parse
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.layout import (
    MANIFEST,
    MAX_DOCUMENT_BYTES,
    is_key,
    manifest_key,
    version_prefix,
)

FORMAT = 1
# Of the blob, and of the documents in it. A version with more evidence has no snapshot; its documents are read singly.
MAX_BYTES = 8 << 20
MAX_DOCUMENTS_BYTES = 64 << 20
_KINDS = ("attestations/", "latency/", "signatures/")


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
        texts = {key.removeprefix(self.prefix): data.decode() for key, data in self.documents.items()}
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
    format: Annotated[int, Format(FORMAT)] = FORMAT


def parse_snapshot(data: bytes) -> Snapshot:
    """Read a snapshot's blob. Raises Malformed for what is none, InputError for one of a newer format."""
    try:
        found = parse_as(_decompress(data), 2 * MAX_DOCUMENTS_BYTES, _SnapshotDocument)
    except NewerFormatError as error:
        raise InputError(f"a snapshot: {error}") from error
    prefix = version_prefix(found.model, found.version)
    return Snapshot(found.model, found.version, {f"{prefix}{name}": t.encode() for name, t in found.documents.items()})


def is_snapshot(store: Store, digest: str) -> bool:
    """Whether a blob is a snapshot: one that a newer one replaced is no remarkable orphan."""
    if not 0 < (store.stored_size(digest) or 0) <= MAX_BYTES:
        return False
    try:
        parse_snapshot(store.read_blob(digest, MAX_BYTES))
    except (IntegrityError, InputError):
        return False
    return True


def _decompress(data: bytes) -> bytes:
    inflated = zlib.decompressobj()
    try:
        found = inflated.decompress(data[: MAX_BYTES + 1], 2 * MAX_DOCUMENTS_BYTES)
    except zlib.error as error:
        raise Malformed(f"a snapshot cannot be decompressed ({error})") from error
    if not inflated.eof or inflated.unused_data:
        raise Malformed(f"a snapshot is cut, or over {MAX_BYTES} bytes")
    return found


def manifest_of(snapshot: Snapshot, digest: str) -> Manifest:
    """The manifest in a snapshot. digest: the one that it must have. Raises IntegrityError for another."""
    data = snapshot.documents.get(manifest_key(snapshot.model, snapshot.version), b"")
    manifest = parse(data, model=snapshot.model, version=snapshot.version)
    if manifest.digest != digest:
        raise IntegrityError(
            f"the snapshot of {snapshot.model}@{snapshot.version} holds manifest {manifest.digest}, not {digest}; "
            "run `enginesmith registry fsck --repair`"
        )
    return manifest


@dataclass(frozen=True)
class SnapshotDocuments:
    """`Documents` of a version out of its snapshot; all else, such as versions that an ensemble pins, from `store`."""

    snapshot: Snapshot
    store: Store | None = None

    @property
    def uri(self) -> str:
        """See `Store.uri`."""
        return self.store.uri if self.store else f"a snapshot of {self.snapshot.model}@{self.snapshot.version}"

    def locator(self, key: str) -> str:
        """See `Store.locator`."""
        return self.store.locator(key) if self.store else key

    def read_blob(self, digest: str, most: int = MAX_DOCUMENT_BYTES) -> bytes:
        """See `Store.read_blob`."""
        return self._beyond.read_blob(digest, most)

    def read(self, key: str) -> bytes | None:
        """See `Store.read`."""
        return self.snapshot.documents.get(key) if key.startswith(self.snapshot.prefix) else self._beyond.read(key)

    def list(self, prefix: str = "") -> Iterator[str]:
        """See `Store.list`."""
        if not prefix.startswith(self.snapshot.prefix):
            return self._beyond.list(prefix)
        found = (key for key in self.snapshot.documents if key.startswith(prefix))
        return iter(sorted(found, key=lambda key: key.split("/")))

    def children(self, prefix: str = "") -> Iterator[str]:
        """See `Store.children`."""
        if not prefix.startswith(self.snapshot.prefix):
            return self._beyond.children(prefix)
        parts = (key.removeprefix(prefix).partition("/") for key in self.list(prefix))
        return iter(sorted({f"{name}{slash}" for name, slash, _ in parts}))

    @property
    def _beyond(self) -> Store:
        if self.store is None:
            raise IntegrityError(f"{self.uri} holds that version alone")
        return self.store
