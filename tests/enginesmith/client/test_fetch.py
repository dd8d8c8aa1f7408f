import fcntl
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from enginesmith.client import pull
from enginesmith.client.pull import SIDE_BY_SIDE, BlobFetcher, Wanted
from enginesmith.core.errors import IntegrityError
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.cache import BlobCache
from enginesmith.registry.store.files import BlobDigest
from tests.enginesmith.registries import flip, names_in, on_each_store
from tests.waiting import PATIENCE_S

CONTENTS = [bytes([number]) * (1000 + number) for number in range(2 * SIDE_BY_SIDE + 1)]


@pytest.fixture
def blobs(store: Store, tmp_path: Path) -> list[Wanted]:
    items = [(store.put_bytes(data), len(data)) for data in CONTENTS]
    return [Wanted(BlobDigest(digest), size, tmp_path / "out" / digest) for digest, size in items]


def test_a_partial_download_belongs_to_one_process_and_its_lock_is_deleted(tmp_path: Path) -> None:
    partial_path = tmp_path / "x.part"
    with pull._lock_download(partial_path):
        (lock,) = tmp_path.iterdir()
        with lock.open("ab") as other_file, pytest.raises(BlockingIOError):
            fcntl.flock(other_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert not names_in(tmp_path)


def count_opened(store: Store, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Ranges that are asked for from now on, by digest."""
    opened, open_counts = Counter[str](), type(store).open_range

    def open_range(self: Store, digest: str, offset: int, size: int):
        opened[digest] += 1
        return open_counts(self, digest, offset, size)

    monkeypatch.setattr(type(store), "open_range", open_range)
    return opened


@on_each_store
def test_all_blobs_are_verified_and_the_listener_gets_their_sum(
    store: Store, blobs: list[Wanted], tmp_path: Path
) -> None:
    message = list[tuple[int, int]]()
    fetcher = BlobFetcher(BlobCache(tmp_path / "cache"), lambda there, whole: message.append((there, whole)))
    fetcher.fetch_all(store, blobs)
    assert [item.dest.read_bytes() for item in blobs] == CONTENTS
    total = sum(map(len, CONTENTS))
    assert message == sorted(message) and message[-1] == (total, total) and {whole for _, whole in message} == {total}


def test_at_most_the_limit_of_downloads_runs_at_once(store, blobs, monkeypatch):
    # The first ones wait for each other: one after the other they would wait in vain.
    first_barrier, running_digests, max_counts = threading.Barrier(SIDE_BY_SIDE), set[str](), list[int]()
    open_before, lock = type(store).open_range, threading.Lock()

    @contextmanager
    def open_range(self: Store, digest: str, offset: int, size: int) -> Iterator[object]:
        with lock:
            running_digests.add(digest)
            max_counts.append(len(running_digests))
            waits = len(max_counts) <= SIDE_BY_SIDE
        if waits:
            first_barrier.wait(timeout=PATIENCE_S)
        with open_before(self, digest, offset, size) as fill:
            yield fill
        with lock:
            running_digests.discard(digest)

    monkeypatch.setattr(type(store), "open_range", open_range)
    BlobFetcher().fetch_all(store, blobs)
    assert max(max_counts) == SIDE_BY_SIDE and [item.dest.read_bytes() for item in blobs] == CONTENTS


def test_a_failed_download_ends_the_others(store: Store, blobs: list[Wanted], monkeypatch: pytest.MonkeyPatch) -> None:
    meters, spoilt_blob, known_meters, meter = list[pull._Meter](), blobs[0], type(store).open_range, pull._Meter

    def note(*arguments: object) -> pull._Meter:
        meters.append(meter(*arguments))
        return meters[-1]

    @contextmanager
    def open_range(self: Store, digest: str, offset: int, size: int) -> Iterator[object]:
        if digest != spoilt_blob.blob.digest:
            assert meters[0].stopped.wait(PATIENCE_S)
        with known_meters(self, digest, offset, size) as fill:
            yield fill

    monkeypatch.setattr(pull, "_Meter", note)
    monkeypatch.setattr(type(store), "open_range", open_range)
    flip(store, spoilt_blob.blob.digest)
    with pytest.raises(IntegrityError, match=spoilt_blob.blob.digest):
        BlobFetcher().fetch_all(store, blobs)
    assert not any(item.dest.exists() for item in blobs)


@on_each_store
def test_existing_blobs_are_not_requested_again(store, blobs, monkeypatch):
    BlobFetcher().fetch_all(store, blobs[:3])
    open_counts = count_opened(store, monkeypatch)
    BlobFetcher().fetch_all(store, blobs)
    assert {*open_counts} == {item.blob.digest for item in blobs[3:]}
    assert names_in(blobs[0].dest.parent) == sorted(item.blob.digest for item in blobs)


def test_downloads_share_the_memory_and_the_connections_of_one(store, blobs, monkeypatch):
    result, open_calls = list[object](), pull.download

    def download(*arguments: object, beside: int, **rest: object) -> str:
        result.append(beside)
        return open_calls(*arguments, beside=beside, **rest)

    monkeypatch.setattr(pull, "download", download)
    BlobFetcher().fetch_all(store, blobs)
    BlobFetcher().fetch_all(store, [])
    BlobFetcher().fetch(store, BlobDigest(store.put_bytes(b"one")), 3, blobs[0].dest)
    assert result == [SIDE_BY_SIDE] * len(blobs) + [1]
