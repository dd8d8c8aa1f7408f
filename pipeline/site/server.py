"""Shows a site's folder over HTTP: GET and HEAD of its own files, and nothing else.

The folder is brought up to date by a thread (`Refresher`); a request reads what lies there. Answers are compressed, and
have a tag, so that a browser that asks again is told that nothing changed.
"""

import gzip
import hashlib
import threading
from collections.abc import Callable
from functools import lru_cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

from enginery.core.errors import EngineryError, UnavailableError
from pipeline.site.drawing import POLICY, REPORT_POLICY

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
}
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_TIMEOUT_S = 30


class Refresher:
    """Calls `refresh` again and again. say: called once when it begins to fail, and once when it goes on."""

    def __init__(self, refresh: Callable[[], object], say: Callable[[str], object]) -> None:
        self._refresh, self._say = refresh, say
        self._failing = False

    def run(self, every_s: float, stop: threading.Event) -> None:
        """Refresh until `stop` is set, every `every_s` seconds after the last time."""
        while not stop.is_set():
            self.once()
            stop.wait(every_s)

    def once(self) -> bool:
        """Refresh, and return whether it could be done; where not, what was there before stays."""
        try:
            self._refresh()
        except EngineryError as error:
            if not self._failing:
                self._say(f"the site is not up to date: {error}")
            self._failing = True
            return False
        if self._failing:
            self._say("the site is up to date again")
        self._failing = False
        return True


class SiteServer(ThreadingHTTPServer):
    """Serves the files of a folder at `prefix`, '' or '/registry'. On a loopback address it answers only requests for
    such a host, so that no page of elsewhere can read it through a name that points here.

    Raises UnavailableError when the port is taken or the address is none of this machine's.
    """

    daemon_threads = True

    def __init__(self, address: str, port: int, root: Path, prefix: str = "") -> None:
        self.root, self.prefix = root, prefix.rstrip("/")
        self.only_loopback = address in ("127.0.0.1", "localhost")
        try:
            super().__init__((address, port), SiteHandler)
        except OSError as error:
            raise UnavailableError(
                f"cannot serve at {address}:{port}: {error.strerror or error}; give another --listen, or port 0"
            ) from error


class SiteHandler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: SiteServer
    server_version = "enginery"
    sys_version = ""
    protocol_version = "HTTP/1.1"
    timeout = _TIMEOUT_S

    def do_GET(self) -> None:
        """A file, or why not."""
        host = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        if self.server.only_loopback and host not in _LOOPBACK:
            self._fail(HTTPStatus.MISDIRECTED_REQUEST)
            return
        try:
            self._answer()
        except (OSError, ValueError):  # no such file, or no name of one
            is_missing = not (self.server.root / "index.html").exists()
            self._fail(HTTPStatus.SERVICE_UNAVAILABLE if is_missing else HTTPStatus.NOT_FOUND)

    def _answer(self) -> None:
        """Send a file. Raises OSError where there is none, ValueError for a path that cannot be one."""
        parts = path_parts(self.path, self.server.prefix)
        path = self.server.root.joinpath(*parts)
        if not path.is_dir():
            self._send(path)
        elif urlsplit(self.path).path.endswith("/"):
            self._send(path / "index.html")
        else:
            self._redirect("/".join([self.server.prefix, *parts, ""]))

    do_HEAD = do_GET  # noqa: N815 - http.server's name

    def _send(self, path: Path) -> None:
        data, tag, packed = _read(path, path.stat().st_mtime_ns)
        known = self.headers.get("If-None-Match") == tag
        self.send_response(HTTPStatus.NOT_MODIFIED if known else HTTPStatus.OK)
        self.send_header("ETag", tag)
        self.send_header("Cache-Control", "no-cache")
        self.send_header("Vary", "Accept-Encoding")
        self._send_protection(REPORT_POLICY if path.name == "report.html" else POLICY)
        if not known:
            if "gzip" in self.headers.get("Accept-Encoding", ""):
                data = packed
                self.send_header("Content-Encoding", "gzip")
            self.send_header("Content-Type", TYPES.get(path.suffix, "application/octet-stream"))
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if not known and self.command == "GET":
            self.wfile.write(data)

    def _send_protection(self, policy: str) -> None:
        self.send_header("Content-Security-Policy", f"{policy}; frame-ancestors 'none'")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")

    def _redirect(self, path: str) -> None:
        self.send_response(HTTPStatus.PERMANENT_REDIRECT)
        self.send_header("Location", path)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _fail(self, status: HTTPStatus) -> None:
        self.send_response(status)
        text = "the site is being written; try again" if status == HTTPStatus.SERVICE_UNAVAILABLE else status.phrase
        data = f"{text}\n".encode()
        self._send_protection(POLICY)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's name
        """Nothing is logged: who looks at what is nobody's business."""


def path_parts(url: str, prefix: str) -> list[str]:
    """The parts of a request's path below the site's folder. Raises ValueError for one that leads elsewhere, or to
    hidden files."""
    path = unquote(urlsplit(url).path, errors="strict") if "%" in url else urlsplit(url).path
    if prefix and path != prefix and not path.startswith(f"{prefix}/"):
        raise ValueError(url)
    parts = [part for part in path[len(prefix) :].split("/") if part]
    if any(part.startswith(".") or "\\" in part or not part.isprintable() for part in parts):
        raise ValueError(url)
    return parts


@lru_cache(maxsize=256)
def _read(path: Path, _: int) -> tuple[bytes, str, bytes]:
    """A file's bytes, their tag, and the bytes compressed. _: when it was written, in nanoseconds."""
    data = path.read_bytes()
    return data, f'"{hashlib.sha256(data).hexdigest()[:24]}"', gzip.compress(data, 6, mtime=0)
