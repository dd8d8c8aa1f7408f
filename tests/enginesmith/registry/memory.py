"""A store in memory, whose every call can be a step of an interleaving: what a file or a request is elsewhere."""

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from enginesmith.core import parsing
from enginesmith.core.errors import IntegrityError, digest_of_bytes
from enginesmith.registry import leases
from enginesmith.registry.store.files import BlobDigest
from enginesmith.registry.store.layout import MAX_DOCUMENT_BYTES, blob_key, check_key
from tests.waiting import PATIENCE_S


class Killed(BaseException):
    """An actor that was killed; no `except Exception` catches it."""


@dataclass
class Actor:
    """Who works on a store, one call at a time. kill_at: the step before which it dies."""

    name: str
    kill_at: int | None = None
    steps: int = 0
    done: bool = False
    error: BaseException | None = None
    go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    back: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    lock: threading.Lock = field(default_factory=threading.Lock)
    calls: list[str] = field(default_factory=list)

    def turn(self, call: str) -> None:
        self.back.release()
        self.go.acquire()
        self.calls.append(call)
        self.steps += 1
        if self.kill_at is not None and self.steps >= self.kill_at:
            raise Killed


@dataclass
class StoreClock:
    """A store's clock, which stands still unless a test sets it. written: when documents were, by it."""

    now: datetime = datetime(2026, 11, 1, 12, tzinfo=UTC)
    written: dict[str, datetime] = field(default_factory=dict)


def set_clocks(monkeypatch: pytest.MonkeyPatch, begin: datetime) -> Callable[[timedelta], None]:
    """Have every store in memory and this machine share a clock that stands still; what moves it."""
    clock = StoreClock(begin)
    monkeypatch.setattr(MemoryStore, "now", lambda store: store._do("now", lambda: clock.now))
    monkeypatch.setattr(parsing, "steady_s", lambda: clock.now.timestamp())

    def move(by: timedelta) -> None:
        clock.now += by

    return move


@dataclass
class MemoryStore:
    """`Store` over a dict. With an actor, each call waits for its turn; putting a blob is two calls, look and write."""

    objects: dict[str, bytes] = field(default_factory=dict)
    actor: Actor | None = None
    calls: dict[str, int] = field(default_factory=dict)
    uri: str = "memory://"
    near: bool = True
    clock: StoreClock = field(default_factory=StoreClock)

    def seen_by(self, actor: Actor) -> "MemoryStore":
        return MemoryStore(self.objects, actor, self.calls, clock=self.clock)

    def locator(self, key: str) -> str:
        return f"memory://{key}"

    def put_file(self, path: Path) -> str:
        return self.put_bytes(path.read_bytes())

    def put_bytes(self, data: bytes) -> str:
        digest = digest_of_bytes(data)
        if not self.has(digest):
            self._do("put", lambda: self.objects.update({blob_key(digest): data}))
        return digest

    def has(self, digest: str) -> bool:
        return self._do("has", lambda: blob_key(digest) in self.objects)

    def stored_size(self, digest: str) -> int | None:
        return self._do(
            "has", lambda: len(self.objects[blob_key(digest)]) if blob_key(digest) in self.objects else None
        )

    def size(self, digest: str) -> int:
        return len(self.read_blob(digest))

    def path(self, digest: str) -> Path:
        raise AssertionError(f"a collection has no use for the file of blob {digest}")

    def fetch(self, digest: str, dest: Path) -> None:
        dest.write_bytes(self.read_blob(digest))

    def read_blob(self, digest: str, max_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:
        result = self._do("read blob", lambda: self.objects.get(blob_key(digest)))
        if result is None:
            raise IntegrityError(f"lost blob {digest}")
        return result

    def rehash(self, digest: str) -> BlobDigest:
        return BlobDigest(digest_of_bytes(self.read_blob(digest)))

    def read(self, key: str) -> bytes | None:
        return self._do("read", lambda: self.objects.get(check_key(key)))

    def read_if_changed(self, key: str, tag: str) -> tuple[bytes | None, str]:
        data = self.read(key)
        result = "" if data is None else digest_of_bytes(data)
        return (None if result == tag else data), result

    def create(self, key: str, data: bytes) -> bool:
        return self._do("create", lambda: self._swap(key, data, None))

    def replace(self, key: str, data: bytes, expected: bytes | None) -> bool:
        return self._do("replace", lambda: self._swap(key, data, expected))

    def _swap(self, key: str, data: bytes, expected: bytes | None) -> bool:
        if self.objects.get(check_key(key)) != expected:
            return False
        self.objects[key] = data
        self.clock.written[key] = self.clock.now
        return True

    def remove(self, key: str) -> None:
        self._do("remove", lambda: self.objects.pop(check_key(key), None))

    def list(self, prefix: str = "") -> Iterator[str]:
        result = self._do("list", lambda: [key for key in list(self.objects) if key.startswith(prefix)])
        return iter(sorted(result, key=lambda key: key.split("/")))

    def children(self, prefix: str = "") -> Iterator[str]:
        keys = self._do("children", lambda: [key for key in list(self.objects) if key.startswith(prefix)])
        parts = (key.removeprefix(prefix).partition("/") for key in keys)
        return iter(sorted({f"{name}{slash}" for name, slash, _ in parts}))

    def sizes(self, prefix: str) -> Iterator[tuple[str, int]]:
        return iter(self._do("list", lambda: [(k, len(v)) for k, v in self.objects.items() if k.startswith(prefix)]))

    def stamps(self, prefix: str) -> Iterator[tuple[str, datetime]]:
        return ((key, self.clock.written.get(key, self.clock.now)) for key, _ in self.sizes(prefix))

    def now(self) -> datetime:
        return self._do("now", lambda: self.clock.now)

    def discard(self, digest: str) -> None:
        self.remove(blob_key(digest))

    def strays(self) -> tuple[str, ...]:
        return ()

    def sweep(self) -> int:
        return 0

    def _do(self, call: str, work: Callable[[], Any]) -> Any:
        self.calls[call] = self.calls.get(call, 0) + 1
        if self.actor is None:
            return work()
        with self.actor.lock:
            self.actor.turn(call)
            return work()


Choose = Callable[[Sequence[Actor]], Actor]


def interleave(works: Sequence[tuple[Actor, Callable[[], object]]], choose: Choose) -> None:
    """Run all works, a store call at a time, whose `choose` says; each actor then has its error, or None."""

    def run(actor: Actor, work: Callable[[], object]) -> None:
        try:
            actor.turn("start")
            work()
        except BaseException as error:
            actor.error = error
        finally:
            actor.done = True
            actor.back.release()

    threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in works]
    for (actor, _), thread in zip(works, threads, strict=True):
        thread.start()
        assert actor.back.acquire(timeout=PATIENCE_S)
    while waiting_actors := [actor for actor, _ in works if not actor.done]:
        actor = choose(waiting_actors)
        actor.go.release()
        assert actor.back.acquire(timeout=PATIENCE_S), f"{actor.name} hangs after {actor.calls[-3:]}"
    for thread in threads:
        thread.join()


