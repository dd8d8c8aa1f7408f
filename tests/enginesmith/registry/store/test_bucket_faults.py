"""Faults of networks and servers, one at a time, in transfers of documents and blobs of buckets of any kind."""

import io
import os
import socket
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote

import pytest

from enginesmith.core.errors import ConflictError, InputError, IntegrityError, UnavailableError, UndecidedError
from enginesmith.registry.store.base import Store, open_store
from enginesmith.registry.store.files import BlobDigest, read_error_counts
from enginesmith.registry.store.layout import MARKER
from enginesmith.registry.store.objects import api
from enginesmith.registry.store.objects import store as writing
from enginesmith.registry.store.objects.api import UploadSource
from enginesmith.registry.store.objects.store import ObjectStore
from enginesmith.registry.versions import channel_state, channels
from enginesmith.registry.versions.channel_state import read_history
from tests.enginesmith.faulty_proxy import PASSING, Fault, FaultyProxy, Kind, Plan, Request
from tests.enginesmith.object_stores.kinds import ServerKind, kind_of, past
from tests.enginesmith.registries import engine, on_each_bucket, publish_engines
from tests.scheduling import slow_after_first

ABSENT = "0" * 64


pytestmark = on_each_bucket


@pytest.fixture
def store(store_behind_proxy: ObjectStore) -> ObjectStore:
    return store_behind_proxy


@pytest.fixture
def write(server_kind: ServerKind) -> str:
    """The method of a write."""
    return server_kind.write


@pytest.mark.parametrize("kind", PASSING)
def test_a_write_with_a_fault_is_done_once(store, proxy, write, kind):
    proxy.once(Fault(kind, at=0.3), method=write)
    assert store.create("models/a.json", b"1" * 50)
    assert proxy.faults == 1 and store.read("models/a.json") == b"1" * 50
    proxy.once(Fault(kind, at=0.3), method=write)
    assert store.replace("models/a.json", b"2" * 50, b"1" * 50)
    assert proxy.faults == 1 and store.read("models/a.json") == b"2" * 50


def test_a_write_without_a_fault_is_sent_once(store: ObjectStore, proxy: FaultyProxy, write: str) -> None:
    store.create("models/a.json", b"1")  # the first write asks for conditions
    proxy.fine()
    assert store.create("models/b.json", b"2" * 50) and proxy.count(write) == 1


@pytest.mark.parametrize("kind", PASSING)
@pytest.mark.parametrize("method", ["HEAD", "GET"])
def test_a_read_with_a_fault_is_repeated(store: ObjectStore, proxy: FaultyProxy, kind: Kind, method: str) -> None:
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


def overtaken(store: ObjectStore, proxy: FaultyProxy, first: Kind, work: Callable[[Store], object]) -> None:
    """The first PUT but of leases and histories meets a fault, and before it comes again somebody else has worked."""
    other_store, write, puts = past(store, proxy.server), kind_of(store).write, 0
    passed_paths = ("leases/", "histories/", "blobs/")

    def plan(request: Request) -> Fault | None:
        nonlocal puts
        named_name = unquote(request.path) + request.body[:500].decode("latin-1")
        if request.method != write or any(folder in named_name for folder in passed_paths):
            return None
        puts += 1
        if puts == 2:
            work(other_store)
        return Fault(first) if puts == 1 else None

    proxy.plan(plan)


def test_another_writers_document_is_not_mistaken_for_ones_own(store: ObjectStore, proxy: FaultyProxy) -> None:
    overtaken(store, proxy, "refused", lambda other: other.create("models/a.json", b"same"))
    with pytest.raises(UndecidedError, match="the object of another writer"):
        store.replace("models/a.json", b"same", None)
    assert proxy.count(kind_of(store).write) == 2
    overtaken(store, proxy, "refused", lambda other: other.create("models/b.json", b"same"))
    assert not store.create("models/b.json", b"same")
    overtaken(store, proxy, "lost answer", lambda other: other.replace("models/a.json", b"theirs", b"mine"))
    with pytest.raises(UndecidedError):
        store.replace("models/a.json", b"mine", b"same")
    assert store.read("models/a.json") == b"theirs"
    overtaken(store, proxy, "lost answer", lambda other: other.remove("models/a.json"))
    with pytest.raises(UndecidedError, match="the key now has no object"):
        store.replace("models/a.json", b"mine", b"theirs")


