"""An HTTP server (aiohttp's) with limits, in its own thread.

::

    with HttpServer(answer, parse_address("127.0.0.1:8080"), methods=("POST",), token=secret) as server:
        print(server.url)
        server.wait()

`answer` is a plain function of a request, called in one of a few threads. aiohttp parses the requests, so that a
malformed, endless or slow one gets one answer, or its connection is closed; docs/decisions/0023-http-servers.md
gives the reasons for aiohttp. Needs the extra `serve`; aiohttp is imported when a server starts.
"""

import asyncio
import hmac
import logging
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Event
from types import TracebackType
from typing import TYPE_CHECKING, Self

from enginesmith.core.errors import EnginesmithError, HttpAddress, UnavailableError
from enginesmith.core.text import WorkerThread

if TYPE_CHECKING:
    from aiohttp import web

_BACKLOG = 128
# Maximum bytes of the request line, and of a header; maximum number of headers.
_LINE_BYTES, _FIELD_BYTES, _MOST_HEADERS = 8190, 8190, 64
# Seconds for the rest of a body that was refused, before its connection is closed.
_LINGER_S = 1.0
# Seconds for the running requests when the server ends.
_GRACE_S = 2.0


@dataclass(frozen=True)
class HttpLimits:
    """Limits of a server. body_bytes: of a request.  connections: at once; more are closed.  threads: for answers.

    idle_s: seconds until a connection sends the next header.  read_s, send_s: for the body, and the answer.
    """

    body_bytes: int = 0
    connections: int = 256
    threads: int = 8
    idle_s: float = 30.0
    read_s: float = 10.0
    send_s: float = 60.0


@dataclass(frozen=True)
class HttpRequest:
    """A request. target: path and query as they were sent.  headers: by name, in any case."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True)
class HttpAnswer:
    """The answer to a request; aiohttp adds its length. For HEAD the body is not sent."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=lambda: {"Content-Type": "text/plain; charset=utf-8"})


