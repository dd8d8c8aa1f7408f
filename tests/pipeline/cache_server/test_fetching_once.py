"""What many clients ask for comes from the registry once, and is right: the same for folders, buckets and caches."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from enginesmith.client.client import Client
from enginesmith.core.errors import IntegrityError
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.download import PART_BYTES
from enginesmith.registry.store.layout import blob_key, channel_key
from enginesmith.registry.store.nearest import open_nearest
from enginesmith.registry.versions.state import read_channel
from tests.enginesmith.registries import engine, flip, on_each_store, overwrite, publish_engines
from tests.pipeline.cache_server.caches import RunningCache, run_cache

CLIENTS = 24
ENGINE = os.urandom(3_000_000)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kept"


@pytest.fixture
def cache(store: Store, folder: Path) -> Iterator[RunningCache]:
    publish_engines(store, [engine(store, data=ENGINE)], channel="stable")
    with run_cache(store.uri, folder, "--fresh", "1s") as found:
        yield found


def digest_of_engine(store: Store) -> str:
    return store.put_bytes(ENGINE)


def pull(uri: str, dest: Path) -> bytes:
    return Client(uri, cache=None).pull("digits:stable", dest).path.read_bytes()


def once(store: Store) -> int:
    """Bytes of the engine and of the snapshot that leads to it."""
    channel = read_channel(store, "digits", "stable")
    assert channel is not None
    return len(ENGINE) + store.size(channel.snapshots[channel.manifest])


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def pull_at_once(uri: str, place: Path, clients: int = CLIENTS) -> None:
    with ThreadPoolExecutor(clients) as pool:
        found = list(pool.map(lambda number: pull(uri, place / str(number)), range(clients)))
    assert all(data == ENGINE for data in found)


@on_each_store
def test_many_clients_get_a_blob_that_came_once(store: Store, cache: RunningCache, tmp_path: Path) -> None:
    pull_at_once(cache.url, tmp_path / "out")
    assert cache.metric("enginesmith_cache_origin_bytes_total") == once(store)
    assert cache.metric("enginesmith_cache_client_bytes_total") == CLIENTS * once(store)
    documents = cache.metric("enginesmith_cache_origin_requests_total")
    pull_at_once(cache.url, tmp_path / "again", 4)
    assert cache.metric("enginesmith_cache_origin_bytes_total") == once(store)
    assert cache.metric("enginesmith_cache_origin_requests_total") - documents <= 10  # what is over a second old
    assert cache.end() == 0


def test_several_caches_of_one_folder_and_a_cache_of_a_cache_fetch_once(
    store: Store, cache: RunningCache, folder: Path, tmp_path: Path
) -> None:
    with run_cache(store.uri, folder) as beside, run_cache(cache.url, tmp_path / "second") as behind:
        uris = [cache.url, beside.url, behind.url]
        with ThreadPoolExecutor(12) as pool:
            found = pool.map(lambda n: pull(uris[n % 3], tmp_path / f"out{n}"), range(12))
            assert all(data == ENGINE for data in found)
        came = [place.metric("enginesmith_cache_origin_bytes_total") for place in (cache, beside, behind)]
        assert came[0] + came[1] == came[2] == once(store)


@pytest.mark.parametrize("seen", [True, False])
def test_a_damaged_file_is_noticed_and_fetched_again(
    store: Store, cache: RunningCache, folder: Path, tmp_path: Path, seen: bool
) -> None:
    pull(cache.url, tmp_path / "first")
    kept = folder / "blobs" / digest_of_engine(store)
    wait_until(kept.exists)  # a client has the bytes before they are verified and kept
    before = kept.stat()
    data = bytearray(ENGINE)
    data[1_000_000] ^= 1
    kept.chmod(0o644)
    kept.write_bytes(data)
    if not seen:  # as a disk changes bits: nothing shows that the file was written, until a client got it
        stamp = folder / "stamps" / kept.name
        facts = kept.stat()
        stamp.write_text(
            f"[[{facts.st_dev}, {facts.st_ino}, {facts.st_size}, {facts.st_mtime_ns}, {facts.st_ctime_ns}]]"
        )
    assert before.st_size == kept.stat().st_size
    assert pull(cache.url, tmp_path / "second") == ENGINE
    assert cache.metric("enginesmith_cache_origin_bytes_total") == once(store) + len(ENGINE)
    assert cache.metric("enginesmith_cache_damaged_total") == 1
    assert kept.read_bytes() == ENGINE


def test_what_the_registry_has_wrong_is_refused_and_not_fetched_for_each_client(
    store: Store, cache: RunningCache, folder: Path, tmp_path: Path
) -> None:
    digest = digest_of_engine(store)
    flip(store, digest)
    for number in range(3):
        with pytest.raises(IntegrityError):
            pull(cache.url, tmp_path / str(number))
    assert cache.metric("enginesmith_cache_origin_bytes_total") == once(store) + len(ENGINE)
    status, _, body = cache.ask(f"/{blob_key(digest)}")
    assert status == 422 and b"other bytes" in body
    assert not (folder / "blobs" / digest).exists()


def test_clients_go_on_without_a_cache_that_is_killed(store: Store, cache: RunningCache, tmp_path: Path) -> None:
    killer = threading.Timer(0.4, lambda: cache.process.send_signal(signal.SIGKILL))
    killer.start()
    with ThreadPoolExecutor(8) as pool, pytest.warns(UserWarning, match="left alone"):
        found = list(pool.map(lambda number: pull(f"{cache.url},{store.uri}", tmp_path / f"out{number}"), range(60)))
    killer.join()
    assert len(found) == 60 and all(data == ENGINE for data in found)


def test_a_cache_that_was_killed_goes_on_where_it_was(store: Store, folder: Path) -> None:
    data = os.urandom(20 << 20)
    digest = store.put_bytes(data)
    (folder / "partial").mkdir(parents=True)
    about = {"digest": digest, "size_bytes": len(data), "part_bytes": PART_BYTES}
    (folder / "partial" / f"{digest}.journal").write_text(f"{json.dumps(about, sort_keys=True)}\n0\n1\n")
    (folder / "partial" / digest).write_bytes(data[: 2 * PART_BYTES])
    with run_cache(store.uri, folder) as cache:
        assert cache.ask(f"/{blob_key(digest)}")[2] == data
        assert cache.metric("enginesmith_cache_origin_bytes_total") == len(data) - 2 * PART_BYTES
        # A client has the bytes before they are verified and kept.
        wait_until(lambda: not list((folder / "partial").iterdir()))


def test_what_was_left_of_other_bytes_is_fetched_anew(store: Store, folder: Path, tmp_path: Path) -> None:
    publish_engines(store, [engine(store, data=ENGINE)], channel="stable")
    digest = digest_of_engine(store)
    (folder / "partial").mkdir(parents=True)
    about = {"digest": digest, "size_bytes": len(ENGINE), "part_bytes": PART_BYTES}
    (folder / "partial" / f"{digest}.journal").write_text(f"{json.dumps(about, sort_keys=True)}\n0\n")
    (folder / "partial" / digest).write_bytes(bytes(len(ENGINE)))
    with run_cache(store.uri, folder) as cache:
        pull_at_once(cache.url, tmp_path / "out", 6)
        assert cache.metric("enginesmith_cache_damaged_total") == 1
        assert cache.metric("enginesmith_cache_origin_bytes_total") == once(store)


def test_a_cache_serves_what_it_has_while_its_registry_is_away(
    store: Store, cache: RunningCache, tmp_path: Path
) -> None:
    with run_cache(cache.url, tmp_path / "behind", "--fresh", "1s", "--offline", "1m") as behind:
        pull(behind.url, tmp_path / "first")
        cache.end(signal.SIGKILL)
        time.sleep(1.1)
        started = time.monotonic()
        assert pull(behind.url, tmp_path / "second") == ENGINE
        assert time.monotonic() - started < 60
        _, headers, _ = behind.ask(f"/{channel_key('digits', 'stable')}")
        assert headers["Warning"].startswith("110")
        assert behind.ask(f"/{channel_key('digits', 'other')}")[0] == 503
        assert behind.ask("/-/ready")[0] == 200


def test_what_changed_is_seen_when_the_document_is_no_longer_fresh(store: Store, cache: RunningCache) -> None:
    key = channel_key("digits", "stable")
    _, headers, first = cache.ask(f"/{key}")
    assert cache.ask(f"/{key}", headers={"If-None-Match": headers["ETag"]})[0] == 304
    overwrite(store, key, b"{}")
    wait_until(lambda: cache.ask(f"/{key}")[2] == b"{}" != first)


def test_the_least_recently_used_go_and_what_is_too_large_is_left_to_the_registry(
    store: Store, folder: Path, tmp_path: Path
) -> None:
    blobs = [store.put_bytes(os.urandom(1000)) for _ in range(3)]
    large = store.put_bytes(b"x" * 3000)
    with run_cache(store.uri, folder, "--bytes", "2500") as cache:
        for digest in blobs:
            assert cache.ask(f"/{blob_key(digest)}")[2] == store.read_blob(digest)
            wait_until(lambda: cache.metric("enginesmith_cache_fetching") == 0)  # its use is noted when it is kept
        wait_until(lambda: sorted(path.name for path in (folder / "blobs").iterdir()) == sorted(blobs[1:]))
        status, _, body = cache.ask(f"/{blob_key(large)}")
        assert status == 413 and b"2500" in body
        assert cache.ask(f"/{blob_key(large)}", "HEAD")[1]["Content-Length"] == "3000"
        assert open_nearest(f"{cache.url},{store.uri}").read_blob(large) == b"x" * 3000
        assert cache.metric("enginesmith_cache_disk_bytes") == 2000
