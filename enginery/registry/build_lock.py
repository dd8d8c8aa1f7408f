"""Taking turns: of several runs on the same thing, wherever they are, one works and the others wait for what it makes.

A turn saves work and nothing hangs on it: two that work at once, by a network that fell apart, make the same version
twice, and records and publication join them. So it may be taken from a holder that seems dead: one whose document did
not change for `DEAD_AFTER_S` by the clock of whoever waits, or whose process is gone from this very machine.
"""

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

from enginery.core import parsing
from enginery.core.digest import canonical_json
from enginery.core.errors import EngineryError, IntegrityError, UndecidedError
from enginery.core.presence import Presence, this_process
from enginery.registry.store.base import Store
from enginery.registry.store.keys import TURNS, turn_key
from enginery.registry.writers import clock

BEAT_S = 10.0
DEAD_AFTER_S = 45.0
# A collection deletes what was not touched for so long.
LITTER = timedelta(days=1)
_POLL_S = 0.5
MAX_BYTES = 1 << 16


@dataclass(frozen=True)
class Holder:
    """Who works. host, namespace, pid, began: as a `Presence`.  thread: two of one process are two holders.
    beat: counts up.  touched: ISO 8601, for people and collections.  since: when it began to work, likewise.
    """

    what: str
    host: str
    namespace: str
    pid: int
    thread: int
    began: str
    beat: int
    touched: str
    since: str

    @property
    def gone(self) -> bool:
        """Whether its process was on this machine and is not there any more."""
        return Presence(self.host, self.namespace, self.pid, self.began).gone

    def __str__(self) -> str:
        since = self.since[:19].replace("T", " ")
        return f"{self.what} is being done by {self.host}, process {self.pid}, since {since} UTC"


@contextmanager
def turn(store: Store, name: str, what: str, say: Callable[[str], object] = lambda _: None) -> Iterator[None]:
    """Work while nobody else works on `name`, a digest. what: in words, for those who wait.

    say: is told who works and since when, each time that it is somebody else.
    """
    mine = _take(store, name, _myself(what), say)
    stop = threading.Event()
    beating = threading.Thread(target=_beat, args=(store, name, mine, stop), daemon=True)
    beating.start()
    try:
        yield
    finally:
        stop.set()
        beating.join()
        with suppress(EngineryError):  # whoever waits finds out by itself
            held = _read(store.read(turn_key(name)))
            if held is not None and _same(held, mine):
                store.remove(turn_key(name))


def is_held(store: Store, name: str) -> bool:
    """Whether somebody works on `name` now, as far as the document tells."""
    holder = _read(store.read(turn_key(name)))
    return holder is not None and not holder.gone


def forget_litter(store: Store) -> None:
    """Delete what dead holders left behind, for a collection."""
    for key in store.list(TURNS):
        holder = _read(store.read(key))
        if holder is None or clock.read_stamp(holder.touched, "touched") < clock.now() - LITTER:
            store.remove(key)


def _take(store: Store, name: str, mine: Holder, say: Callable[[str], object]) -> Holder:
    key, seen, since, told = turn_key(name), b"", time.monotonic(), ""
    while True:
        data = store.read(key)
        holder = _read(data)
        if holder is not None and _same(holder, mine):
            return mine
        if data != seen:
            seen, since = data or b"", time.monotonic()
        if holder is None or holder.gone or time.monotonic() - since > DEAD_AFTER_S:
            mine = replace(mine, since=clock.stamp(clock.now()))
            with suppress(UndecidedError):  # the next look tells
                if store.replace(key, canonical_json(asdict(mine)), data):
                    return mine
            continue
        if told != (told := str(holder)):
            say(told)
        time.sleep(random.uniform(_POLL_S / 2, _POLL_S))  # noqa: S311 - no secret


def _beat(store: Store, name: str, mine: Holder, stop: threading.Event) -> None:
    """Say every `BEAT_S` that the holder lives; end when somebody else took the turn."""
    while not stop.wait(BEAT_S):
        after = replace(mine, beat=mine.beat + 1, touched=clock.stamp(clock.now()))
        with suppress(EngineryError):  # another beat follows
            data = store.read(turn_key(name))
            held = _read(data)
            if held is None or not _same(held, mine):
                return
            if store.replace(turn_key(name), canonical_json(asdict(after)), data):
                mine = after


def _same(one: Holder, other: Holder) -> bool:
    return replace(one, beat=0, touched="") == replace(other, beat=0, touched="")


def _myself(what: str) -> Holder:
    me, now = this_process(), clock.stamp(clock.now())
    return Holder(what, me.host, me.namespace, me.pid, threading.get_ident(), me.began, 0, now, now)


def _read(data: bytes | None) -> Holder | None:
    """A holder; None where nobody is, or what is there cannot be read."""
    try:
        document: dict[str, Any] = parsing.parse_json(data, MAX_BYTES) if data is not None else {}
        words = ("what", "host", "namespace", "began", "since")
        texts = {name: parsing.field(document, name, parsing.text) for name in words}
        clock.read_stamp(document.get("touched"), "touched")
        counts = {name: parsing.field(document, name, parsing.count) for name in ("pid", "thread", "beat")}
        return Holder(**texts, **counts, touched=document["touched"])  # type: ignore[arg-type]
    except IntegrityError:
        return None
