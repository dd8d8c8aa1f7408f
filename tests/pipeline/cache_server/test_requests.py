"""How a cache answers: ranges and conditions, tokens, what is malformed, its health, how it starts and ends."""

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from enginesmith.client.client import Client
from enginesmith.core.errors import UnavailableError, UnknownNameError
from enginesmith.registry.store.base import Store, open_store
from enginesmith.registry.store.layout import blob_key, channel_key
from tests.enginesmith.registries import engine, publish_engines
from tests.pipeline.cache_server.caches import RunningCache, run_cache

DATA = bytes(range(256)) * 4


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """The registry of `cache`."""
    store = open_store(tmp_path_factory.mktemp("served") / "registry", create=True)
    publish_engines(store, [engine(store, data=DATA)], channel="stable")
    return store


@pytest.fixture(scope="module")
def cache(served: Store, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCache]:
    with run_cache(served.uri, tmp_path_factory.mktemp("cache") / "kept", "--serve", "runs/") as found:
        yield found


def test_ranges_and_conditions(served: Store, cache: RunningCache) -> None:
    path = f"/{blob_key(served.put_bytes(DATA))}"
    for asked, part in (("0-9", DATA[:10]), ("1000-", DATA[1000:]), ("-7", DATA[-7:]), ("1020-9999", DATA[1020:])):
        status, headers, body = cache.ask(path, headers={"Range": f"bytes={asked}"})
        assert (status, body) == (206, part)
        start = DATA.index(part) if asked != "-7" else len(DATA) - 7
        assert headers["Content-Range"].endswith("/1024") and int(headers["Content-Length"]) == len(part), start
    for asked in ("1024-", "5-4", "0-1,3-4", "x-y"):
        assert cache.ask(path, headers={"Range": f"bytes={asked}"})[0] == 416
    status, headers, body = cache.ask(path)
    assert (status, body) == (200, DATA)
    assert cache.ask(path, headers={"If-None-Match": headers["ETag"]})[::2] == (304, b"")
    empty = served.put_bytes(b"")
    assert cache.ask(f"/{blob_key(empty)}")[::2] == (200, b"")


@pytest.mark.parametrize(
    "path",
    [
        "/leases/a.json", "/../../etc/passwd", "//etc/passwd", "/models/%2e%2e/leases/a.json", "/models/..%2fleases",
        "/runs/../leases/a.json", "/?list=names", "/models/?list=keys", "/models/digits/?list=keys", "/x?list=keys",
        "/models/digits/channels/stable.json?x=y", "/\x00", "/models/digits/channels/%73table.json",
    ],
)  # fmt: skip
def test_other_keys_and_escapes_are_refused(cache: RunningCache, path: str) -> None:
    with socket.create_connection(("127.0.0.1", cache.port)) as raw:
        raw.sendall(f"GET {path} HTTP/1.1\r\nHost: cache\r\nConnection: close\r\n\r\n".encode())
        answer = raw.makefile("rb").read()
    assert answer.split(b" ")[1] in (b"404", b"400")
    assert b"Traceback" not in answer and b"/pipeline/" not in answer


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_is_written(cache: RunningCache, method: str) -> None:
    assert cache.ask(f"/{channel_key('digits', 'stable')}", method)[0] == 405


def test_garbage_is_answered_in_one_line(cache: RunningCache) -> None:
    for sent in (b"GARBAGE\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00", b"GET /" + b"a" * 20000):
        with socket.create_connection(("127.0.0.1", cache.port)) as raw:
            raw.sendall(sent)
            raw.settimeout(5)
            raw.shutdown(socket.SHUT_WR)
            assert b"Traceback" not in raw.makefile("rb").read()
    assert cache.ask("/-/healthy")[0] == 200


def test_what_is_asked_for_beside_is_served(served: Store, cache: RunningCache) -> None:
    served.create("runs/a.json", b"{}")
    assert cache.ask("/runs/a.json")[2] == b"{}" and cache.ask("/runs/?list=keys")[2] == b'["runs/a.json"]'


