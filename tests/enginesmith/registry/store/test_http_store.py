import http.server
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from enginesmith.core.errors import InputError, IntegrityError, UnavailableError
from enginesmith.registry.store import http as http_store
from enginesmith.registry.store.base import Store, absolute_uri, open_store, split_places
from enginesmith.registry.store.files import read_error_counts
from enginesmith.registry.store.http import HttpStore
from enginesmith.registry.store.layout import blob_key, channel_key
from enginesmith.registry.store.objects import api
from tests.enginesmith.object_stores.servers import serving
from tests.enginesmith.registries import engine, flip, publish_engines


class Site(http.server.ThreadingHTTPServer):
    """A folder's web server, with ranges and nginx's lists. fault: what it does to answers.  seen: the requests."""

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), Answering)
        self.root, self.seen, self.fault = root, list[tuple[str, str, dict[str, str]]](), list[str]()
        self.listed = b""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Answering(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Site

    def do_GET(self) -> None:
        self.server.seen.append((self.command, self.path, dict(self.headers)))
        fault = self.server.fault.pop(0) if self.server.fault else ""
        path = self.server.root / self.path.lstrip("/")
        if fault == "closed":
            self.close_connection = True
            return
        if path.is_dir() and self.path.endswith("/") and not fault:
            lower_fields = [{"name": i.name, "type": "directory" if i.is_dir() else "file"} for i in path.iterdir()]
            self._send(200, json.dumps(lower_fields).encode(), {"Content-Type": "application/json"})
            return
        if fault == "listed":
            self._send(200, self.server.listed, {})
            return
        if fault.isdigit() or not path.is_file():
            self._send(int(fault or 404), b"told\n", {"Content-Type": "text/plain"})
            return
        data = path.read_bytes()
        tag = f'"{hash(data)}"'
        if self.headers.get("If-None-Match") == tag:
            self._send(304, b"", {"ETag": tag})
            return
        status, part = 200, data
        if "Range" in self.headers and fault != "no ranges":
            start, end = self.headers["Range"].removeprefix("bytes=").split("-")
            status, part = 206, data[int(start) : int(end) + 1]
        self._send(status, part, {"ETag": tag}, cut=fault == "cut")

    do_HEAD = do_GET

    def _send(self, status: int, body: bytes, headers: dict[str, str], cut: bool = False) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[: len(body) // 2] if cut else body)
        if cut:
            self.close_connection = True


@pytest.fixture
def site(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setattr(api, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setenv("ENGINESMITH_CACHE", str(tmp_path / "cache"))
    publish_engines(store, [engine(store)], channel="stable")
    with serving(actual := Site(tmp_path / "registry")):
        yield actual


@pytest.fixture
def behind(site: Site) -> HttpStore:
    store = open_store(site.url)
    assert isinstance(store, HttpStore)
    site.seen.clear()
    return store


def read_range(store: Store, digest: str, start: int, size: int) -> bytes:
    data = bytearray(size)
    with store.open_range(digest, start, size) as fill:
        fill(memoryview(data)[: size // 2])
        fill(memoryview(data)[size // 2 :])
    return bytes(data)


def test_the_store_reads_the_registrys_documents(store: Store, site: Site, behind: HttpStore, tmp_path: Path) -> None:
    key, digest = channel_key("digits", "stable"), store.put_bytes(bytes(range(256)) * 40)
    assert behind.read(key) == store.read(key) and behind.read("models/none.json") is None
    data, tag = behind.read_if_changed(key, "")
    assert data == store.read(key) and behind.read_if_changed(key, tag) == (None, tag)
    assert behind.read_blob(digest) == store.read_blob(digest) == behind.path(digest).read_bytes()
    assert behind.stored_size(digest) == 10240 and not behind.has("0" * 64)
    site.fault = ["410", "413", "422"]
    assert [behind.read(key) for _ in range(3)] == [None] * 3
    assert read_range(behind, digest, 100, 300) == store.read_blob(digest)[100:400]
    behind.fetch(digest, tmp_path / "there")
    assert (tmp_path / "there").read_bytes() == store.read_blob(digest)
    assert not behind.near and behind.locator(key) == f"{behind.uri}/{key}"


def test_nginx_autoindex_lists_the_folders_names(store: Store, behind: HttpStore) -> None:
    store.create("models/digits/pins/one.json", b"{}")
    for prefix in ("models/", "models/digits/versions/", "models/none/"):
        assert list(behind.list(prefix)) == list(store.list(prefix))
        assert list(behind.children(prefix)) == list(store.children(prefix))


def test_listings_of_a_server_are_validated(behind: HttpStore, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    for listed_data in (b"<html>", b'{"name": "a"}', b'["a"]', b"[" * 100_000, b'[{"name": "a"}]'):
        site.fault, site.listed = ["listed"], listed_data
        with pytest.raises(IntegrityError, match="autoindex_format json"):
            list(behind.list("models/"))
    site.fault, site.listed = ["listed"], b'[{"name": "..", "type": "directory"}, {"name": "/etc", "type": "file"}]'
    assert list(behind.list("models/")) == []
    site.fault = ["listed"]
    site.listed = b"[%b, %b, %b]" % (b'{"name": "a/b", "type": "file"}', *[b'{"name": "c", "type": "file"}'] * 2)
    assert list(behind.children("models/")) == ["c"]
    site.fault, site.listed = ["listed"] * 99, b'[{"name": "a", "type": "directory"}]'
    with pytest.raises(IntegrityError, match="without end"):
        list(behind.list("models/"))
    monkeypatch.setattr(http_store, "MAX_KEYS", 3)
    site.fault, site.listed = ["listed"] * 99, b'[{"name": "a", "type": "file"}, {"name": "b", "type": "directory"}]'
    with pytest.raises(IntegrityError, match=r"does not end \(4 so far"):
        list(behind.list("models/"))
    monkeypatch.setattr(http_store, "MAX_DOCUMENT_BYTES", 9)
    with pytest.raises(IntegrityError, match="no list of names for 'models/': over 9 bytes"):
        list(behind.list("models/"))


@pytest.mark.parametrize("fault", ["closed", "cut", "500", "429"])
def test_an_interrupted_download_continues(store: Store, behind: HttpStore, site: Site, fault: str) -> None:
    digest = store.put_bytes(bytes(range(256)) * 4)
    site.fault = [fault, fault]
    assert read_range(behind, digest, 0, 1024) == store.read_blob(digest)
    requests = [headers["Range"] for _, _, headers in site.seen]
    assert len(requests) == 3 and requests[1].startswith("bytes=512-" if fault == "cut" else "bytes=0-")
    site.fault = [fault]
    assert behind.read(channel_key("digits", "stable")) == store.read(channel_key("digits", "stable"))


def test_a_connection_serves_many_requests_and_is_replaced_when_closed(behind, site, monkeypatch):
    connections: list[object] = []
    connect = http_store._connect
    monkeypatch.setattr(http_store, "_connect", lambda place: connections.append(place) or connect(place))
    for _ in range(5):
        behind.read(channel_key("digits", "stable"))
    assert not connections
    site.fault, errors = ["closed"], read_error_counts()
    assert behind.read(channel_key("digits", "stable")) and len(connections) == 1
    assert read_error_counts() == errors, "it is no attempt that failed, and nothing waits"


def test_wrong_bytes_are_never_given(store: Store, behind: HttpStore, site: Site) -> None:
    digest = store.put_bytes(b"engine")
    tag, body = behind.bucket.open_from(blob_key(digest), 0, "")
    body.close()
    assert tag == f'"{hash(b"engine")}"', "by which other bytes are seen where reading goes on"
    flip(store, digest)
    for loaded_blob in (behind.read_blob, behind.path):
        with pytest.raises(IntegrityError, match=r"other bytes.*; run .* at the registry itself$"):
            loaded_blob(digest)
    with pytest.raises(IntegrityError, match="not have"):
        behind.size("0" * 64)
    with pytest.raises(IntegrityError, match="ends before"):
        read_range(behind, digest, 0, 100)
    site.fault = ["no ranges"]
    with pytest.raises(IntegrityError, match=r"ends before it should, or the server has no ranges; .* itself$"):
        read_range(behind, digest, 2, 2)


@pytest.mark.parametrize(
    ("status", "error", "words"),
    [
        (503, UnavailableError, "run again later"),
        (401, UnavailableError, "ENGINESMITH_CACHE_TOKEN_FILE"),
        (407, UnavailableError, "a proxy in front of the server requires"),
        (302, UnavailableError, "302"),
    ],
)
def test_a_servers_refusal_is_reported_and_not_retried(behind, site, status, error, words):
    site.fault = [str(status)]
    with pytest.raises(error, match=words):
        behind.read(channel_key("digits", "stable"))
    assert len(site.seen) == 1


def test_the_store_is_read_only(behind: HttpStore, site: Site, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    writes = (
        lambda: behind.put_bytes(b"x"),
        lambda: behind.put_file(tmp_path / "file"),
        lambda: behind.create("runs/a.json", b"{}"),
        lambda: behind.replace("runs/a.json", b"{}", None),
        lambda: behind.remove("runs/a.json"),
        lambda: behind.discard("0" * 64),
        lambda: behind.rehash("0" * 64),
        lambda: open_store(site.url, create=True),
    )
    for write in writes:
        with pytest.raises(InputError, match="read-only"):
            write()
    assert not site.seen and behind.strays() == () and behind.sweep() == 0


def test_a_token_is_sent_and_read_again_with_each_request(behind, site, tmp_path, monkeypatch):
    monkeypatch.setenv(http_store.TOKEN_FILE, str(tmp_path / "token"))
    with pytest.raises(UnavailableError, match="cannot be read"):
        behind.has("0" * 64)
    for token in ("first", "second"):
        (tmp_path / "token").write_text(f"{token}\n")
        behind.has("0" * 64)
        assert site.seen[-1][2]["Authorization"] == f"Bearer {token}"
    (tmp_path / "token").write_text("two\nlines")
    with pytest.raises(UnavailableError, match="no token"):
        behind.has("0" * 64)


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("http://user:secret@cache/", "without user"),
        ("http://cache/?token=secret", "without user"),
        ("http://", "no host"),
        ("http://cache:port/", "not a URI"),
        ("http://cache/../x", "prefix"),
        ("a,,b", "not a path"),
    ],
)
def test_an_invalid_location_is_refused_without_its_secret(uri: str, words: str) -> None:
    with pytest.raises(InputError, match=words) as error:
        open_store(uri)
    assert "secret" not in str(error.value)


def test_the_last_place_of_a_list_is_the_registry_and_all_become_absolute(store: Store, tmp_path: Path) -> None:
    assert open_store(f"http://127.0.0.1:9,{store.uri}") == store
    assert split_places("http://a, s3://b/c") == ("http://a", "s3://b/c")
    strange_path = tmp_path / "a,b"
    assert open_store(open_store(strange_path, create=True).uri).uri == f"file://{tmp_path}/a%2Cb"
    assert absolute_uri(f"http://cache/,{store.uri}") == f"http://cache/,{store.uri}"


def test_a_server_without_a_registry_is_no_registry(site: Site) -> None:
    with pytest.raises(UnavailableError, match="no registry at"):
        open_store(f"{site.url}/elsewhere")


def test_a_serving_node_reads_with_the_standard_library_only(site: Site) -> None:
    code = (
        "import sys; from enginesmith import Client; Client(sys.argv[1]).store; "
        "print(*{m.partition('.')[0] for m in sys.modules} & {'boto3','aiohttp','click','rich','numpy','pipeline'})"
    )
    result = subprocess.run([sys.executable, "-c", code, site.url], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""


def test_a_fork_closes_its_copies_of_idle_connections(behind: HttpStore) -> None:
    behind.read(channel_key("tiny", "stable"))
    if not (child := os.fork()):
        os._exit(len(http_store._idle))
    assert http_store._idle and os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
