from typing import Any

import pytest

from enginesmith.core.errors import digest_of
from enginesmith.registry.builds.runs import KIND, RecordCopies, StoreListing, remember
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.layout import blob_key, record_key
from tests.enginesmith.registry.memory import MemoryStore

KEYS = [str(number) * 64 for number in range(3)]


def fill(store: Any) -> list[str]:
    """Three records with a blob each; the blobs."""
    blobs = [store.put_bytes(key.encode()) for key in KEYS]
    for key, blob in zip(KEYS, blobs, strict=True):
        remember(store, "build", key, {"n": key}, [blob])
    return blobs


def read(store: Any, *, save: bool = True) -> list[object]:
    """The values of the records, as a plan of a model reads them."""
    copies = RecordCopies(StoreListing(store), "tiny")
    items = [copies.read_record("build", key) for key in KEYS]
    if save:
        copies.save()
    return [record.value["n"] if record else None for record in items]


def test_copied_records_are_read_in_one_request() -> None:
    store = MemoryStore()
    blobs = fill(store)
    assert read(store) == KEYS
    store.calls.clear()
    copies = RecordCopies(StoreListing(store), "tiny")  # type: ignore[arg-type]
    assert [copies.stored_size(blob) for blob in blobs] == [64] * 3
    assert read(store) == KEYS and store.calls.pop("read") == 2, "the copies, by each of the two"
    assert store.calls.keys() == {"list"}


def test_a_lost_record_is_lost_even_if_a_copy_exists(store: Store) -> None:
    fill(store)
    assert read(store) == KEYS
    store.remove(record_key("build", KEYS[1]))
    assert read(store) == [KEYS[0], None, KEYS[2]]


def test_a_blob_lost_or_stored_since_the_listing_has_its_present_size(store: Store) -> None:
    blobs, listing = fill(store), StoreListing(store)
    store.remove(blob_key(blobs[0]))
    copies = RecordCopies(listing, "tiny")
    assert copies.stored_size(blobs[0]) is None and copies.stored_size(blobs[1]) == 64
    late_digest = store.put_bytes(KEYS[0].encode())
    assert copies.stored_size(late_digest) == 64


@pytest.mark.parametrize("data", [b"", b'{"blobs":[],"value":{"records":7}}', b'{"blobs":[],"value":{}}'])
def test_damaged_copies_are_ignored_and_renewed(store: Store, data: bytes) -> None:
    fill(store)
    key = record_key(KIND, digest_of({"model": "tiny"}))
    store.create(key, data)
    assert read(store) == KEYS
    assert KEYS[0] in (store.read(key) or b"").decode()


def test_an_invalid_copy_is_no_record() -> None:
    store = MemoryStore()
    fill(store)
    remember(store, KIND, digest_of({"model": "tiny"}), {"records": {record_key("build", KEYS[0]): {"value": 1}}})  # type: ignore[arg-type]
    assert read(store, save=False)[0] == KEYS[0]


def test_a_record_that_changes_under_its_key_is_never_copied(store: Store) -> None:
    remember(store, "latest-golden", KEYS[0], {"n": 1})
    copies = RecordCopies(StoreListing(store), "tiny")
    assert copies.read_record("latest-golden", KEYS[0])
    copies.save()
    assert store.read(record_key(KIND, digest_of({"model": "tiny"}))) is None