@pytest.mark.parametrize("first", slow_after_first(["lost answer", "refused"]))
def test_a_channel_recognizes_its_move_in_its_history(store: ObjectStore, proxy: FaultyProxy, first: Kind) -> None:
    """A promotion whose answer was lost is neither lost nor made twice, though somebody moved the channel on."""
    entry = engine(store)
    first_manifest, two, three = (publish_engines(store, [entry], content, channel=None).manifest for content in "abc")
    channels.promote(store, first_manifest, "stable")
    overtaken(store, proxy, first, lambda other: channels.promote(other, three, "stable", by="bob"))
    if first == "refused":
        with pytest.raises(ConflictError, match="bob moved it to 3 meanwhile"):
            channels.promote(store, two, "stable", by="ada")
    else:
        channels.promote(store, two, "stable", by="ada")
    after = channel_state.read_channel(store, "digits", "stable")
    expected = ["1", "2", "3"] if first == "lost answer" else ["1", "3"]
    assert [move.version for move in read_history(store, after).moves] == expected


def test_permanent_errors_are_reported_with_the_location(store: ObjectStore, proxy: FaultyProxy, write: str) -> None:
    proxy.plan(lambda request: Fault("refused"))
    counts = read_error_counts()
    with pytest.raises(UnavailableError, match=f"writing models/a.json in {store.place.locator('')}.*{proxy.url}"):
        store.create("models/a.json", b"1")
    assert proxy.count(write) == api.ATTEMPTS
    more_counts = {name: count - counts[name] for name, count in read_error_counts().items()}
    assert more_counts == {"errors": 1, "retries": api.ATTEMPTS - 1}


def test_an_unreachable_server_is_reported_at_once(proxy, server_kind, s3_environment):
    with socket.create_server(("127.0.0.1", 0)) as free_server:
        port = free_server.getsockname()[1]
    with pytest.raises(UnavailableError, match=f"at http://127.0.0.1:{port}.*check the endpoint"):
        open_store(server_kind.uri(f"http://127.0.0.1:{port}", "x"))


def test_a_server_that_ignores_conditions_is_read_only(store: ObjectStore, proxy: FaultyProxy) -> None:
    digest = store.put_bytes(b"x")
    proxy.plan(lambda request: Fault("deaf"))
    writing.require_conditional_writes.cache_clear()
    uses = [lambda: open_store(store.uri, create=True), lambda: store.create("a", b""), lambda: store.put_bytes(b"y")]
    for use in uses:
        with pytest.raises(InputError, match=r"ignores conditional writes: it overwrote .* that it is absent"):
            use()
    assert open_store(store.uri).read_blob(digest) == b"x" and store.read(MARKER) == b'{"format":1}'
    assert [key for key in store.list() if "blobs" not in key] == [MARKER]
    proxy.plan(lambda request: Fault("deaf") if _asks_for(request, store.bucket.never) else None)
    with pytest.raises(InputError, match="required that it has another tag"):
        store.create("a", b"")
    proxy.fine()
    assert store.create("a", b"")


def test_a_server_that_knows_no_conditions_is_refused_too(store: ObjectStore, proxy: FaultyProxy, write: str) -> None:
    writing.require_conditional_writes.cache_clear()
    proxy.once(Fault("error", status=501, code="NotImplemented"), method=write)
    with pytest.raises(InputError, match="ignores conditional writes"):
        store.create("a", b"")


def _asks_for(request: Request, tag: str) -> bool:
    """Whether a request wants an object with this tag."""
    return ("if-match", tag) in {(name.lower(), value) for name, value in request.headers} or (
        f"ifGenerationMatch={tag}" in f"{request.path}&"
    )


@pytest.mark.parametrize("kind", slow_after_first(["flipped answer", *PASSING]))
def test_a_large_upload_with_a_fault_is_completed(store: ObjectStore, proxy: FaultyProxy, kind: Kind) -> None:
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


def test_a_stored_blob_is_not_sent_again(store: ObjectStore, proxy: FaultyProxy, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(os.urandom(kind_of(store).part * 5 // 2))
    digest = store.put_file(tmp_path / "file")
    proxy.fine()
    assert store.put_file(tmp_path / "file") == digest
    assert [result.method for result in proxy.requests] == [kind_of(store).look]


def test_a_bit_flip_on_the_way_costs_a_second_read(store: ObjectStore, proxy: FaultyProxy) -> None:
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
