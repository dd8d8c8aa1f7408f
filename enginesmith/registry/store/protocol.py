"""The protocol of a registry's stores.

A store has blobs (immutable, by digest) and documents (small, by key, changed by compare-and-swap). It has no notion of
models, so that another kind of store needs one file and passes the same tests.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from datetime import datetime
from pathlib import Path
from typing import Protocol

from enginesmith.core.errors import IntegrityError
from enginesmith.registry.store.download import Fill
from enginesmith.registry.store.files import BlobDigest
from enginesmith.registry.store.layout import MAX_DOCUMENT_BYTES


class Documents(Protocol):
    """What resolving a version reads: a whole store, or a snapshot of the version's documents (`versions.lookup`)."""

    @property
    def uri(self) -> str:
        """The URI that `open_store` opens this store with."""

    def locator(self, key: str) -> str:
        """The URI of a document: 'file:///srv/registry/KEY', 's3://bucket/prefix/KEY'."""

    def read_blob(self, digest: str, max_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:
        """A blob's bytes, verified, `max_bytes` at most: no more are held in memory, whatever size the server states.

        Raises IntegrityError for a missing, corrupt or larger blob.
        """

    def read(self, key: str) -> bytes | None:
        """Read a document; None if it is absent."""

    def list(self, prefix: str = "") -> Iterator[str]:
        """All keys under a prefix that ends in '/' (or is empty), blobs included, sorted part by part.

        A remote store lists pages of keys, whatever the number of folders.
        """

    def children(self, prefix: str = "") -> Iterator[str]:
        """The names directly under a prefix, sorted; folders end in '/'. Lists nothing deeper."""


class Store(Documents, Protocol):
    """A place for blobs and documents.

    Every method raises UnavailableError when the place is out of reach, full or read-only, and leaves no half-written
    object then. Keys and digests are checked before they become a path (InputError).
    """

    @property
    def near(self) -> bool:
        """Whether blobs are files of this machine, so that keeping copies of them in a cache gains nothing."""

    def put_file(self, path: Path) -> str:
        """Store a file as a blob and return its digest. An intact blob of it stays, a corrupt one is replaced."""
        return self.put_and_digest_file(path).digest

    def put_and_digest_file(self, path: Path) -> BlobDigest:
        """Like `put_file`; returns the BLAKE3 of the same bytes too."""

    def put_bytes(self, data: bytes) -> str:
        """Store bytes and return their digest."""

    def has(self, digest: str) -> bool:
        """Whether a blob exists, without reading its bytes. A link out of the store is no blob."""
        return self.stored_size(digest) is not None

    def stored_size(self, digest: str) -> int | None:
        """Size of a blob in bytes; None where `has` is False. Reads no bytes of it."""

    def size(self, digest: str) -> int:
        """Size of a blob in bytes. Raises IntegrityError if it is missing."""
        if (size_bytes := self.stored_size(digest)) is None:
            raise self.lost_error(digest)
        return size_bytes

    def lost_error(self, digest: str) -> IntegrityError:
        """The error of a blob that is missing."""
        return IntegrityError(f"{self.uri} has lost blob {digest}; run `enginesmith registry fsck`, then build again")

    def path(self, digest: str) -> Path:
        """A local read-only file with a blob's bytes, not verified. Raises IntegrityError if the blob is missing.

        For a remote registry it is a cached copy, which may be evicted later: open it at once, or use `fetch`.
        """

    def fetch(self, digest: str, dest: Path) -> None:
        """Copy a blob to `dest`, verified and atomically. Raises IntegrityError for a missing or corrupt blob."""

    def open_range(self, digest: str, offset: int, size: int) -> AbstractContextManager[Fill]:
        """Open `size` bytes of a blob from `offset`: gives a function that fills a view with the next bytes.

        The bytes are not verified. Several threads may each open a range. Raises IntegrityError, here or while filling,
        when the blob is missing or too short.
        """

    def rehash(self, digest: str) -> BlobDigest:
        """The digests of a blob's stored bytes, read anew.

        Raises IntegrityError if the blob is missing.
        """

    def read_if_changed(self, key: str, tag: str) -> tuple[bytes | None, str]:
        """A document and its tag; (None, `tag`) if it still has that tag, without reading it; (None, '') if absent."""

    def create(self, key: str, data: bytes) -> bool:
        """Write a document if it is absent, and return whether this call wrote it. Of several writers one wins."""

    def replace(self, key: str, data: bytes, expected: bytes | None) -> bool:
        """Write a document if its content is `expected` (None: absent), and return whether this call wrote it.

        Raises UndecidedError when the response was lost and the content does not show who wrote it: read it again.
        """

    def remove(self, key: str) -> None:
        """Delete a document or a blob by its key, if it exists.

        Only `gc` may delete blobs, since it alone checks that nothing refers to them.
        """

    def sizes(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Each key under a prefix that ends in '/', with its size in bytes, in any order.

        A thousand of them cost a remote store one request. What is a link in a folder is left out: `stored_size` says
        whether it counts.
        """

    def stamps(self, prefix: str) -> Iterator[tuple[str, datetime]]:
        """Each key under a prefix that ends in '/', with the time of its last write by the store's clock, in any order.

        It costs what `sizes` costs.
        """

    def now(self) -> datetime:
        """The time in UTC by the clock that `stamps` are of. What lasts from one machine's write to another's is
        measured by it, since the clocks of two machines differ."""

    def discard(self, digest: str) -> None:
        """Move a corrupt blob to discarded/ for inspection, so that it counts as missing and can be stored again; one
        that was stored again since it was read is sound, and stays."""

    def strays(self) -> tuple[str, ...]:
        """Files or uploads that dead writers left behind, in words; no key refers to them."""
        return ()

    def sweep(self) -> int:
        """Delete what `strays` lists, and return how many; nothing of a running process is deleted."""
        return 0
