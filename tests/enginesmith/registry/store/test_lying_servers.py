import http.server
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from enginesmith.core.errors import EnginesmithError, IntegrityError, UnavailableError
from enginesmith.registry.store.base import Store, bucket_at
from enginesmith.registry.store.http import HttpBucket, HttpStore, parse_location
from enginesmith.registry.store.layout import MAX_BLOB_BYTES
from enginesmith.registry.store.objects import api
from enginesmith.registry.store.objects.store import ObjectStore
from tests.enginesmith.object_stores.kinds import ENVIRONMENT
from tests.enginesmith.object_stores.servers import serving
from tests.enginesmith.registries import on_each_store

DIGEST = "ab" * 32
KEY = "models/digits/channels/stable.json"
FACTS = {"ETag": '"0"', "x-goog-generation": "1", "Last-Modified": "Mon, 01 Jan 2024 00:00:00 GMT"}
# Of a body of a hundred bytes. A listing of S3, of Google and of Azure is told by its address.
LENGTHS = ["1000000000000000", "100000000000", "-5", "9" * 5000, "abc", "chunks"]


class Liar(http.server.ThreadingHTTPServer):
    """Answers with 100 bytes and states `length`; 'chunks': sends 80 MiB after stating 100; 'no chunks': sends none."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answering)
        self.length, self.asked, self.token = "100", 0, ""

    def handle_error(self, *_: object) -> None: ...


class Answering(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Liar

    def do_GET(self) -> None:
        self.server.asked += 1
        chunks, body = self.server.length.endswith("chunks"), b"x" * 100
        self.close_connection = True
        stated_fields = {**FACTS, "Content-Length": "100" if chunks else self.server.length}
        if "Range" in self.headers or "x-ms-range" in self.headers:
            stated_fields["Content-Range"] = "bytes 0-99/100"
        if "list-type=2" in self.path:
            token = self.server.token or self.server.asked
            more_text = f"<IsTruncated>true</IsTruncated><NextContinuationToken>{token}</NextContinuationToken>"
            body = f"<ListBucketResult>{more_text}</ListBucketResult>".encode()
            stated_fields["Content-Length"] = str(len(body))
        self.send_response(206 if "Content-Range" in stated_fields else 200)
        for name, value in {**stated_fields, **({"Transfer-Encoding": "chunked"} if chunks else {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET" and not chunks:
            self.wfile.write(body)
        for _ in range(80 if self.command == "GET" and self.server.length == "chunks" else 0):
            self.wfile.write(b"100000\r\n" + b"x" * (1 << 20) + b"\r\n")
        if self.server.length == "no chunks":
            self.wfile.write(b"0\r\n\r\n")

    do_HEAD = do_GET


@pytest.fixture
def liar(monkeypatch: pytest.MonkeyPatch) -> Iterator[Liar]:
    monkeypatch.setattr(api, "FIRST_PAUSE_S", 0.0)
    for name, value in {**ENVIRONMENT, "AZURE_STORAGE_KEY": "dGVzdA=="}.items():
        monkeypatch.setenv(name, value)
    with serving(actual := Liar()):
        yield actual


def store_of(kind: str, liar: Liar) -> Store:
    url = f"http://127.0.0.1:{liar.server_port}"
    if kind == "http":
        return HttpStore(HttpBucket(parse_location(url)))
    places = {"s3": f"s3://bucket/p?endpoint={url}", "gs": f"gs://bucket/p?endpoint={url}"}
    places["az"] = f"az://account/bucket/p?endpoint={url}/account"
    return ObjectStore(bucket_at(places[kind]))


@contextmanager
def bounded(more: int = 1 << 30) -> Iterator[None]:
    """Let this process have so many bytes more than it has."""
    with open("/proc/self/statm") as stream:  # noqa: PTH123
        number = int(stream.read().split()[0]) * resource.getpagesize()
    limits_before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (number + more, limits_before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits_before)


# What the clouds' libraries raise for a length that is no number leaves a socket to the garbage collection.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("kind", ["http", "s3", "gs", "az"])
@pytest.mark.parametrize("length", LENGTHS)
def test_a_false_length_is_an_error(liar: Liar, kind: str, length: str) -> None:
    store = store_of(kind, liar)
    liar.length = length
    asks_functions: list[Callable[[], object]] = [lambda: store.read_blob(DIGEST), lambda: store.stored_size(DIGEST)]
    if kind != "az":  # its library reads a body in chunks to its end
        asks_functions.append(lambda: store.read(KEY))
    elif length == "chunks":
        asks_functions = asks_functions[1:]
    for ask in asks_functions:
        with bounded():
            try:
                result = ask()
            except EnginesmithError:
                continue
        assert result in (None, 100, 10**11, b"x" * 100), "the very bytes, or a size that a blob may have"


@pytest.mark.parametrize("length", [str(MAX_BLOB_BYTES + 1), "-1"])
def test_an_impossible_blob_size_is_reported_at_once(liar: Liar, length: str) -> None:
    store = store_of("http", liar)
    liar.length = length
    with pytest.raises(IntegrityError, match=f"the server says .* has {length} bytes"):
        store.size(DIGEST)
    assert liar.asked == 1


def test_a_range_is_the_requested_one(liar: Liar) -> None:
    store = store_of("http", liar)
    with pytest.raises(IntegrityError, match="ends before it should"), store.open_range(DIGEST, 100, 100) as fill:
        fill(memoryview(bytearray(100)))
    liar.length = "no chunks"
    with pytest.raises(UnavailableError, match="no complete answer"), store.open_range(DIGEST, 0, 100) as fill:
        fill(memoryview(bytearray(100)))


@pytest.mark.parametrize("same", [True, False])
def test_an_endless_listing_ends(liar: Liar, monkeypatch: pytest.MonkeyPatch, same: bool) -> None:
    monkeypatch.setattr(api, "MAX_KEYS", 3000)
    store = store_of("s3", liar)
    liar.token = "same" if same else ""
    with pytest.raises(IntegrityError, match=r"does not end \(0 so far"):
        list(store.list("models/"))


@on_each_store
def test_a_blob_larger_than_its_kind_is_not_read(store: Store) -> None:
    digest = store.put_bytes(b"x" * 1000)
    assert store.read_blob(digest, 1000) == b"x" * 1000
    with pytest.raises(IntegrityError, match="over the limit of 999 bytes"):
        store.read_blob(digest, 999)
