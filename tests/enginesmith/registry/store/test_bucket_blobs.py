"""What networks and servers do to blobs on their way to a bucket of any kind and back."""

import io
import os
from pathlib import Path

import pytest

from enginesmith.core.errors import IntegrityError
from enginesmith.registry.store.files import BlobDigest
from enginesmith.registry.store.objects import store as writing
from enginesmith.registry.store.objects.api import UploadSource
from enginesmith.registry.store.objects.store import ObjectStore
from tests.enginesmith.faulty_proxy import PASSING, Fault, FaultyProxy, Kind, Plan, Request
from tests.enginesmith.object_stores.kinds import kind_of
from tests.enginesmith.registries import on_each_bucket

pytestmark = on_each_bucket
ABSENT = "0" * 64


@pytest.fixture
def store(store_behind_proxy: ObjectStore) -> ObjectStore:
    return store_behind_proxy


@pytest.mark.parametrize("kind", [*PASSING, "flipped answer"])
def test_a_large_upload_that_met_a_fault_is_completed(store: ObjectStore, proxy: FaultyProxy, kind: Kind) -> None:
    """At its beginning, in its second part, and at its completion."""
    size = kind_of(store).part * 5 // 2
    store.put_bytes(b"")  # the first write asks for conditions
    proxy.fine()
    store.put_bytes(os.urandom(size))
    for number in (2, 3, len(proxy.requests)):
        data = os.urandom(size)
        proxy.plan(_at(number, Fault(kind, at=0.3)))
        digest = store.put_bytes(data)
        assert proxy.faults == 1, number
        proxy.fine()
        assert store.read_blob(digest) == data


def _at(number: int, fault: Fault) -> Plan:
    def plan(request: Request) -> Fault | None:
        return fault if request.number == number else None

    return plan


def test_a_body_that_breaks_off_comes_whole(store: ObjectStore, proxy: FaultyProxy, tmp_path: Path) -> None:
    data = os.urandom(200_000)
    digest = store.put_bytes(data)
    proxy.plan(lambda request: Fault("cut answer", at=0.6) if request.number in (2, 3) else None)
    store.fetch(digest, tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == data and proxy.faults == 2


def test_a_blob_that_is_there_is_not_sent_again(store: ObjectStore, proxy: FaultyProxy, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(os.urandom(kind_of(store).part * 5 // 2))
    digest = store.put_file(tmp_path / "file")
    proxy.fine()
    assert store.put_file(tmp_path / "file") == digest
    assert [found.method for found in proxy.requests] == [kind_of(store).look]


def test_a_bit_that_flips_on_the_way_costs_a_second_reading_and_no_blob(store: ObjectStore, proxy: FaultyProxy) -> None:
    digest = store.put_bytes(b"hello")
    proxy.once(Fault("flipped answer"), method="GET")
    assert store.read_blob(digest) == b"hello" and proxy.count("GET") == 2
    proxy.plan(lambda request: Fault("flipped answer"))
    with pytest.raises(IntegrityError, match="holds other bytes"):
        store.read_blob(digest)


@pytest.mark.parametrize("blob", [BlobDigest(ABSENT), BlobDigest(ABSENT, ABSENT)], ids=["sha256", "blake3"])
def test_a_source_that_changes_while_it_is_sent_is_not_stored(store: ObjectStore, blob: BlobDigest) -> None:
    for size in (500, kind_of(store).part * 7 // 2):
        source = UploadSource(io.BytesIO(b"x" * size), size, blob)
        with pytest.raises(IntegrityError, match="changed while it was uploaded"):
            writing.put(store.bucket, source)
    assert not store.has(ABSENT)
