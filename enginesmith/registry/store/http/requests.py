"""The place of a registry behind HTTP, and GET and HEAD requests to it."""

import atexit
import os
import ssl
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, IncompleteRead
from pathlib import Path
from urllib.parse import urlsplit

from enginesmith.core.errors import InputError, IntegrityError, UnavailableError
from enginesmith.registry.store.files import count_io
from enginesmith.registry.store.layout import is_key
from enginesmith.registry.store.objects.api import ATTEMPTS, CONNECT_TIMEOUT_S, READ_TIMEOUT_S, pauses

_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class HttpLocation:
    """A server and where the registry is on it. prefix: '' or 'some/folder', without a slash at its ends."""

    scheme: str
    host: str
    port: int
    prefix: str = ""

    @property
    def uri(self) -> str:
        """The URI that `parse_location` reads."""
        return self.locator("").removesuffix("/")

    @property
    def site(self) -> str:
        """'http://host:port'."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port == _PORTS[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{host}{port}"

    def locator(self, key: str) -> str:
        """The URL of a key."""
        return f"{self.site}{self.path(key)}"

    def path(self, key: str) -> str:
        """The path of a key in requests: '/prefix/KEY'."""
        return f"/{self.prefix}/{key}" if self.prefix else f"/{key}"


def parse_location(text: str) -> HttpLocation:
    """Read an http:// or https:// URI. Raises InputError, which never repeats what may be a secret."""
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
            f"registry {text[:200]!r}: the parts of the prefix must be letters, digits and . _ -, and not start with "
            "these signs"
        )
    return HttpLocation(url.scheme, url.hostname, port or _PORTS[url.scheme], prefix)


# GET and HEAD requests to a registry behind HTTP: connections that are kept, what is asked again, errors in words.
#
# Of the standard library alone, because serving nodes read by it. No proxy is asked: a cache is near. A bearer token,
# if the server wants one, is read from the file that ENGINESMITH_CACHE_TOKEN_FILE names at every request, so that it
# may be renewed; redirections are not followed, so that no other host gets it.

TOKEN_FILE = "ENGINESMITH_CACHE_TOKEN_FILE"  # noqa: S105 - the name of a variable
# Idle connections that are kept for each server.
_KEPT = 32
_MOST_REASON = 300

# The object is not had here, whatever else the server has: absent, larger than it keeps, damaged where it reads from.
_MISSING = (404, 410, 413, 416, 422)
_PASSING = (408, 429, 500, 502, 504)
# What http.client raises for a request; ValueError, where it reads a number from a header that was cut off.
FAILURES = (OSError, HTTPException, ValueError)


class AbsentError(IntegrityError):
    """The server does not have this object, or not whole, or lists it for nobody."""


# Connections without a request. A fork closes its copies of them: two processes must not share a socket.
_idle: dict[HttpLocation, deque[HTTPConnection]] = {}
os.register_at_fork(after_in_child=_idle.clear)


@atexit.register
def close_idle() -> None:
    """Close the connections that are kept."""
    while _idle:
        for connection in _idle.popitem()[1]:
            connection.close()


@contextmanager
def exchange(
    place: HttpLocation, method: str, target: str, headers: Mapping[str, str] | None = None
) -> Iterator[HTTPResponse]:
    """Send one request and give its answer: 200, 206 or 304. target: the path, with a query.

    The connection is kept if the body was read to its end. Raises AbsentError, UnavailableError for a
    request that the server refuses, and `FAILURES` for one that is worth another attempt.
    """
    connection, answer = _send(place, method, target, {**(headers or {}), **_authorization()})
    try:
        if answer.status not in (200, 206, 304):
            _raise_status(place, target, answer)
        yield answer
    except BaseException:
        answer.close()
        connection.close()
        raise
    # Of a body that was not read to its end `length` is what is left.
    if (
        answer.isclosed()
        and not answer.length
        and not answer.will_close
        and len(idle_connections := _kept(place)) < _KEPT
    ):
        idle_connections.append(connection)
    else:
        answer.close()
        connection.close()


