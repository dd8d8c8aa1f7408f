"""An HTTP proxy on loopback that does to requests what networks, servers and operators do.

It stands between a cloud's library and a server. A *plan* is asked about every request, in the order in which they
come, and answers with a fault or None. Every request is remembered, so that tests can count them.
"""

import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Literal
from urllib.parse import urlsplit

Kind = Literal[
    "refused",  # the connection is closed before anything is forwarded
    "cut request",  # part of the request is forwarded, then both sides are closed
    "lost answer",  # the server does it, and nobody hears
    "cut answer",  # the server does it, and part of the answer comes
    "error",  # the server says so and does nothing
    "error after",  # the server does it and says 500
    "slow",  # the answer comes in pieces
    "silent",  # the server does it, and nothing comes for a second
    "deaf",  # conditions are stripped: a server that ignores them
    "flipped request",  # a bit of the body changes on the way there
    "flipped answer",  # a bit of the body changes on the way back
    "killed before",  # the client is killed when its request arrives
    "killed after",  # the client is killed when the server has done it
]


@dataclass(frozen=True)
class Request:
    """A request as it came. number: 1 for the first since the plan was set."""

    number: int
    method: str
    path: str
    headers: tuple[tuple[str, str], ...]
    body: bytes

    def bytes(self) -> bytes:
        head = "".join(f"{name}: {value}\r\n" for name, value in self.headers)
        return f"{self.method} {self.path} HTTP/1.1\r\n{head}Connection: close\r\n\r\n".encode() + self.body


@dataclass(frozen=True)
class Fault:
    """What happens to a request. at: where, as a share of its bytes.  code, status: of an error.  pid: whom to kill.

    until: an answer is cut right after this, whatever `at` says.
    """

    kind: Kind
    at: float = 0.5
    code: str = "SlowDown"
    status: int = 503
    pid: int = 0
    until: bytes = b""


# What a request survives, when it is sent again.
PASSING: tuple[Kind, ...] = (
    "refused", "cut request", "lost answer", "cut answer", "error", "error after", "slow", "flipped request",
)  # fmt: skip

Plan = Callable[[Request], Fault | None]


@dataclass
class FaultyProxy:
    """A proxy that runs. url: what clients take for the server."""

    url: str
    server: tuple[str, int]
    requests: list[Request] = field(default_factory=list)
    faults: int = 0
    _plan: Plan = lambda _: None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def plan(self, plan: Plan) -> None:
        """Do this to the requests that come from now on, and count them from 1."""
        with self._lock:
            self._plan, self.requests, self.faults = plan, [], 0

    def once(self, fault: Fault, number: int = 1, method: str = "", part: str = "") -> None:
        """One fault, at the number-th of the requests with this method whose path has this part."""
        seen = 0

        def plan(request: Request) -> Fault | None:
            nonlocal seen
            if method in ("", request.method) and part in request.path:
                seen += 1
                return fault if seen == number else None
            return None

        self.plan(plan)

    def fine(self) -> None:
        self.plan(lambda _: None)

    def count(self, method: str = "", part: str = "") -> int:
        """How many requests came since the plan was set."""
        return sum(method in ("", request.method) and part in request.path for request in self.requests)

    def serve(self, client: socket.socket) -> None:
        """Answer one connection, which is one request."""
        with client, suppress(OSError):
            client.settimeout(30)
            head, rest = _read_head(client)
            if not head:
                return
            first_part, *lines = head.decode("latin-1").split("\r\n")
            method, path, _ = first_part.split(" ", 2)
            items = [tuple(line.split(": ", 1)) for line in lines]
            length = next((int(value) for name, value in items if name.lower() == "content-length"), 0)
            if any(name.lower() == "expect" for name, _ in items):
                client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            body = _read_body(client, rest, length)
            headers = tuple(pair for pair in items if pair[0].lower() not in ("expect", "connection"))
            with self._lock:
                request = Request(len(self.requests) + 1, method, path, headers, body)
                self.requests.append(request)
                fault = self._plan(request)
                self.faults += fault is not None
            self._answer(client, request, fault or Fault("slow", at=1))

    def _answer(self, client: socket.socket, request: Request, fault: Fault) -> None:
        if fault.kind == "killed before":
            os.kill(fault.pid, signal.SIGKILL)
        elif fault.kind == "cut request":
            whole_data = request.bytes()
            part = whole_data[: int(len(whole_data) * fault.at)]
            # moto's web server would take a head that breaks off for a whole one, without body and conditions.
            if b"\r\n\r\n" in part:
                with socket.create_connection(self.server) as server:
                    server.sendall(part)
        elif fault.kind == "error":
            client.sendall(_error(fault))
        elif fault.kind != "refused":
            self._do(client, request, fault)

    def _do(self, client: socket.socket, request: Request, fault: Fault) -> None:
        """The faults in which the server does what was asked."""
        answer = self._forward(_spoilt(request, fault.kind))
        match fault.kind:
            case "killed after":
                os.kill(fault.pid, signal.SIGKILL)
            case "cut answer":
                message = answer.lower().index(fault.until) + len(fault.until)
                client.sendall(answer[: message if fault.until else int(len(answer) * fault.at)])
            case "error after":
                client.sendall(_error(Fault("error", code="InternalError", status=500)))
            case "silent":
                client.settimeout(1.0)
                client.recv(1)
            case "slow":
                _send_slowly(client, answer, fault.at)
            case "flipped answer":
                head, _, body = answer.partition(b"\r\n\r\n")
                client.sendall(head + b"\r\n\r\n" + _flip(body))
            case "deaf" | "flipped request":
                client.sendall(answer)

    def _forward(self, request: Request) -> bytes:
        """The server's whole answer, with `Connection: close`, so that no client sends its next request into it."""
        with socket.create_connection(self.server) as server:
            server.sendall(request.bytes())
            answer = b""
            while block := server.recv(1 << 20):
                answer += block
            return answer.replace(b"\r\n", b"\r\nConnection: close\r\n", 1)


