"""A registry that is read from the nearest of several places: `http://cache.region,s3://bucket/prefix`.

The last place is the registry itself; those before it are caches (`enginery cache`) or mirrors of it, nearest first.

**Reads** go to the first place that answers, one by one: where it is out of reach, or does not have what is asked for,
the next one is asked, and a blob goes on at the byte where it broke off. A place that was out of reach is left alone
for a while, longer each time, and asked before that only if no other place answers. **Writes** go to the last place, and
so do later reads of the keys that were written.

**What lags.** A mirror may be behind the registry. A channel's history only grows, so a place whose history is the
beginning of one that was seen before is behind, and the next place is asked: in one process a channel never moves back
because another place answered. The registry's own answer is taken as it is.

**Wrong bytes.** Who finds that a blob's bytes are not what its digest says calls `doubt`, and it then comes from the
last place.
"""

import json
import random
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

from enginery.core.errors import EngineryError, IntegrityError, RelayError, UnavailableError
from enginery.registry.store.base import Doubting, Store, absolute_uri, open_store, split_places
from enginery.registry.store.download import Fill
from enginery.registry.store.files import BlobDigest
from enginery.registry.store.layout import MODELS

Value = TypeVar("Value")
Say = Callable[[str], object]

# Seconds for which a place that was out of reach is left alone: the first time, and at most; a fifth more or less.
FIRST_AWAY_S = 30.0
LONGEST_AWAY_S = 300.0
_JITTER = 0.2
# Requests to a cache before the next place is asked.
_ATTEMPTS = 2
# Channels, written keys and doubted blobs that are remembered.
_REMEMBERED = 1024


def warn(text: str) -> None:
    """Tell of a place that does not answer by Python's own warnings."""
    warnings.warn(text, stacklevel=3)


def open_nearest(uri: str | Path, say: Say = warn) -> Store:
    """Open a registry to read from its nearest place; one with a single place is opened by `open_store`.

    say: called when a place stops to answer, and when it answers again. Of several places none is asked yet. Raises as
    `open_store`.
    """
    places = (uri,) if isinstance(uri, Path) else split_places(uri)
    return open_store(uri) if len(places) == 1 else NearestStore([absolute_uri(str(place)) for place in places], say)


class _Place:
    """One place: opened at first use, and left alone for a while after it was out of reach."""

    def __init__(self, uri: str, last: bool) -> None:
        self.uri, self.last = uri, last
        self._store: Store | None = None
        self._lock = threading.Lock()
        self._failures, self._until = 0, 0.0

    def open(self) -> Store:
        """The store. Raises InputError and UnavailableError."""
        with self._lock:
            if self._store is None:
                self._store = self._opened()
            return self._store

    def _opened(self) -> Store:
        if not self.last and self.uri.startswith(("http://", "https://")):
            from enginery.registry.store.http.store import open_http

            return open_http(self.uri, create=False, attempts=_ATTEMPTS)
        return open_store(self.uri)

    @property
    def locator(self) -> Callable[[str], str]:
        """Where a key is, for messages."""
        return self._store.locator if self._store is not None else lambda key: f"{self.uri.partition('?')[0]}/{key}"

    @property
    def away(self) -> bool:
        """Whether it is left alone now."""
        return time.monotonic() < self._until

    def failed(self) -> float | None:
        """Leave it alone for a while; the seconds if it answered before, else None."""
        with self._lock:
            first, self._failures = not self._failures, self._failures + 1
            wait = min(FIRST_AWAY_S * 2 ** min(self._failures - 1, 10), LONGEST_AWAY_S)
            wait *= random.uniform(1 - _JITTER, 1 + _JITTER)  # noqa: S311 - no secret
            self._until = time.monotonic() + wait
            return wait if first else None

    def answered(self) -> bool:
        """Note that it answers; whether it did not before."""
        if not self._failures:
            return False
        with self._lock:
            back, self._failures, self._until = bool(self._failures), 0, 0.0
            return back


Places = list[_Place]
Opened = list[tuple[_Place, Fill]]


