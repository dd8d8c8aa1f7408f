"""Where a registry keeps its bytes: the protocol that every kind of store answers, and the door to them.

A store knows blobs (immutable, by digest) and documents (small, by key, compared and swapped). It knows nothing of
models, so that another kind of store is one file more and the same tests.
"""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol
from urllib.parse import SplitResult, quote, unquote, urlsplit

from enginery.core.errors import InputError
from enginery.registry.store.blob_digest import Seal
from enginery.registry.store.download import Fill
from enginery.registry.store.folder import FileStore, open_folder

__all__ = ["FileStore", "Store", "absolute_uri", "open_store"]


class Store(Protocol):
    """A place for blobs and documents.

    Every method raises UnavailableError when the place is out of reach, full or read-only, and leaves no half-written
    object then. Keys and digests are checked before they become a path (InputError).
    """

    @property
    def uri(self) -> str:
        """What `open_store` opens this store with."""
        ...

    @property
    def near(self) -> bool:
        """Whether blobs are files of this machine, so that keeping copies of them in a cache gains nothing."""
        ...

    def locator(self, key: str) -> str:
        """Where a document is, as other tools write it: 'file:///srv/registry/KEY', 's3://bucket/prefix/KEY'."""
        ...

    def put_file(self, path: Path) -> str:
        """Store a file's bytes and return their digest. A sound blob of that digest stays, a corrupt one is healed."""
        ...

    def seal_file(self, path: Path) -> Seal:
        """Like `put_file`; gives the BLAKE3 of the same bytes too, where the library is there."""
        ...

    def put_bytes(self, data: bytes) -> str:
        """Store bytes and return their digest."""
        ...

    def has(self, digest: str) -> bool:
        """Whether a blob is there; cheap, and without looking at its bytes. A link out of the store is no blob."""
        ...

    def stored_size(self, digest: str) -> int | None:
        """Size of a blob in bytes, None where `has` is False; as cheap."""
        ...

    def size(self, digest: str) -> int:
        """Size of a blob in bytes. Raises IntegrityError if it is missing."""
        ...

    def path(self, digest: str) -> Path:
        """A local file with a blob's bytes, to be read only; not verified. Raises IntegrityError if missing.

        Of a registry elsewhere it is a cached copy, which may be gone when much else came after it: open it at once,
        or use `fetch`.
        """
        ...

    def fetch(self, digest: str, dest: Path) -> None:
        """Copy a blob to `dest`, which appears whole and verified or not at all. Raises IntegrityError."""
        ...

    def read_blob(self, digest: str) -> bytes:
        """A blob's bytes, verified. Raises IntegrityError."""
        ...

    def open_range(self, digest: str, start: int, size: int) -> AbstractContextManager[Fill]:
        """`size` bytes of a blob from `start` on: what this gives fills a view with the next of them; not verified.

        Many threads may have one open each. Raises IntegrityError, then or while filling, when the blob is missing or
        ends before.
        """
        ...

    def rehash(self, digest: str) -> Seal:
        """The digests of the bytes that are there under a blob's name, read anew (the BLAKE3 where the library is
        there). Raises IntegrityError if absent."""
        ...

    def read(self, key: str) -> bytes | None:
        """A document, or None."""
        ...

    def read_if_changed(self, key: str, tag: str) -> tuple[bytes | None, str]:
        """A document and its tag; (None, `tag`) while it has that tag, which costs little; (None, '') if absent."""
        ...

    def create(self, key: str, data: bytes) -> bool:
        """Write a document that is never replaced, unless there is one; whether this call wrote it.

        Of several writers exactly one wins.
        """
        ...

    def replace(self, key: str, data: bytes, expected: bytes | None) -> bool:
        """Write a document if it still is `expected` (None: absent); whether this call wrote it.

        Raises UndecidedError when a broken connection leaves that open: look at what is there.
        """
        ...

    def remove(self, key: str) -> None:
        """Delete a document or a blob, by its key; what is absent stays absent. For `retention` alone: nothing else
        knows what is still needed."""
        ...

    def list(self, prefix: str = "") -> Iterator[str]:
        """All keys under a prefix that ends in '/' (or is empty), blobs included, sorted part by part.

        A store elsewhere answers in pages of keys, however many folders those lie in.
        """
        ...

    def children(self, prefix: str = "") -> Iterator[str]:
        """The names directly under a prefix, sorted; those that have more below end in '/'. Reads nothing deeper."""
        ...

    def discard(self, digest: str) -> None:
        """Move a corrupt blob away, so that it counts as missing and can be put again; kept for looking at."""
        ...

    def strays(self) -> tuple[str, ...]:
        """What writers that died left behind. Harmless: no key leads there."""
        ...

    def sweep(self) -> int:
        """Delete what dead writers left behind; return how many. Never touches what a living process writes."""
        ...


def place_of(store: Store, key: str) -> str:
    """Where a key is, as people write it: a path, or an s3:// URI."""
    uri = store.locator(key)
    return unquote(uri.removeprefix("file://")) if uri.startswith("file://") else uri


def open_store(uri: str | Path, *, create: bool = False) -> Store:
    """Open the registry at a path, a `file://` or an `s3://` URI.

    With `create`, it is made if need be, and it is made sure that it can be written.

    Raises InputError for what cannot be a registry (a file, a place with other things in it, a newer format, an
    unknown scheme, a server without conditional writes) and UnavailableError for what is not there or not writable.
    """
    text = os.fspath(uri)
    if isinstance(uri, Path) or "://" not in text:
        return open_folder(Path(_not_empty(text)), create=create)
    parts = _split(text)
    if parts.scheme == "s3":
        # Here, because boto3 takes a quarter of a second to import.
        from enginery.registry.store.s3.opening import open_bucket

        return open_bucket(text, create=create)
    if parts.scheme != "file":
        raise InputError(f"registry {text}: scheme {parts.scheme!r} is not known; use a path, file:// or s3://")
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise InputError(f"registry {text}: a file URI needs an absolute path, as in file:///srv/registry")
    return open_folder(Path(unquote(parts.path)), create=create)


def absolute_uri(uri: str) -> str:
    """The URI that means the same registry from every folder and machine that sees it; nothing is opened.

    Raises InputError for what cannot be a registry, as `open_store`.
    """
    if "://" not in uri:
        return f"file://{quote(str(Path(_not_empty(uri)).expanduser().absolute()))}"
    parts = _split(uri)
    if parts.scheme == "s3":
        from enginery.registry.store.s3.place import parse_place

        return parse_place(uri).uri
    if parts.scheme != "file":
        raise InputError(f"registry {uri}: scheme {parts.scheme!r} is not known; use a path, file:// or s3://")
    return uri


def _split(text: str) -> SplitResult:
    """The parts of a URI that may be repeated. Raises InputError for one with credentials, and repeats none of it.

    A secret may hold '/' and then lies outside what a URI's reader takes for the authority; only a file's path may
    hold '@'.
    """
    scheme, _, rest = text.partition("://")
    if "@" in (rest.partition("/")[0] if scheme == "file" else rest):
        raise InputError(
            f"registry {scheme[:20]}://...: a URI without user and password is needed; give credentials in the usual "
            "AWS ways (environment, profile, role)"
        )
    try:
        return urlsplit(text)
    except ValueError as error:
        raise InputError(f"registry {text[:200]!r} is not a URI ({error}); give a path, file:// or s3://") from error


def _not_empty(text: str) -> str:
    if not text.strip() or "\0" in text:
        raise InputError(f"registry {text!r} is not a path; give --registry or set ENGINERY_REGISTRY")
    return text
