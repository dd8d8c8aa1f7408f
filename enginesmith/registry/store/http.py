"""A read-only registry behind HTTP: a bucket, as a web server offers it for a registry's folder.

A document is `GET /KEY`, with `If-None-Match` if its ETag is known; a blob `GET` with `Range`, its size `HEAD`. `GET
/PREFIX/` is a JSON list of `{"name": ..., "type": "directory"}` of the direct children: nginx's with `autoindex_format
json`. The server is not trusted: readers verify blobs, and documents like those of any registry.

Uses only the standard library, because serving nodes read with it. It ignores proxies, because a cache is near. If the
server requires a bearer token, it is read from the file in ENGINESMITH_CACHE_TOKEN_FILE at every request, so that it
can be renewed; redirections are not followed, so that no other host receives it.
"""

import atexit
import os
import ssl
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, IncompleteRead
from pathlib import Path
from typing import ClassVar, NoReturn
from urllib.parse import urlsplit

from enginesmith.core import parsing
from enginesmith.core.errors import InputError, IntegrityError, UnavailableError
from enginesmith.registry.store.layout import MARKER, MAX_DOCUMENT_BYTES, MAX_KEYS, check_format, is_key
from enginesmith.registry.store.objects import api
from enginesmith.registry.store.objects.api import Declined, Failed, ListedObject, ListedPage, ObjectFacts
from enginesmith.registry.store.objects.place import BucketPlace
from enginesmith.registry.store.objects.store import ObjectStore

_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class HttpLocation(BucketPlace):
    """A server and the registry's path on it. prefix: '' or 'some/folder', without a slash at its ends.

    attempts: see `BucketPlace`; fewer if there is another place to read from.
    """

    scheme: str
    host: str
    port: int
    prefix: str = ""
    attempts: int | None = None

    @property
    def root(self) -> str:
        """'http://host:port'."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port == _PORTS[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{host}{port}"


def parse_location(text: str, attempts: int | None = None) -> HttpLocation:
    """Parse an http:// or https:// URI. Raises InputError; its message never contains a possible secret."""
    scheme, _, location = text.partition("://")
    if "@" in location or "?" in location or "#" in location:
        raise InputError(
            f"registry {scheme[:20]}://...: a cache's URI is http://host:port/prefix, without user, password, query "
            "or fragment; a token comes from the file that ENGINESMITH_CACHE_TOKEN_FILE names"
        )
    try:
        url = urlsplit(text)
        port = url.port
    except ValueError as error:
        raise InputError(f"registry {text[:200]!r} is not a URI ({error}); give http://host:port/prefix") from error
    prefix = url.path.strip("/")
    if not url.hostname or not url.hostname.isascii():
        raise InputError(f"registry {text[:200]!r} names no host; give http://host:port/prefix")
    if prefix and not is_key(prefix):
        raise InputError(
            f"registry {text[:200]!r}: each part of the prefix must be 1 to 128 of A-Z a-z 0-9 . _ -, a letter "
            "or digit first"
        )
    return HttpLocation(url.scheme, url.hostname, port or _PORTS[url.scheme], prefix, attempts)


TOKEN_FILE = "ENGINESMITH_CACHE_TOKEN_FILE"  # noqa: S105 - the name of a variable
# The number of idle connections that are kept for each server.
_KEPT = 32
# This server does not provide the object: absent, larger than a proxy allows (413), or damaged in its source (422).
_MISSING = (api.ABSENT, 410, 413, 422)
_PASSING = (408, 429, 500, 502, 504)
# The exceptions of http.client for a request; ValueError for a number in a header that was cut off.
FAILURES = (OSError, HTTPException, ValueError)

# Connections without a request. A fork closes its copies of them: two processes must not share a socket.
_idle: dict[HttpLocation, deque[HTTPConnection]] = {}
os.register_at_fork(after_in_child=_idle.clear)


@atexit.register
def close_idle() -> None:
    """Close the idle connections."""
    while _idle:
        for connection in _idle.popitem()[1]:
            connection.close()


@contextmanager
def _answers() -> Iterator[None]:
    """Convert exceptions of http.client to Failed, with the remedy."""
    try:
        yield
    except ssl.SSLCertVerificationError as error:
        raise Failed("its certificate is not accepted; set SSL_CERT_FILE to its certificate authority") from error
    except FAILURES as error:
        reason = f"{type(error).__name__}: {getattr(error, 'strerror', None) or str(error)[:300] or 'no answer'}"
        remedy = "check that the cache runs and can be reached"
        raise Failed(f"no complete answer ({reason}); {remedy}", passing=True) from error


