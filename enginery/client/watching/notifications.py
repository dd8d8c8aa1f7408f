"""Notifications over HTTP: who moves a channel posts to the nodes, which then look at once and not when it is time.

A notification says that there may be news, and nothing that is believed: the node reads the registry as ever. A lost
one costs the interval, a false one a conditional request, and many of them no more than one look in ten seconds
(`looking`). Over anything but loopback a token is needed, which both sides have in `ENGINERY_NOTIFY_TOKEN`.
"""

import hmac
import json
import os
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from threading import Event
from types import TracebackType
from urllib.parse import SplitResult, urlsplit

from enginery.core.errors import InputError, UnavailableError

TOKEN = "ENGINERY_NOTIFY_TOKEN"  # noqa: S105 - the name of the variable
MAX_BYTES = 64 << 10
_READ_S, _SEND_S = 5.0, 5.0
_SLICE_S = 0.5
_AT_ONCE = 64


class NotificationListener:
    """A small HTTP server that wakes a watcher; used as a context manager, and given to it as `wake`.

    address: 'HOST:PORT'; port 0 takes a free one.  token: what senders must show; None is that of the environment.
    Raises InputError for an address that is none, and for one beyond loopback without a token.
    """

    def __init__(self, address: str, token: str | None = None) -> None:
        self._token = os.environ.get(TOKEN, "") if token is None else token
        self._host, self._port = _parse_address(address)
        if not self._token and not _is_loopback(self._host):
            raise InputError(f"listening on {address} needs a token, for anybody may send there: set {TOKEN}")
        self._news = Event()
        self._server: ThreadingHTTPServer | None = None

    def __enter__(self) -> "NotificationListener":
        """Start to listen. Raises UnavailableError where the address is taken."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        kind = type("_Server", (ThreadingHTTPServer,), {"address_family": family, "daemon_threads": True})
        try:
            self._server = kind((self._host, self._port), self._handler())
        except OSError as error:
            raise UnavailableError(
                f"notifications: {self._host}:{self._port}: {error.strerror}; give another --listen"
            ) from error
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop to listen."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return self._server.server_address[1] if self._server else self._port

    def wait(self, seconds: float, stop: Event) -> bool:
        """See `looking.Wake`."""
        end = time.monotonic() + seconds
        while not stop.is_set() and (rest := end - time.monotonic()) > 0:
            if self._news.wait(min(rest, _SLICE_S)):
                self._news.clear()
                return True
        return False

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        news, token = self._news, self._token

        class Handler(BaseHTTPRequestHandler):
            timeout = _READ_S

            def do_POST(self) -> None:
                given = self.headers.get("Authorization", "")
                length = self.headers.get("Content-Length", "0")
                if token and not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
                    self._answer(401)
                elif not length.isdecimal() or int(length) > MAX_BYTES:
                    self._answer(413)
                else:
                    self.rfile.read(int(length))
                    news.set()
                    self._answer(202)

            def _answer(self, status: int) -> None:
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.send_header("Connection", "close")
                self.end_headers()
                self.close_connection = True

            def log_message(self, *_: object) -> None:
                """Write nothing: a flood of requests must not fill the log."""

        return Handler


def notify(urls: Iterable[str], channels: Sequence[str], token: str | None = None) -> list[tuple[str, str | None]]:
    """Post to every address of each URL that these channels moved; each address with the reason why it failed, or None.

    The name of a Kubernetes service without a cluster IP has the addresses of all its pods. token: as in
    `NotificationListener`. Raises InputError for what is no http URL.
    """
    secret = os.environ.get(TOKEN, "") if token is None else token
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
    except (OSError, HTTPException) as error:
        return f"{name} does not answer: {getattr(error, 'strerror', None) or type(error).__name__}"
    finally:
        connection.close()


def _http_url(url: str) -> SplitResult:
    with suppress(ValueError):  # of a port that is none, too
        parts = urlsplit(url)
        if parts.scheme == "http" and parts.hostname and "@" not in parts.netloc and parts.port != 0:
            return parts
    raise InputError(f"{url.rpartition('@')[2][:80]!r} is no URL to notify; give http://HOST:PORT")


def _parse_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise InputError(f"{address[:80]!r} is no address to listen on; give HOST:PORT, as in 127.0.0.1:8900")
    return host.strip("[]"), int(port)


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
