import errno
import gzip
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from enginesmith import listening
from enginesmith.core.errors import (
    EnginesmithError,
    HttpAddress,
    InputError,
    UnavailableError,
    parse_address,
    require_token,
)
from enginesmith.listening import HttpAnswer, HttpLimits, HttpRequest, HttpServer
from tests.waiting import PATIENCE_S

LOOPBACK = HttpAddress("127.0.0.1", 0)
LARGE = b"x" * (32 << 20)


def answer(request: HttpRequest) -> HttpAnswer:
    match request.target:
        case "/large":
            return HttpAnswer(200, LARGE)
        case "/leave":
            raise SystemExit("a library that ends its thread")
        case "/away":
            raise UnavailableError("the registry is down")
    return HttpAnswer(200, f"{request.method} {request.target} {len(request.body)}\n".encode())


@contextmanager
def serving(limits: HttpLimits = HttpLimits(body_bytes=100), **options) -> Iterator[HttpServer]:  # noqa: B008
    with HttpServer(answer, LOOPBACK, limits, methods=("GET", "POST"), **options) as server:
        yield server


@contextmanager
def connected(server: HttpServer) -> Iterator[socket.socket]:
    with socket.create_connection((server.address.host, server.address.port), timeout=PATIENCE_S) as connection:
        yield connection


def read_all(connection: socket.socket) -> bytes:
    received_data = b""
    try:
        while data := connection.recv(1 << 16):
            received_data += data
    except ConnectionResetError:
        pass
    return received_data


def statuses(data: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.[01] (\d{3}) ", data)]


def ask(server: HttpServer, data: bytes) -> bytes:
    with connected(server) as connection:
        connection.sendall(data)
        return read_all(connection)


CLOSE = b"Host: x\r\nConnection: close\r\n"


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /a HTTP/1.1\r\n" + CLOSE + b"\r\n", 200),
        (b"POST /a HTTP/1.1\r\nContent-Length: 3\r\n" + CLOSE + b"\r\nabc", 200),
        (b"POST /a HTTP/1.1\r\nContent-Length: 101\r\n" + CLOSE + b"\r\n" + b"a" * 101, 413),
        (b"POST /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n" + CLOSE + b"\r\n65\r\n" + b"a" * 101 + b"\r\n", 413),
        (b"POST /a HTTP/1.1\r\nTransfer-Encoding: chunked\r\n" + CLOSE + b"\r\nzz\r\n", 400),
        (b"GET /a HTTP/1.1\r\nContent-Length: " + b"9" * 5000 + b"\r\n" + CLOSE + b"\r\n", 400),
        (b"GET /a HTTP/1.1\r\nContent-Length: -1\r\n" + CLOSE + b"\r\n", 400),
        (b"GET /a HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n" + CLOSE + b"\r\na", 400),
        (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\n" + CLOSE + b"\r\n", 400),
        (b"GET /a HTTP/1.1\r\nX: " + b"a" * 9000 + b"\r\n" + CLOSE + b"\r\n", 400),
        (b"GET /a HTTP/1.1\r\n" + b"X: a\r\n" * 200 + CLOSE + b"\r\n", 400),
        (b"DELETE /a HTTP/1.1\r\n" + CLOSE + b"\r\n", 405),
        (b"TRACE /a HTTP/1.1\r\n" + CLOSE + b"\r\n", 405),
        (b"CONNECT x:80 HTTP/1.1\r\n" + CLOSE + b"\r\n", 405),
        (b"OPTIONS * HTTP/1.1\r\n" + CLOSE + b"\r\n", 405),
        (b"GET http://x/a HTTP/1.1\r\n" + CLOSE + b"\r\n", 200),
        (b"\x00\x01\x02\r\n\r\n", 400),
        (b"GET /leave HTTP/1.1\r\n" + CLOSE + b"\r\n", 500),
        (b"GET /away HTTP/1.1\r\n" + CLOSE + b"\r\n", 503),
    ],
)  # fmt: skip
def test_each_request_gets_one_answer(request_: bytes, status: int, capfd: pytest.CaptureFixture[str]) -> None:
    with serving() as server:
        assert statuses(ask(server, request_)) == [status]
        assert statuses(ask(server, b"GET / HTTP/1.1\r\n" + CLOSE + b"\r\n")) == [200], "it goes on"
    assert "Traceback" not in capfd.readouterr().err


def test_a_compressed_body_is_not_inflated() -> None:
    packed_array = gzip.compress(b"a" * 90)
    head = b"POST /a HTTP/1.1\r\nContent-Encoding: gzip\r\nContent-Length: " + str(len(packed_array)).encode() + b"\r\n"
    with serving() as server:
        assert ask(server, head + CLOSE + b"\r\n" + packed_array).endswith(f"POST /a {len(packed_array)}\n".encode())


