"""Counters of registry I/O errors and retries in this process; they only increase.

Counted where every request passes (`atomic_write.reachable` for folders, `s3.retries` for buckets); read by metrics.

The digests that a blob is verified by: its SHA-256, which is its name, or its BLAKE3, if a manifest has one.

SHA-256 on a CPU without instructions for it is slower than a network; BLAKE3 is about ten times as fast there
(https://github.com/BLAKE3-team/BLAKE3-specs). But that a BLAKE3 belongs to a SHA-256 is the word of whoever wrote the
manifest, and a cache is shared by registries that need not trust each other. So bytes that were verified by BLAKE3 are
stored under the pair of both digests and used for that pair only, until their SHA-256 was computed, too.

Files that appear whole or not at all.

A file is written under a temporary name, locked by its writer, synced to disk and renamed. The lock tells a file
that is being written from one whose writer died: only the latter can be locked by somebody else, so `sweep` never
takes a file from a living process, whatever its age and whichever container it lives in. (`flock`, so: Linux and
other Unixes; on NFS it needs version 4.)
"""

import errno
import fcntl
import hashlib
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol

from enginery.core.digest import CHUNK_BYTES, check_digest
from enginery.core.errors import UnavailableError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


_COUNTS_LOCK = threading.Lock()
_COUNTS = {"errors": 0, "retries": 0}


def count_error() -> None:
    """Count a request that failed for good."""
    with _COUNTS_LOCK:
        _COUNTS["errors"] += 1


def count_retry() -> None:
    """Count a request that is sent again."""
    with _COUNTS_LOCK:
        _COUNTS["retries"] += 1


def read_error_counts() -> dict[str, int]:
    """'errors' and 'retries' since this process began."""
    with _COUNTS_LOCK:
        return dict(_COUNTS)


# Large enough that hashing runs without Python's lock for most of its time.
_BLOCK_BYTES = 1 << 20


class Hasher(Protocol):
    """A hash function over bytes in pieces, as in `hashlib`."""

    def update(self, data: "ReadableBuffer", /) -> object:
        """Add a piece of data."""
        ...

    def hexdigest(self) -> str:
        """The digest of all pieces, in lower-case hexadecimal."""
        ...


@dataclass(frozen=True)
class BlobDigest:
    """A blob's digests. digest: the SHA-256, its name.  blake3: verifies the bytes if given, else the SHA-256 does.

    Raises InputError for malformed digests.
    """

    digest: str
    blake3: str | None = None

    def __post_init__(self) -> None:
        check_digest(self.digest)
        if self.blake3 is not None:
            check_digest(self.blake3)

    @property
    def name(self) -> str:
        """The file name under which bytes that were verified by these digests are stored."""
        return self.digest if self.blake3 is None else f"{self.digest}-{self.blake3}"

    @property
    def expected(self) -> str:
        """The digest that `hasher` must give for the blob's bytes."""
        return self.blake3 or self.digest

    @property
    def algorithm(self) -> str:
        """The hash function's name for messages: 'SHA-256' or 'BLAKE3'."""
        return "SHA-256" if self.blake3 is None else "BLAKE3"

    @property
    def sha256_only(self) -> "BlobDigest":
        """The digest without the BLAKE3, which only a manifest vouches for."""
        return BlobDigest(self.digest)

    def hasher(self) -> Hasher:
        """A new hasher. Raises ModuleNotFoundError where a BLAKE3 is given and the library is not installed."""
        found = sha256() if self.blake3 is None else new_blake3_hasher()
        if found is None:
            raise ModuleNotFoundError("blake3")
        return found

    def matches(self, path: Path) -> bool:
        """Whether a file's content has the expected digest. Reads all of it; raises OSError."""
        hasher = self.hasher()
        with path.open("rb") as stream:
            for block in _blocks(stream):
                hasher.update(block)
        return hasher.hexdigest() == self.expected


def choose_digest(digest: str, blake3: str | None) -> BlobDigest:
    """A blob's digest, with its BLAKE3 if the library is installed. blake3: from the manifest, or None."""
    return BlobDigest(digest, blake3 if new_blake3_hasher() is not None else None)


def new_blake3_hasher() -> Hasher | None:
    """A new BLAKE3 hasher; None where the library is not installed."""
    found = _library()
    return None if found is None else found()


def digest_stream(source: BinaryIO, dest: BinaryIO | None = None) -> BlobDigest:
    """Read a stream to its end and return its SHA-256 and, where the library is installed, its BLAKE3. dest: a stream
    that the bytes are copied to."""
    sha, other = sha256(), new_blake3_hasher()
    for block in _blocks(source):
        sha.update(block)
        if other is not None:
            other.update(block)
        if dest is not None:
            dest.write(block)
    return BlobDigest(sha.hexdigest(), None if other is None else other.hexdigest())


def _blocks(stream: BinaryIO) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(_BLOCK_BYTES))
    while count := stream.readinto(buffer):  # type: ignore[attr-defined]
        yield buffer[:count]


