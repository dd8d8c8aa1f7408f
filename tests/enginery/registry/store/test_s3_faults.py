"""What networks and servers do to documents in a bucket, one fault at a time."""

import gc
import hashlib
import re
import socket
from collections.abc import Callable
from dataclasses import replace

import pytest

from enginery.core.errors import InputError, UnavailableError, UndecidedError
from enginery.registry.store.base import Store, open_store
from enginery.registry.store.layout import MARKER
from enginery.registry.store.objects import attempts, writing
from enginery.registry.store.objects.store import ObjectStore
from enginery.registry.store.s3.bucket import S3Bucket
from enginery.registry.versions import channels, lookup
from tests.enginery.faulty_proxy import PASSING, Fault, FaultyProxy, Kind, Request
from tests.enginery.registries import engine, publish_engines, uploads
from tests.enginery.s3_server import BUCKET

ABSENT = "0" * 64


@pytest.fixture
def store(store_behind_proxy: ObjectStore) -> ObjectStore:
    return store_behind_proxy


@pytest.mark.parametrize("kind", PASSING)
def test_a_write_that_met_a_fault_is_done_once_and_known_to_be_done(
    store: ObjectStore, proxy: FaultyProxy, kind: Kind
) -> None:
    proxy.once(Fault(kind, at=0.3), method="PUT")
    assert store.create("models/a.json", b"1" * 50)
    assert proxy.faults == 1 and store.read("models/a.json") == b"1" * 50
    proxy.once(Fault(kind, at=0.3), method="PUT")
    assert store.replace("models/a.json", b"2" * 50, b"1" * 50)
    assert proxy.faults == 1 and store.read("models/a.json") == b"2" * 50


@pytest.mark.parametrize("kind", PASSING)
@pytest.mark.parametrize("method", ["HEAD", "GET"])
def test_a_read_that_met_a_fault_is_read_again(store: ObjectStore, proxy: FaultyProxy, kind: Kind, method: str) -> None:
    store.create("models/a.json", b"1" * 50)
    digest = store.put_bytes(b"hello" * 100)
    for use, expected in (
        (lambda: store.read("models/a.json"), b"1" * 50),
        (lambda: store.has(digest), True),
        (lambda: store.read_blob(digest), b"hello" * 100),
        (lambda: list(store.children("models/")), ["a.json"]),
    ):
        proxy.once(Fault(kind, at=0.8), method=method)
        assert use() == expected


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # botocore drops an answer that it cannot parse
@pytest.mark.parametrize("until", [b"http/1.1 200", b"last-modified: ", b"content-length: ", b"etag: "])
def test_an_answer_that_ends_among_its_headers_is_no_answer(
    store: ObjectStore, proxy: FaultyProxy, until: bytes
) -> None:
    digest = store.put_bytes(b"hello")
    store.create("models/a.json", b"1")
    for method, use, expected in (
        ("GET", lambda: store.read("models/a.json"), b"1"),
        ("GET", lambda: store.read_blob(digest), b"hello"),
        ("HEAD", lambda: store.size(digest), 5),
    ):
        proxy.once(Fault("cut answer", until=until), method=method)
        assert use() == expected and proxy.count(method) == 2
    gc.collect()


def overtaken(store: ObjectStore, proxy: FaultyProxy, first: Kind, work: Callable[[Store], object]) -> None:
    """The first PUT but of leases meets a fault, and before it comes again somebody else has worked here."""
    past = ObjectStore(S3Bucket(replace(store.place, endpoint=f"http://{proxy.server[0]}:{proxy.server[1]}")))
    puts = 0

    def plan(request: Request) -> Fault | None:
        nonlocal puts
        if request.method != "PUT" or "/leases/" in request.path:
            return None
        puts += 1
        if puts == 2:
            work(past)
        return Fault(first) if puts == 1 else None

    proxy.plan(plan)


def test_somebody_elses_document_is_not_taken_for_ones_own(store: ObjectStore, proxy: FaultyProxy) -> None:
    overtaken(store, proxy, "refused", lambda past: past.create("models/a.json", b"same"))
    with pytest.raises(UndecidedError, match="somebody else's"):
        store.replace("models/a.json", b"same", None)
    assert proxy.count("PUT") == 2
    overtaken(store, proxy, "refused", lambda past: past.create("models/b.json", b"same"))
    assert not store.create("models/b.json", b"same")
    overtaken(store, proxy, "lost answer", lambda past: past.replace("models/a.json", b"theirs", b"mine"))
    with pytest.raises(UndecidedError):
        store.replace("models/a.json", b"mine", b"same")
    assert store.read("models/a.json") == b"theirs"


