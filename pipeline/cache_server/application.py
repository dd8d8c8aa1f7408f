"""The requests that a cache answers, by aiohttp: GET and HEAD of keys and lists, its health, its metrics.

/KEY                  a document or a blob; ETag, If-None-Match; of blobs Range too
/PREFIX/?list=keys    all keys below, as a JSON list; ?list=names: the names directly below
/-/healthy, /-/ready  200; ready is 503 once the process is to end
/metrics              Prometheus
"""

import asyncio
import hmac
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from aiohttp import web
from prometheus_client import generate_latest

from pipeline.cache_server.blobs import Blobs, BrokenOffError, OpenBlob
from pipeline.cache_server.counts import CacheCounts
from pipeline.cache_server.documents import Documents, KeptDocument
from pipeline.cache_server.origin import NotServedError
from pipeline.cache_server.served import ServedKeys

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_OPEN_PATHS = ("/-/healthy", "/-/ready", "/metrics")
_RETRY_S = "5"


class CacheApplication:
    """token_file: a file with the bearer token that clients must send; None: anybody may read."""

    def __init__(
        self,
        documents: Documents,
        blobs: Blobs,
        served: ServedKeys,
        counts: CacheCounts,
        token_file: Path | None = None,
    ) -> None:
        self._documents, self._blobs, self._served, self._counts = documents, blobs, served, counts
        self._token_file = token_file
        self.ending = False

    def build(self) -> web.Application:
        """The application."""

        @web.middleware
        async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
            return await self._answer(request, handler)

        app = web.Application(middlewares=[answer])
        app.router.add_get("/-/healthy", self._healthy)
        app.router.add_get("/-/ready", self._ready)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/{key:.*}", self._get)
        return app

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Whatever goes wrong becomes a status and one line of text."""
        try:
            if request.path not in _OPEN_PATHS and not self._is_allowed(request):
                raise NotServedError(401, "a bearer token is needed")
            return await handler(request)
        except NotServedError as error:
            if error.status in (401, 403):
                self._counts.requests.labels("none", "refused").inc()
            return _plain(error.status, str(error))
        except web.HTTPException as error:
            return _plain(error.status, error.reason)

    def _is_allowed(self, request: web.Request) -> bool:
        """Whether the request has the token, which is read each time, so that it may be renewed."""
        if self._token_file is None:
            return True
        try:
            token = self._token_file.read_bytes().strip()
        except OSError as error:
            raise NotServedError(503, "the cache's token file cannot be read") from error
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        return bool(token) and hmac.compare_digest(given, b"Bearer " + token)

    async def _healthy(self, _request: web.Request) -> web.Response:
        return _plain(200, "ok")

    async def _ready(self, _request: web.Request) -> web.Response:
        return _plain(503, "ending") if self.ending else _plain(200, "ok")

    async def _metrics(self, _request: web.Request) -> web.Response:
        text = await asyncio.get_running_loop().run_in_executor(None, generate_latest, self._counts.registry)
        return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def _get(self, request: web.Request) -> web.StreamResponse:
        # As it was sent: an escaped '/' or '.' is part of no key.
        key = request.rel_url.raw_path.removeprefix("/")
        if (listing := request.query.get("list")) in ("keys", "names"):
            if not self._served.lists(key, listing):  # type: ignore[arg-type]
                self._counts.requests.labels("list", "refused").inc()
                raise NotServedError(404, "this cache does not list that")
            return self._document(request, "list", *await self._documents.list(key, listing))  # type: ignore[arg-type]
        kind = self._served.kind(key)
        if kind == "blob":
            return await self._blob(request, key.rpartition("/")[2])
        if kind is None or request.query_string:
            self._counts.requests.labels("none", "refused").inc()
            raise NotServedError(404, "no such key is served here")
        return self._document(request, "document", *await self._documents.read(key))

    def _document(self, request: web.Request, kind: str, found: KeptDocument, result: str) -> web.Response:
        self._counts.requests.labels(kind, result).inc()
        headers = {"ETag": found.etag, "Cache-Control": "no-cache"}
        if found.stale:
            headers["Warning"] = '110 - "the registry is out of reach"'
        if found.data is None:
            return _plain(404, "not in the registry")
        if _has_etag(request, found.etag):
            return web.Response(status=304, headers=headers)
        return web.Response(body=found.data, headers={**headers, "Content-Type": "application/octet-stream"})

    async def _blob(self, request: web.Request, digest: str) -> web.StreamResponse:
        headers = {"ETag": f'"{digest}"', "Accept-Ranges": "bytes", "Cache-Control": "immutable, max-age=31536000"}
        headers["Content-Type"] = "application/octet-stream"
        if request.method == "HEAD":
            if "no-cache" in request.headers.get("Cache-Control", ""):
                await self._blobs.recheck(digest)
            return web.Response(headers={**headers, "Content-Length": str(await self._blobs.size(digest))})
        if _has_etag(request, headers["ETag"]):
            return web.Response(status=304, headers=headers)
        blob = await self._blobs.open(digest)
        try:
            self._counts.requests.labels("blob", blob.result).inc()
            return await self._send(request, blob, headers)
        finally:
            blob.close()

    async def _send(self, request: web.Request, blob: OpenBlob, headers: dict[str, str]) -> web.StreamResponse:
        """Send a blob or a range of it, each stretch as soon as it is there."""
        start, end = _range_of(request, blob.size)
        status = 206 if "Range" in request.headers else 200
        if status == 206:
            headers = {**headers, "Content-Range": f"bytes {start}-{end - 1}/{blob.size}"}
        response = web.StreamResponse(status=status, headers=headers)
        response.content_length = end - start
        try:
            await response.prepare(request)
            with os.fdopen(os.dup(blob.fd), "rb") as file:
                while start < end:
                    until = min(await blob.reach(start), end)
                    if request.transport is None:
                        return response
                    await asyncio.get_running_loop().sendfile(request.transport, file, start, until - start)
                    self._counts.client_bytes.inc(until - start)
                    start = until
            await response.write_eof()
        except (BrokenOffError, ConnectionError):
            # The status is sent: that the body is not whole is told by its end alone.
            if request.transport is not None:
                request.transport.abort()
        return response


def _plain(status: int, text: str) -> web.Response:
    headers = {"Retry-After": _RETRY_S} if status == 503 else {}
    return web.Response(status=status, text=f"{text}\n", headers=headers)


def _has_etag(request: web.Request, etag: str) -> bool:
    with suppress(ValueError):
        return any(f'"{known.value}"' == etag for known in request.if_none_match or ())
    return False


def _range_of(request: web.Request, size: int) -> tuple[int, int]:
    """Start and end of the bytes that are asked for. Raises NotServedError (416) for what is not in the blob."""
    try:
        asked = request.http_range
    except ValueError as error:
        raise NotServedError(416, "one range of bytes is understood, bytes=START-END") from error
    start, end, _ = asked.indices(size)
    if "Range" in request.headers and (start >= end or (asked.start or 0) >= size):
        raise NotServedError(416, f"this blob has {size} bytes")
    return start, end
