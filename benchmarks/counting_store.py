"""A store in memory that counts its requests by kind, as a bucket would be asked, and may take a while for each."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.enginesmith.registry.memory import MemoryStore

PAGE = 1000


@dataclass
class CountingStore(MemoryStore):
    """`MemoryStore` as a remote one. requests: by kind; a listing is one for each thousand keys.  pause_s: of each.

    A swap is two requests, as in a bucket: one for the tag of the content that is expected, and the write.
    """

    near: bool = False
    requests: Counter[str] = field(default_factory=Counter)
    pause_s: float = 0.0
    by_folder: dict[str, dict[str, None]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def put(self, key: str, data: bytes) -> None:
        """Store an object without a request, while a registry is made up."""
        self.objects[key] = data
        self._index(key)

    def read(self, key: str) -> bytes | None:
        self._count("GET")
        return self.objects.get(key)

    def read_if_changed(self, key: str, tag: str) -> tuple[bytes | None, str]:
        self._count("GET")
        data = self.objects.get(key)
        data_tag = str(id(data)) if data is not None else ""
        return (None, tag) if data_tag == tag else (data, data_tag)

    def stored_size(self, digest: str) -> int | None:
        self._count("HEAD")
        data = self.objects.get(f"blobs/sha256/{digest[:2]}/{digest}")
        return None if data is None else len(data)

    def has(self, digest: str) -> bool:
        return self.stored_size(digest) is not None

    def create(self, key: str, data: bytes) -> bool:
        return self.replace(key, data, None)

    def replace(self, key: str, data: bytes, expected: bytes | None) -> bool:
        if expected is not None:
            self._count("HEAD")
        self._count("PUT")
        with self.lock:
            if self.objects.get(key) != expected:
                return False
            self.objects[key] = data
            self._index(key)
        return True

    def remove(self, key: str) -> None:
        self._count("DELETE")
        with self.lock:
            self.objects.pop(key, None)
            folder, _, name = key.rpartition("/")
            self.by_folder.get(f"{folder}/", {}).pop(name, None)

    def list(self, prefix: str = "") -> Iterator[str]:
        return iter(sorted((key for key, _ in self.sizes(prefix)), key=lambda key: key.split("/")))

    def children(self, prefix: str = "") -> Iterator[str]:
        names = sorted(self.by_folder.get(prefix, ()))
        self._count("LIST", max(1, -(-len(names) // PAGE)))
        return iter(names)

    def sizes(self, prefix: str) -> Iterator[tuple[str, int]]:
        page = 0
        for page, (key, size) in enumerate(self._below(prefix)):
            if page % PAGE == 0:
                self._count("LIST")
            yield key, size
        if not page:
            self._count("LIST")

    @contextmanager
    def count(self) -> Iterator[Counter[str]]:
        """The requests of a block."""
        requests_before, counts = self.requests.copy(), Counter[str]()
        yield counts
        counts.update(self.requests - requests_before)

    def _below(self, prefix: str) -> Iterator[tuple[str, int]]:
        for name in list(self.by_folder.get(prefix, ())):
            if name.endswith("/"):
                yield from self._below(f"{prefix}{name}")
            elif (data := self.objects.get(f"{prefix}{name}")) is not None:
                yield f"{prefix}{name}", len(data)

    def _index(self, key: str) -> None:
        parts = key.split("/")
        for depth in range(len(parts)):
            folder = "".join(f"{part}/" for part in parts[:depth])
            names = self.by_folder.setdefault(folder, {})
            name = parts[depth] if depth == len(parts) - 1 else f"{parts[depth]}/"
            if name in names:
                continue
            names[name] = None

    def _count(self, kind: str, count: int = 1) -> None:
        with self.lock:
            self.requests[kind] += count
        if self.pause_s:
            time.sleep(self.pause_s * count)