class _Answer:
    """The answer to a request, and its `Body`."""

    def __init__(self, place: HttpLocation, connection: HTTPConnection, response: HTTPResponse) -> None:
        self.response = response
        self._place, self._connection = place, connection

    def readinto(self, into: memoryview, /) -> int:
        """See `Body.readinto`."""
        with _answers():
            if not (count := self.response.readinto(into)) and self.response.length:
                raise IncompleteRead(b"", self.response.length)
        return count

    def close(self) -> None:
        """See `Body.close`: `length` is the rest of an answer that was not read to its end."""
        idle_connections, response = _idle.setdefault(self._place, deque()), self.response
        if response.isclosed() and not (response.length or response.will_close) and len(idle_connections) < _KEPT:
            idle_connections.append(self._connection)
            return
        response.close()
        self._connection.close()


def _send(place: HttpLocation, method: str, key: str, headers: Mapping[str, str]) -> _Answer:
    """The answer to a request: 200, 206 or 304. It is sent over an idle connection, or a new one if the server has
    closed that meanwhile. Raises Declined, Failed, and UnavailableError for an unreadable token."""
    all_headers = {**headers, **_authorization()}
    with _answers():
        while True:
            idle_connections = _idle.setdefault(place, deque())
            connection, is_new = (idle_connections.pop(), False) if idle_connections else (_connect(place), True)
            try:
                connection.request(method, f"/{place.key(key)}", headers=all_headers)
                answer = _Answer(place, connection, connection.getresponse())
                break
            except FAILURES:
                connection.close()
                if is_new:
                    raise
    if (status := answer.response.status) in (200, 206, 304):
        return answer
    answer.close()
    if status == api.NO_RANGE:
        raise Declined(api.NO_RANGE, "no range")
    if status in _MISSING:
        raise Declined(api.ABSENT, "not there")
    if status == 503 or status in _PASSING:
        raise Failed(f"the server is overloaded or failing ({status}); run again later", passing=status != 503)
    if status == 401:
        raise Failed(f"the server requires a valid token; set {TOKEN_FILE} to the file that holds it")
    if status == 407:
        raise Failed("a proxy in front of the server requires authentication; use a network path without this proxy")
    raise Failed(f"the server refuses with {status}; check the URI")


def _connect(place: HttpLocation) -> HTTPConnection:
    if place.scheme == "https":
        context = ssl.create_default_context()
        connection: HTTPConnection = HTTPSConnection(
            place.host, place.port, timeout=api.CONNECT_TIMEOUT_S, context=context
        )
    else:
        connection = HTTPConnection(place.host, place.port, timeout=api.CONNECT_TIMEOUT_S)
    connection.connect()
    connection.sock.settimeout(api.READ_TIMEOUT_S)
    return connection


def _authorization() -> dict[str, str]:
    """The header with the bearer token; empty without a token file. Raises UnavailableError."""
    if not (token_file := os.environ.get(TOKEN_FILE, "").strip()):
        return {}
    try:
        token = Path(token_file).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UnavailableError(
            f"{TOKEN_FILE} is {token_file}, and it cannot be read; give a file with a token"
        ) from error
    if not token.isprintable() or not token:
        raise UnavailableError(f"{TOKEN_FILE} is {token_file}, and it holds no token: one line is needed")
    return {"Authorization": f"Bearer {token}"}


# The maximum depth of folders: a registry has 6 (models/NAME/versions/VERSION/attestations/ENGINE/).
_MOST_FOLDERS = 12
# Listings contain no times of writes.
_SOME_TIME = datetime.fromtimestamp(0, UTC)


def _refuse(reader: "HttpBucket | HttpStore", *_: object, **__: object) -> NoReturn:
    raise InputError(
        f"{reader.place.uri} is read-only: engines are pulled from it; give the registry itself to publish, move "
        "channels, verify or collect"
    )


