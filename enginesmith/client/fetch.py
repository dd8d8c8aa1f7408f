"""Downloads a blob to a path: from the file that is there already, this machine's cache, or the registry.

A blob of a remote registry is downloaded into the cache, once for all processes, over several connections, and resumed
where a killed download ended; then the path becomes a hard link to it, or a copy on another file system. Without a
cache it is downloaded beside the path. A file appears whole and verified, or not at all. Several blobs, as the shards
of a large model are, come side by side and share the connections and the memory of one.
"""

import errno
import fcntl
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from enginesmith.core.errors import IntegrityError
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.cache import BlobCache, VerificationCache, local_cache
from enginesmith.registry.store.download import download, journal_of
from enginesmith.registry.store.files import (
    BlobDigest,
    copy_hashed,
    make_folder,
    reachable,
    rename_durably,
    start_atomic_write,
    sweep,
    sync_folder,
)

# Source of the bytes: the file was there already, this machine's cache, or the registry.
Origin = Literal["there", "cache", "registry"]
# Called with the downloaded and the total bytes.
Progress = Callable[[int, int], object]

# Blobs that are downloaded at the same time: each of the four connections that a single one begins with has its own.
SIDE_BY_SIDE = 4

_PARTIAL = ".enginesmith-partial-"
_NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.EACCES)
_UNUSABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)


def silent(_done: int, _total: int) -> None:
    """A progress listener that does nothing."""


@dataclass(frozen=True)
class Wanted:
    """A blob to be written to `dest`. size_bytes: as the manifest says."""

    blob: BlobDigest
    size_bytes: int
    dest: Path


@dataclass(frozen=True)
class BlobFetcher:
    """Downloads blobs. cache: None for none.  progress: called with downloaded and total bytes.  rehash: read local
    files again instead of trusting the verification cache.  beside: how many of them run at the same time."""

    cache: BlobCache | None = None
    progress: Progress = silent
    rehash: bool = False
    beside: int = 1

    @classmethod
    def for_store(cls, store: Store, progress: Progress = silent, *, rehash: bool = False) -> "BlobFetcher":
        """The fetcher with this machine's cache (`cache.local_cache`); without one for a registry on this machine."""
        return cls(None if store.near else local_cache(), progress, rehash)

    def fetch(self, store: Store, blob: BlobDigest, size_bytes: int, dest: Path) -> Origin:
        """Write the blob to `dest`, verified and atomically, and return where its bytes came from.

        Raises IntegrityError when the registry sends other bytes or has lost the blob, UnavailableError when registry
        or disk are out of reach; the next call resumes the download.
        """
        with reachable(f"writing {dest}"):
            make_folder(dest.parent)
            verifications = self.cache.verifications if self.cache is not None and not self.rehash else None
            if _is_there(dest, blob, size_bytes, verifications):
                return "there"
            sweep(dest.parent)
            if self.cache is None or store.near or size_bytes > self.cache.limit_bytes:
                self._direct(store, blob, size_bytes, dest)
                if verifications is not None:
                    verifications.add(blob, dest)
                return "registry"
            return self._through(self.cache, store, blob, size_bytes, dest)

    def fetch_all(self, store: Store, wanted: Sequence[Wanted]) -> None:
        """Write several blobs as `fetch` writes one, at most `SIDE_BY_SIDE` at a time; the listener gets their sums.

        Once one of them fails the others stop, and what has come of them is kept for the next call. Raises what the
        first raised, as `fetch`.
        """
        if not wanted:
            return
        meter = _Meter(self.progress, sum(item.size_bytes for item in wanted))
        beside = min(SIDE_BY_SIDE, len(wanted))
        with ThreadPoolExecutor(beside) as pool:

            def start(item: Wanted) -> object:
                fetcher = replace(self, progress=meter.listener(), beside=beside)
                return fetcher.fetch(store, item.blob, item.size_bytes, item.dest)

            try:
                for ended in as_completed([pool.submit(start, item) for item in wanted]):
                    ended.result()
            except BaseException:
                meter.stopped.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _through(self, cache: BlobCache, store: Store, blob: BlobDigest, size_bytes: int, dest: Path) -> Origin:
        origin: list[Origin] = ["cache"]

        def bring(partial: Path) -> str:
            origin[:] = ["registry"]
            return self._download(store, blob, size_bytes, partial)

        try:
            with cache.hold_verified(blob, bring, rehash=self.rehash) as (held, found):
                _place(held, found, dest, cache.verifications)
                return origin[0]
        except OSError as error:
            if error.errno not in _UNUSABLE:
                raise
            # A cache that is full, read-only or another user's is no reason to fail: download without it.
            cache.give_up(blob)
            self._direct(store, blob, size_bytes, dest)
            return "registry"

    def _direct(self, store: Store, blob: BlobDigest, size_bytes: int, dest: Path) -> None:
        """Download to a partial file beside `dest`, one process at a time, and rename it."""
        partial = dest.with_name(f"{_PARTIAL}{blob.digest[:32]}")
        with _lock_download(partial):
            if _is_there(dest, blob, size_bytes, None):
                return
            self._download(store, blob, size_bytes, partial)
            rename_durably(partial, dest)

    def _download(self, store: Store, blob: BlobDigest, size_bytes: int, partial: Path) -> str:
        """Download a blob to `partial` and return its digest, the expected one.

        Other bytes are downloaded again from the start, as `list_sources` says; then IntegrityError is raised.
        """
        for source in list_sources(store):
            found = download(
                partial,
                blob,
                size_bytes,
                lambda start, size, source=source: source.open_range(blob.digest, start, size),  # type: ignore[misc]
                lambda there: self.progress(there, size_bytes),
                beside=self.beside,
            )
            journal_of(partial).unlink()
            if found == blob.expected:
                return found
            partial.unlink()
        raise IntegrityError(
            f"blob {blob.digest} of {store.uri} holds other bytes (their {blob.algorithm} is {found}, and should be "
            f"{blob.expected}); run `enginesmith registry fsck --repair`, then build again"
        )