def read_whole(
    place: HttpLocation, target: str, max_bytes: int, headers: Mapping[str, str] | None = None, attempts: int = ATTEMPTS
) -> tuple[int, bytes, str]:
    """Status (200 or 304), body and ETag of a GET, asked again where that may help. max_bytes: bytes of the body.

    Raises AbsentError and UnavailableError; IntegrityError for a longer body.
    """
    for pause in pauses(attempts):
        try:
            with exchange(place, "GET", target, headers) as answer:
                body = answer.read(max_bytes + 1)
                if len(body) > max_bytes or (answer.length or 0) > max_bytes:
                    raise IntegrityError(
                        f"{place.site}{target}: over {max_bytes} bytes, which no document of a registry is"
                    )
                if answer.length:  # what is left of the stated length: `read` would take memory for it first
                    raise IncompleteRead(body, answer.length)
                return answer.status, body, answer.getheader("ETag") or ""
        except FAILURES as error:
            wait(place, target, error, pause)
    raise AssertionError("unreachable")


def wait(place: HttpLocation, target: str, error: Exception, pause: float | None) -> None:
    """Wait `pause` seconds before another attempt; None: raise UnavailableError with the remedy."""
    if pause is None or isinstance(error, ssl.SSLCertVerificationError):
        count_io("errors")
        raise UnavailableError(f"reading {place.site}{target}: {_explain(error)}") from error
    count_io("retries")
    time.sleep(pause)


def _explain(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return "its certificate is not accepted; set SSL_CERT_FILE to its certificate authority"
    reason = getattr(error, "strerror", None) or str(error)[:_MOST_REASON] or "no answer"
    return f"no whole answer ({type(error).__name__}: {reason}); check that the cache runs and can be reached"


def _send(
    place: HttpLocation, method: str, target: str, headers: Mapping[str, str]
) -> tuple[HTTPConnection, HTTPResponse]:
    """Send over an idle connection, or a new one where the server has closed that meanwhile."""
    while True:
        idle_connections = _kept(place)
        connection, is_new = (idle_connections.pop(), False) if idle_connections else (_connect(place), True)
        try:
            connection.request(method, target, headers=dict(headers))
            return connection, connection.getresponse()
        except FAILURES:
            connection.close()
            if is_new:
                raise


def _connect(place: HttpLocation) -> HTTPConnection:
    if place.scheme == "https":
        context = ssl.create_default_context()
        connection: HTTPConnection = HTTPSConnection(place.host, place.port, timeout=CONNECT_TIMEOUT_S, context=context)
    else:
        connection = HTTPConnection(place.host, place.port, timeout=CONNECT_TIMEOUT_S)
    connection.connect()
    connection.sock.settimeout(READ_TIMEOUT_S)
    return connection


def _kept(place: HttpLocation) -> deque[HTTPConnection]:
    """The idle connections to a server."""
    return _idle.setdefault(place, deque())


def _authorization() -> dict[str, str]:
    """The header with the bearer token; none without a file. Raises UnavailableError."""
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


def _raise_status(place: HttpLocation, target: str, answer: HTTPResponse) -> None:
    status, reason = answer.status, _reason(answer)
    url = f"{place.site}{target}"
    if status in _MISSING:
        raise AbsentError(f"{url}: {reason or 'not there'} ({status})")
    if status == 503:
        raise UnavailableError(f"{url}: {reason or 'what it reads from does not answer'}; run again later")
    if status in _PASSING:
        raise HTTPException(f"status {status} {reason}")
    if status in (401, 407):
        raise UnavailableError(f"{url}: it wants a token; set {TOKEN_FILE} to the file that holds it")
    raise UnavailableError(f"{url}: refused with {status} {reason}; check the URI")


def _reason(answer: HTTPResponse) -> str:
    """What the server says, as one short printable line; nothing where it says it in HTML."""
    if not (answer.getheader("Content-Type") or "").startswith("text/plain"):
        return ""
    line = answer.read(_MOST_REASON).decode(errors="replace").partition("\n")[0]
    return "".join(char for char in line if char.isprintable())
