"""Faults in transfers of blobs to and from a bucket, one at a time, and S3's own errors and cut answers."""

import gc
import hashlib
import os
import re
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from blake3 import blake3

from enginesmith.core.errors import UnavailableError
from enginesmith.registry.store.base import open_store
from enginesmith.registry.store.files import BlobDigest
from enginesmith.registry.store.layout import blob_key
from enginesmith.registry.store.objects import api, body
from enginesmith.registry.store.objects.store import ObjectStore
from enginesmith.registry.store.s3 import bucket
from enginesmith.registry.store.s3.requests import client
from tests.enginesmith.faulty_proxy import Fault, FaultyProxy, Request
from tests.enginesmith.object_stores.kinds import past
from tests.enginesmith.registries import uploads
from tests.enginesmith.s3_server import BUCKET

ABSENT = "0" * 64


@pytest.fixture
def store(store_behind_proxy: ObjectStore) -> ObjectStore:
    return store_behind_proxy


@pytest.mark.slow
def test_an_interrupted_body_is_resumed_at_that_byte(store, proxy, tmp_path):
    data = os.urandom(200_000)
    digest = store.put_bytes(data)
    proxy.plan(lambda request: Fault("cut answer", at=0.6) if request.number in (2, 3, 4) else None)
    store.fetch(digest, tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == data and proxy.count("GET") == 4
    reading = [dict(request.headers).get("Range") for request in proxy.requests if request.method == "GET"]
    assert reading[0] is None and all(str(result).startswith("bytes=") for result in reading[1:])
    sent_numbers = [int(str(result).removeprefix("bytes=").removesuffix("-")) for result in reading[1:]]
    assert sent_numbers == sorted(set(sent_numbers)) and sent_numbers[0] > 100_000


def test_a_body_that_always_breaks_at_one_place_ends(store: ObjectStore, proxy: FaultyProxy) -> None:
    digest = store.put_bytes(b"x" * 5000)
    proxy.plan(lambda request: Fault("cut answer", at=0.1 if "Range" in dict(request.headers) else 0.9))
    with pytest.raises(UnavailableError, match="no complete answer"):
        store.read_blob(digest)
    assert proxy.count("GET") <= 2 * api.ATTEMPTS


@pytest.mark.parametrize("use", ["rehash", "read_blob"])
def test_a_blob_repaired_during_a_read_is_read_again(store: ObjectStore, proxy: FaultyProxy, use: str) -> None:
    data = b"sound" * 1000
    key = store.place.key(blob_key(digest := store.put_bytes(data)))
    direct_client = client(replace(store.place, endpoint=f"http://{proxy.server[0]}:{proxy.server[1]}"))
    direct_client.put_object(Bucket=store.place.bucket, Key=key, Body=b"longer" * 1000)

    def plan(request: Request) -> Fault | None:
        if request.number == 2:
            direct_client.put_object(Bucket=store.place.bucket, Key=key, Body=data)
        return Fault("cut answer", at=0.9) if request.number == 1 else None

    proxy.plan(plan)
    expected = {"rehash": BlobDigest(digest, blake3(data).hexdigest()), "read_blob": data}
    assert getattr(store, use)(digest) == expected[use] and proxy.count("GET") == 3


def test_a_blob_that_another_tool_copied_is_read_before_use(store: ObjectStore, proxy: FaultyProxy) -> None:
    data = os.urandom(3500)
    digest = hashlib.sha256(data).hexdigest()
    direct_client = client(replace(store.place, endpoint=f"http://{proxy.server[0]}:{proxy.server[1]}"))
    for size, content in ((700, data), (700, data[::-1])):
        fields = {"Bucket": store.place.bucket, "Key": store.place.key(blob_key(digest))}
        begun_upload = direct_client.create_multipart_upload(**fields)["UploadId"]
        parts = [
            {
                "PartNumber": number,
                "ETag": direct_client.upload_part(
                    **fields, UploadId=begun_upload, PartNumber=number, Body=content[start : start + size]
                )["ETag"],
            }
            for number, start in enumerate(range(0, len(content), size), 1)
        ]
        direct_client.complete_multipart_upload(**fields, UploadId=begun_upload, MultipartUpload={"Parts": parts})
        proxy.fine()
        assert store.put_bytes(data) == digest and proxy.count("GET") == 1
        assert (proxy.count("POST") == 0) == (content == data)
        assert store.read_blob(digest) == data


def test_old_parts_of_a_killed_upload_are_deleted(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    key = store.place.key(blob_key(ABSENT))
    client(store.place).create_multipart_upload(Bucket=store.place.bucket, Key=key)
    monkeypatch.setattr(bucket, "LEFT_AFTER", timedelta(days=365_000))  # moto says that all uploads began in 2010
    assert store.strays() == () and store.sweep() == 0 and uploads(store) == 1
    monkeypatch.setattr(bucket, "LEFT_AFTER", timedelta(days=1))
    assert store.strays() == (f"unfinished upload of {key}",)
    open_store(store.uri, create=True)
    assert store.strays() == () and uploads(store) == 0


def test_an_upload_that_is_swept_away_begins_again(store: ObjectStore, proxy: FaultyProxy) -> None:
    def plan(request: Request) -> None:
        if "partNumber=3" in request.path and not swept_sweeps:
            swept_sweeps.append(past(store, proxy.server).sweep())

    swept_sweeps: list[int] = []
    proxy.plan(plan)
    digest = store.put_bytes(b"x" * 3500)
    assert swept_sweeps == [1] and store.read_blob(digest) == b"x" * 3500


def test_publishing_works_without_the_right_to_list_uploads(store: ObjectStore, proxy: FaultyProxy) -> None:
    proxy.plan(lambda request: Fault("error", status=403, code="AccessDenied") if "uploads" in request.path else None)
    assert open_store(store.uri, create=True).create("a", b"")


@pytest.mark.parametrize("beneath", [True, False])
def test_a_range_leaves_its_connection_to_the_next_one(store, proxy, beneath, monkeypatch):
    """Read by urllib3's response, or by the one below it."""
    if not beneath:
        monkeypatch.setattr(body, "HTTPResponse", Path)
    data = os.urandom(9000)
    digest = store.put_bytes(data)
    pool = client(store.place)._endpoint.http_session._manager.connection_from_url(proxy.url)
    connections_before = pool.num_connections
    for start in (0, 3000, 6000):
        target_data = bytearray(3000)
        with store.open_range(digest, start, 3000) as fill:
            fill(memoryview(target_data)[:1000])
            fill(memoryview(target_data)[1000:])
        assert target_data == data[start : start + 3000]
    assert pool.num_connections - connections_before <= 1
    with store.open_range(digest, 0, 9000) as fill:
        fill(memoryview(bytearray(10)))  # given up halfway: what is left on that connection is nobody's answer
    assert store.read_blob(digest) == data


def test_an_upload_that_stays_broken_leaves_no_remains(store: ObjectStore, proxy: FaultyProxy) -> None:
    proxy.plan(lambda request: Fault("error") if "partNumber=3" in request.path else None)
    with pytest.raises(UnavailableError, match=r"overloaded or failing \(SlowDown\)"):
        store.put_bytes(b"x" * 3500)
    proxy.fine()
    assert not store.has(hashlib.sha256(b"x" * 3500).hexdigest()) and uploads(store) == 0


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # botocore drops an answer that it cannot parse
@pytest.mark.parametrize("until", [b"http/1.1 200", b"last-modified: ", b"content-length: ", b"etag: "])
def test_an_answer_that_ends_in_its_headers_is_incomplete(store, proxy, until):
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
        (500, "", r"overloaded or failing \(500\)"),
        (400, "Whatever", "refuses with 400 Whatever"),
    ],
)
def test_each_error_has_its_remedy_and_no_secret(store, proxy, status, code, words):
    proxy.plan(lambda request: Fault("error", status=status, code=code))
    uses = [lambda: store.read("models/a.json"), lambda: store.create("models/a.json", b""), lambda: list(store.list())]
    for use in [*uses, lambda: store.put_bytes(b"x"), lambda: store.read_blob(ABSENT), store.strays]:
        with pytest.raises(UnavailableError) as error_info:
            use()
        # A HEAD is answered without a code.
        assert re.search(words, str(error_info.value)) or "HEAD" in {request.method for request in proxy.requests[-1:]}
        assert not re.search("secret-in-message|testing", str(error_info.value).replace(BUCKET, ""))
