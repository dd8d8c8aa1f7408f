"""A registry that is read from a list of places, tried in order: `http://cache.region,s3://bucket/prefix`.

The last place is the registry itself; the others are caches or mirrors of it, nearest first. A read goes to the first
place that answers. If a place is unreachable, lacks the object, or returns other bytes than a blob's digest requires,
the next one is asked; a range continues there at the byte where it broke off. An unreachable place is skipped for
`AWAY_S`, and asked earlier only if no other one answers. Writes, and reads for writers, go to the last place. There is
no other state: a mirror that lags returns its own content until it has caught up.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Concatenate, ParamSpec, TypeVar

from enginesmith.core.errors import EnginesmithError, UnavailableError
from enginesmith.registry.store.base import Store, absolute_uri, open_store, split_places
from enginesmith.registry.store.download import Fill

Value = TypeVar("Value")
Arguments = ParamSpec("Arguments")
Say = Callable[[str], object]

# Seconds for which an unreachable place is skipped.
AWAY_S = 30.0
# Requests to a place over HTTP before the next place is asked.
_ATTEMPTS = 2
# An answer that no place gives.
_NEVER: Any = object()


def open_nearest(uri: str, say: Say) -> Store:
    """Open a registry to read from the nearest of several places; no request is sent yet.

    say: called when a place stops answering, and when it answers again. Raises as `open_store`.
    """
    uris = split_places(uri)
    last_index = len(uris) - 1
    return NearestStore([_Place(absolute_uri(str(uri)), index == last_index) for index, uri in enumerate(uris)], say)


@dataclass
class _Place:
    """One place, opened on first use. until: end of its skipping, on `time.monotonic`; None while it answers."""

    uri: str
    last: bool
    until: float | None = None

    @cached_property
    def store(self) -> Store:
        """The store. Raises InputError and UnavailableError."""
        if not self.last and self.uri.startswith(("http://", "https://")):
            from enginesmith.registry.store.http import open_http

            return open_http(self.uri, create=False, attempts=_ATTEMPTS)
        return open_store(self.uri)

    @property
    def away(self) -> bool:
        """Whether the place is skipped now."""
        return self.until is not None and time.monotonic() < self.until


_Places = list[_Place]  # here, where `list` is no method


def _delegated(
    method: Callable[Concatenate[Store, Arguments], Value], *, first: bool
) -> Callable[Concatenate["NearestStore", Arguments], Value]:
    """A method of `NearestStore` that calls `method` of `Store`, with the same arguments.

    first: True calls it on the first place that answers; False only on the last place, the registry itself.
    """

    def ask(place: _Place, *arguments: Arguments.args, **options: Arguments.kwargs) -> Value:
        answer: Value = getattr(place.store, method.__name__)(*arguments, **options)
        return answer

    def call(store: "NearestStore", /, *arguments: Arguments.args, **options: Arguments.kwargs) -> Value:
        if first:
            return store._first(lambda place: ask(place, *arguments, **options))
        return ask(store._places[-1], *arguments, **options)

    return call


class NearestStore(Store):
    """The store at several places (`Store` documents the methods). May be used by many threads."""

    def __init__(self, places: Sequence[_Place], say: Say) -> None:
        self._places, self._say = places, say

    def list_rests(self) -> Iterator["NearestStore"]:
        """Yield this list without its first place, without its first two, and so on."""
        return (NearestStore(self._places[index:], self._say) for index in range(1, len(self._places)))

    @property
    def uri(self) -> str:
        """The URIs of all places, separated by commas."""
        return ",".join(endpoint.uri for endpoint in self._places)

    @property
    def near(self) -> bool:
        """See `Store.near`: only if all places are."""
        return all(endpoint.uri.startswith("file://") for endpoint in self._places)

    def locator(self, key: str) -> str:
        """See `Store.locator`: the key's place in the registry itself."""
        return f"{self._places[-1].uri.partition('?')[0]}/{key}"

    # Writes, and reads for writers: from the registry itself.
    put_and_digest_file = _delegated(Store.put_and_digest_file, first=False)
    put_bytes = _delegated(Store.put_bytes, first=False)
    create = _delegated(Store.create, first=False)
    replace = _delegated(Store.replace, first=False)
    remove = _delegated(Store.remove, first=False)
    discard = _delegated(Store.discard, first=False)
    rehash = _delegated(Store.rehash, first=False)
    sizes = _delegated(Store.sizes, first=False)
    stamps = _delegated(Store.stamps, first=False)
    now = _delegated(Store.now, first=False)
    strays = _delegated(Store.strays, first=False)
    sweep = _delegated(Store.sweep, first=False)

    # Reads: from the first place that answers.
    size = _delegated(Store.size, first=True)
    path = _delegated(Store.path, first=True)
    fetch = _delegated(Store.fetch, first=True)
    read_blob = _delegated(Store.read_blob, first=True)

    def stored_size(self, digest: str) -> int | None:
        """See `Store.stored_size`: in the first place that has it."""
        return self._first(lambda place: place.store.stored_size(digest), None)

    @contextmanager
    def open_range(self, digest: str, offset: int, size: int) -> Iterator[Fill]:
        """See `Store.open_range`. If one place breaks off, the next one continues."""
        position, candidates = offset, self._order()
        with ExitStack() as exit_stack:
            current_fill: Fill | None = None

            def fill(into: memoryview) -> None:
                nonlocal position, current_fill
                while True:
                    try:
                        if current_fill is None:
                            current_fill = exit_stack.enter_context(
                                candidates[0].store.open_range(digest, position, offset + size - position)
                            )
                        current_fill(into)
                    except EnginesmithError as error:
                        current_fill = None
                        exit_stack.close()
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
        """See `Store.read_if_changed`. The tag names the place, too; a document from another place is read anew."""
        tag_index, _, inner_tag = tag.partition(":")

        def ask(place: _Place) -> tuple[bytes | None, str]:
            index = str(self._places.index(place))
            content, new_tag = place.store.read_if_changed(key, inner_tag if index == tag_index else "")
            return content, f"{index}:{new_tag}" if new_tag else ""

        absent_document: tuple[bytes | None, str] = (None, "")
        return self._first(ask, absent_document)

    def list(self, prefix: str = "") -> Iterator[str]:
        """See `Store.list`: in the first place that has such keys."""
        no_keys: tuple[str, ...] = ()
        yield from self._first(lambda place: tuple(place.store.list(prefix)), no_keys)

    def children(self, prefix: str = "") -> Iterator[str]:
        """See `Store.children`: in the first place that has such keys."""
        no_keys: tuple[str, ...] = ()
        yield from self._first(lambda place: tuple(place.store.children(prefix)), no_keys)

    def _order(self) -> _Places:
        """The places in the order of requests: those that are skipped come last."""
        return sorted(self._places, key=lambda place: place.away)

    def _first(self, ask: Callable[[_Place], Value], nothing: Value = _NEVER) -> Value:
        """The first answer other than `nothing`; `nothing` if a place gives it and no reachable place knows more.
        Raises the last place's error if none answers."""
        has_answer, failure = False, None
        for endpoint in self._order():
            if has_answer and endpoint.away:
                break
            try:
                answer = ask(endpoint)
            except EnginesmithError as error:
                self._note(endpoint, error)
                failure = error
                continue
            self._note(endpoint, None)
            if answer != nothing:
                return answer
            has_answer = True
        if failure is not None and not has_answer:
            raise failure
        return nothing

    def _note(self, place: _Place, error: EnginesmithError | None) -> None:
        """Record whether a place is unreachable, and report a change."""
        away_until = place.until
        if isinstance(error, UnavailableError):
            place.until = time.monotonic() + AWAY_S
            if away_until is None:
                uri_list = " and ".join(endpoint.uri for endpoint in self._places if endpoint is not place)
                self._say(
                    f"{place.uri} does not answer; reading {uri_list}, and retrying after {AWAY_S:.0f} s: {error}"
                )
        elif away_until is not None:
            place.until = None
            self._say(f"{place.uri} answers again")
