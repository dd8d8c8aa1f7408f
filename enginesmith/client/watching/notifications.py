"""Notifications over HTTP: who moves a channel posts to the nodes, which then look at once and not when it is time.

A notification says that there may be news, and nothing that is believed: the node reads the registry as ever. A lost
one costs the interval, a false one a conditional request, and many of them no more than one look in ten seconds
(`looking`). Over anything but loopback a token is needed, which both sides have in `ENGINESMITH_NOTIFY_TOKEN`.
"""

import json
import socket
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPException
from threading import Event
from types import TracebackType
from urllib.parse import SplitResult, urlsplit

from enginesmith.core.address import parse_address, read_token, require_token
from enginesmith.core.errors import InputError
from enginesmith.listening import HttpAnswer, HttpLimits, HttpRequest, HttpServer

TOKEN = "ENGINESMITH_NOTIFY_TOKEN"  # noqa: S105 - the name of the variable
LIMITS = HttpLimits(body_bytes=64 << 10, connections=64, threads=1, read_s=5.0, send_s=5.0)
_SEND_S = 5.0
_SLICE_S = 0.5
_AT_ONCE = 64


class NotificationListener:
    """A small HTTP server that wakes a watcher; used as a context manager, and given to it as `wake`.

    address: 'HOST:PORT'; port 0 takes a free one.  token: what senders must show; None is that of the environment.
    Needs the extra `serve`. Raises InputError for an address that is none, and for one beyond loopback without a token,
    UnavailableError where it is taken.
    """

    def __init__(self, address: str, token: str | None = None) -> None:
        secret = read_token(TOKEN) if token is None else token
        where = parse_address(address)
        require_token(where, secret, TOKEN)
        self._news = Event()
        self._server = HttpServer(
            self._take, where, LIMITS, methods=("POST",), token=secret, remedy="give another --listen"
        )

    def __enter__(self) -> "NotificationListener":
        self._server.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.__exit__(kind, error, trace)

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return self._server.address.port

    def wait(self, seconds: float, stop: Event) -> bool:
        """See `looking.Wake`."""
        end = time.monotonic() + seconds
        while not stop.is_set() and (rest := end - time.monotonic()) > 0:
            if self._news.wait(min(rest, _SLICE_S)):
                self._news.clear()
                return True
        return False

    def _take(self, _: HttpRequest) -> HttpAnswer:
        self._news.set()
        return HttpAnswer(202)


def notify(urls: Iterable[str], channels: Sequence[str], token: str | None = None) -> list[tuple[str, str | None]]:
    """Post to every address of each URL that these channels moved; each address with the reason why it failed, or None.

    The name of a Kubernetes service without a cluster IP has the addresses of all its pods. token: as in
    `NotificationListener`. Raises InputError for what is no http URL.
    """
    secret = read_token(TOKEN) if token is None else token
    places = [place for url in urls for place in _addresses_of(_http_url(url))]
    body = json.dumps({"channels": list(channels)}).encode()
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(lambda place: (place[0], _post(place, body, secret)), places))


# An address as text, and how it is reached: host, port, path; '' for a name that has no address, with the reason.
_Place = tuple[str, str, int, str]


def _addresses_of(url: SplitResult) -> list[_Place]:
    host, port, path = str(url.hostname), url.port or 80, url.path or "/"
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        return [(f"{host}:{port}", "", port, f"it has no address ({error.strerror or error})")]
    addresses = dict.fromkeys(str(item[4][0]) for item in found)
    return [(f"{address}:{port}", address, port, path) for address in addresses]


def _post(place: _Place, body: bytes, token: str) -> str | None:
    from http.client import HTTPConnection

    name, address, port, path = place
    if not address:
        return path
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})}
    connection = HTTPConnection(address, port, timeout=_SEND_S)
    try:
        connection.request("POST", path, body, headers)
        status = connection.getresponse().status
        return None if 200 <= status < 300 else f"{name} answers {status}"
    except (OSError, HTTPException, ValueError) as error:
        return f"{name} does not answer: {getattr(error, 'strerror', None) or type(error).__name__}"
    finally:
        connection.close()


def _http_url(url: str) -> SplitResult:
    with suppress(ValueError):  # of a port that is none, too
        parts = urlsplit(url)
        if parts.scheme == "http" and parts.hostname and "@" not in parts.netloc and parts.port != 0:
            return parts
    raise InputError(f"{url.rpartition('@')[2][:80]!r} is no URL to notify; give http://HOST:PORT")