@pytest.mark.parametrize("first", ["lost answer", "refused"])
def test_a_channel_knows_its_move_from_its_history(store: ObjectStore, proxy: FaultyProxy, first: Kind) -> None:
    """A promotion whose answer was lost is neither lost nor made twice, though somebody moved the channel on."""
    entry = engine(store)
    one, two, three = (publish_engines(store, [entry], content, channel=None).manifest for content in "abc")
    channels.promote(store, one, "stable")
    overtaken(store, proxy, first, lambda past: channels.promote(past, three, "stable", by="bob"))
    after = channels.promote(store, two, "stable", by="ada")
    expected = ["1", "2", "3"] if first == "lost answer" else ["1", "3", "2"]
    assert [move.version for move in after.history] == expected
    assert lookup.read_channel(store, "digits", "stable") == after


def test_what_stays_broken_is_told_with_the_place_and_leaves_nothing(store: ObjectStore, proxy: FaultyProxy) -> None:
    proxy.plan(lambda request: Fault("refused"))
    with pytest.raises(UnavailableError, match=f"writing models/a.json in {store.place.locator('')}.*{proxy.url}"):
        store.create("models/a.json", b"1")
    assert proxy.count("PUT") == attempts.ATTEMPTS
    proxy.plan(lambda request: Fault("error") if "partNumber=3" in request.path else None)
    with pytest.raises(UnavailableError, match=r"overloaded or failing \(SlowDown\)"):
        store.put_bytes(b"x" * 3500)
    proxy.fine()
    assert not store.has(hashlib.sha256(b"x" * 3500).hexdigest()) and uploads(store) == 0


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (403, "AccessDenied", "not allowed"),
        (403, "SignatureDoesNotMatch", "check the access key, its secret"),
        (403, "InvalidAccessKeyId", "credentials are not accepted"),
        (400, "ExpiredToken", "have expired"),
        (403, "RequestTimeTooSkewed", "clock"),
        (404, "NoSuchBucket", f"no bucket '{BUCKET}'"),
        (503, "SlowDown", "overloaded or failing"),
        (500, "InternalError", "overloaded or failing"),
        (400, "Whatever", "refuses with 400 Whatever"),
    ],
)
def test_each_error_has_its_remedy_and_no_secret(
    store: ObjectStore, proxy: FaultyProxy, status: int, code: str, words: str
) -> None:
    proxy.plan(lambda request: Fault("error", status=status, code=code))
    uses = [lambda: store.read("models/a.json"), lambda: store.create("models/a.json", b""), lambda: list(store.list())]
    for use in [*uses, lambda: store.put_bytes(b"x"), lambda: store.read_blob(ABSENT), store.strays]:
        with pytest.raises(UnavailableError) as told:
            use()
        # A HEAD is answered without a code.
        assert re.search(words, str(told.value)) or "HEAD" in {request.method for request in proxy.requests[-1:]}
        assert not re.search("secret-in-message|testing", str(told.value).replace(BUCKET, ""))


def test_a_server_that_nobody_reaches_is_said_at_once(proxy: FaultyProxy, s3_environment: None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(UnavailableError, match=f"at http://127.0.0.1:{port} .*check the endpoint"):
        open_store(f"s3://enginery-tests/x?endpoint=http://127.0.0.1:{port}")


def test_a_server_that_ignores_conditions_is_read_and_not_published_to(store: ObjectStore, proxy: FaultyProxy) -> None:
    digest = store.put_bytes(b"x")
    proxy.plan(lambda request: Fault("deaf"))
    writing.require_conditional_writes.cache_clear()
    uses = [lambda: open_store(store.uri, create=True), lambda: store.create("a", b""), lambda: store.put_bytes(b"y")]
    for use in uses:
        with pytest.raises(InputError, match=r"ignores conditional writes: it overwrote .* had to be absent"):
            use()
    assert open_store(store.uri).read_blob(digest) == b"x" and store.read(MARKER) == b'{"format":1}'
    assert [key for key in store.list() if "blobs" not in key] == [MARKER]
    proxy.plan(lambda request: Fault("deaf") if ("If-Match", '"' + "0" * 32 + '"') in request.headers else None)
    with pytest.raises(InputError, match="had to be another"):
        store.create("a", b"")
    proxy.fine()
    assert store.create("a", b"")


def test_a_server_that_knows_no_conditions_is_refused_too(store: ObjectStore, proxy: FaultyProxy) -> None:
    writing.require_conditional_writes.cache_clear()
    proxy.once(Fault("error", status=501, code="NotImplemented"), method="PUT")
    with pytest.raises(InputError, match="ignores conditional writes"):
        store.create("a", b"")
