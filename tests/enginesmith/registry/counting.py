"""A store in memory that counts what each call would be as requests to a bucket, and their bytes.

A call costs what `S3Store` sends for it (`test_counting` compares both): a blob that is put is looked for first, a
listing has pages of a thousand keys. With `delay_s` each request takes so long, so that the seconds of a piece of work
divided by it are the number of requests that were one after another.
"""

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from enginesmith.core.errors import IntegrityError, UnavailableError, digest_of_bytes
from enginesmith.registry.store.download import Fill
from enginesmith.registry.store.files import BlobDigest
from enginesmith.registry.store.layout import MARKER, MARKER_CONTENT, MAX_DOCUMENT_BYTES, blob_key, check_key
from tests.enginesmith.registry.memory import MemoryStore

PAGE = 1000


@dataclass
class Requests:
    """Requests by kind (a method, 'LIST', or 'UNCHANGED': a GET answered by 304), and the bytes of bodies both ways."""

    kinds: Counter[str] = field(default_factory=Counter)
    keys: list[str] = field(default_factory=list)
    received: int = 0
    sent: int = 0

    @property
    def count(self) -> int:
        return self.kinds.total()


@dataclass
class CountingStore(MemoryStore):
    """`MemoryStore` as a bucket. down: every request fails.  keep_keys: whether to note 'GET key' of each request."""

    uri: str = "memory://registry"
    near: bool = False
    delay_s: float = 0.0
    down: bool = False
    keep_keys: bool = True
    tags: dict[str, str] = field(default_factory=dict)
    folders: dict[str, dict[str, None]] = field(default_factory=dict)
    requests: Requests = field(default_factory=Requests)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._write(MARKER, MARKER_CONTENT)

    @contextmanager
    def counted(self) -> Iterator[Requests]:
        requests_before, self.requests = self.requests, Requests()
        try:
            yield self.requests
        finally:
            self.requests = requests_before

    def put_and_digest_file(self, path: Path) -> BlobDigest:
        return BlobDigest(self.put_file(path))

    def put_bytes(self, data: bytes) -> str:
        digest = digest_of_bytes(data)
        if not self.has(digest):
            self._count("PUT", blob_key(digest), sent=len(data))
            self._write(blob_key(digest), data)
        return digest

    def has(self, digest: str) -> bool:
        return self.stored_size(digest) is not None

    def stored_size(self, digest: str) -> int | None:
        self._count("HEAD", blob_key(digest))
        result = self.objects.get(blob_key(digest))
        return None if result is None else len(result)

    def size(self, digest: str) -> int:
        result = self.stored_size(digest)
        if result is None:
            raise self._lost(digest)
        return result

    def read_blob(self, digest: str, max_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:
        data = self.read(blob_key(digest))
        if data is None:
            raise self._lost(digest)
        if digest_of_bytes(data) != digest:
            raise IntegrityError(f"blob {digest} of {self.uri} holds other bytes")
        return data

    @contextmanager
    def open_range(self, digest: str, offset: int, size: int) -> Iterator[Fill]:
        data = self.objects.get(blob_key(digest))
        self._count("GET", blob_key(digest), received=0 if data is None else size)
        if data is None:
            raise self._lost(digest)
        rest = memoryview(data)[offset : offset + size]

        def fill(into: memoryview) -> None:
            nonlocal rest
            if len(rest) < len(into):
                raise IntegrityError(f"blob {digest} of {self.uri} ends before it should")
            into[:], rest = rest[: len(into)], rest[len(into) :]

        yield fill

    def rehash(self, digest: str) -> BlobDigest:
        return BlobDigest(digest_of_bytes(self.read(blob_key(digest)) or b""))

    def read(self, key: str) -> bytes | None:
        data = self.objects.get(check_key(key))
        self._count("GET", key, received=len(data or b""))
        return data

    def read_if_changed(self, key: str, tag: str) -> tuple[bytes | None, str]:
        data = self.objects.get(check_key(key))
        if data is not None and tag == self.tags[key]:
            self._count("UNCHANGED", key)
            return None, tag
        self._count("GET", key, received=len(data or b""))
        return (None, "") if data is None else (data, self.tags[key])

    def create(self, key: str, data: bytes) -> bool:
        return self.replace(key, data, None)

    def replace(self, key: str, data: bytes, expected: bytes | None) -> bool:
        self._count("PUT", check_key(key), sent=len(data))
        with self.lock:
            if self.objects.get(key) != expected:
                return False
            self._write(key, data)
            return True

    def remove(self, key: str) -> None:
        self._count("DELETE", check_key(key))
        if self.objects.pop(key, None) is not None:
            self.tags.pop(key)
            while key:
                key, _, name = key.rpartition("/")
                names = self.folders[key]
                names.pop(name, None)
                if names:
                    break

    def list(self, prefix: str = "") -> Iterator[str]:
        result = sorted(self._below(prefix.rstrip("/")), key=lambda key: key.split("/"))
        for _ in range(max(1, -(-len(result) // PAGE))):
            self._count("LIST", prefix)
        return iter(result)

    def children(self, prefix: str = "") -> Iterator[str]:
        folder = prefix.rstrip("/")
        names = sorted(self.folders.get(folder, ()))
        for _ in range(max(1, -(-len(names) // PAGE))):
            self._count("LIST", prefix)
        return (name if f"{prefix}{name}" in self.objects else f"{name}/" for name in names)

    def sizes(self, prefix: str) -> Iterator[tuple[str, int]]:
        return ((key, len(self.objects[key])) for key in self.list(prefix))

    def stamps(self, prefix: str) -> Iterator[tuple[str, datetime]]:
        return ((key, datetime.now(UTC)) for key in self.list(prefix))

    def now(self) -> datetime:
        self._count("HEAD", MARKER)
        return datetime.now(UTC)

    def _write(self, key: str, data: bytes) -> None:
        self.objects[key] = data
        self.tags[key] = hashlib.md5(data, usedforsecurity=False).hexdigest()
        while key:
            key, _, name = key.rpartition("/")
            names = self.folders.setdefault(key, {})
            if name in names:
                break
            names[name] = None

    def _below(self, folder: str) -> Iterator[str]:
        for name in self.folders.get(folder, ()):
            key = f"{folder}/{name}" if folder else name
            if key in self.objects:
                yield key
            else:
                yield from self._below(key)

    def _count(self, kind: str, key: str, *, received: int = 0, sent: int = 0) -> None:
        if self.delay_s:
            time.sleep(self.delay_s)
        result = self.requests
        with self.lock:
            result.kinds[kind] += 1
            result.received += received
            result.sent += sent
            if self.keep_keys:
                result.keys.append(f"{kind} {key}")
        if self.down:
            raise UnavailableError(f"{self.uri} does not answer")

    def _lost(self, digest: str) -> IntegrityError:
        return IntegrityError(f"{self.uri} has lost blob {digest}; run `enginesmith registry fsck`, then build again")
