"""What only a registry in a bucket has: doors, requests to be counted, a cache, encryption, other people's settings. A
fork while another thread makes a client: the child can make one too. Proxies are those of the environment, as every
AWS tool takes them."""

import hashlib
import io
import os
import socket
from pathlib import Path
from threading import Event, Lock, Thread
from types import SimpleNamespace
from typing import cast

import pytest

from enginesmith.core.errors import UnavailableError
from enginesmith.core.names import Reference
from enginesmith.registry.store.base import open_store
from enginesmith.registry.store.cache import local_cache
from enginesmith.registry.store.files import BlobDigest
from enginesmith.registry.store.layout import MARKER, channel_key, manifest_key
from enginesmith.registry.store.objects import api
from enginesmith.registry.store.objects.api import ObjectFacts
from enginesmith.registry.store.objects.place import S3Location
from enginesmith.registry.store.objects.store import ObjectStore
from enginesmith.registry.store.s3 import requests
from enginesmith.registry.store.s3.bucket import S3Bucket
from enginesmith.registry.store.s3.requests import client
from enginesmith.registry.versions import index
from enginesmith.registry.versions.lookup import catalogue, versions
from enginesmith.registry.versions.publish import attach_page
from tests.enginesmith.registries import engine, flip, in_child, publish_engines
from tests.enginesmith.s3_server import BUCKET
from tests.waiting import PATIENCE_S


@pytest.fixture
def store(s3_uri: str) -> ObjectStore:
    store = open_store(s3_uri, create=True)
    assert isinstance(store, ObjectStore)
    return store


@pytest.fixture
def sent(store: ObjectStore) -> list[str]:
    """The requests that leave this process: 'GET /bucket/key?query'."""
    items: list[str] = []
    client(store.place).meta.events.register(
        "before-send.s3", lambda request, **_: items.append(f"{request.method} {request.url}")
    )
    return items


def pages_of(store: ObjectStore, size: int) -> None:
    event = "provide-client-params.s3.ListObjectsV2"
    client(store.place).meta.events.register(event, lambda params, **_: {**params, "MaxKeys": size})


