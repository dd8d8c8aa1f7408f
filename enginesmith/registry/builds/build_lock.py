"""Build locks: of several runs that build the same thing, on any machines, one builds and the others wait.

A lock saves work and is not needed for correctness: two runs that build at once make the same version twice, and the
second publication finds the first. So a lock may be taken from a holder that seems dead: one whose document did not
change for `DEAD_AFTER_S` by the clock of the waiting run, or whose process has ended on this machine.
"""

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta

from enginesmith.core.codec import encode, parse_as
from enginesmith.core.constraints import Count
from enginesmith.core.digest import canonical_json
from enginesmith.core.errors import EnginesmithError, IntegrityError, UndecidedError
from enginesmith.core.origin import Presence, this_process
from enginesmith.core.text import precise_now
from enginesmith.registry import leases
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.layout import BUILD_LOCKS, build_lock_key

BEAT_S = 10.0
DEAD_AFTER_S = 45.0
# Garbage collection deletes locks that were not renewed for so long.
STALE_AFTER = timedelta(days=1)
_POLL_S = 0.5
MAX_BYTES = 1 << 16


@dataclass(frozen=True)
class LockHolder:
    """The holder of a build lock. what: the work, for messages.  host, namespace, pid, began: as in `Presence`.
    thread: two threads of a process are two holders.  beat: counter of renewals.  since: when it got the lock (ISO
    8601).
    """

    what: str
    host: str
    namespace: str
    pid: Count
    thread: Count
    began: str
    beat: Count
    since: str

    @property
    def gone(self) -> bool:
        """Whether its process ran on this machine and has ended."""
        return Presence(self.host, self.namespace, self.pid, self.began).has_ended

    def __str__(self) -> str:
        since = self.since[:19].replace("T", " ")
        return f"{self.what} is being done by {self.host}, process {self.pid}, since {since} UTC"


@contextmanager
def hold_build_lock(
    store: Store, name: str, what: str, say: Callable[[str], object] = lambda _: None
) -> Iterator[None]:
    """Hold the build lock `name`, a digest, while the block runs; waits as long as another run holds it.

    what: the work, for the messages of waiting runs.  say: called with the holder in words, whenever it changes.
    """
    me = this_process()
    mine = LockHolder(what, me.host, me.namespace, me.pid, threading.get_ident(), me.began, 0, precise_now())
    mine = _take(store, name, mine, say)
    try:
        with leases.keep_renewing(_Beat(store, name, mine), BEAT_S):
            yield
    finally:
        with suppress(EnginesmithError):  # a waiting run notices that the lock is not renewed
            held = _read(store.read(build_lock_key(name)))
            if held is not None and _same(held, mine):
                store.remove(build_lock_key(name))


def is_held(store: Store, name: str) -> bool:
    """Whether a run holds the build lock `name` whose process is not known to have ended."""
    holder = _read(store.read(build_lock_key(name)))
    return holder is not None and not holder.gone


def remove_stale_locks(store: Store) -> None:
    """Delete build locks that were not renewed for a day by the store's clock, or cannot be read; garbage collection
    calls this."""
    renewed = dict(store.stamps(BUILD_LOCKS))
    stale = store.now() - STALE_AFTER if renewed else None
    for key, at in renewed.items():
        if _read(store.read(key)) is None or (stale and at < stale):
            store.remove(key)


def _take(store: Store, name: str, mine: LockHolder, say: Callable[[str], object]) -> LockHolder:
    key, seen, since, reported = build_lock_key(name), b"", time.monotonic(), ""
    while True:
        data = store.read(key)
        holder = _read(data)
        if holder is not None and _same(holder, mine):
            return mine
        if data != seen:
            seen, since = data or b"", time.monotonic()
        if holder is None or holder.gone or time.monotonic() - since > DEAD_AFTER_S:
            mine = replace(mine, since=precise_now())
            with suppress(UndecidedError):  # the next read shows who wrote
                if store.replace(key, canonical_json(encode(mine)), data):
                    return mine
            continue
        if reported != (reported := str(holder)):
            say(reported)
        time.sleep(random.uniform(_POLL_S / 2, _POLL_S))  # noqa: S311 - no secret


@dataclass
class _Beat:
    """Renews a lock. mine: as it was written last."""

    store: Store
    name: str
    mine: LockHolder

    def __call__(self) -> None:
        """Write the lock with its next beat, unless another holder has taken it."""
        after = replace(self.mine, beat=self.mine.beat + 1)
        key = build_lock_key(self.name)
        data = self.store.read(key)
        held = _read(data)
        is_mine = held is not None and _same(held, self.mine)
        if is_mine and self.store.replace(key, canonical_json(encode(after)), data):
            self.mine = after


def _same(one: LockHolder, other: LockHolder) -> bool:
    return replace(one, beat=0) == replace(other, beat=0)


def _read(data: bytes | None) -> LockHolder | None:
    """The holder in a lock's document; None if the document is absent or cannot be read."""
    try:
        return parse_as(data or b"{}", MAX_BYTES, LockHolder)
    except IntegrityError:
        return None
