import hashlib
import os
from datetime import timedelta
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from enginesmith.core.errors import InputError, IntegrityError, UnavailableError, digest_of_bytes
from enginesmith.registry.store import layout
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.files import BlobDigest
from enginesmith.registry.store.layout import BLOBS, blob_key
from enginesmith.registry.store.objects import reading
from tests.enginesmith.registries import flip, on_each_kind, run_together

pytestmark = on_each_kind

HELLO = hashlib.sha256(b"hello").hexdigest()
ABSENT = "0" * 64


def test_a_blob_is_named_by_its_sha256_and_can_be_read(store: Store, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"hello")
    assert store.put_file(tmp_path / "file") == HELLO
    assert store.put_bytes(b"hello") == HELLO
    assert store.has(HELLO) and store.size(HELLO) == 5
    assert store.read_blob(HELLO) == b"hello" == store.path(HELLO).read_bytes()
    assert list(store.list("blobs/")) == [blob_key(HELLO)]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=10)
@given(data=st.binary(max_size=3000))
def test_any_bytes_can_be_stored_and_read(store: Store, tmp_path: Path, data: bytes) -> None:
    digest = store.put_bytes(data)
    store.fetch(digest, tmp_path / "out" / "file")
    assert digest == hashlib.sha256(data).hexdigest()
    assert (tmp_path / "out" / "file").read_bytes() == data == store.read_blob(digest)


def test_an_absent_blob_is_named_and_nothing_is_left(store: Store, tmp_path: Path) -> None:
    assert not store.has(ABSENT)
    for use in (store.size, store.path, store.read_blob, lambda digest: store.fetch(digest, tmp_path / "out")):
        with pytest.raises(IntegrityError, match=ABSENT):
            use(ABSENT)
    assert not (tmp_path / "out").exists()


def test_one_flipped_bit_is_found_and_the_old_file_stays(store: Store, tmp_path: Path) -> None:
    store.put_bytes(b"hello")
    flip(store, HELLO)
    dest = tmp_path / "out" / "file"
    dest.parent.mkdir()
    dest.write_bytes(b"before")
    with pytest.raises(IntegrityError, match="--repair"):
        store.fetch(HELLO, dest)
    with pytest.raises(IntegrityError):
        store.read_blob(HELLO)
    assert [path.name for path in dest.parent.iterdir()] == ["file"] and dest.read_bytes() == b"before"


@pytest.mark.parametrize("how", ["put_bytes", "put_file", "discard"])
def test_putting_the_bytes_again_heals_a_corrupt_blob(store: Store, tmp_path: Path, how: str) -> None:
    store.put_bytes(b"hello")
    flip(store, HELLO)
    (tmp_path / "file").write_bytes(b"hello")
    if how == "discard":
        store.discard(HELLO)
        assert not store.has(HELLO) and HELLO not in "".join(store.list())
    store.put_file(tmp_path / "file") if how == "put_file" else store.put_bytes(b"hello")
    assert store.read_blob(HELLO) == b"hello"


def test_a_blob_that_is_sound_again_is_not_discarded(store: Store) -> None:
    """Somebody who read it as corrupt may come long after it was stored again, and a version may name it by then."""
    store.discard(store.put_bytes(b"hello"))
    assert store.read_blob(HELLO) == b"hello"


def read_range(store: Store, digest: str, start: int, size: int, block: int = 1 << 20) -> bytearray:
    target_data = bytearray(size)
    with store.open_range(digest, start, size) as fill:
        for index in range(0, size, block):
            fill(memoryview(target_data)[index : index + block])
    return target_data


def test_a_range_fills_the_given_memory(store: Store) -> None:
    data = os.urandom(700_000)
    digest = store.put_bytes(data)
    for start, size in ((0, 700_000), (0, 1), (699_999, 1), (123, 600_000), (5, 0)):
        assert read_range(store, digest, start, size) == data[start : start + size]
    assert read_range(store, digest, 1, 650_000, block=100_000) == data[1:650_001], "one after the other"
    for start, size in ((0, 700_001), (699_999, 2), (700_000, 1)):
        with pytest.raises(IntegrityError, match=rf"{digest}.*ends before"):
            read_range(store, digest, start, size)
    with pytest.raises(IntegrityError, match=ABSENT):
        read_range(store, ABSENT, 0, 1)


