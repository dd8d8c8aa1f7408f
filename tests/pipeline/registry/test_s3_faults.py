"""What networks and servers do to a registry in a bucket, one fault at a time."""

import hashlib
import io
import os
import re
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from builders.errors import InputError, IntegrityError, UnavailableError, UndecidedError
from pipeline.registry import channels
from pipeline.registry.keys import MARKER, blob_key
from pipeline.registry.s3 import answers, probe, strays, upload
from pipeline.registry.s3.client import client
from pipeline.registry.s3.store import S3Store
from pipeline.registry.store import Store, open_store
from tests.pipeline.registry.faulty_proxy import Fault, FaultyProxy, Kind, Request, proxying
from tests.pipeline.registry.registries import engine, publish_engines
from tests.pipeline.registry.s3_server import BUCKET

ABSENT = "0" * 64


@pytest.fixture(scope="module")
def running(s3_server: str) -> Iterator[FaultyProxy]:
    with proxying(s3_server) as proxy:
        yield proxy


@pytest.fixture
def proxy(running: FaultyProxy, monkeypatch: pytest.MonkeyPatch) -> FaultyProxy:
    monkeypatch.setattr(answers, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(upload, "PART_BYTES", 1000)
    running.fine()
    return running


@pytest.fixture
def store(proxy: FaultyProxy, s3_uri: str) -> S3Store:
    """An empty registry behind the proxy."""
    store = open_store(f"{s3_uri.partition('?')[0]}?endpoint={proxy.url}", create=True)
    assert isinstance(store, S3Store)
    proxy.fine()
    return store


PASSING: list[Kind] = [
    "refused",
    "cut request",
    "lost answer",
    "cut answer",
    "error",
    "error after",
    "slow",
    "flipped request",
]


@pytest.mark.parametrize("kind", PASSING)
def test_a_write_that_met_a_fault_is_done_once_and_known_to_be_done(
    store: S3Store, proxy: FaultyProxy, kind: Kind
) -> None:
    proxy.once(Fault(kind, at=0.3), method="PUT")
    assert store.create("models/a.json", b"1" * 50)
    assert proxy.faults == 1 and store.read("models/a.json") == b"1" * 50
    proxy.once(Fault(kind, at=0.3), method="PUT")
    assert store.replace("models/a.json", b"2" * 50, b"1" * 50)
    assert proxy.faults == 1 and store.read("models/a.json") == b"2" * 50


@pytest.mark.parametrize("kind", PASSING)
@pytest.mark.parametrize("method", ["HEAD", "GET"])
def test_a_read_that_met_a_fault_is_read_again(store: S3Store, proxy: FaultyProxy, kind: Kind, method: str) -> None:
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


@pytest.mark.parametrize("kind", [*PASSING, "flipped answer"])
def test_an_upload_in_parts_that_met_a_fault_is_completed(store: S3Store, proxy: FaultyProxy, kind: Kind) -> None:
    """At its beginning, in its second part, and at its completion."""
    for number, (method, part) in enumerate((("POST", "uploads"), ("PUT", "partNumber=2"), ("POST", "uploadId="))):
        data = os.urandom(3500)
        proxy.once(Fault(kind, at=0.3), method=method, part=part)
        digest = store.put_bytes(data)
        assert proxy.faults == 1, number
        proxy.fine()
        assert store.read_blob(digest) == data


def overtaken(store: S3Store, proxy: FaultyProxy, first: Kind, work: Callable[[Store], object]) -> None:
    """The first PUT meets a fault, and before it comes again somebody else has worked in the same registry."""
    past = S3Store(replace(store.place, endpoint=f"http://{proxy.server[0]}:{proxy.server[1]}"))
    puts = 0

    def plan(request: Request) -> Fault | None:
        nonlocal puts
        puts += request.method == "PUT"
        if request.method == "PUT" and puts == 2:
            work(past)
        return Fault(first) if request.method == "PUT" and puts == 1 else None

    proxy.plan(plan)


def test_somebody_elses_document_is_not_taken_for_ones_own(store: S3Store, proxy: FaultyProxy) -> None:
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
def test_a_channel_knows_its_move_from_its_history(store: S3Store, proxy: FaultyProxy, first: Kind) -> None:
    """A promotion whose answer was lost is neither lost nor made twice, though somebody moved the channel on."""
    entry = engine(store)
    one, two, three = (publish_engines(store, [entry], content, channel=None).manifest for content in "abc")
    channels.promote(store, one, "stable")
    overtaken(store, proxy, first, lambda past: channels.promote(past, three, "stable", by="bob"))
    after = channels.promote(store, two, "stable", by="ada")
    expected = ["1", "2", "3"] if first == "lost answer" else ["1", "3", "2"]
    assert [move.version for move in after.history] == expected
    assert channels.read(store, "digits", "stable") == after


def test_what_stays_broken_is_told_with_the_place_and_leaves_nothing(store: S3Store, proxy: FaultyProxy) -> None:
    proxy.plan(lambda request: Fault("refused"))
    with pytest.raises(UnavailableError, match=f"writing models/a.json in {store.place.locator('')}.*{proxy.url}"):
        store.create("models/a.json", b"1")
    assert proxy.count("PUT") == answers.ATTEMPTS
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
    store: S3Store, proxy: FaultyProxy, status: int, code: str, words: str
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


def test_a_server_that_ignores_conditions_is_read_and_not_published_to(store: S3Store, proxy: FaultyProxy) -> None:
    digest = store.put_bytes(b"x")
    proxy.plan(lambda request: Fault("deaf"))
    probe.require_conditional_writes.cache_clear()
    uses = [lambda: open_store(store.uri, create=True), lambda: store.create("a", b""), lambda: store.put_bytes(b"y")]
    for use in uses:
        with pytest.raises(InputError, match="ignores conditional writes: it took a PUT with If-None-Match"):
            use()
    assert open_store(store.uri).read_blob(digest) == b"x" and store.read(MARKER) == b'{"format":1}'
    assert [key for key in store.list() if "blobs" not in key] == [MARKER]
    proxy.plan(lambda request: Fault("deaf") if ("If-Match", '"' + "0" * 32 + '"') in request.headers else None)
    with pytest.raises(InputError, match="PUT with If-Match"):
        store.create("a", b"")
    proxy.fine()
    assert store.create("a", b"")


def test_a_server_that_knows_no_conditions_is_refused_too(store: S3Store, proxy: FaultyProxy) -> None:
    probe.require_conditional_writes.cache_clear()
    proxy.once(Fault("error", status=501, code="NotImplemented"), method="PUT")
    with pytest.raises(InputError, match="ignores conditional writes"):
        store.create("a", b"")


def test_a_body_that_breaks_off_is_resumed_where_it_broke(store: S3Store, proxy: FaultyProxy, tmp_path: Path) -> None:
    data = os.urandom(200_000)
    digest = store.put_bytes(data)
    proxy.plan(lambda request: Fault("cut answer", at=0.6) if request.number in (2, 3, 4) else None)
    store.fetch(digest, tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == data and proxy.count("GET") == 4
    ranges = [dict(request.headers).get("Range") for request in proxy.requests if request.method == "GET"]
    assert ranges[0] is None and all(str(found).startswith("bytes=") for found in ranges[1:])
    sent = [int(str(found).removeprefix("bytes=").removesuffix("-")) for found in ranges[1:]]
    assert sent == sorted(set(sent)) and sent[0] > 100_000


def test_a_body_that_always_breaks_off_at_one_place_ends(store: S3Store, proxy: FaultyProxy) -> None:
    digest = store.put_bytes(b"x" * 5000)
    proxy.plan(lambda request: Fault("cut answer", at=0.1 if "Range" in dict(request.headers) else 0.9))
    with pytest.raises(UnavailableError, match="no whole answer"):
        store.read_blob(digest)
    assert proxy.count("GET") <= 2 * answers.ATTEMPTS


def test_a_blob_that_is_healed_while_it_is_read_is_read_anew(store: S3Store, proxy: FaultyProxy) -> None:
    data = b"sound" * 1000
    key = store.place.key(blob_key(digest := store.put_bytes(data)))
    direct = client(replace(store.place, endpoint=f"http://{proxy.server[0]}:{proxy.server[1]}"))
    direct.put_object(Bucket=store.place.bucket, Key=key, Body=b"wrong" * 1000)

    def plan(request: Request) -> Fault | None:
        if request.number == 2:
            direct.put_object(Bucket=store.place.bucket, Key=key, Body=data)
        return Fault("cut answer", at=0.9) if request.number == 1 else None

    proxy.plan(plan)
    assert store.rehash(digest) == digest and proxy.count("GET") == 3


def test_a_bit_that_flips_on_the_way_costs_a_second_reading_and_no_blob(store: S3Store, proxy: FaultyProxy) -> None:
    digest = store.put_bytes(b"hello")
    proxy.once(Fault("flipped answer"), method="GET")
    assert store.read_blob(digest) == b"hello" and proxy.count("GET") == 2
    proxy.plan(lambda request: Fault("flipped answer"))
    with pytest.raises(IntegrityError, match="holds other bytes"):
        store.read_blob(digest)


def test_a_blob_that_is_there_is_not_sent_again(store: S3Store, proxy: FaultyProxy, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(os.urandom(3500))
    digest = store.put_file(tmp_path / "file")
    assert proxy.count("PUT", "partNumber") == 4
    proxy.fine()
    assert store.put_file(tmp_path / "file") == digest and [found.method for found in proxy.requests] == ["HEAD"]


def test_a_blob_that_another_tool_copied_is_read_before_it_is_trusted(store: S3Store, proxy: FaultyProxy) -> None:
    data = os.urandom(3500)
    digest = hashlib.sha256(data).hexdigest()
    direct = client(replace(store.place, endpoint=f"http://{proxy.server[0]}:{proxy.server[1]}"))
    for size, content in ((700, data), (700, data[::-1])):
        where = {"Bucket": store.place.bucket, "Key": store.place.key(blob_key(digest))}
        begun = direct.create_multipart_upload(**where)["UploadId"]
        parts = [
            {
                "PartNumber": number,
                "ETag": direct.upload_part(
                    **where, UploadId=begun, PartNumber=number, Body=content[start : start + size]
                )["ETag"],
            }
            for number, start in enumerate(range(0, len(content), size), 1)
        ]
        direct.complete_multipart_upload(**where, UploadId=begun, MultipartUpload={"Parts": parts})
        proxy.fine()
        assert store.put_bytes(data) == digest and proxy.count("GET") == 1
        assert (proxy.count("POST") == 0) == (content == data)
        assert store.read_blob(digest) == data


def test_a_source_that_changes_while_it_is_sent_is_not_stored(store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for size in (500, 3500):
        source = upload.Source(io.BytesIO(b"x" * size), size, ABSENT)
        with pytest.raises(IntegrityError, match="changed while it was uploaded"):
            upload.put(store.place, source)
    assert not store.has(ABSENT) and uploads(store) == 0


def test_what_a_killed_upload_left_is_swept_when_it_is_old(store: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    key = store.place.key(blob_key(ABSENT))
    client(store.place).create_multipart_upload(Bucket=store.place.bucket, Key=key)
    monkeypatch.setattr(strays, "LEFT_AFTER", timedelta(days=365_000))  # moto says that all uploads began in 2010
    assert store.strays() == () and store.sweep() == 0 and uploads(store) == 1
    monkeypatch.setattr(strays, "LEFT_AFTER", timedelta(days=1))
    assert store.strays() == (f"unfinished upload of {key}",)
    open_store(store.uri, create=True)
    assert store.strays() == () and uploads(store) == 0


def test_an_upload_that_is_swept_away_begins_again(store: S3Store, proxy: FaultyProxy) -> None:
    def plan(request: Request) -> None:
        if "partNumber=3" in request.path and not swept:
            swept.append(S3Store(replace(store.place, endpoint=f"http://{proxy.server[0]}:{proxy.server[1]}")).sweep())

    swept: list[int] = []
    proxy.plan(plan)
    digest = store.put_bytes(b"x" * 3500)
    assert swept == [1] and store.read_blob(digest) == b"x" * 3500


def test_whoever_may_not_see_uploads_can_publish_all_the_same(store: S3Store, proxy: FaultyProxy) -> None:
    proxy.plan(lambda request: Fault("error", status=403, code="AccessDenied") if "uploads" in request.path else None)
    assert open_store(store.uri, create=True).create("a", b"")


def uploads(store: S3Store) -> int:
    """Uploads that were neither completed nor aborted."""
    found = client(store.place).list_multipart_uploads(Bucket=store.place.bucket, Prefix=store.place.prefix)
    return len(found.get("Uploads", ()))
