"""A registry that is read from the nearest of several places: `http://cache.region,s3://bucket/prefix`.

The last place is the registry itself; those before it are caches (docs/guides/cache.md) or mirrors of it, nearest
first.

**Reads** go to the first place that answers, one by one: where it is out of reach, or does not have what is asked for,
the next one is asked, and a blob goes on at the byte where it broke off. A place that was out of reach is left alone
for a while, longer each time, and asked before that only if no other place answers. **Writes** go to the last place,
and so do later reads of the keys that were written.

**What lags.** A mirror may be behind the registry. A place where a channel's state is older than one that was seen
before is behind, and the next place is asked: in one process a channel never moves back because another place answered.
A mirror states the time of its own moves, by its own clock, so a state that another one replaced here is older too,
whatever it says. The registry's own answer is taken as it is.

**Wrong bytes.** Who finds that a blob's bytes are not what its digest says calls `doubt`, and it then comes from the
last place.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import TypeVar

from enginesmith.core import parsing
from enginesmith.core.digest import digest_of_bytes
from enginesmith.core.errors import EnginesmithError, IntegrityError, RelayError, UnavailableError
from enginesmith.registry.store.base import Doubting, Store, absolute_uri, open_store, split_places
from enginesmith.registry.store.download import Fill
from enginesmith.registry.store.files import BlobDigest
from enginesmith.registry.store.layout import MAX_DOCUMENT_BYTES, MODELS
from enginesmith.registry.store.near_place import NearPlace

Value = TypeVar("Value")
Say = Callable[[str], object]

# Channels, written keys and doubted blobs that are remembered; and of a channel, states that another one replaced.
_REMEMBERED, _REPLACED = 1024, 8


def warn(text: str) -> None:
    """Tell of a place that does not answer by Python's own warnings."""
    warnings.warn(text, stacklevel=3)


def open_nearest(uri: str | Path, say: Say = warn, *, check: bool = True) -> Store:
    """Open a registry to read from its nearest place; one with a single place is opened by `open_store`.

    say: called when a place stops to answer, and when it answers again. Of several places none is asked yet. Raises as
    `open_store`, whose `check` is that of a single place.
    """
    places = (uri,) if isinstance(uri, Path) else split_places(uri)
    if len(places) == 1:
        return open_store(uri, check=check)
    return NearestStore([absolute_uri(str(place)) for place in places], say)


Places = list[NearPlace]


