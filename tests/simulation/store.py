"""A store in memory behind the registry's protocol, one view of it for each world, with the faults that a run decides.

Each method is one request or several, as on an object store. A request whose answer is lost was done: a write then says
that it is out of reach, or undecided where another writer's document is there, as the bucket stores do.
"""

from __future__ import annotations

import io
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import TypeVar

from enginesmith.core.errors import IntegrityError, UnavailableError, UndecidedError, digest_of_bytes
from enginesmith.registry.store.download import Fill
from enginesmith.registry.store.files import BlobDigest
from enginesmith.registry.store.layout import blob_key, check_key
from tests.simulation.world import APART, BEGIN, Violation, World

PAGE = 50
T = TypeVar("T")
Parts = tuple[str, ...]
# Parts of the keys of documents for which a writer counts on its lease.
_COUNTING = ("/manifest.json", "/channels/", "/pins/")


class Content:
    """What a store holds: objects by key, when each was written, and what changed, for stale lists. order: the parts of
    all keys, sorted.  keys: all keys in this order."""

    def __init__(self, objects: dict[str, bytes] | None = None, order: Iterable[Parts] = ()) -> None:
        self.objects: dict[str, bytes] = dict(objects or {})
        self.order: list[Parts] = list(order)
        self.keys: list[str] = list(map("/".join, self.order))
        self.written: dict[str, datetime] = {}
        self.serial: dict[str, int] = {}
        self.changes: list[tuple[datetime, str, bool]] = []

    def copy(self) -> Content:
        """Another one with the same objects."""
        return Content(self.objects, self.order)

    def set(self, key: str, data: bytes | None, now: datetime) -> None:
        """Write an object, or remove it (None)."""
        object_before = self.objects.get(key)
        if data is None:
            del self.objects[key]
        else:
            self.objects[key] = data
            self.written[key] = now
        self.serial[key] = self.serial.get(key, 0) + 1
        if (object_before is None) != (data is None):
            self.changes.append((now, key, object_before is None))
            parts = tuple(key.split("/"))
            place = bisect_left(self.order, parts)
            self.order[place : place + (object_before is not None)] = [parts] if data is not None else []
            self.keys[place : place + (object_before is not None)] = [key] if data is not None else []

    def page(self, prefix: str, after: Parts | None, hidden: frozenset[str]) -> list[str]:
        """The next keys of a list, in the order of their parts."""
        keys = self.below(prefix, after)
        if hidden or not prefix.endswith("/"):
            keys = [key for key in keys if key.startswith(prefix) and key not in hidden]
        return keys[:PAGE]

    def below(self, folder: str, after: Parts | None = None) -> list[str]:
        """The keys of a folder, in the order of their parts."""
        part = tuple(folder.split("/")[:-1])
        place = bisect_left(self.order, (*part, "")) if after is None else bisect_right(self.order, after)
        return self.keys[place : bisect_left(self.order, (*part[:-1], f"{part[-1]}\0"), place) if part else None]