def test_a_get_with_a_body_gets_one_answer() -> None:
    inner_data = b"GET /inner HTTP/1.1\r\nHost: x\r\n\r\n"
    head = b"GET /a HTTP/1.1\r\nHost: x\r\nContent-Length: " + str(len(inner_data)).encode() + b"\r\n\r\n"
    with serving() as server, connected(server) as connection:
        connection.sendall(head + inner_data + b"GET /last HTTP/1.1\r\n" + CLOSE + b"\r\n")
        data = read_all(connection)
        assert statuses(data) == [200, 200] and b"/inner" not in data
    with serving(HttpLimits()) as server:
        assert statuses(ask(server, head + inner_data)) == [413], "where no body is taken"


@pytest.mark.timeout(60)
def test_a_client_that_does_not_read_gets_no_second_answer(capfd: pytest.CaptureFixture[str]) -> None:
    with serving(HttpLimits(send_s=0.2, connections=1)) as server, connected(server) as connection:
        connection.sendall(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.recv(10)
        while statuses(ask(server, b"GET / HTTP/1.1\r\n" + CLOSE + b"\r\n")) != [200]:
            pass  # until the connection is cut, which is the only one
        data = read_all(connection)
    assert statuses(data) == [] and len(data) < len(LARGE)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("sent", "limits", "status"),
    [
        (b"", {"idle_s": 0.2}, []),
        (b"GET / HT", {"idle_s": 0.2}, []),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nabc", {"read_s": 0.2}, [408]),
    ],
)
def test_a_silent_connection_is_closed(sent: bytes, limits: dict[str, float], status: list[int]) -> None:
    with serving(HttpLimits(**{"body_bytes": 9, "idle_s": 3600.0, "read_s": 3600.0} | limits)) as server:
        assert statuses(ask(server, sent)) == status


def test_connections_beyond_the_limit_are_closed() -> None:
    with serving(HttpLimits(connections=2)) as server, connected(server) as one, connected(server) as second_connection:
        for connection in (one, second_connection):
            connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert connection.recv(100)
        with connected(server) as third_connection:
            assert read_all(third_connection) == b""
        one.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert one.recv(100), "those that are there stay"


def test_a_lack_of_descriptors_is_reported_once_and_the_server_continues(monkeypatch, capfd) -> None:
    accept, refusals = socket.socket.accept, [OSError(errno.EMFILE, "Too many open files") for _ in range(2)]

    def refuse(listener: socket.socket) -> tuple[socket.socket, object]:
        if refusals:
            raise refusals.pop()
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", refuse)
    monkeypatch.setattr("asyncio.constants.ACCEPT_RETRY_DELAY", 0)
    with serving() as server:
        assert statuses(ask(server, b"GET / HTTP/1.1\r\n" + CLOSE + b"\r\n")) == [200] and not refusals
    assert capfd.readouterr().err.count(f"{server.url} cannot accept connections: Too many open files;") == 1


def test_a_request_without_the_token_is_answered_before_its_body(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "_LINGER_S", 0.01)  # the body never comes
    with serving(token="secret") as server:
        for value in (b"", b"Bearer other", b"secret", b"\xff"):
            shown_data = b"Authorization: " + value + b"\r\n" if value else b""
            data = ask(server, b"POST / HTTP/1.1\r\nContent-Length: 50\r\n" + shown_data + CLOSE + b"\r\n")
            assert statuses(data) in ([401], [400])
        data = ask(server, b"GET / HTTP/1.1\r\nAuthorization: Bearer secret\r\n" + CLOSE + b"\r\n")
        assert statuses(data) == [200] and b"Server: enginesmith" in data


def test_used_and_foreign_addresses_are_refused() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken_server,
        pytest.raises(UnavailableError, match="already in use; give another --listen"),
    ):
        HttpServer(answer, HttpAddress("127.0.0.1", taken_server.getsockname()[1])).__enter__()
    with pytest.raises(UnavailableError, match="cannot listen on"):
        HttpServer(answer, HttpAddress("a" * 300, 0)).__enter__()
    assert parse_address("[::1]:80") == HttpAddress("::1", 80) and str(parse_address("[::1]:80")) == "[::1]:80"
    assert parse_address(":80", "127.0.0.1").host == "127.0.0.1"
    for wrong_text in ("", "80", ":80", "host:", "host:65536", "host:-1", "host:٣", f"host:{'9' * 5000}"):
        with pytest.raises(InputError, match="is not an address to listen on"):
            parse_address(wrong_text)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org"])
def test_beyond_loopback_a_token_is_required(host: str) -> None:
    with pytest.raises(InputError, match="needs a token, because anybody can send to it; set THE_TOKEN"):
        require_token(HttpAddress(host, 80), "", "THE_TOKEN")
    require_token(HttpAddress(host, 80), "secret", "THE_TOKEN")
    for near_name in ("localhost", "127.0.0.1", "127.9.9.9", "::1"):
        require_token(HttpAddress(near_name, 80), "", "THE_TOKEN")


def test_a_waiting_caller_learns_that_the_server_ended() -> None:
    with HttpServer(answer, LOOPBACK) as server:
        server._fail(MemoryError("no room"))
        with pytest.raises(EnginesmithError, match="is not served any more: MemoryError"):
            server.wait()
        server.ended.clear()