class HttpServer:
    """A server that listens while the block runs. answer: called in a thread; an EnginesmithError that it raises is
    answered with 503.

    methods: the allowed ones.  token: the required bearer token; '' is none.  remedy: for an address that cannot be
    listened on; then UnavailableError is raised when the block begins.
    """

    def __init__(
        self,
        answer: Callable[[HttpRequest], HttpAnswer],
        address: HttpAddress,
        limits: HttpLimits = HttpLimits(),
        *,
        methods: Sequence[str] = ("GET", "HEAD"),
        token: str = "",
        remedy: str = "give another --listen, or port 0",
    ) -> None:
        self._answer, self._limits, self._methods, self._remedy = answer, limits, tuple(methods), remedy
        self._bearer = f"Bearer {token}".encode() if token else b""
        self.address = address
        self.ended = Event()
        self._failure: BaseException | None = None
        self._started: Future[Callable[[], None]] = Future()

    @property
    def url(self) -> str:
        """'http://127.0.0.1:8080', with the actual port."""
        return f"http://{self.address}"

    def __enter__(self) -> Self:
        import aiohttp.web  # noqa: F401 - here, so that the caller gets the error if it is missing

        listen_socket = _bind(self.address, self._remedy)
        self.address = HttpAddress(self.address.host, listen_socket.getsockname()[1])
        self._thread = WorkerThread("enginesmith-http", lambda: self._run(listen_socket), self._fail)
        self._thread.start()
        self._stop = self._started.result()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if not self.ended.is_set():
            self._stop()
        self._thread.join()

    def wait(self) -> None:
        """Wait until the server ends by itself. Raises EnginesmithError with the reason."""
        self.ended.wait()
        raise EnginesmithError(f"{self.url} is not served any more: {self._failure!r}")

    def _fail(self, error: BaseException) -> None:
        """Record the error that ended the thread, for waiting callers."""
        self._failure = error
        self.ended.set()
        if not self._started.done():
            self._started.set_exception(EnginesmithError(f"{self.url} cannot be served: {error!r}"))

    def _run(self, listening: socket.socket) -> None:
        # The main thread must get Ctrl-C: it would not wake if this thread got it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        asyncio.run(self._serve(listening))

    async def _serve(self, listening: socket.socket) -> None:
        loop, stop_event, pool = asyncio.get_running_loop(), asyncio.Event(), ThreadPoolExecutor(self._limits.threads)
        loop.set_exception_handler(self._say_stuck)
        runner = self._make_runner(pool)
        await runner.setup()
        server = runner.server

        def connect() -> asyncio.BaseProtocol:
            return server() if server and len(server.connections) < self._limits.connections else _Refused()

        async with await loop.create_server(connect, sock=listening, backlog=_BACKLOG):
            self._started.set_result(lambda: _call_soon(loop, stop_event))
            await stop_event.wait()
        await runner.cleanup()
        pool.shutdown(wait=False, cancel_futures=True)
        self.ended.set()

    def _say_stuck(self, loop: asyncio.AbstractEventLoop, context: Mapping[str, object]) -> None:
        """Print once why the server cannot accept connections. Errors of single connections are not printed."""
        if "socket" in context and isinstance(error := context.get("exception"), OSError):
            loop.set_exception_handler(lambda *_: None)
            remedy = "new connections wait until the cause is gone (this is printed once)"
            print(f"error: {self.url} cannot accept connections: {error.strerror}; {remedy}", file=sys.stderr)

    def _make_runner(self, pool: ThreadPoolExecutor) -> "web.AppRunner":
        """aiohttp's server with the limits, before it listens."""
        from aiohttp import web

        @web.middleware
        async def handle(request: web.Request, handler: object) -> web.StreamResponse:  # noqa: ARG001 - their names
            return await self._handle(request, pool)

        # There are no routes, whose errors aiohttp would answer itself. A size of 0 would mean no limit.
        application = web.Application(client_max_size=max(1, self._limits.body_bytes), middlewares=[handle])
        # aiohttp would write a traceback for each broken connection.
        silent_logger = logging.Logger("enginesmith.http")
        silent_logger.addHandler(logging.NullHandler())
        return web.AppRunner(
            application,
            access_log=None,
            logger=silent_logger,
            shutdown_timeout=_GRACE_S,
            keepalive_timeout=self._limits.idle_s,
            lingering_time=_LINGER_S,
            auto_decompress=False,
            max_line_size=_LINE_BYTES,
            max_field_size=_FIELD_BYTES,
            max_headers=_MOST_HEADERS,
        )

    async def _handle(self, request: "web.Request", pool: ThreadPoolExecutor) -> "web.StreamResponse":
        from aiohttp import web

        refusal = self._refuse(request)
        if refusal is not None:
            return await self._send(request, refusal, closes=True)
        try:
            async with asyncio.timeout(self._limits.read_s):
                body = await request.read()
        except TimeoutError:
            return await self._send(request, _plain(408, "the body did not come in time"), closes=True)
        except web.HTTPRequestEntityTooLarge:
            return await self._send(request, self._too_large, closes=True)
        except Exception:  # a body that is cut off, or has invalid chunks
            return await self._send(request, _plain(400, "the body is broken"), closes=True)
        http_request = HttpRequest(request.method, request.raw_path, request.headers, body)
        answer = await asyncio.get_running_loop().run_in_executor(pool, self._call, http_request)
        return await self._send(request, answer)

    def _refuse(self, request: "web.Request") -> HttpAnswer | None:
        """The answer to a request that is refused unread; None for an allowed request."""
        credentials = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        if self._bearer and not hmac.compare_digest(credentials, self._bearer):
            return _plain(401, "a bearer token is needed")
        if request.method not in self._methods:
            headers = {"Allow": ", ".join(self._methods), "Content-Type": "text/plain; charset=utf-8"}
            return HttpAnswer(405, b"this method is not answered\n", headers)
        if (request.content_length or 0) > self._limits.body_bytes:
            return self._too_large
        return None

    @property
    def _too_large(self) -> HttpAnswer:
        return _plain(413, f"a request has at most {self._limits.body_bytes} bytes here")

    def _call(self, asked: HttpRequest) -> HttpAnswer:
        try:
            return self._answer(asked)
        except EnginesmithError as error:
            return _plain(503, str(error))
        except BaseException as error:  # a bug, or a library that ends its thread: it must not end the server
            print(f"error: {asked.method} {asked.target[:200]!r}: {error!r}", file=sys.stderr)
            return _plain(500, "this request cannot be answered")

    async def _send(self, request: "web.Request", answer: HttpAnswer, *, closes: bool = False) -> "web.StreamResponse":
        """Send a whole answer; a connection that does not receive it in time is cut."""
        from aiohttp import web

        headers = {"Server": "enginesmith", **answer.headers}
        response = web.Response(status=answer.status, body=answer.body, headers=headers)
        if closes:
            response.force_close()
        transport = request.transport
        try:
            if isinstance(transport, asyncio.WriteTransport):
                transport.set_write_buffer_limits(high=0)  # `write_eof` then waits until the kernel has all bytes
            async with asyncio.timeout(self._limits.send_s):
                await response.prepare(request)
                await response.write_eof()
        except (TimeoutError, OSError):
            if isinstance(transport, asyncio.WriteTransport):
                transport.abort()
        return response


class _Refused(asyncio.Protocol):
    """A connection beyond the limit, which is closed at once."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Close the connection."""
        if isinstance(transport, asyncio.Transport):
            transport.abort()


def _call_soon(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    with suppress(RuntimeError):  # the loop has ended meanwhile
        loop.call_soon_threadsafe(stop.set)


def _plain(status: int, text: str) -> HttpAnswer:
    return HttpAnswer(status, f"{text}\n".encode())


def _bind(address: HttpAddress, remedy: str) -> socket.socket:
    """A listening socket. Raises UnavailableError if the address is in use, or does not belong to this machine."""
    address_family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        return socket.create_server((address.host, address.port), family=address_family, backlog=_BACKLOG)
    except (OSError, UnicodeError) as error:
        reason = (getattr(error, "strerror", None) or str(error)).partition(" (while")[0]
        raise UnavailableError(f"cannot listen on {address}: {reason}; {remedy}") from error
