"""Clocks, randomness, threads and pauses of the product come from the simulated world; pure results are cached."""

import os
import random
import secrets
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from datetime import datetime, tzinfo
from functools import lru_cache
from types import FunctionType
from typing import Any

from enginesmith.core import codec, errors, names, parsing
from enginesmith.registry import leases, manifest
from enginesmith.registry import leases as marks
from enginesmith.registry.builds import runs
from enginesmith.registry.collection import sweep
from enginesmith.registry.store import download, layout, parallel
from enginesmith.registry.versions import channel_state, lookup
from tests.one_thread import ROOMS, Inline, side_by_side
from tests.simulation.world import World

# Functions of bytes and texts that return frozen values.
_PURE: tuple[Callable[..., Any], ...] = (
    codec.parse_as,
    errors.digest_of_bytes,
    errors.is_digest,
    layout.blob_key,
    layout.is_key,
    layout.manifest_key,
    layout.version_prefix,
    manifest.parse,
    names.is_name,
    names.version_order,
    marks.shard_of,
    marks._parse_shard,
    marks._parse_state,
    runs.read_record,
    lookup.parse_snapshot,
    channel_state.parse_channel,
    channel_state.parse_history,
)


# Results of each that a process remembers: more make a seed slower, since the processor's cache holds fewer of them.
_REMEMBERED = 1 << 10


class _InlineThread(threading.Thread):
    """A thread whose work is done where it is started."""

    def start(self) -> None:
        self.run()

    def join(self, timeout: float | None = None) -> None:
        pass

    def is_alive(self) -> bool:
        return False


class _AnyDatetime(type):
    """The class of a clock whose instances are all times."""

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, datetime)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, datetime)


class _Clock(datetime, metaclass=_AnyDatetime):
    """A time of a simulated world. One class for all runs: caches of the product hold its instances."""

    world: World

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
        return cls.world.now()


class _Lock:
    """A lock that actors wait for by giving up their turn."""

    def __init__(self) -> None:
        self._world, self._held = _Clock.world, False

    def __enter__(self) -> None:
        while self._held:
            self._world.sleep(0.1)
        self._held = True

    def __exit__(self, *_: object) -> None:
        self._held = False


class _Claim(sweep.Claim):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._lock = _Lock()  # type: ignore[assignment]

    def check(self) -> None:
        _Clock.world.rely(super().check, lambda: self.sweeper.expires, 5)


@contextmanager
def patched(world: World) -> Iterator[None]:
    """Have all of the product's modules run in the world while the block runs."""
    original_check = leases.Guard.check

    def check(self: leases.Guard) -> None:
        world.rely(lambda: original_check(self), lambda: self.lease.expires, 20)

    replacements = {**_CACHED, futures.ThreadPoolExecutor: Inline, datetime: _Clock, sweep.Claim: _Claim}
    places = _places(len(sys.modules))
    _Clock.world = world
    faked_times: list[tuple[Any, str, Any]] = [
        *((time, "sleep", world.sleep), (time, "time", lambda: world.now().timestamp()), (os, "getpid", lambda: 1)),
        *((secrets, "token_hex", world.token), (secrets, "randbelow", lambda _: 0)),
        (socket, "gethostname", lambda: world.current.process.name if world.current else "host"),
        *((os, name, _as_step(world, getattr(os, name))) for name in _CHANGES),
        *((download.threading, "Thread", _InlineThread), (zlib, "compress", _COMPRESS)),
        *((parsing, "steady_s", lambda: world.time.timestamp()), (random, "uniform", lambda *ends: sum(ends) / 2)),
        *((leases, "keep_renewing", world.repeat), (leases.Guard, "check", check)),
    ]
    found_owners = [(owner, name, getattr(owner, name)) for owner, name, _ in faked_times]
    try:
        for space, name, original_place in places:
            space[name] = replacements[original_place]
        for owner, name, value in faked_times:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in found_owners:
            setattr(owner, name, value)
        for space, name, original_place in places:
            space[name] = original_place


def _as_step(world: World, work: Callable[..., Any]) -> Callable[..., Any]:
    def step(*args: Any, **options: Any) -> Any:
        if world.current and world.current.on_step:
            world.before_request()
        return work(*args, **options)

    return step


_CHANGES = ("link", "mkdir", "rename", "replace", "rmdir", "symlink", "unlink")
_COMPRESS = lru_cache(1 << 12)(zlib.compress)
_DIGESTS = lru_cache(_REMEMBERED)(lambda data, read=errors.digests_in: tuple(read(data)))
_CACHED: dict[object, Any] = {
    **{function: lru_cache(_REMEMBERED)(function) for function in _PURE},
    errors.digests_in: lambda data: iter(_DIGESTS(data)),
    parallel.side_by_side: side_by_side,
}


@lru_cache(1)
def _places(modules: int) -> list[tuple[dict[str, Any], str, Any]]:
    """Names to replace in the product's modules: namespace, name, original. modules: how many are imported."""
    originals = {futures.ThreadPoolExecutor, datetime, sweep.Claim, *_CACHED}
    return [
        (vars(module), name, value)
        for room, module in list(sys.modules.items())
        if room.partition(".")[0] in (*ROOMS, "tests") and room != __name__
        for name, value in list(vars(module).items())
        if isinstance(value, type | FunctionType) and value in originals
    ]
