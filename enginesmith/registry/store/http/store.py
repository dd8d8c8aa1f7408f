"""The store behind HTTP (`enginesmith.registry.store.base.Store` documents the methods): it is read, and never written.

A document is `GET /KEY`, with `If-None-Match` where one is known; a blob `GET` with `Range`, its existence and size
`HEAD`. `GET /PREFIX/` is a JSON list of `{"name": ..., "type": "directory"}` of what is directly below: nginx's with
`autoindex_format json`. What the server says is not believed: blobs are verified by whoever reads them, documents as
those of any registry.
"""

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.client import HTTPResponse, IncompleteRead
from pathlib import Path
from typing import BinaryIO, NoReturn

from enginesmith.core import parsing
from enginesmith.core.errors import InputError, IntegrityError, UnavailableError
from enginesmith.registry.store.cache import cached_file
from enginesmith.registry.store.download import Fill
from enginesmith.registry.store.files import make_folder, reachable, start_atomic_write, sweep
from enginesmith.registry.store.http.requests import (
    FAILURES,
    AbsentError,
    HttpLocation,
    exchange,
    parse_location,
    read_whole,
    wait,
)
from enginesmith.registry.store.layout import (
    MARKER,
    MAX_DOCUMENT_BYTES,
    blob_key,
    check_format,
    check_key,
    check_size,
    is_key,
)
from enginesmith.registry.store.objects.api import ATTEMPTS, pauses

_READ_BYTES = 1 << 20
# Folders in one another in a list: a registry has 6 (models/NAME/versions/VERSION/attestations/ENGINE/).
_MOST_FOLDERS = 12