@cache
def _library() -> "Callable[[], Hasher] | None":
    """Loaded at first use, and left out where it is not installed: a serving node can do without."""
    try:
        from blake3 import blake3
    except ImportError:
        return None
    return blake3


PREFIX = ".enginery-landing-"

_REMEDIES = {
    errno.ENOSPC: "free some space there and run again; nothing half-written was kept",
    errno.EDQUOT: "the quota is used up: free some space and run again; nothing half-written was kept",
    errno.EFBIG: "raise the file size limit (ulimit -f) and run again; nothing half-written was kept",
    errno.EROFS: "remount it writable, or choose another place",
    errno.EACCES: "give this user access to it, or choose another place",
    errno.EPERM: "give this user access to it, or choose another place",
    errno.ENOLCK: "its file system has no locks; choose another place",
    errno.EOPNOTSUPP: "its file system has no locks; choose another place",
}


@contextmanager
def reachable(doing: str) -> Iterator[None]:
    """Turn an OSError inside into an UnavailableError: 'writing /x: No space left on device; free some space ...'."""
    try:
        yield
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "check that it is there and healthy, then run again")
        if error.errno == errno.EISDIR:
            place = error.filename2 or error.filename
            remedy = f"{place} is a folder where a file belongs: choose another place, or move that folder away"
        reason = error.strerror or str(error)
        count_error()
        raise UnavailableError(f"{doing}: {reason}; {remedy}") from error


@dataclass(frozen=True)
class AtomicWrite:
    """A file that is being written under a temporary name: write to `stream`, then `commit`."""

    path: Path
    stream: BinaryIO

    def commit(self, dest: Path, *, read_only: bool = False) -> None:
        """Rename the file to `dest`, replacing an existing file; durable when this returns. Raises OSError."""
        if read_only:
            os.fchmod(self.stream.fileno(), os.fstat(self.stream.fileno()).st_mode & 0o444)
        self.sync()
        self.path.replace(dest)
        sync_folder(dest.parent)

    def sync(self) -> None:
        """Flush the content to disk."""
        self.stream.flush()
        os.fsync(self.stream.fileno())


def rename_durably(path: Path, dest: Path, *, read_only: bool = False) -> None:
    """Sync a finished file and rename it to `dest`, replacing an existing file; durable on return. Raises OSError."""
    with path.open("rb") as stream:
        if read_only:
            os.fchmod(stream.fileno(), os.fstat(stream.fileno()).st_mode & 0o444)
        os.fsync(stream.fileno())
    path.replace(dest)
    sync_folder(dest.parent)


@contextmanager
def start_atomic_write(folder: Path) -> Iterator[AtomicWrite]:
    """Create a file under a temporary name in `folder`, which is deleted at the end unless it was committed."""
    file = _claim(folder)
    try:
        yield file
    finally:
        # Unlink before close: as soon as the lock goes, a sweep may take the name.
        with suppress(FileNotFoundError):
            file.path.unlink()
        # A failed write fails again while closing; the first error is the one to report.
        with suppress(OSError):
            file.stream.close()


def _claim(folder: Path) -> AtomicWrite:
    """Create and lock a temporary file. Between the two a sweep may delete it; then try another name."""
    while True:
        path = folder / f"{PREFIX}{secrets.token_hex(8)}"
        stream = path.open("xb")
        fcntl.flock(stream.fileno(), fcntl.LOCK_EX)
        if os.fstat(stream.fileno()).st_nlink:
            return AtomicWrite(path, stream)
        stream.close()


def strays(folder: Path) -> list[Path]:
    """The temporary files in `folder` whose writers have died."""
    if not folder.is_dir():
        return []
    return [
        path for path in sorted(folder.iterdir()) if path.name.startswith(PREFIX) and _is_abandoned(path, remove=False)
    ]


def sweep(folder: Path) -> int:
    """Delete the temporary files in `folder` whose writers have died, and return how many."""
    if not folder.is_dir():
        return 0
    found = (path for path in folder.iterdir() if path.name.startswith(PREFIX))
    return sum(_is_abandoned(path, remove=True) for path in found)


def _is_abandoned(path: Path, *, remove: bool) -> bool:
    with suppress(OSError), path.open("rb") as stream:
        fcntl.flock(stream.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        if remove:
            path.unlink()
        return True
    return False


def copy_hashed(source: BinaryIO, dest: BinaryIO, hasher: Hasher | None = None) -> str:
    """Copy in blocks; return the digest of what was copied, by `hasher` or SHA-256."""
    found = hasher or hashlib.sha256()
    while block := source.read(CHUNK_BYTES):
        found.update(block)
        dest.write(block)
    return found.hexdigest()


def make_folder(path: Path) -> None:
    """Create a folder and its parents, durably."""
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(exist_ok=True)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Sync a folder, so that the names in it are durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that appears whole or not at all. Raises UnavailableError."""
    with reachable(f"writing {path}"):
        make_folder(path.parent)
        with start_atomic_write(path.parent) as file:
            file.stream.write(data)
            file.commit(path)