@dataclass(frozen=True)
class HttpBucket(api.ByMd5):
    """The files at `place` (`objects.api.BucketApi` documents the methods). Tags are ETags."""

    kind: ClassVar[str] = "web server"
    never: ClassVar[str] = ""
    place: HttpLocation

    put = put_large = delete = copy = now = _refuse

    def head(self, key: str) -> ObjectFacts:
        """See `BucketApi.head`."""
        with closing(_send(self.place, "HEAD", key, {})) as answer, _answers():
            answer.response.read()
            size, tag = (answer.response.getheader(name) or "" for name in ("Content-Length", "ETag"))
            return ObjectFacts(int(size), tag)

    def get(self, key: str, unless: str, limit: int) -> tuple[bytes, str]:
        """See `BucketApi.get`. The answer for an unchanged object has no body (304)."""
        headers = {"If-None-Match": unless} if unless else {}
        with closing(_send(self.place, "GET", key, headers)) as answer, _answers():
            response = answer.response
            content = response.read(limit + 1)
            if response.status == api.UNCHANGED:
                raise Declined(api.UNCHANGED, "unchanged")
            if max(len(content), response.length or 0) > limit:
                raise Declined(api.TOO_LARGE, "large")
            if response.length:  # the rest of the stated length: `read` would allocate memory for it first
                raise IncompleteRead(content, response.length)
            # A server without ETags still answers; its documents are read each time.
            return content, response.getheader("ETag") or "none"

    def open_from(self, key: str, offset: int, tag: str) -> tuple[str, api.Body]:
        """See `BucketApi.open_from`."""
        answer = _send(self.place, "GET", key, {"Range": f"bytes={offset}-"} if offset else {})
        current_tag = answer.response.getheader("ETag") or ""
        if offset and not _starts_at(answer.response, f"bytes {offset}-"):
            answer.close()
            raise Declined(api.NO_RANGE, "no range")
        if tag and current_tag != tag:
            answer.close()
            raise Declined(api.CONDITION_FAILED, "another")
        return current_tag, answer

    def open_range(self, key: str, offset: int, size: int) -> api.Body:
        """See `BucketApi.open_range`. Also declines if the server does not support ranges."""
        last_offset = offset + size - 1
        answer = _send(self.place, "GET", key, {"Range": f"bytes={offset}-{last_offset}"})
        is_whole = answer.response.status == 200 and offset == 0
        if not is_whole and not _starts_at(answer.response, f"bytes {offset}-{last_offset}/"):
            answer.close()
            raise Declined(api.NO_RANGE, "no range")
        if answer.response.getheader("Content-Length") != str(size):
            answer.close()
            raise Declined(api.NO_RANGE, "it ends too early")
        return answer

    def page(self, prefix: str, token: str, *, deep: bool) -> ListedPage:  # noqa: ARG002 - there is one page
        """See `BucketApi.page`: one request per folder. Sizes and times are unknown.

        Raises IntegrityError if the answer is no list, and for an endless listing.
        """
        objects, folders, pending = list[ListedObject](), list[str](), [prefix]
        while pending:
            folder = pending.pop()
            if folder.count("/") > _MOST_FOLDERS:
                raise IntegrityError(f"{self.place.uri} lists folders inside folders without end; is it a registry?")
            for name, is_folder in api.ask(self, "listing", lambda folder=folder: self._entries(folder)):  # type: ignore[misc]
                if is_folder:
                    folders.append(f"{folder}{name}/")
                    pending += folders[-1:] if deep else []
                else:
                    objects.append(ListedObject(f"{folder}{name}", 0, "", _SOME_TIME))
            if (key_count := len(objects) + len(folders)) > MAX_KEYS:
                raise IntegrityError(
                    f"{self.place.locator(prefix)}: the list of its keys does not end ({key_count} so far)"
                )
        return ListedPage(tuple(objects), () if deep else tuple(folders), "")

    def _entries(self, folder: str) -> set[tuple[str, bool]]:
        """The names in a folder, and whether each is one; empty for an absent folder. Raises IntegrityError, Failed."""
        try:
            rows = parsing.load_json(self.get(folder, "", MAX_DOCUMENT_BYTES)[0])
            entries = {(str(row["name"]), row["type"] == "directory") for row in rows}
        except Declined as refusal:
            if refusal.status == api.ABSENT:
                return set()
            reason = f"over {MAX_DOCUMENT_BYTES} bytes" if refusal.status == api.TOO_LARGE else str(refusal)
            raise IntegrityError(f"{self.place.uri} returned no list of names for '{folder}': {reason}") from refusal
        except (ValueError, RecursionError, LookupError, TypeError) as error:
            raise IntegrityError(
                f"{self.place.uri} returned no JSON list of names for '{folder}'; with nginx, turn on `autoindex` and "
                "`autoindex_format json`"
            ) from error
        return {(name, is_folder) for name, is_folder in entries if is_key(name) and "/" not in name}


def _starts_at(response: HTTPResponse, content_range: str) -> bool:
    """Whether an answer is the requested range; a server may omit the range's header."""
    stated_range = f"{response.getheader('Content-Range') or ''}/"
    return response.status == 206 and stated_range.startswith((content_range, "/"))


class HttpStore(ObjectStore):
    """The store in a read-only bucket. `open_store` creates and checks it."""

    put_file = put_and_digest_file = put_bytes = create = replace = remove = discard = _refuse
    rehash = sizes = stamps = now = _refuse
    remedy: ClassVar[str] = "run `enginesmith registry fsck` at the registry itself"

    def lost_error(self, digest: str) -> IntegrityError:
        """See `Store.lost_error`."""
        return IntegrityError(f"{self.uri} does not have blob {digest}; {self.remedy}")


def open_http(uri: str, *, create: bool, attempts: int | None = None) -> HttpStore:
    """Open the registry at an http(s):// URI. Raises InputError and UnavailableError; see `open_store`."""
    store = HttpStore(HttpBucket(parse_location(uri, attempts)))
    if create:
        _refuse(store)
    marker = store.read(MARKER)
    if marker is None:
        raise UnavailableError(f"there is no registry at {store.uri}; check the URI")
    check_format(marker, store.uri)
    return store