@contextmanager
def proxying(server: str) -> Iterator[FaultyProxy]:
    parts = urlsplit(server)
    listening = socket.create_server(("127.0.0.1", 0), backlog=128)
    proxy = FaultyProxy(f"http://127.0.0.1:{listening.getsockname()[1]}", (str(parts.hostname), int(parts.port or 0)))

    def accept() -> None:
        with suppress(OSError):
            while True:
                client, _ = listening.accept()
                threading.Thread(target=proxy.serve, args=(client,), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        with suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join(10)


def _read_head(client: socket.socket) -> tuple[bytes, bytes]:
    data = b""
    while b"\r\n\r\n" not in data:
        block = client.recv(1 << 16)
        if not block:
            return b"", b""
        data += block
    head, _, rest = data.partition(b"\r\n\r\n")
    return head, rest


def _read_body(client: socket.socket, begun: bytes, length: int) -> bytes:
    blocks, actual_count = [begun], len(begun)
    while actual_count < length:
        block = client.recv(1 << 20)
        if not block:
            raise ConnectionError("the client went away")
        blocks.append(block)
        actual_count += len(block)
    return b"".join(blocks)


def _error(fault: Fault) -> bytes:
    # What servers say is not to be repeated to people: it may hold secrets.
    body = f"<Error><Code>{fault.code}</Code><Message>secret-in-message</Message><Token-0>testing</Token-0></Error>"
    head = f"HTTP/1.1 {fault.status} Told\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n"
    head += f"x-ms-error-code: {fault.code}\r\n"
    return f"{head}Connection: close\r\n\r\n{body}".encode()


def _send_slowly(client: socket.socket, answer: bytes, share: float) -> None:
    step = max(1, int(len(answer) * share))
    for start in range(0, len(answer), step):
        client.sendall(answer[start : start + step])
        if start + step < len(answer):
            time.sleep(0.005)


def _spoilt(request: Request, kind: Kind) -> Request:
    if kind == "deaf":
        conditions = ("if-match", "if-none-match")
        headers = tuple(pair for pair in request.headers if pair[0].lower() not in conditions)
        return replace(request, headers=headers, path=re.sub(r"&ifGenerationMatch=[0-9]+", "", request.path))
    return replace(request, body=_flip(request.body)) if kind == "flipped request" else request


def _flip(body: bytes) -> bytes:
    """The first bit of the content: in a body of several parts, of the last one's."""
    rindex = body.rindex(b"\r\n\r\n") + 4 if body.startswith(b"--") and b"\r\n\r\n" in body else 0
    return body[:rindex] + bytes([body[rindex] ^ 1]) + body[rindex + 1 :] if body else body
