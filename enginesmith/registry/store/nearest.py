"""A registry that is read from a list of places, tried in order: `http://cache.region,s3://bucket/prefix`.

The last place is the registry itself; those before it are caches or mirrors of it, nearest first. A read goes to the
first place that answers: one that is out of reach, lacks what is asked for, or has other bytes than a blob's digest
says, is followed by the next; a range goes on there at the byte where it broke off. A place that was out of reach is
left alone for `AWAY_S`, and asked before that only if no other one answers. Writes, and what only writers ask, go to
the last place. Nothing else is remembered: a mirror that lags shows what it has, until it has caught up.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from enginesmith.core.errors import EnginesmithError, UnavailableError
from enginesmith.registry.store.base import Store, absolute_uri, open_store, split_places
from enginesmith.registry.store.download import Fill
from enginesmith.registry.store.files import BlobDigest
from enginesmith.registry.store.layout import MAX_DOCUMENT_BYTES

Value = TypeVar("Value")
Say = Callable[[str], object]

# Seconds for which a place that was out of reach is left alone.
AWAY_S = 30.0
# Requests to a place over HTTP before the next place is asked.
_ATTEMPTS = 2
# What no place answers.
_NEVER: Any = object()


def open_nearest(uri: str, say: Say) -> Store:
    """Open a registry to read from the nearest of several places, of which none is asked yet.

    say: called when a place stops to answer, and when it answers again. Raises as `open_store`.
    """
    places = split_places(uri)
    last = len(places) - 1
    return NearestStore([_Place(absolute_uri(str(uri)), number == last) for number, uri in enumerate(places)], say)


@dataclass
class _Place:
    """One place, opened at first use. until: it is left alone till then, by `time.monotonic`; None while it answers."""

    uri: str
    last: bool
    until: float | None = None

    @cached_property
    def store(self) -> Store:
        """The store. Raises InputError and UnavailableError."""
        if not self.last and self.uri.startswith(("http://", "https://")):
            from enginesmith.registry.store.http.store import open_http

            return open_http(self.uri, create=False, attempts=_ATTEMPTS)
        return open_store(self.uri)

    @property
    def away(self) -> bool:
        """Whether it is left alone now."""
        return self.until is not None and time.monotonic() < self.until


_Places = list[_Place]  # here, where `list` is no method


class NearestStore:
    """The store at several places (`Store` documents the methods). May be used by many threads."""

    def __init__(self, places: Sequence[_Place], say: Say) -> None:
        self._places, self._say = places, say

    def list_rests(self) -> Iterator["NearestStore"]:
        """The list without its first place, without its first two, and so on."""
        return (NearestStore(self._places[index:], self._say) for index in range(1, len(self._places)))

    @property
    def uri(self) -> str:
        """All places, with commas."""
        return ",".join(place.uri for place in self._places)

    @property
    def near(self) -> bool:
        """See `Store.near`: only where all places are."""
        return all(place.uri.startswith("file://") for place in self._places)

    @property
    def _registry(self) -> Store:
        """The last place."""
        return self._places[-1].store

    def locator(self, key: str) -> str:
        """See `Store.locator`: where it is in the registry itself."""
        return f"{self._places[-1].uri.partition('?')[0]}/{key}"

    def put_file(self, path: Path) -> str:
        """See `Store.put_file`."""
        return self._registry.put_file(path)

    def put_and_digest_file(self, path: Path) -> BlobDigest:
        """See `Store.put_and_digest_file`."""
        return self._registry.put_and_digest_file(path)

    def put_bytes(self, data: bytes) -> str:
        """See `Store.put_bytes`."""
        return self._registry.put_bytes(data)

    def create(self, key: str, data: bytes) -> bool:
        """See `Store.create`."""
        return self._registry.create(key, data)

    def replace(self, key: str, data: bytes, expected: bytes | None) -> bool:
        """See `Store.replace`."""
        return self._registry.replace(key, data, expected)

    def remove(self, key: str) -> None:
        """See `Store.remove`."""
        self._registry.remove(key)

    def discard(self, digest: str) -> None:
        """See `Store.discard`."""
        self._registry.discard(digest)

    def rehash(self, digest: str) -> BlobDigest:
        """See `Store.rehash`."""
        return self._registry.rehash(digest)

    def sizes(self, prefix: str) -> Iterator[tuple[str, int]]:
        """See `Store.sizes`."""
        return self._registry.sizes(prefix)

    def stamps(self, prefix: str) -> Iterator[tuple[str, datetime]]:
        """See `Store.stamps`."""
        return self._registry.stamps(prefix)

    def now(self) -> datetime:
        """See `Store.now`."""
        return self._registry.now()

    def strays(self) -> tuple[str, ...]:
        """See `Store.strays`."""
        return self._registry.strays()

    def sweep(self) -> int:
        """See `Store.sweep`."""
        return self._registry.sweep()

    def has(self, digest: str) -> bool:
        """See `Store.has`."""
        return self.stored_size(digest) is not None

    def stored_size(self, digest: str) -> int | None:
        """See `Store.stored_size`: in the first place that has it."""
        return self._first(lambda place: place.store.stored_size(digest), None)

    def size(self, digest: str) -> int:
        """See `Store.size`."""
        return self._first(lambda place: place.store.size(digest))

    def path(self, digest: str) -> Path:
        """See `Store.path`."""
        return self._first(lambda place: place.store.path(digest))

    def fetch(self, digest: str, dest: Path) -> None:
        """See `Store.fetch`."""
        self._first(lambda place: place.store.fetch(digest, dest))

    def read_blob(self, digest: str, max_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:
        """See `Store.read_blob`."""
        return self._first(lambda place: place.store.read_blob(digest, max_bytes))

    @contextmanager
    def open_range(self, digest: str, offset: int, size: int) -> Iterator[Fill]:
        """See `Store.open_range`. The next place goes on where one broke off."""
        position, candidates = offset, self._order()
        with ExitStack() as stack:
            current_fill: Fill | None = None

            def fill(into: memoryview) -> None:
                nonlocal position, current_fill
                while True:
                    try:
                        if current_fill is None:
                            current_fill = stack.enter_context(
                                candidates[0].store.open_range(digest, position, offset + size - position)
                            )
                        current_fill(into)
                    except EnginesmithError as error:
                        current_fill = None
                        stack.close()
                        self._note(candidates.pop(0), error)
                        if not candidates:
                            raise
                    else:
                        self._note(candidates[0], None)
                        position += len(into)
                        return

            yield fill

    def read(self, key: str) -> bytes | None:
        """See `Store.read`."""
        return self._first(lambda place: place.store.read(key), None)

    def read_if_changed(self, key: str, tag: str) -> tuple[bytes | None, str]:
        """See `Store.read_if_changed`. The tag names the place, too; another one's document is read anew."""
        number, _, inner_tag = tag.partition(":")

        def ask(place: _Place) -> tuple[bytes | None, str]:
            index = str(self._places.index(place))
            data, new_tag = place.store.read_if_changed(key, inner_tag if index == number else "")
            return data, f"{index}:{new_tag}" if new_tag else ""

        nothing: tuple[bytes | None, str] = (None, "")
        return self._first(ask, nothing)

    def list(self, prefix: str = "") -> Iterator[str]:
        """See `Store.list`: in the first place that has such keys."""
        nothing: tuple[str, ...] = ()
        yield from self._first(lambda place: tuple(place.store.list(prefix)), nothing)

    def children(self, prefix: str = "") -> Iterator[str]:
        """See `Store.children`: in the first place that has such keys."""
        nothing: tuple[str, ...] = ()
        yield from self._first(lambda place: tuple(place.store.children(prefix)), nothing)

    def _order(self) -> _Places:
        """The places in the order in which they are asked: those that are left alone come last."""
        return sorted(self._places, key=lambda place: place.away)

    def _first(self, ask: Callable[[_Place], Value], nothing: Value = _NEVER) -> Value:
        """The first answer that is not `nothing`; that, if a place says so and no other one that can be reached knows
        more. Raises what the last place raised if none answers."""
        answered, failure = False, None
        for place in self._order():
            if answered and place.away:
                break
            try:
                answer = ask(place)
            except EnginesmithError as error:
                self._note(place, error)
                failure = error
                continue
            self._note(place, None)
            if answer != nothing:
                return answer
            answered = True
        if failure is not None and not answered:
            raise failure
        return nothing

    def _note(self, place: _Place, error: EnginesmithError | None) -> None:
        """Note whether a place is out of reach, and say so when that is new."""
        away_until = place.until
        if isinstance(error, UnavailableError):
            place.until = time.monotonic() + AWAY_S
            if away_until is None:
                uris = " and ".join(other.uri for other in self._places if other is not place)
                self._say(f"{place.uri} does not answer; reading {uris}, and retrying after {AWAY_S:.0f} s: {error}")
        elif away_until is not None:
            place.until = None
            self._say(f"{place.uri} answers again")
