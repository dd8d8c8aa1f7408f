"""Finds the version that a reference stands for, and the documents to resolve it by, in as few requests as it takes.

Of a channel the pointer is read (one request, conditional where it was read before), and its snapshot, a blob, which a
machine's cache keeps. Where there is no pointer, or a writer is moving the channel at this moment, or the snapshot is
lost or damaged, the channel and the version's documents are read one by one from the registry, with the same answer.

A pointer may bring a version to a part of the nodes (`rollouts.waves`): then the answer depends on the node that asks.
"""

import json
import secrets
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

from enginery.core.digest import digest_of_bytes
from enginery.core.errors import IntegrityError
from enginery.core.names import Reference
from enginery.registry.rollouts.waves import ServingNode
from enginery.registry.store.base import Store, check_marker
from enginery.registry.store.cache import BlobCache
from enginery.registry.store.files import make_folder
from enginery.registry.store.layout import channel_key, pointer_key
from enginery.registry.versions import lookup
from enginery.registry.versions.lookup import DEFAULT_CHANNELS, Channel, Located, Move, parse_channel_document
from enginery.registry.versions.pointers import Pointer, parse_pointer
from enginery.registry.versions.refresh import is_current
from enginery.registry.versions.snapshots import MAX_BYTES as SNAPSHOT_BYTES
from enginery.registry.versions.snapshots import SnapshotDocuments, manifest_of, parse_snapshot


@dataclass
class DocumentMemory:
    """The last content of documents that change, with their tags, for conditional requests; also in files of `folder`,
    if it is not None, for the next process."""

    folder: Path | None = None
    known: dict[str, tuple[str, bytes]] = field(default_factory=dict)

    def read(self, store: Store, key: str) -> bytes | None:
        """A document's content, None if it is absent; one conditional request."""
        name = digest_of_bytes(f"{store.uri} {key}".encode())
        tag, before = self.known.get(name) or self._load(name)
        data, found = store.read_if_changed(key, tag)
        if found and data is None:
            self.known[name] = tag, before
            return before
        if data is None:
            self.known.pop(name, None)
            return None
        self.known[name] = found, data
        self._keep(name, found, data)
        return data

    def _load(self, name: str) -> tuple[str, bytes]:
        if self.folder is not None:
            with suppress(OSError, ValueError):
                tag, text = json.loads((self.folder / name).read_bytes())
                return str(tag), str(text).encode()
        return "", b""

    def _keep(self, name: str, tag: str, data: bytes) -> None:
        if self.folder is None:
            return
        fresh = self.folder / f".{secrets.token_hex(8)}"
        with suppress(OSError, UnicodeDecodeError):  # it is asked for without a condition next time
            make_folder(self.folder)
            fresh.write_text(json.dumps([tag, data.decode()]))
            fresh.replace(self.folder / name)


@dataclass
class VersionLocator:
    """Locates versions in one registry. cache: for snapshots; None for none.  memory: of pointers.

    node: the one that asks; None is one that no rollout reaches, which gets what the channel serves.
    """

    store: Store
    cache: BlobCache | None = None
    memory: DocumentMemory = field(default_factory=DocumentMemory)
    node: ServingNode | None = None
    checked: bool = False

    @classmethod
    def for_store(cls, store: Store, cache: BlobCache | None, node: ServingNode | None = None) -> "VersionLocator":
        """The locator with a machine's cache; without one for a registry on this machine."""
        if cache is None or store.near:
            return cls(store, node=node)
        return cls(store, cache, DocumentMemory(cache.folder / "pointers"), node)

    def read_pointer(self, model: str, channel: str) -> Pointer | None:
        """The pointer of a channel; None if it is absent or damaged. Raises InputError for one of a newer format.

        One with a rollout that a writer marked, and whose channel has not moved yet, counts as it is: a node that was
        reached would else go back for as long as a move takes.
        """
        data = self.memory.read(self.store, pointer_key(model, channel))
        try:
            pointer = parse_pointer(data, model, channel)
        except IntegrityError:
            return None
        if pointer and pointer.rollout and pointer.moving:
            found = self.read_channel(model, channel)
            return replace(pointer, moving=None) if found and is_current(pointer, found) else pointer
        return pointer

    def read_channel(self, model: str, channel: str) -> Channel | None:
        """The channel itself, by a conditional request; None if it is absent. Raises IntegrityError for damage."""
        data = self.memory.read(self.store, channel_key(model, channel))
        return parse_channel_document(self.store, data, model, channel)

    def locate(self, reference: Reference) -> Located:
        """`lookup.locate`, by the channel's pointer where it has one; `Located.documents` are its snapshot's then.

        Raises as `lookup.locate`, InputError for a pointer of a newer format, UnavailableError where no registry is.
        """
        if reference.version is None:
            for name in (reference.channel,) if reference.channel else DEFAULT_CHANNELS:
                pointer = self.read_pointer(reference.model, name)
                if found := self._through(pointer, reference) if pointer else None:
                    return found
                if pointer or reference.channel or self.read_channel(reference.model, name):
                    break
        self.check_registry()
        return lookup.locate(self.store, reference)

    def locate_by(self, pointer: Pointer | None, reference: Reference) -> Located:
        """`locate` of a channel whose pointer was read just now; None: by the channel itself."""
        return (self._through(pointer, reference) if pointer else None) or lookup.locate(self.store, reference)

    def _through(self, pointer: Pointer, reference: Reference) -> Located | None:
        """The version that a pointer leads to; None where it leads nowhere, and the channel must be asked."""
        served = pointer.served_to(self.node)
        if served is None:
            return None
        move = Move(served.version, served.manifest, served.at, proven_only=served.proven_only)
        channel = Channel(pointer.model, pointer.channel, (move,))
        try:
            if served.snapshot is None:
                manifest = lookup.load_served(self.store, channel)
                return Located(reference, manifest, channel)
            snapshot = parse_snapshot(self.read_blob(served.snapshot, SNAPSHOT_BYTES))
            manifest = manifest_of(snapshot, served.manifest)
            if (manifest.model, manifest.version) != (pointer.model, served.version):
                raise IntegrityError(f"it is the snapshot of {manifest.model}@{manifest.version}")
        except IntegrityError:
            return None
        return Located(reference, manifest, channel, documents=SnapshotDocuments(snapshot, self.store))

    def check_registry(self) -> None:
        """Raise UnavailableError where no registry is, once: who reads a pointer needs no marker."""
        if not self.checked:
            check_marker(self.store)
            self.checked = True

    def read_blob(self, digest: str, most: int) -> bytes:
        """A small blob's bytes, verified, from the cache or through it. most: as of `Store.read_blob`, which says what
        is raised."""
        if self.cache is None:
            return self.store.read_blob(digest, most)

        def bring(sink: BinaryIO) -> str:
            sink.write(data := self.store.read_blob(digest, most))
            return digest_of_bytes(data)

        try:
            with self.cache.hold(digest, bring) as path:
                data = path.read_bytes()
            if digest_of_bytes(data) == digest:
                return data
            self.cache.drop(digest)
        except OSError:  # a cache that is full, read-only or another user's
            pass
        return self.store.read_blob(digest, most)
