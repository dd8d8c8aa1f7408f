import fcntl
import hashlib
import os
from functools import partial
from pathlib import Path
from typing import BinaryIO

import pytest

from enginesmith.core.errors import InputError, IntegrityError
from enginesmith.registry.store.cache import BlobCache, local_cache
from tests.enginesmith.registries import names_in, run_together
from tests.waiting import run_threads


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def giving(data: bytes, calls: list[bytes] | None = None):
    def download(sink: BinaryIO) -> str:
        (calls if calls is not None else []).append(data)
        sink.write(data)
        return digest(data)

    return download


def put(cache: BlobCache, data: bytes) -> str:
    with cache.hold(digest(data), giving(data)) as path:
        assert path.read_bytes() == data
    return digest(data)


def test_a_blob_is_downloaded_once_and_is_read_only(tmp_path: Path) -> None:
    cache, calls = BlobCache(tmp_path / "cache"), []
    for _ in range(3):
        with cache.hold(digest(b"x"), giving(b"x", calls)) as path:
            assert path.read_bytes() == b"x" and path.stat().st_mode & 0o222 == 0
    assert calls == [b"x"] and cache.holds(digest(b"x"))


def test_wrong_bytes_are_not_kept(tmp_path: Path) -> None:
    cache = BlobCache(tmp_path / "cache")
    with pytest.raises(IntegrityError, match="they were not stored"), cache.hold(digest(b"x"), giving(b"y")):
        pass
    assert not cache.holds(digest(b"x")) and names_in(tmp_path / "cache" / "tmp") == []


def test_the_least_recently_used_blob_is_removed_first(tmp_path: Path) -> None:
    cache = BlobCache(tmp_path / "cache", limit_bytes=300)
    first_digest, second_digest, three = (put(cache, bytes([number]) * 100) for number in range(3))
    for age, name in enumerate((second_digest, three, first_digest)):  # as if used in this order, long ago
        os.utime(tmp_path / "cache" / "stamps" / name, (age, age))
    four = put(cache, b"4" * 100)
    assert [cache.holds(name) for name in (first_digest, second_digest, three, four)] == [True, False, True, True]
    put(cache, bytes([2]) * 100)  # used again
    put(cache, b"5" * 100)
    assert not cache.holds(first_digest) and cache.holds(three)


def test_a_blob_in_use_stays_and_a_too_large_one_is_alone(tmp_path: Path) -> None:
    cache = BlobCache(tmp_path / "cache", limit_bytes=100)
    with cache.hold(digest(b"a" * 80), giving(b"a" * 80)) as path:
        large_digest = put(cache, b"b" * 200)
        assert path.read_bytes() == b"a" * 80 and cache.holds(large_digest)
    put(cache, b"c" * 50)
    assert names_in(tmp_path / "cache" / "blobs") == [digest(b"c" * 50)]


def test_one_of_many_processes_downloads_a_blob(tmp_path: Path) -> None:
    cache = BlobCache(tmp_path / "cache")

    def want() -> None:
        def download(sink: BinaryIO) -> str:
            (tmp_path / f"fetched-{os.getpid()}").touch()
            return giving(b"x" * 100_000)(sink)

        with cache.hold(digest(b"x" * 100_000), download) as path:
            assert path.stat().st_size == 100_000

    run_together([want] * 6)
    assert len(list(tmp_path.glob("fetched-*"))) == 1


def test_threads_that_fill_and_evict_always_see_whole_blobs(tmp_path: Path) -> None:
    cache, wrong_names = BlobCache(tmp_path / "cache", limit_bytes=250), []

    def use(seed: int) -> None:
        for number in range(40):
            data = bytes([(seed + number) % 5]) * 100
            with cache.hold(digest(data), giving(data)) as path:
                wrong_names.extend([data] if path.read_bytes() != data else [])

    run_threads(partial(use, seed) for seed in range(4))
    assert wrong_names == []


def test_a_file_replaced_before_its_lock_is_not_evicted(tmp_path, monkeypatch):
    cache, lock = BlobCache(tmp_path / "cache", limit_bytes=250), fcntl.flock
    path = cache.folder / "blobs" / put(cache, b"a" * 200)

    def replace_and_lock(fd: int, operation: int) -> None:
        if operation & fcntl.LOCK_NB and os.fstat(fd).st_size == 200:
            path.unlink()
            path.write_bytes(b"a" * 200)
        lock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", replace_and_lock)
    put(cache, b"b" * 100)
    assert path.is_file()


def test_environment_variables_set_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ENGINESMITH_CACHE", "XDG_CACHE_HOME", "ENGINESMITH_CACHE_BYTES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert local_cache() == BlobCache(tmp_path / ".cache" / "enginesmith", 16 << 30)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert local_cache() == BlobCache(tmp_path / "xdg" / "enginesmith", 16 << 30)
    monkeypatch.setenv("ENGINESMITH_CACHE", str(tmp_path / "mine"))
    monkeypatch.setenv("ENGINESMITH_CACHE_BYTES", "1000")
    assert local_cache() == BlobCache(tmp_path / "mine", 1000)
    monkeypatch.setenv("ENGINESMITH_CACHE_BYTES", "0")
    assert local_cache() is None
    monkeypatch.setenv("ENGINESMITH_CACHE_BYTES", "16G")
    with pytest.raises(InputError, match="number of bytes"):
        local_cache()
