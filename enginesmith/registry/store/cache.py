"""This machine's cache of blobs from remote registries, shared by all its processes.

A blob is verified before it enters, under a lock of its digest, so that only one of several processes downloads it. The
cache is bounded: the least recently used blobs are evicted first, but never one that is being read. Everything in it
can be deleted at any time. A blob that was verified by a manifest's BLAKE3 is stored under the pair of both digests
(see `files`), and under its SHA-256 only after that was computed. (`flock`: Linux and other Unixes; on NFS version 4.)

A verified file is not digested again while its device, inode, size and the times of the last change of its content and
of its inode are the same (`VerificationCache`; no program can set back the last of these, and git uses the same test).
Digesting a gigabyte takes seconds, comparing these values microseconds. Bits that the disk changes by itself go
unnoticed; `--rehash` reads every file.
"""

import fcntl
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from enginesmith.core.errors import InputError, IntegrityError, check_digest
from enginesmith.registry.store import files
from enginesmith.registry.store.download import journal_of

DEFAULT_BYTES = 16 << 30
# Partial downloads that were not written to for a week are deleted.
PARTIAL_S = 7 * 24 * 3600.0
# Digests with the same beginning share a lock, so that the number of locks is bounded.
_LOCK_DIGITS = 3

# Writes a blob's bytes into a stream and returns the digest of these bytes.
Download = Callable[[BinaryIO], str]
# Writes a blob's bytes into a file, which may already hold some of them, and returns the digest of its content.
Bring = Callable[[Path], str]
# Device, inode, size in bytes, and the times in ns of the last change of content and of the inode.
Facts = list[int]

# The number of files of one blob that are recorded; the oldest are dropped first.
_KEPT = 8
# A write within one tick of the kernel's clock does not change the times: a new file is recorded some ticks later.
_TICKS_S = 0.02


@dataclass(frozen=True)
class VerificationCache:
    """Records of verified files, one small file in `folder` for each `BlobDigest.name`: a record of a BLAKE3 does not
    verify the SHA-256 that a manifest pairs it with. All may be deleted at any time."""

    folder: Path

    def is_verified(self, blob: files.BlobDigest, path: Path) -> bool:
        """Whether a file holds the blob: by its record or its SHA-256's, else by digesting it. Raises OSError."""
        file_record = _facts(path)
        if file_record in self._read(blob.name) or file_record in self._read(blob.sha256_only.name):
            return True
        if not blob.matches(path):
            return False
        if _facts(path)[:4] == file_record[:4]:
            self.add(blob, path)
        return True

    def add(self, blob: files.BlobDigest, path: Path) -> None:
        """Record that `path` was just verified. If the record cannot be written, the file is digested again later."""
        changed_ns = path.stat().st_ctime_ns
        time.sleep(max(0.0, min(_TICKS_S, _TICKS_S - (time.time() - changed_ns / 1e9))))
        file_record = _facts(path)
        other_records = [record for record in self._read(blob.name) if record[:2] != file_record[:2]]
        with suppress(OSError):
            files.make_folder(self.folder)
            new_file = self.folder / f".{secrets.token_hex(8)}"
            new_file.write_text(json.dumps([file_record, *other_records][:_KEPT]))
            new_file.replace(self.folder / blob.name)

    def forget(self, blob: files.BlobDigest) -> None:
        """Delete the records of a blob's files."""
        for name in {blob.name, blob.sha256_only.name}:
            with suppress(OSError):
                (self.folder / name).unlink(missing_ok=True)

    def note_use(self, name: str) -> None:
        """Record that the blob with this name was used just now."""
        with suppress(OSError):
            files.make_folder(self.folder)
            (self.folder / name).touch()

    def last_used(self, name: str) -> float | None:
        """When a blob was last used, in seconds since 1970; None if unknown."""
        with suppress(OSError):
            return (self.folder / name).stat().st_mtime
        return None

    def _read(self, name: str) -> list[Facts]:
        with suppress(OSError, ValueError, RecursionError):
            document = json.loads((self.folder / name).read_bytes() or b"[]")
            if isinstance(document, list):
                return [record for record in document if isinstance(record, list) and len(record) == 5]
        return []