class NearestStore:
    """The store at several places (`Store` documents the methods). May be used by many threads."""

    def __init__(self, uris: Sequence[str], say: Say) -> None:
        self._places = [_Place(uri, uri == uris[-1]) for uri in uris]
        self._say = say
        # By channel: the longest history that was seen, and its bytes.
        self._channels: dict[str, tuple[list[object], bytes]] = {}
        self._written: dict[str, None] = {}
        self._doubted: dict[str, None] = {}

    @property
    def uri(self) -> str:
        """All places, with commas."""
        return ",".join(place.uri for place in self._places)

    @property
    def near(self) -> bool:
        """See `Store.near`: only where all places are."""
        return all(place.uri.startswith("file://") for place in self._places)

    def locator(self, key: str) -> str:
        """See `Store.locator`: where it is in the registry itself."""
        return self._places[-1].locator(key)

    def put_file(self, path: Path) -> str:
        """See `Store.put_file`."""
        return self._registry().put_file(path)

    def put_and_digest_file(self, path: Path) -> BlobDigest:
        """See `Store.put_and_digest_file`."""
        return self._registry().put_and_digest_file(path)

    def put_bytes(self, data: bytes) -> str:
        """See `Store.put_bytes`."""
        return self._registry().put_bytes(data)

    def create(self, key: str, data: bytes) -> bool:
        """See `Store.create`."""
        _remember(self._written, key, None)
        return self._registry().create(key, data)

    def replace(self, key: str, data: bytes, expected: bytes | None) -> bool:
        """See `Store.replace`."""
        _remember(self._written, key, None)
        return self._registry().replace(key, data, expected)

    def remove(self, key: str) -> None:
        """See `Store.remove`."""
        _remember(self._written, key, None)
        self._registry().remove(key)

    def discard(self, digest: str) -> None:
        """See `Store.discard`."""
        self._registry().discard(digest)

    def rehash(self, digest: str) -> BlobDigest:
        """See `Store.rehash`."""
        return self._registry().rehash(digest)

    def sizes(self, prefix: str) -> Iterator[tuple[str, int]]:
        """See `Store.sizes`."""
        return self._registry().sizes(prefix)

    def strays(self) -> tuple[str, ...]:
        """See `Store.strays`."""
        return self._registry().strays()

    def sweep(self) -> int:
        """See `Store.sweep`."""
        return self._registry().sweep()

    def has(self, digest: str) -> bool:
        """See `Store.has`."""
        return self.stored_size(digest) is not None

    def stored_size(self, digest: str) -> int | None:
        """See `Store.stored_size`: in the first place that has it."""
        return self._first(lambda store: store.stored_size(digest), None, self._order(digest))

    def size(self, digest: str) -> int:
        """See `Store.size`."""
        return self._any(lambda store: store.size(digest), self._order(digest))

    def path(self, digest: str) -> Path:
        """See `Store.path`."""
        return self._any(lambda store: store.path(digest), self._order(digest))

    def fetch(self, digest: str, dest: Path) -> None:
        """See `Store.fetch`."""
        self._any(lambda store: store.fetch(digest, dest), self._order(digest))

    def read_blob(self, digest: str) -> bytes:
        """See `Store.read_blob`."""
        return self._any(lambda store: store.read_blob(digest), self._order(digest))

    @contextmanager
    def open_range(self, digest: str, start: int, size: int) -> Iterator[Fill]:
        """See `Store.open_range`. The next place goes on where one broke off."""
        at = start
        with ExitStack() as opened:
            current: Opened = []

            def fill(into: memoryview) -> None:
                nonlocal at
                while True:
                    try:
                        if not current:
                            self._open_next(digest, places, at, start + size - at, opened, current)
                        current[0][1](into)
                    except EngineryError as error:
                        failed = current.pop()[0] if current else None
                        opened.close()
                        self._note(failed, error)
                        if not places:
                            raise
                    else:
                        self._note(current[0][0], None)
                        at += len(into)
                        return

            places = self._order(digest)
            yield fill

    def _open_next(
        self,
        digest: str,
        places: Places,
        start: int,
        size: int,
        opened: ExitStack,
        current: Opened,
    ) -> None:
        """Open the rest of a range at the next of `places`. Raises what that one raises."""
        place = places.pop(0)
        try:
            current.append((place, opened.enter_context(place.open().open_range(digest, start, size))))
        except EngineryError as error:
            self._note(place, error)
            raise

    def doubt(self, digest: str) -> None:
        """Read a blob from the last place from now on, because other bytes came; tell caches to look at theirs."""
        _remember(self._doubted, digest, None)
        for place in self._places[:-1]:
            if not place.away:
                try:
                    store = place.open()
                except EngineryError as error:
                    self._note(place, error)
                else:
                    if isinstance(store, Doubting):
                        store.doubt(digest)

    def read(self, key: str) -> bytes | None:
        """See `Store.read`."""
        return self.read_if_changed(key, "")[0]

    def read_if_changed(self, key: str, tag: str) -> tuple[bytes | None, str]:
        """See `Store.read_if_changed`. The tag names the place, too; another one's document is read anew."""
        number, _, known = tag.partition(":")

        def ask(place: _Place) -> tuple[bytes | None, str]:
            index = str(self._places.index(place))
            data, found = place.open().read_if_changed(key, known if index == number else "")
            if data is not None and self._lags(place, key, data):
                return None, ""
            return data, f"{index}:{found}" if found else ""

        data, found = self._first(None, (None, ""), self._order_of(key), ask)
        if not found and key in self._channels:  # only places that lag have answered
            return self._channels[key][1], "seen"
        return data, found

    def list(self, prefix: str = "") -> Iterator[str]:
        """See `Store.list`: in the first place that has such keys."""
        yield from self._first(lambda store: tuple(store.list(prefix)), (), self._order())

    def children(self, prefix: str = "") -> Iterator[str]:
        """See `Store.children`: in the first place that has such keys."""
        yield from self._first(lambda store: tuple(store.children(prefix)), (), self._order())

    def _registry(self) -> Store:
        """The last place."""
        return self._places[-1].open()

    def _order(self, digest: str = "") -> Places:
        """The places in the order in which they are asked: those that are left alone come last."""
        places = self._places[::-1] if digest in self._doubted else self._places
        return sorted(places, key=lambda place: place.away)

    def _order_of(self, key: str) -> Places:
        return self._places[-1:] if key in self._written else self._order()

    def _any(self, ask: Callable[[Store], Value], places: Places) -> Value:
        """What the first place answers that does not fail. Raises what the last one raised."""
        for place in places:
            try:
                found = ask(place.open())
            except EngineryError as error:
                self._note(place, error)
                failure = error
            else:
                self._note(place, None)
                return found
        raise failure

    def _first(
        self,
        ask: Callable[[Store], Value] | None,
        nothing: Value,
        places: Places,
        ask_place: "Callable[[_Place], Value] | None" = None,
    ) -> Value:
        """The first answer that is not `nothing`; that, if a place says so and no other one that can be reached knows
        more. Raises what the last place raised if none answers."""
        answered, failure = False, None
        for place in places:
            if answered and place.away:
                break
            try:
                found = ask_place(place) if ask_place else ask(place.open()) if ask else nothing
            except EngineryError as error:
                self._note(place, error)
                failure = error
                continue
            self._note(place, None)
            if found != nothing:
                return found
            answered = True
        if failure is not None and not answered:
            raise failure
        return nothing

    def _lags(self, place: _Place, key: str, data: bytes) -> bool:
        """Whether a channel's document is older than what was seen; what is not is remembered."""
        if not (key.startswith(MODELS) and "/channels/" in key):
            return False
        history = _history(data)
        seen = self._channels.get(key, ([], b""))[0]
        if not place.last and len(history) < len(seen) and seen[: len(history)] == history:
            return True
        _remember(self._channels, key, (history, data))
        return False

    def _note(self, place: _Place | None, error: EngineryError | None) -> None:
        """Note whether a place answered (None), and say so when that is new."""
        if place is None:
            return
        if isinstance(error, UnavailableError) and not isinstance(error, RelayError):
            if (wait := place.failed()) is not None:
                others = " and ".join(other.uri for other in self._places if other is not place)
                self._say(f"{place.uri} is left alone for {wait:.0f} s, and {others} read instead: {error}")
        elif (error is None or isinstance(error, IntegrityError | RelayError)) and place.answered():
            self._say(f"{place.uri} answers again")


def _history(data: bytes) -> list[object]:
    """The moves in a channel's document; none where it cannot be read, of which `lookup` gives the reason."""
    try:
        found = json.loads(data)["history"]
    except (ValueError, RecursionError, KeyError, TypeError):
        return []
    return found if isinstance(found, list) else []


def _remember(known: dict[str, Value], key: str, value: Value) -> None:
    """Put a value last; the first go where there are too many."""
    known.pop(key, None)
    known[key] = value
    while len(known) > _REMEMBERED:
        known.pop(next(iter(known)), None)