@dataclass(frozen=True)
class HttpStore:
    """The store at `place`. `open_store` makes one and checks it. May be used by many threads and after a fork.

    attempts: requests before giving up; fewer where another place can be asked instead.
    """

    place: HttpLocation
    attempts: int = ATTEMPTS
    near = False  # see `Store.near`

    @property
    def uri(self) -> str:
        """'http://host:port/prefix'."""
        return self.place.uri

    def locator(self, key: str) -> str:
        """See `Store.locator`."""
        return self.place.locator(check_key(key))

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise InputError(
            f"{self.uri} is read-only: engines are pulled from it; give the registry itself to publish, move channels, "
            "verify or collect"
        )

    # What writes, and what only writers ask for.
    put_file = put_and_digest_file = put_bytes = create = replace = remove = discard = _refuse
    rehash = sizes = stamps = now = _refuse

    def strays(self) -> tuple[str, ...]:
        """See `Store.strays`: nobody writes here."""
        return ()

    def sweep(self) -> int:
        """See `Store.sweep`."""
        return 0

    def has(self, digest: str) -> bool:
        """See `Store.has`."""
        return self.stored_size(digest) is not None

    def stored_size(self, digest: str) -> int | None:
        """See `Store.stored_size`."""
        target = self.place.path(blob_key(digest))
        for pause in pauses(self.attempts):
            try:
                with exchange(self.place, "HEAD", target) as answer:
                    answer.read()
                    return check_size(int(answer.headers["Content-Length"]), f"{self.place.site}{target}")
            except AbsentError:
                return None
            except (*FAILURES, TypeError) as error:
                wait(self.place, target, error, pause)
        raise AssertionError("unreachable")

    def size(self, digest: str) -> int:
        """See `Store.size`."""
        size_bytes = self.stored_size(digest)
        if size_bytes is None:
            raise IntegrityError(
                f"{self.uri} does not have blob {digest}; run `enginesmith registry fsck` at the registry itself"
            )
        return size_bytes

    def path(self, digest: str) -> Path:
        """See `Store.path`. The file is this machine's cached copy, verified when it was downloaded."""
        return cached_file(digest, lambda sink: self._stream_verified(digest, sink))

    def fetch(self, digest: str, dest: Path) -> None:
        """See `Store.fetch`."""
        with reachable(f"copying blob {digest} of {self.uri} to {dest}"):
            make_folder(dest.parent)
            sweep(dest.parent)
            with start_atomic_write(dest.parent) as file:
                self._stream_verified(digest, file.stream)
                file.commit(dest)

    def read_blob(self, digest: str, max_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:
        """See `Store.read_blob`."""
        _, content, _ = read_whole(self.place, self.place.path(blob_key(digest)), max_bytes, attempts=self.attempts)
        if hashlib.sha256(content).hexdigest() != digest:
            raise self._other_bytes(digest)
        return content

    @contextmanager
    def open_range(self, digest: str, offset: int, size: int) -> Iterator[Fill]:
        """See `Store.open_range`."""
        blob_range = _BlobRange(self, blob_key(digest), offset, offset + size)
        try:
            yield blob_range.fill
        finally:
            blob_range.close()

    def read(self, key: str) -> bytes | None:
        """See `Store.read`."""
        return self.read_if_changed(key, "")[0]

    def read_if_changed(self, key: str, tag: str) -> tuple[bytes | None, str]:
        """See `Store.read_if_changed`. The tag is the ETag; an unchanged document costs one request without a body."""
        target = self.place.path(check_key(key))
        try:
            status, content, etag = read_whole(
                self.place, target, MAX_DOCUMENT_BYTES, {"If-None-Match": tag} if tag else {}, self.attempts
            )
        except AbsentError:
            return None, ""
        # A server without ETags still answers; its documents are read each time.
        return (None, tag) if status == 304 else (content, etag or "none")

    def list(self, prefix: str = "") -> Iterator[str]:
        """See `Store.list`: a request for each folder. Raises IntegrityError for folders without an end."""
        if prefix.count("/") > _MOST_FOLDERS:
            raise IntegrityError(f"{self.uri} lists folders in folders without an end; is it a registry?")
        for name in self.children(prefix):
            yield from self.list(f"{prefix}{name}") if name.endswith("/") else (f"{prefix}{name}",)

    def children(self, prefix: str = "") -> Iterator[str]:
        """See `Store.children`. Raises UnavailableError where the server lists nothing."""
        target = self.place.path(f"{check_key(prefix.removesuffix('/'))}/" if prefix else "")
        try:
            _, listing_bytes, _ = read_whole(self.place, target, MAX_DOCUMENT_BYTES, attempts=self.attempts)
            entries = [(str(entry["name"]), entry["type"] == "directory") for entry in parsing.load_json(listing_bytes)]
        except AbsentError:
            return
        except (ValueError, RecursionError, LookupError, TypeError) as error:
            raise IntegrityError(
                f"{self.uri} answers '{prefix}' with no JSON list of names; with nginx, turn on `autoindex` and "
                "`autoindex_format json`"
            ) from error
        valid_entries = {(name, is_folder) for name, is_folder in entries if is_key(name) and "/" not in name}
        yield from sorted(f"{name}/" if is_folder else name for name, is_folder in valid_entries)

    def _stream_verified(self, digest: str, sink: BinaryIO) -> str:
        """Write a blob's bytes to `sink` and return its digest."""
        remaining_bytes, hasher = self.size(digest), hashlib.sha256()
        block = memoryview(bytearray(_READ_BYTES))
        with self.open_range(digest, 0, remaining_bytes) as fill:
            while remaining_bytes:
                view = block[: min(remaining_bytes, len(block))]
                fill(view)
                hasher.update(view)
                sink.write(view)
                remaining_bytes -= len(view)
        if hasher.hexdigest() != digest:
            raise self._other_bytes(digest)
        return digest

    def _other_bytes(self, digest: str) -> IntegrityError:
        return IntegrityError(
            f"blob {digest} of {self.uri} holds other bytes; run `enginesmith registry fsck` at the registry itself"
        )


class _BlobRange:
    """The bytes of a blob from `start` to `end`, in order; not verified, which needs the whole blob."""

    def __init__(self, store: HttpStore, key: str, offset: int, end: int) -> None:
        self._store, self._target = store, store.place.path(key)
        self._at, self._end = offset, end
        self._stack = ExitStack()
        self._body: HTTPResponse | None = None
        self._furthest, self._waiting = offset, pauses(store.attempts)

    def fill(self, into: memoryview) -> None:
        """Fill `into` with the next bytes; a body that breaks off is asked for again from there."""
        filled_bytes = 0
        while filled_bytes < len(into):
            try:
                body = self._body or self._open()
                count = body.readinto(into[filled_bytes : filled_bytes + _READ_BYTES])
                if not count:
                    raise IncompleteRead(b"", self._end - self._at)
            except FAILURES as error:
                self.close()
                if self._at > self._furthest:
                    self._furthest, self._waiting = self._at, pauses(self._store.attempts)
                wait(self._store.place, self._target, error, next(self._waiting))
            else:
                filled_bytes += count
                self._at += count

    def close(self) -> None:
        """Release the connection, for reuse if the whole range was read."""
        body, self._body = self._body, None
        if body is not None:
            body.close()
        self._stack.close()

    def _open(self) -> HTTPResponse:
        range_header = {"Range": f"bytes={self._at}-{self._end - 1}"}
        answer = self._stack.enter_context(exchange(self._store.place, "GET", self._target, range_header))
        content_length, content_range = answer.getheader("Content-Length"), answer.getheader("Content-Range") or ""
        is_whole = answer.status == 200 and self._at == 0
        is_range = answer.status == 206 and f"{content_range}/".startswith((f"bytes {self._at}-{self._end - 1}/", "/"))
        if not (is_range or is_whole) or content_length != str(self._end - self._at):
            answer.close()
            raise AbsentError(
                f"{self._store.place.site}{self._target}: it ends before it should, or the server has no ranges"
            )
        self._body = answer
        return answer


def open_http(uri: str, *, create: bool, attempts: int = ATTEMPTS) -> HttpStore:
    """Open the registry at an http(s):// URI. Raises InputError and UnavailableError; see `open_store`."""
    store = HttpStore(parse_location(uri), attempts)
    if create:
        store._refuse()
    marker = store.read(MARKER)
    if marker is None:
        raise UnavailableError(f"there is no registry at {store.uri}; check the URI")
    check_format(marker, store.uri)
    return store
