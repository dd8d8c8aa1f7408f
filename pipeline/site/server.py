"""Shows a site's folder over HTTP: GET and HEAD of its own files, and nothing else.

`Refresher` brings the folder up to date; a request reads what lies there. Answers are compressed, and have a tag, so
that a browser that asks again is told that nothing changed.
"""

import gzip
import hashlib
import re
import threading
from collections.abc import Callable
from functools import lru_cache
from http import HTTPStatus
from pathlib import Path
from urllib.parse import unquote

from enginesmith.core.errors import EnginesmithError
from enginesmith.listening import HttpAnswer, HttpRequest
from pipeline.site.drawing import POLICY, REPORT_POLICY

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
}
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


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
        """Refresh, and return whether that succeeded; if not, the earlier files stay."""
        try:
            self._refresh()
        except EnginesmithError as error:
            if not self._failing:
                self._say(f"the site is not up to date: {error}")
            self._failing = True
            return False
        if self._failing:
            self._say("the site is up to date again")
        self._failing = False
        return True


class SiteFiles:
    """Answers requests with the files of a folder at `prefix`, '' or '/registry'.

    only_loopback: answer only requests for a host that is loopback, so that no page of elsewhere can read it through a
    name that points here.
    """

    def __init__(self, root: Path, prefix: str = "", *, only_loopback: bool = False) -> None:
        self._root, self._prefix, self._only_loopback = root, prefix.rstrip("/"), only_loopback

    def __call__(self, request: HttpRequest) -> HttpAnswer:
        """A file, or why not."""
        host = request.headers.get("Host", "")
        if self._only_loopback and re.sub(r":[0-9]*\Z", "", host) not in _LOOPBACK:
            return _refusal(HTTPStatus.MISDIRECTED_REQUEST)
        try:
            # Raises OSError where there is none, ValueError for a path that cannot be one.
            segments = path_parts(request.target, self._prefix)
            path = self._root.joinpath(*segments)
            if not path.is_dir():
                return _read_file(path, request)
            if request.target.partition("?")[0].endswith("/"):
                return _read_file(path / "index.html", request)
            return HttpAnswer(HTTPStatus.PERMANENT_REDIRECT, b"", {"Location": "/".join([self._prefix, *segments, ""])})
        except (OSError, ValueError):  # no such file, or no name of one
            is_missing = not (self._root / "index.html").exists()
            return _refusal(HTTPStatus.SERVICE_UNAVAILABLE if is_missing else HTTPStatus.NOT_FOUND)


def _read_file(path: Path, request: HttpRequest) -> HttpAnswer:
    data, etag, gzip_data = _read(path, path.stat().st_mtime_ns)
    policy = REPORT_POLICY if path.name == "report.html" else POLICY
    headers = {"ETag": etag, "Cache-Control": "no-cache", "Vary": "Accept-Encoding", **_protection(policy)}
    if request.headers.get("If-None-Match") == etag:
        return HttpAnswer(HTTPStatus.NOT_MODIFIED, b"", headers)
    headers["Content-Type"] = TYPES.get(path.suffix, "application/octet-stream")
    if "gzip" in request.headers.get("Accept-Encoding", ""):
        return HttpAnswer(HTTPStatus.OK, gzip_data, {**headers, "Content-Encoding": "gzip"})
    return HttpAnswer(HTTPStatus.OK, data, headers)


def _protection(policy: str) -> dict[str, str]:
    return {
        "Content-Security-Policy": f"{policy}; frame-ancestors 'none'",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }


def _refusal(status: HTTPStatus) -> HttpAnswer:
    text = "the site is being written; try again" if status == HTTPStatus.SERVICE_UNAVAILABLE else status.phrase
    headers = {**_protection(POLICY), "Content-Type": "text/plain; charset=utf-8"}
    return HttpAnswer(status, f"{text}\n".encode(), headers)


def path_parts(target: str, prefix: str) -> list[str]:
    """The parts of a request's path below the site's folder. Raises ValueError for one that leads elsewhere, or to
    hidden files."""
    path = unquote(target.partition("?")[0], errors="strict")
    if not path.startswith("/"):
        raise ValueError(target)
    if prefix and path != prefix and not path.startswith(f"{prefix}/"):
        raise ValueError(target)
    segments = [segment for segment in path[len(prefix) :].split("/") if segment]
    if any(segment.startswith(".") or "\\" in segment or not segment.isprintable() for segment in segments):
        raise ValueError(target)
    return segments


@lru_cache(maxsize=256)
def _read(path: Path, _: int) -> tuple[bytes, str, bytes]:
    """A file's bytes, their tag, and the bytes compressed. _: when it was written, in nanoseconds."""
    data = path.read_bytes()
    return data, f'"{hashlib.sha256(data).hexdigest()[:24]}"', gzip.compress(data, 6, mtime=0)