class SimulatedStore:
    """The registry's `Store`. observe(key, before, after): called after each change, and raises Violation."""

    near = True

    def __init__(
        self,
        world: World,
        content: Content,
        observe: Callable[[str, bytes | None, bytes | None], None] = lambda *_: None,
        name: str = "memory",
    ) -> None:
        self.world, self.content, self.observe, self.name = world, content, observe, name
        self.uri = f"file:///{name}"

    def locator(self, key: str) -> str:
        return f"{self.uri}/{key}"

    # Blobs.

    def put_file(self, path: Path) -> str:
        return self.put_bytes(path.read_bytes())

    def put_bytes(self, data: bytes) -> str:
        digest = digest_of_bytes(data)
        key = blob_key(digest)
        if self._request("HEAD", key, 14) != data:
            self._write(f"PUT {key[:14]}", lambda: self._set(key, data))
        self.world.rely_no_more()  # an upload may take hours
        return digest

    def has(self, digest: str) -> bool:
        return self.stored_size(digest) is not None

    def stored_size(self, digest: str) -> int | None:
        key = blob_key(digest)
        stored_object = self._request("HEAD", key, 14)
        return None if stored_object is None else len(stored_object)

    def size(self, digest: str) -> int:
        blob_size = self.stored_size(digest)
        if blob_size is None:
            raise IntegrityError(f"blob {digest} is missing")
        return blob_size

    def fetch(self, digest: str, dest: Path) -> None:
        dest.write_bytes(self.read_blob(digest))

    def read_blob(self, digest: str, max_bytes: int = 1 << 30) -> bytes:
        key = blob_key(digest)
        data = self._request("GET", key, 14)
        if data is None or digest_of_bytes(data) != digest:
            raise IntegrityError(f"blob {digest} is missing, or holds other bytes")
        return data

    def open_range(self, digest: str, offset: int, size: int) -> AbstractContextManager[Fill]:
        @contextmanager
        def opened() -> Iterator[Fill]:
            stream = io.BytesIO(self.read_blob(digest)[offset : offset + size])

            def fill(view: memoryview) -> None:
                if stream.readinto(view) != len(view):
                    raise IntegrityError(f"blob {digest} is too short")

            yield fill

        return opened()

    def rehash(self, digest: str) -> BlobDigest:
        key = blob_key(digest)
        data = self._request("GET", key, 14)
        if data is None:
            raise IntegrityError(f"blob {digest} is missing")
        return BlobDigest(digest_of_bytes(data), None)

    # Documents.

    def read(self, key: str) -> bytes | None:
        check_key(key)
        return self._request("GET", key)

    def read_if_changed(self, key: str, tag: str) -> tuple[bytes | None, str]:
        data = self.read(key)
        current_text = "" if data is None else str(self.content.serial.get(key, 0))
        return (None, tag) if data is not None and current_text == tag else (data, current_text)

    def create(self, key: str, data: bytes) -> bool:
        return self.replace(key, data, None)

    def replace(self, key: str, data: bytes, expected: bytes | None) -> bool:
        check_key(key)
        return self._write(f"PUT {key}", lambda: self._swap(key, data, expected), key, data)

    def remove(self, key: str) -> None:
        check_key(key)
        self._write(f"DELETE {key if not key.startswith('blobs/') else key[:14]}", lambda: self._set(key, None))

    # Lists.

    def list(self, prefix: str = "") -> Iterator[str]:
        past_parts: list[Parts] = []
        gone_nodes, ghosts = self._stale()
        while True:
            after = past_parts[-1] if past_parts else None
            self._request("LIST", prefix)
            keys = self.content.page(prefix, after, gone_nodes)
            yield from keys
            if len(keys) < PAGE:
                yield from (key for key in ghosts if key.startswith(prefix))
                return
            past_parts.append(tuple(keys[-1].split("/")))

    def children(self, prefix: str = "") -> Iterator[str]:
        parts = (key.removeprefix(prefix).partition("/") for key in self.list(prefix))
        return iter(sorted({f"{name}{slash}" for name, slash, _ in parts}))

    def stamps(self, prefix: str) -> Iterator[tuple[str, datetime]]:
        for key in self.list(prefix):
            if key in self.content.objects:
                yield key, self.content.written.get(key, BEGIN)

    def now(self) -> datetime:
        side = self.world.choices.pick(self.world.temper.apart, 2) if not self.world.calm else 0
        self._request("clock")
        return self.world.time + (timedelta(), APART, -APART)[side] if side else self.world.time

    def discard(self, digest: str) -> None:
        key = blob_key(digest)
        self._write("discard", lambda: self.is_sound(digest) or self._set(key, None))

    def is_sound(self, digest: str) -> bool:
        """Whether a blob is not there, or has its bytes."""
        return (data := self.content.objects.get(blob_key(digest))) is None or digest_of_bytes(data) == digest

    def strays(self) -> tuple[str, ...]:
        return ()

    def sweep(self) -> int:
        return 0

    # Requests.

    def _request(self, method: str, key: str = "", shown: int | None = None) -> bytes | None:
        """Make a request, and return what it asks for. shown: how many characters of its key the trace has."""
        world = self.world
        world.before_request()
        if (refusal_rate := world.temper.refuse) and not world.calm and world.choices.pick(refusal_rate, 1):
            world.note(f"{method} {key[:shown]}".rstrip() + ": 503")
            raise UnavailableError(f"{self.uri} answers 503")
        return self.content.objects.get(key)

    def _write(self, what: str, work: Callable[[], T], key: str = "", data: bytes = b"") -> T:
        world = self.world
        world.before_request()
        if key and not world.calm and world.choices.pick(world.temper.ask_again, 1):
            return self._lose(what, work, key, data)
        fault = 0 if world.calm else world.choices.pick(world.temper.refuse + world.temper.lose, 3)
        if fault in (1, 2):
            world.note(f"{what}: 503, not done")
            raise UnavailableError(f"{self.uri} answers 503")
        result = self._do(what, work)
        world.note(f"{what}{'' if result in (True, None) else ' -> ' + str(result)}")
        world.maybe_crash()
        if fault == 3:
            world.note(f"{what}: done, answer lost")
            raise UnavailableError(f"{self.uri} does not answer")
        return result

    def _do(self, what: str, work: Callable[[], T]) -> T:
        try:
            return work()
        except Violation:
            self.world.note(f"{what}, which breaks a rule")
            raise

    def _lose(self, what: str, work: Callable[[], T], key: str, data: bytes) -> T:
        """Do a write, and have its writer ask again because the answer was lost."""
        result, serial = self._do(what, work), self.content.serial.get(key)
        self.world.note(f"{what}: done ({result}), answer lost, looks again")
        self.world.sleep((0.0, 0.1, 1.0, 20.0)[self.world.choices.pick(0.7, 3)])
        self.world.before_request()
        if result is True and self.content.serial.get(key) == serial:
            return result
        raise UndecidedError(f"writing {key}: the response was lost, and the key now has the object of another writer")

    def _swap(self, key: str, data: bytes, expected: bytes | None) -> bool:
        if self.content.objects.get(key) != expected:
            return False
        self._set(key, data)
        return True

    def _set(self, key: str, data: bytes | None) -> None:
        object_before = self.content.objects.get(key)
        if object_before != data:
            self.content.set(key, data, self.world.time)
            if data is None or any(part in key for part in _COUNTING):
                self.world.rely_no_more()
            self.observe(key, object_before, data)

    def _stale(self) -> tuple[frozenset[str], list[str]]:
        """Keys just written that a stale list omits, and keys just removed that it still shows."""
        world = self.world
        if world.calm or not world.choices.pick(world.temper.stale, 1):
            return frozenset(), []
        start_time = world.time - timedelta(seconds=world.temper.stale_s)
        late_keys = [(key, came) for change_time, key, came in self.content.changes if change_time > start_time]
        ghosts = sorted({key for key, came in late_keys if not came and key not in self.content.objects})
        return frozenset(key for key, came in late_keys if came), ghosts