class _StoppedError(Exception):
    """Ends a download because another one has failed."""


@dataclass
class _Meter:
    """The bytes that several downloads have brought together, told to one listener. total: of all, in bytes."""

    progress: Progress
    total: int
    came: int = 0
    stopped: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def listener(self) -> Progress:
        """A listener for one of the downloads. It raises `_StoppedError` once they are to end."""
        own = 0

        def add(there: int, _size: int) -> None:
            nonlocal own
            if self.stopped.is_set():
                raise _StoppedError
            with self.lock:
                self.came, own = self.came + there - own, there
                self.progress(self.came, self.total)

        return add


def _is_there(dest: Path, blob: BlobDigest, size_bytes: int, verifications: VerificationCache | None) -> bool:
    if not dest.is_file() or dest.stat().st_size != size_bytes:
        return False
    return blob.matches(dest) if verifications is None else verifications.is_verified(blob, dest)


def _place(held: Path, blob: BlobDigest, dest: Path, verifications: VerificationCache) -> None:
    """Make `dest` a hard link to a cached blob, or a verified copy where the file system refuses links."""
    fresh = dest.with_name(f".enginesmith-link-{secrets.token_hex(8)}")
    try:
        os.link(held, fresh)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        with held.open("rb") as source, start_atomic_write(dest.parent) as file:
            if copy_hashed(source, file.stream, blob.hasher()) != blob.expected:
                raise IntegrityError(f"cached blob {held} is damaged; delete it and run again") from None
            file.commit(dest)
    else:
        fresh.replace(dest)
        # Renaming one name of a file over another does nothing.
        fresh.unlink(missing_ok=True)
        sync_folder(dest.parent)
    verifications.add(blob, dest)


@contextmanager
def _lock_download(partial: Path) -> Iterator[None]:
    """Hold the lock file beside a partial download, and delete it afterwards."""
    path = partial.with_name(f"{partial.name}.lock")
    while True:
        with path.open("ab") as lock:
            fcntl.flock(lock.fileno(), fcntl.LOCK_EX)
            if not os.fstat(lock.fileno()).st_nlink:
                continue  # deleted by a download that has just ended
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def list_sources(store: Store) -> Iterator[Store]:
    """The store, and what is read after it where its bytes were wrong: of a list of places what is left of it, ever
    shorter; any other store once more, since a resumed part or the network may have been at fault."""
    yield store
    yield from getattr(store, "list_rests", lambda: [store])()
