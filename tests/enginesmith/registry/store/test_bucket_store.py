import os

import pytest

from enginesmith.core.errors import InputError, IntegrityError, UnavailableError
from enginesmith.registry.store.base import bucket_at, open_store
from enginesmith.registry.store.layout import MARKER, blob_key
from enginesmith.registry.store.objects import reading
from enginesmith.registry.store.objects.api import BucketApi
from enginesmith.registry.store.objects.store import ObjectStore
from tests.enginesmith.object_stores.kinds import BUCKET
from tests.enginesmith.registries import in_child, on_each_bucket, overwrite

pytestmark = on_each_bucket


@pytest.fixture
def store(bucket_uri: str) -> ObjectStore:
    store = open_store(bucket_uri, create=True)
    assert isinstance(store, ObjectStore)
    return store


def test_only_create_makes_a_registry(bucket_uri: str) -> None:
    with pytest.raises(UnavailableError, match=r"no registry at .*--registry"):
        open_store(bucket_uri)
    store = open_store(bucket_uri, create=True)
    assert store.read(MARKER) == b'{"format":1}' and open_store(bucket_uri) == store
    with pytest.raises(InputError, match="registry key"):
        store.locator("../x")


def test_the_error_names_a_missing_bucket(bucket_uri: str) -> None:
    with pytest.raises(UnavailableError, match=r"no (bucket|container) 'enginesmith-absent'"):
        open_store(bucket_uri.replace(f"/{BUCKET}/", "/enginesmith-absent/", 1), create=True)


@pytest.mark.parametrize(
    ("key", "data", "error", "words"),
    [
        ("thesis.tex", b"", InputError, r"holds 'thesis\.tex' and is not a registry"),
        (MARKER, b'{"format": 2}', InputError, "upgrade enginesmith"),
        (MARKER, b"{", IntegrityError, "damaged"),
    ],
)
def test_a_place_with_other_content_is_refused(bucket_uri, key, data, error, words):
    overwrite(ObjectStore(bucket_at(bucket_uri)), key, data)
    with pytest.raises(error, match=words):
        open_store(bucket_uri, create=True)


def test_a_registry_that_another_process_creates_meanwhile_is_opened(bucket_uri, monkeypatch):
    loaded_document = reading.read_document

    def read_before_creation(bucket: BucketApi, key: str, attempts: int | None = None) -> None:
        monkeypatch.setattr(reading, "read_document", loaded_document)
        open_store(bucket_uri, create=True).put_bytes(b"x")

    monkeypatch.setattr(reading, "read_document", read_before_creation)
    assert open_store(bucket_uri, create=True).read(MARKER) == b'{"format":1}'


def test_prefixes_in_one_bucket_are_separate(bucket_uri: str) -> None:
    bucket_path, _, options = bucket_uri.partition("?")
    first_store, second_store = (open_store(f"{bucket_path}/{name}?{options}", create=True) for name in ("a", "a-b"))
    digest = first_store.put_bytes(b"x")
    assert not second_store.has(digest) and list(second_store.list()) == [MARKER] == list(second_store.children())


def test_a_corrupt_blob_is_moved_aside(store: ObjectStore) -> None:
    digest = store.put_bytes(b"hello")
    overwrite(store, blob_key(digest), b"jello")
    store.discard(digest)
    store.discard(digest)
    assert not store.has(digest)
    assert reading.read_document(store.bucket, f"discarded/{digest}")[0] == b"jello"


def test_a_child_process_has_its_own_client(store: ObjectStore) -> None:
    """Two processes on one connection would read each other's answers; `fork` carries sockets and locks over."""
    digest = store.put_bytes(b"x")
    assert os.waitpid(in_child(lambda: store.has(store.put_bytes(b"y" * 100))), 0)[1] == 0
    assert store.read_blob(digest) == b"x"


def test_keys_come_in_pages_and_in_the_same_order_as_from_a_folder(store, tmp_path, monkeypatch):
    for name in ("gcs", "azure"):
        monkeypatch.setattr(f"enginesmith.registry.store.{name}.bucket.PAGE_KEYS", 2)
    folder = open_store(tmp_path / "registry", create=True)
    for key in ("a/b", "a.b/c", "a-b/c", "a0/c", "a/b-c/d", "a/b/c"):
        store.create(key, b"")
        if key != "a/b":
            folder.create(key, b"")
    assert [key for key in store.list() if key != "a/b"] == list(folder.list())
    assert list(store.children()) == list(folder.children())
    overwrite(store, "empty/", b"")  # what consoles make for a folder
    assert "empty/" not in list(store.list()) and list(store.children("empty/")) == []