def _facts(path: Path) -> Facts:
    file_stat = os.stat(path)  # noqa: PTH116 - follows links, as reading does
    return [file_stat.st_dev, file_stat.st_ino, file_stat.st_size, file_stat.st_mtime_ns, file_stat.st_ctime_ns]


@dataclass(frozen=True)
class BlobCache:
    """A cache in `folder` of at most `limit_bytes`; only blobs in use may exceed it."""

    folder: Path
    limit_bytes: int = DEFAULT_BYTES

    @contextmanager
    def hold(self, digest: str, download: Download) -> Iterator[Path]:
        """Protect a blob's file from eviction while the block reads it; `download` writes it if it is absent.

        The file was verified when it was stored. Raises IntegrityError if `download` wrote other bytes, OSError if the
        cache's disk is full or read-only, and whatever `download` raises.
        """
        path = self._blob(check_digest(digest))
        stream = _open_shared(path) or self._open_or_download(digest, path, download)
        try:
            self.verifications.note_use(digest)
            yield path
        finally:
            stream.close()

    @contextmanager
    def hold_verified(
        self, blob: files.BlobDigest, bring: Bring, *, rehash: bool = False
    ) -> Iterator[tuple[Path, files.BlobDigest]]:
        """Like `hold`, but verifies a file again that changed since it was verified.

        Gives the file, and the digest it was verified by: `blob`, or its SHA-256 only. The block may link to the file.
        `bring` writes the file at a given path, whose content stays if it fails, and returns the content's digest.
        Raises IntegrityError if it wrote other bytes, OSError, and whatever `bring` raises.
        """
        with self._lock(blob.digest):
            if rehash:
                self.verifications.forget(blob)
            cached_digest = self._sound(blob)
            if cached_digest is None:
                self._bring(blob, bring)
                cached_digest = blob
            self.verifications.note_use(cached_digest.name)
            yield self._blob(cached_digest.name), cached_digest
        self._evict()

    @property
    def verifications(self) -> VerificationCache:
        """The records of verified files."""
        return VerificationCache(self.folder / "stamps")

    def holds(self, digest: str) -> bool:
        """Whether a blob is in the cache."""
        return self._blob(check_digest(digest)).is_file()

    def drop(self, digest: str) -> None:
        """Delete a blob, for example one whose file is damaged."""
        with suppress(FileNotFoundError):
            self._blob(check_digest(digest)).unlink()

    def give_up(self, blob: files.BlobDigest) -> None:
        """Delete a blob's partial download."""
        partial_path = self.folder / "partial" / blob.name
        for path in (partial_path, journal_of(partial_path)):
            with suppress(OSError):
                path.unlink()

    def _blob(self, name: str) -> Path:
        return self.folder / "blobs" / name

    def _sound(self, blob: files.BlobDigest) -> files.BlobDigest | None:
        """The stored blob's digests, preferably its SHA-256 alone; None if it is absent. Deletes a damaged file."""
        for candidate in dict.fromkeys((blob.sha256_only, blob)):
            path = self._blob(candidate.name)
            if path.is_file():
                if self.verifications.is_verified(candidate, path):
                    return candidate
                path.unlink()
        return blob if blob == blob.sha256_only and self._adopt(blob) else None

    def _adopt(self, blob: files.BlobDigest) -> bool:
        """Whether a file that was verified by a BLAKE3 has this SHA-256; if so, it is renamed to it."""
        for path in sorted((self.folder / "blobs").glob(f"{blob.name}-*")):
            if blob.matches(path):
                path.replace(self._blob(blob.name))
                self.verifications.add(blob, self._blob(blob.name))
                return True
        return False

    def _open_or_download(self, digest: str, path: Path, download: Download) -> BinaryIO:
        """The blob's file, locked against eviction; downloaded unless another process has just downloaded it."""
        with self._lock(digest):
            # In a loop, because another process may have downloaded the blob, or evicted it right after this download.
            while (stream := _open_shared(path)) is None:
                if not self._adopt(files.BlobDigest(digest)):
                    files.sweep(self.folder / "tmp")
                    with files.start_atomic_write(self.folder / "tmp") as file:
                        actual_digest = download(file.stream)
                        if actual_digest != digest:
                            raise IntegrityError(
                                f"the bytes downloaded for blob {digest} have the digest {actual_digest}; they were "
                                "not stored"
                            )
                        file.commit(path, read_only=True)
        self._evict()
        return stream

    @contextmanager
    def _lock(self, digest: str) -> Iterator[None]:
        """Hold the lock of a digest; creates the cache's folders."""
        for folder in ("blobs", "locks", "partial", "tmp"):
            files.make_folder(self.folder / folder)
        with (self.folder / "locks" / digest[:_LOCK_DIGITS]).open("ab") as lock_file:
            fcntl.flock(lock_file.fileno(), fcntl.LOCK_EX)
            yield

    def _bring(self, blob: files.BlobDigest, bring: Bring) -> None:
        partial_path, path = self.folder / "partial" / blob.name, self._blob(blob.name)
        for entry in os.scandir(self.folder / "partial"):
            with suppress(FileNotFoundError):
                if not entry.name.startswith(blob.name) and entry.stat().st_mtime < time.time() - PARTIAL_S:
                    Path(entry.path).unlink()
        actual_digest = bring(partial_path)
        if actual_digest != blob.expected:
            raise IntegrityError(
                f"the bytes downloaded for blob {blob.digest} have the {blob.algorithm} {actual_digest}, not "
                f"{blob.expected}; they were not stored"
            )
        files.rename_durably(partial_path, path, read_only=True)
        self.verifications.add(blob, path)

    def _evict(self) -> None:
        """Delete the least recently used blobs until the rest fits, but none that is being read."""
        cache_entries: list[tuple[float, int, Path]] = []
        for entry in os.scandir(self.folder / "blobs"):
            with suppress(FileNotFoundError):
                file_stat, used_at = entry.stat(), self.verifications.last_used(entry.name)
                cache_entries.append(
                    (file_stat.st_mtime if used_at is None else used_at, file_stat.st_size, Path(entry.path))
                )
        excess_bytes = sum(size for _, size, _ in cache_entries) - self.limit_bytes
        for _, size, path in sorted(cache_entries):
            if excess_bytes <= 0:
                return
            with suppress(OSError), path.open("rb") as stream:
                fcntl.flock(stream.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(stream.fileno()).st_nlink:  # otherwise the path now names another file, which may be in use
                    path.unlink()
                excess_bytes -= size


def local_cache() -> BlobCache | None:
    """This machine's cache: in ENGINESMITH_CACHE, else $XDG_CACHE_HOME/enginesmith, else ~/.cache/enginesmith, of at
    most ENGINESMITH_CACHE_BYTES (default 16 GiB). None if that is 0. Raises InputError if it is no number."""
    size_text = os.environ.get("ENGINESMITH_CACHE_BYTES", "").strip()
    if size_text and not size_text.isdecimal():
        raise InputError(f"ENGINESMITH_CACHE_BYTES is {size_text!r}; give a number of bytes, or 0 for no cache")
    limit = int(size_text) if size_text else DEFAULT_BYTES
    cache_home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = os.environ.get("ENGINESMITH_CACHE") or f"{cache_home}/enginesmith"
    return BlobCache(Path(os.path.abspath(os.path.expanduser(folder))), limit) if limit else None  # noqa: PTH100, PTH111


def cached_file(digest: str, download: Download) -> Path:
    """This machine's cached copy of a remote blob, verified when it was stored; `download` fetches it if it is absent.

    Raises IntegrityError without a cache, UnavailableError if the cache is not writable, and as `BlobCache.hold`.
    """
    cache = local_cache()
    if cache is None:
        raise IntegrityError(f"blob {check_digest(digest)} has no local file: ENGINESMITH_CACHE_BYTES is 0")
    with files.reachable(f"caching blob {digest} in {cache.folder}"), cache.hold(digest, download) as path:
        return path


def _open_shared(path: Path) -> BinaryIO | None:
    """The file, locked for reading; None if it is absent, or was deleted before it could be locked."""
    try:
        stream = path.open("rb")
    except FileNotFoundError:
        return None
    fcntl.flock(stream.fileno(), fcntl.LOCK_SH)
    if os.fstat(stream.fileno()).st_nlink:
        return stream
    stream.close()
    return None