def after(first: Actor, steps: int) -> Choose:
    """`first` makes so many steps, then the others run to their end, then it goes on."""

    def choose(waiting: Sequence[Actor]) -> Actor:
        other_actors = [actor for actor in waiting if actor is not first]
        return first if first in waiting and (first.steps < steps or not other_actors) else other_actors[0]

    return choose


def in_turns(first: Actor, steps: int, second: Actor, others: float) -> Choose:
    """`first` makes so many steps, `second` so many of its own; then `first` ends, and then `second`."""

    def choose(waiting: Sequence[Actor]) -> Actor:
        if len(waiting) == 1:
            return waiting[0]
        return second if first.steps >= steps and second.steps < others else first

    return choose


def run_alone(
    store: MemoryStore, work: Callable[[MemoryStore], object], kill_at: int | None = None
) -> tuple[MemoryStore, Actor]:
    """Run a work on a copy of a store, killed before a step or not at all; gives the copy and who worked."""
    copy, actor = MemoryStore(dict(store.objects)), Actor("alone", kill_at)
    interleave([(actor, partial(work, copy.seen_by(actor)))], lambda waiting: waiting[0])
    assert actor.error is None if kill_at is None else isinstance(actor.error, Killed), (kill_at, actor.error)
    return copy, actor


def steps_of(store: MemoryStore, work: Callable[[MemoryStore], object]) -> range:
    """Each step of a work on a copy of a store, from 1 on."""
    return range(1, run_alone(store, work)[1].steps + 1)


def run_two(
    store: MemoryStore,
    first: Callable[[MemoryStore], object],
    second: Callable[[MemoryStore], object],
    steps: int,
    others: float = math.inf,
) -> tuple[MemoryStore, Actor, Actor]:
    """Run two works on a copy of a store: `first` makes so many steps, `second` so many of its own, then both end."""
    copy, first_actor, actor = MemoryStore(dict(store.objects)), Actor("first"), Actor("second")
    works = [(first_actor, partial(first, copy.seen_by(first_actor))), (actor, partial(second, copy.seen_by(actor)))]
    interleave(works, in_turns(first_actor, steps, actor, others))
    return copy, first_actor, actor


def mark_late(store: Any, name: str) -> Callable[[], bool]:
    """Mark a name as a collection does that had looked before the name was served; gives whether it is still marked."""
    shard = leases.shard_of(name)
    leases.update_state(store, lambda state: replace(state, generation=1, latest=1, shards=(shard,)))
    tombstone = leases.Tombstone(datetime(2026, 1, 1, tzinfo=UTC), 1)
    leases.update_shard(store, shard, lambda state: replace(state, waiting={name: tombstone}))
    return lambda: name in leases.read_shards(store, [shard])[shard].waiting
