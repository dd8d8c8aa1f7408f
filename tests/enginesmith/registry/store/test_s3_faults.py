"""What is S3's own when answers are cut off or are errors."""

import gc
import hashlib
import re

import pytest

from enginesmith.core.errors import UnavailableError
from enginesmith.registry.store.objects.store import ObjectStore
from tests.enginesmith.faulty_proxy import Fault, FaultyProxy
from tests.enginesmith.registries import uploads
from tests.enginesmith.s3_server import BUCKET

ABSENT = "0" * 64


@pytest.fixture
def store(store_behind_proxy: ObjectStore) -> ObjectStore:
    return store_behind_proxy


def test_an_upload_that_stays_broken_leaves_nothing(store: ObjectStore, proxy: FaultyProxy) -> None:
    proxy.plan(lambda request: Fault("error") if "partNumber=3" in request.path else None)
    with pytest.raises(UnavailableError, match=r"overloaded or failing \(SlowDown\)"):
        store.put_bytes(b"x" * 3500)
    proxy.fine()
    assert not store.has(hashlib.sha256(b"x" * 3500).hexdigest()) and uploads(store) == 0


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # botocore drops an answer that it cannot parse
@pytest.mark.parametrize("until", [b"http/1.1 200", b"last-modified: ", b"content-length: ", b"etag: "])
def test_an_answer_that_ends_among_its_headers_is_no_answer(store, proxy, until):
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
        with pytest.raises(UnavailableError) as told:
            use()
        # A HEAD is answered without a code.
        assert re.search(words, str(told.value)) or "HEAD" in {request.method for request in proxy.requests[-1:]}
        assert not re.search("secret-in-message|testing", str(told.value).replace(BUCKET, ""))