class NearestStore:
    """The store at several places (`Store` documents the methods). May be used by many threads."""

    def __init__(self, uris: Sequence[str], say: Say) -> None:
        self._places = [NearPlace(uri, uri == uris[-1]) for uri in uris]
        self._say = say
        # By channel: the order of the state that was seen, and the document's bytes.
        self._channels: dict[str, tuple[tuple[str, int, int], bytes]] = {}
        self._replaced: dict[str, tuple[str, ...]] = {}
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

    def stamps(self, prefix: str) -> Iterator[tuple[str, datetime]]:
        """See `Store.stamps`."""
        return self._registry().stamps(prefix)

    def now(self) -> datetime:
        """See `Store.now`."""
        return self._registry().now()

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
        return self._first(lambda place: place.open().stored_size(digest), None, self._order(digest))

    def size(self, digest: str) -> int:
        """See `Store.size`."""
        return self._any(lambda store: store.size(digest), self._order(digest))

    def path(self, digest: str) -> Path:
        """See `Store.path`."""
        return self._any(lambda store: store.path(digest), self._order(digest))

    def fetch(self, digest: str, dest: Path) -> None:
        """See `Store.fetch`."""
        self._any(lambda store: store.fetch(digest, dest), self._order(digest))

    def read_blob(self, digest: str, most: int = MAX_DOCUMENT_BYTES) -> bytes:
        """See `Store.read_blob`."""
        return self._any(lambda store: store.read_blob(digest, most), self._order(digest))

    @contextmanager
    def open_range(self, digest: str, start: int, size: int) -> Iterator[Fill]:
        """See `Store.open_range`. The next place goes on where one broke off."""
        at, left = start, self._order(digest)
        with ExitStack() as opened:
            current: tuple[NearPlace, Fill] | None = None

            def fill(into: memoryview) -> None:
                nonlocal at, current
                while True:
                    place = current[0] if current else left.pop(0)
                    try:
                        if current is None:
                            found = place.open().open_range(digest, at, start + size - at)
                            current = place, opened.enter_context(found)
                        current[1](into)
                    except EnginesmithError as error:
                        current = None
                        opened.close()
                        self._note(place, error)
                        if not left:
                            raise
                    else:
                        self._note(place, None)
                        at += len(into)
                        return

            yield fill

    def doubt(self, digest: str) -> None:
        """Read a blob from the last place from now on, because other bytes came; tell caches to look at theirs."""
        _remember(self._doubted, digest, None)
        for place in self._places[:-1]:
            if not place.away:
                try:
                    store = place.open()
                except EnginesmithError as error:
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

        def ask(place: NearPlace) -> tuple[bytes | None, str]:
            index = str(self._places.index(place))
            data, found = place.open().read_if_changed(key, known if index == number else "")
            if data is not None and self._lags(place, key, data):
                return None, ""
            return data, f"{index}:{found}" if found else ""

        nothing: tuple[bytes | None, str] = (None, "")
        data, found = self._first(ask, nothing, self._order_of(key))
        if not found and key in self._channels:  # only places that lag have answered
            return self._channels[key][1], "seen"
        return data, found

    def list(self, prefix: str = "") -> Iterator[str]:
        """See `Store.list`: in the first place that has such keys."""
        nothing: tuple[str, ...] = ()
        yield from self._first(lambda place: tuple(place.open().list(prefix)), nothing, self._order())

    def children(self, prefix: str = "") -> Iterator[str]:
        """See `Store.children`: in the first place that has such keys."""
        nothing: tuple[str, ...] = ()
        yield from self._first(lambda place: tuple(place.open().children(prefix)), nothing, self._order())

    def _registry(self) -> Store:
        """The last place."""
        return self._places[-1].open()

    def _order(self, digest: str = "") -> Places:
        """The places in the order in which they are asked: those that are left alone come last."""
        places = self._places[::-1] if digest in self._doubted else self._places
        return sorted(places, key=lambda place: place.away)

    def _order_of(self, key: str) -> Places:
        """The registry alone for what was written, and for histories: that of a mirror is of its own moves."""
        return self._places[-1:] if key in self._written or "/histories/" in key else self._order()

    def _any(self, ask: Callable[[Store], Value], places: Places) -> Value:
        """What the first place answers that does not fail. Raises what the last one raised."""
        for place in places:
            try:
                found = ask(place.open())
            except EnginesmithError as error:
                self._note(place, error)
                failure = error
            else:
                self._note(place, None)
                return found
        raise failure

    def _first(self, ask: Callable[[NearPlace], Value], nothing: Value, places: Places) -> Value:
        """The first answer that is not `nothing`; that, if a place says so and no other one that can be reached knows
        more. Raises what the last place raised if none answers."""
        answered, failure = False, None
        for place in places:
            if answered and place.away:
                break
            try:
                found = ask(place)
            except EnginesmithError as error:
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

    def _lags(self, place: NearPlace, key: str, data: bytes) -> bool:
        """Whether a channel's state is older than what was seen; what is not is remembered."""
        if not (key.startswith(MODELS) and "/channels/" in key):
            return False
        moved, (seen, before) = _read_order(data), self._channels.get(key, (("", 0, 0), data))
        replaced = self._replaced.get(key, ())
        if not place.last and (moved < seen or digest_of_bytes(data) in replaced):
            return True
        if before != data:
            _remember(self._replaced, key, (*replaced, digest_of_bytes(before))[-_REPLACED:])
        _remember(self._channels, key, (moved, data))
        return False

    def _note(self, place: NearPlace | None, error: EnginesmithError | None) -> None:
        """Note whether a place answered (None), and say so when that is new."""
        if place is None:
            return
        if isinstance(error, UnavailableError) and not isinstance(error, RelayError):
            if (wait := place.note_failure()) is not None:
                others = " and ".join(other.uri for other in self._places if other is not place)
                self._say(f"{place.uri} is left alone for {wait:.0f} s, and {others} read instead: {error}")
        elif (error is None or isinstance(error, IntegrityError | RelayError)) and place.note_answer():
            self._say(f"{place.uri} answers again")


def _read_order(data: bytes) -> tuple[str, int, int]:
    """When a channel moved last (ISO 8601, UTC), how often it did, and the number of its state, which a rollout
    raises; ('', 0, 0) where that cannot be read, of which `lookup` gives the reason."""
    try:
        document = parsing.load_json(data)
        return str(document["move"]["at"]), int(document["moves"]), int(document["revision"])
    except (ValueError, RecursionError, LookupError, TypeError, OverflowError):  # OverflowError: 1e999 moves
        return "", 0, 0


def _remember(known: dict[str, Value], key: str, value: Value) -> None:
    """Put a value last; the first go where there are too many."""
    known.pop(key, None)
    known[key] = value
    while len(known) > _REMEMBERED:
        known.pop(next(iter(known)), None)