def test_a_name_that_is_not_there_is_told_with_those_that_are(cache: RunningCache) -> None:
    with pytest.raises(UnknownNameError, match=r"no model 'digit' .*digits"):
        Client(cache.url).resolve("digit")
    with pytest.raises(UnknownNameError, match=r"no channel of digits 'stabel'.*stable"):
        Client(cache.url).resolve("digits:stabel")


def test_only_who_has_the_token_reads(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = tmp_path / "token"
    token.write_text("correct-horse\n")
    publish_engines(store, [engine(store, data=DATA)], channel="stable")
    with run_cache(store.uri, tmp_path / "kept", "--token-file", str(token)) as cache:
        assert cache.ask("/-/ready")[0] == 200 and cache.ask("/metrics")[0] == 200
        for given in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "correct-horse"}):
            assert cache.ask(f"/{channel_key('digits', 'stable')}", headers=given)[0] == 401
        with pytest.raises(UnavailableError, match="wants a token"):
            open_store(cache.url)
        monkeypatch.setenv("ENGINESMITH_CACHE_TOKEN_FILE", str(token))
        assert Client(cache.url, cache=None).pull("digits:stable", tmp_path / "out").path.read_bytes() == DATA
        token.write_text("renewed")
        assert Client(cache.url).resolve("digits:stable").candidates
        token.unlink()
        assert cache.ask(f"/{channel_key('digits', 'stable')}")[0] == 503


def test_a_download_that_runs_is_sent_when_it_is_told_to_end(store: Store, tmp_path: Path) -> None:
    digest = store.put_bytes(bytes(20_000_000))
    with run_cache(store.uri, tmp_path / "kept") as cache:
        with socket.create_connection(("127.0.0.1", cache.port)) as raw:
            raw.sendall(f"GET /{blob_key(digest)} HTTP/1.1\r\nHost: cache\r\n\r\n".encode())
            stream = raw.makefile("rb")
            while stream.readline().strip():
                pass
            ending = threading.Thread(target=cache.end)
            ending.start()
            time.sleep(0.5)
            assert len(stream.read(20_000_000)) == 20_000_000
        ending.join()
        assert cache.process.returncode == 0
    assert "ending: " in "".join(cache.said) and "stopped" in "".join(cache.said)


def run(*arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "enginesmith", "cache", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


def test_what_it_cannot_do_is_said_before_it_listens(store: Store, cache: RunningCache, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    kept = str(tmp_path / "other")
    listen = ("--dir", kept, "--registry", store.uri, "--listen")
    assert run(*listen, f"127.0.0.1:{cache.port}")[0] == 3
    assert "HOST:PORT" in run(*listen, "8080")[1]
    assert run("--dir", str(tmp_path / "file" / "x"), "--registry", store.uri, "--listen", "127.0.0.1:0")[0] == 3
    code, told = run("--dir", kept, "--registry", "ftp://x", "--listen", "127.0.0.1:0")
    assert code == 2 and "scheme 'ftp'" in told
    assert "no size" in run("--dir", kept, "--bytes", "100 potatoes")[1]
    code, told = run("--dir", store.uri.removeprefix("file://"), "--registry", store.uri, "--listen", "127.0.0.1:0")
    assert code == 2 and "is a registry; give the cache a folder of its own" in told
    code, told = run(*listen, "127.0.0.1:0", "--token-file", str(tmp_path / "file"))
    assert code == 2 and "no token" in told


def test_it_starts_while_its_registry_is_away(tmp_path: Path) -> None:
    with run_cache(str(tmp_path / "later"), tmp_path / "kept") as cache:
        deadline = time.monotonic() + 20
        while not any("there is no registry at" in line for line in cache.said):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        status, headers, body = cache.ask("/enginesmith-registry.json")
        assert status == 503 and headers["Retry-After"] and b"no registry" in body
        open_store(tmp_path / "later", create=True)
        assert cache.ask("/enginesmith-registry.json")[0] == 200