def test_both_digests_of_a_blob_are_computed_in_one_pass(store: Store, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(data := os.urandom(1 << 20) + b"more")
    result = store.put_and_digest_file(tmp_path / "file")
    assert result == BlobDigest(digest_of_bytes(data), blake3(data).hexdigest()) == store.rehash(result.digest)
    assert store.read_blob(result.digest) == data


def test_a_document_is_read_again_only_when_it_changed(store: Store) -> None:
    assert store.read_if_changed("models/a.json", "") == (None, "") == store.read_if_changed("models/a.json", '"x"')
    store.create("models/a.json", b"1")
    data, tag = store.read_if_changed("models/a.json", "")
    assert data == b"1" and store.read_if_changed("models/a.json", tag) == (None, tag)
    store.replace("models/a.json", b"2", b"1")
    data, other = store.read_if_changed("models/a.json", tag)
    assert data == b"2" and other != tag and store.read_if_changed("models/a.json", other) == (None, other)


def test_a_document_is_created_once_and_swapped_only_from_its_content(store: Store) -> None:
    assert store.read("models/a.json") is None
    assert not store.replace("models/a.json", b"2", b"1")
    assert store.create("models/a.json", b"1") and not store.create("models/a.json", b"2")
    assert not store.replace("models/a.json", b"3", b"2") and not store.replace("models/a.json", b"3", None)
    assert store.replace("models/a.json", b"2", b"1") and store.read("models/a.json") == b"2"


def test_an_oversized_document_is_refused(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.create("models/a.json", b"x" * 11)
    for module in (layout, reading):
        monkeypatch.setattr(module, "MAX_DOCUMENT_BYTES", 10)
    with pytest.raises(IntegrityError, match="over the limit of 10 bytes"):
        store.read("models/a.json")


def test_keys_are_listed_in_order(store: Store) -> None:
    for key in ("models/b/x.json", "models/a/y/z.json", "models/a/x.json"):
        store.create(key, b"{}")
    assert list(store.list("models/")) == ["models/a/x.json", "models/a/y/z.json", "models/b/x.json"]
    assert list(store.children("models/")) == ["a/", "b/"] and list(store.children("models/a/")) == ["x.json", "y/"]
    assert list(store.list("records/")) == [] == list(store.children("models/a/x.json/"))


def test_sizes_of_stored_blobs(store: Store) -> None:
    assert list(store.sizes("models/")) == []
    store.create("models/a/x.json", b"{}")
    store.create("models/b/y/z.json", b"[1]")
    digest = store.put_bytes(b"four")
    assert sorted(store.sizes("models/")) == [("models/a/x.json", 2), ("models/b/y/z.json", 3)]
    assert list(store.sizes(f"{BLOBS}{digest[:2]}/")) == [(blob_key(digest), 4)] == list(store.sizes(BLOBS))


def test_times_use_the_stores_clock(store: Store) -> None:
    time_before = store.now()
    store.create("models/a/x.json", b"{}")
    ((key, written_stamp),) = store.stamps("models/")
    # The header Date has whole seconds, and a machine's clock of files steps.
    assert key == "models/a/x.json" and written_stamp.tzinfo is not None
    assert time_before - timedelta(seconds=1.1) <= written_stamp <= store.now() + timedelta(seconds=1.1)
    assert list(store.stamps("models/b/")) == []


@pytest.mark.parametrize(
    "key", ["", "/etc/passwd", "../x", "a/../b", "a//b", "a/", ".hidden", "a\nb", "a\0b", "a b", "a/..b", "ä", "\\"]
)
def test_a_key_never_leaves_the_store(store: Store, key: str) -> None:
    for use in (store.read, lambda key: store.create(key, b""), lambda key: store.replace(key, b"", None)):
        with pytest.raises(InputError):
            use(key)


@pytest.mark.parametrize("digest", ["", "abc", "../" * 21 + "x", "A" * 64, "0" * 63 + "\n", "0" * 65])
def test_an_invalid_digest_never_becomes_a_path(store: Store, tmp_path: Path, digest: str) -> None:
    def ranged(digest: str) -> None:
        read_range(store, digest, 0, 1)

    for use in (store.has, store.size, store.path, store.read_blob, store.discard, ranged):
        with pytest.raises(InputError):
            use(digest)
    with pytest.raises(InputError):
        store.fetch(digest, tmp_path / "out")


def test_a_missing_source_file_is_named(store: Store, tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="absent"):
        store.put_file(tmp_path / "absent")


def test_one_of_racing_creators_wins(store: Store) -> None:
    def create(index: int) -> None:
        for key in range(8):
            if store.create(f"models/{key}.json", str(index).encode()):
                assert store.create(f"models/won-{key}-{index}.json", b"")

    run_together([lambda index=index: create(index) for index in range(6)])
    winning_keys = [key for key in store.list("models/") if "won-" in key]
    assert len(winning_keys) == 8
    for key in winning_keys:
        _, number, winner = key.removesuffix(".json").rsplit("-", 2)
        assert store.read(f"models/{number}.json") == winner.encode()


def test_racing_swaps_lose_no_update(store: Store) -> None:
    store.create("counter", b"0")

    def count() -> None:
        result = 0
        while result < 5:
            data_before = store.read("counter") or b""
            result += store.replace("counter", str(int(data_before) + 1).encode(), data_before)

    run_together([count] * 6)
    assert store.read("counter") == b"30"


def test_racing_puts_of_one_blob_all_succeed(store: Store) -> None:
    data = b"x" * 300_000
    run_together([lambda: store.put_bytes(data)] * 6)
    assert store.read_blob(hashlib.sha256(data).hexdigest()) == data and store.strays() == ()