def test_missing_credentials_are_reported_with_a_remedy(s3_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    forget()
    try:
        with pytest.raises(UnavailableError, match=r"no usable credentials.*AWS_PROFILE"):
            open_store(s3_uri, create=True)
        monkeypatch.setenv("AWS_PROFILE", "nobody")
        forget()
        with pytest.raises(UnavailableError, match="AWS configuration cannot be used"):
            open_store(s3_uri)
    finally:
        forget()


def forget() -> None:
    """What boto3 found in the environment is looked for again."""
    requests._client.cache_clear()
    requests._session.cache_clear()


def test_listing_costs_pages_and_no_manifest(store: ObjectStore, sent: list[str]) -> None:
    """8 models x 6 versions in pages of 20: one request a page, one a channel, and one for an index that is absent."""
    for model in range(8):
        for version in range(1, 7):
            store.create(manifest_key(f"m{model}", str(version)), b"{}")
    channel = publish_engines(store, [engine(store)], model="m0", version="v1").manifest
    state = store.read(channel_key("m0", "candidate")) or b""
    other_state = state.replace(b'"m0"', b'"m1"').replace(b'"candidate"', b'"stable"')
    store.create(channel_key("m1", "stable"), other_state)
    keys = len(list(store.list("models/")))
    pages_of(store, 20)
    sent.clear()
    listed_models = index.list_models(store)
    pages = -(-keys // 20)
    assert len(sent) == pages + 3 and sum("list-type" in request for request in sent) == pages
    assert not any("manifest.json" in request for request in sent) and channel.version == "v1"
    assert [len(row.versions) for row in listed_models] == [7, *[6] * 7]
    assert {row.model: row.channels for row in listed_models if row.channels} == {
        "m0": {"candidate": "v1"},
        "m1": {"stable": "v1"},
    }
    sent.clear()
    assert versions(store, "m3") == [str(number) for number in range(1, 7)] and len(sent) == 1
    assert [row.model for row in catalogue(store)] == sorted(f"m{model}" for model in range(8))


def test_showing_a_version_does_not_read_its_page(store: ObjectStore, sent: list[str]) -> None:
    manifest = publish_engines(store, [engine(store)]).manifest
    attach_page(store, manifest, b"<html>", b"{}")
    sent.clear()
    page = index.show_version(store, Reference("digits")).page
    assert page == f"{store.place.locator('')}/models/digits/versions/1/report.html"
    assert not any(request.startswith("GET") and "report.html" in request for request in sent)


def test_a_fetched_blob_is_downloaded_once(store: ObjectStore, sent: list[str], tmp_path: Path) -> None:
    digest = store.put_bytes(b"hello")
    store.fetch(digest, tmp_path / "one")
    sent.clear()
    store.fetch(digest, tmp_path / "two")
    assert sent == [] and (tmp_path / "two").read_bytes() == b"hello"
    assert (tmp_path / "two").stat().st_mode & 0o200


def test_a_damaged_cached_copy_is_deleted_and_no_fault_of_the_registry(store: ObjectStore, tmp_path: Path) -> None:
    digest = store.put_bytes(b"hello")
    path = store.path(digest)
    path.chmod(0o644)
    path.write_bytes(b"jello")
    store.fetch(digest, tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == b"hello" and not path.exists()
    assert store.path(digest).read_bytes() == b"hello"


@pytest.mark.parametrize("limit", ["1000", "3", "0"])
def test_without_a_cache_a_blob_is_downloaded_anyway(store, tmp_path, monkeypatch, limit):
    """Where a file has its name, the blob is too large for it, or it is off."""
    monkeypatch.setenv("ENGINESMITH_CACHE_BYTES", limit)
    if limit == "1000":
        (tmp_path / "cache").write_text("")
    digest = store.put_bytes(b"hello")
    store.fetch(digest, tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == b"hello"
    cache = local_cache()
    assert cache is None or not (tmp_path / "cache").is_dir() or not cache.holds(digest)


def test_every_write_requests_the_encryption(s3_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "PART_BYTES", 1000)
    store = open_store(f"{s3_uri}&sse=aws:kms&kms_key=mine", create=True)
    assert isinstance(store, ObjectStore) and store.create("a", b"")
    for data in (b"small", b"large" * 500):
        digest = store.put_bytes(data)
        assert store.put_bytes(data) == digest
    for key in (MARKER, "a", *store.list("blobs/")):
        result = client(store.place).head_object(Bucket=BUCKET, Key=store.place.key(key))
        assert (result["ServerSideEncryption"], result["SSEKMSKeyId"]) == ("aws:kms", "mine")
    flip(store, digest)
    store.discard(digest)


def test_access_lists_are_not_used_and_no_credential_is_stored(store: ObjectStore, sent: list[str]) -> None:
    publish_engines(store, [engine(store)])
    assert not any("acl" in request for request in sent)
    assert all(b"testing" not in (store.read(key) or b"") for key in store.list())
    assert "testing-secret" not in repr(store) + store.uri


def test_only_the_checksum_of_a_single_upload_proves_other_bytes() -> None:
    content = b"engine"
    sent_source = api.UploadSource(io.BytesIO(content), len(content), BlobDigest("0" * 64))
    plain_text = f'"{hashlib.md5(content).hexdigest()}"'
    for checksum, expected in ((plain_text, True), (f'"{"0" * 32}"', False), (f'"{"0" * 32}-2"', None), ("", None)):
        assert S3Bucket.holds(cast("S3Bucket", None), ObjectFacts(6, "", checksum), sent_source) is expected


def test_no_child_process_inherits_a_held_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    lock_held, client_made, expected = Lock(), Event(), Event()

    def make(*_: object, **__: object) -> str:
        with lock_held:  # as botocore's session does
            client_made.set()
            expected.wait(0.5)
        return "a client"

    monkeypatch.setattr(requests, "_session", lambda: SimpleNamespace(client=make, region_name=None))
    thread = Thread(target=requests.client, args=(S3Location("bucket", ""),))
    thread.start()
    client_made.wait()

    def take() -> None:
        assert lock_held.acquire(timeout=PATIENCE_S), "the lock came over as it was held"

    child = in_child(take)
    expected.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0
    requests._client.cache_clear()


def uri(prefix: str) -> str:
    """A place of its own, since a process keeps a client for each; RFC 6761: no resolver knows the host."""
    return f"s3://{BUCKET}/{prefix}?endpoint=http://nowhere.invalid"


@pytest.fixture(autouse=True)
def no_proxies(s3_environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "FIRST_PAUSE_S", 0.001)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


def test_requests_use_the_environments_proxy_unless_excluded(s3_server, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", s3_server)
    with pytest.raises(UnavailableError, match="there is no bucket"):  # says the proxy, which is moto
        open_store(uri("by-proxy"))
    monkeypatch.setenv("NO_PROXY", "nowhere.invalid")
    with pytest.raises(UnavailableError) as error_info:
        open_store(uri("straight"))
    assert "there is no bucket" not in str(error_info.value)


def test_an_unreachable_proxy_is_named_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed_server:
        port = closed_server.getsockname()[1]
    monkeypatch.setenv("HTTP_PROXY", f"http://user:hunter2@127.0.0.1:{port}")
    with pytest.raises(UnavailableError, match="proxy cannot be reached; check HTTPS_PROXY") as error_info:
        open_store(uri("away"))
    assert "hunter2" not in str(error_info.value)
