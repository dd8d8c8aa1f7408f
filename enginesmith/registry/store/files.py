"""Files of a store: the digests of their bytes, and atomic writes.

**Digests.** A blob's name is its SHA-256. SHA-256 on a CPU without instructions for it is slower than a network; BLAKE3
is about ten times as fast there (https://github.com/BLAKE3-team/BLAKE3-specs), so a manifest may give a blob's BLAKE3
too. Only the manifest claims that both digests belong to the same bytes, and registries that need not trust each other
share a cache. So bytes that were verified by BLAKE3 are stored under the pair of both digests and used only for that
pair, until their SHA-256 has been computed, too.

**Atomic writes.** A file is written under a temporary name, locked by its writer, synced to disk and renamed. Only the
file of a dead writer can be locked by another process, so `sweep` never deletes the file of a living process, whatever
the file's age and the process's container. (`flock`: Linux and other Unixes; on NFS version 4.)

**Errors.** `reachable` converts an OSError to an UnavailableError with a remedy. I/O errors and retries of a process
are counted (`count_io`) for metrics.
"""

import errno
import fcntl
import hashlib
import os
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal, Protocol

from enginesmith.core.errors import UnavailableError, check_digest

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_COUNTS_LOCK = threading.Lock()
_COUNTS = {"errors": 0, "retries": 0}


def count_io(kind: Literal["errors", "retries"]) -> None:
    """Count a request that finally failed ('errors'), or that is sent again ('retries')."""
    with _COUNTS_LOCK:
        _COUNTS[kind] += 1


def read_error_counts() -> dict[str, int]:
    """The numbers of 'errors' and 'retries' since this process began."""
    with _COUNTS_LOCK:
        return dict(_COUNTS)


# Large enough that hashing releases Python's lock for most of its time.
_BLOCK_BYTES = 1 << 20


class Hasher(Protocol):
    """A hash function over bytes in pieces, as in `hashlib`."""

    def update(self, data: "ReadableBuffer", /) -> object:
        """Add a piece of data."""

    def hexdigest(self) -> str:
        """The digest of all pieces, in lower-case hexadecimal."""


@dataclass(frozen=True)
class BlobDigest:
    """A blob's digests. digest: the SHA-256, its name.  blake3: if given, it verifies the bytes; else the SHA-256 does.

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
        """The digest that `hasher` must compute for the blob's bytes."""
        return self.blake3 or self.digest

    @property
    def algorithm(self) -> str:
        """The hash function's name for messages: 'SHA-256' or 'BLAKE3'."""
        return "SHA-256" if self.blake3 is None else "BLAKE3"

    @property
    def sha256_only(self) -> "BlobDigest":
        """The digest without the BLAKE3, which only a manifest claims."""
        return BlobDigest(self.digest)

    def hasher(self) -> Hasher:
        """A new hasher of the algorithm."""
        return hashlib.sha256() if self.blake3 is None else new_blake3_hasher()

    def matches(self, path: Path) -> bool:
        """Whether a file's content has the expected digest. Reads the whole file; raises OSError."""
        with path.open("rb") as stream:
            return copy_hashed(stream, None, self.hasher()) == self.expected


def new_blake3_hasher() -> Hasher:
    """A new BLAKE3 hasher."""
    from blake3 import blake3  # imported here, because few processes digest anything

    return blake3()


def copy_hashed(source: BinaryIO, dest: BinaryIO | None, hasher: Hasher | None = None) -> str:
    """Copy a stream to `dest` (None: only read it), and return its digest by `hasher`, by default SHA-256."""
    digest_state = hasher or hashlib.sha256()
    for block in _blocks(source):
        digest_state.update(block)
        if dest is not None:
            dest.write(block)
    return digest_state.hexdigest()


def digest_stream(source: BinaryIO, dest: BinaryIO | None = None) -> BlobDigest:
    """Read a stream to its end and return its digests. dest: a stream that the bytes are copied to."""
    sha256_hasher, blake3_hasher = hashlib.sha256(), new_blake3_hasher()
    for block in _blocks(source):
        sha256_hasher.update(block)
        blake3_hasher.update(block)
        if dest is not None:
            dest.write(block)
    return BlobDigest(sha256_hasher.hexdigest(), blake3_hasher.hexdigest())


def _blocks(stream: BinaryIO) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(_BLOCK_BYTES))
    while count := stream.readinto(buffer):  # type: ignore[attr-defined]
        yield buffer[:count]


PREFIX = ".enginesmith-landing-"

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
    """Convert an OSError inside to an UnavailableError: 'writing /x: No space left on device; free some space ...'."""
    try:
        yield
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "check that it is there and healthy, then run again")
        if error.errno == errno.EISDIR:
            path = error.filename2 or error.filename
            remedy = f"{path} is a folder where a file belongs: choose another place, or move that folder away"
        reason = error.strerror or str(error)
        count_io("errors")
        raise UnavailableError(f"{doing}: {reason}; {remedy}") from error


@dataclass(frozen=True)
class AtomicWrite:
    """A file that is being written under a temporary name: write to `stream`, then `commit`."""

    path: Path
    stream: BinaryIO

    def commit(self, dest: Path, *, read_only: bool = False) -> None:
        """Rename the file to `dest`, replacing an existing file; durable when this returns. Raises OSError."""
        self.stream.flush()
        _rename_synced(self.stream, self.path, dest, read_only)

    def sync(self) -> None:
        """Flush the content to disk."""
        self.stream.flush()
        os.fsync(self.stream.fileno())


def rename_durably(path: Path, dest: Path, *, read_only: bool = False) -> None:
    """Sync a finished file and rename it to `dest`, replacing an existing file; durable on return. Raises OSError."""
    with path.open("rb") as stream:
        _rename_synced(stream, path, dest, read_only)


def _rename_synced(stream: BinaryIO, path: Path, dest: Path, read_only: bool) -> None:
    if read_only:
        os.fchmod(stream.fileno(), os.fstat(stream.fileno()).st_mode & 0o444)
    os.fsync(stream.fileno())
    path.replace(dest)
    sync_folder(dest.parent)


@contextmanager
def start_atomic_write(folder: Path) -> Iterator[AtomicWrite]:
    """Create a file under a temporary name in `folder`, which is deleted at the end unless it was committed."""
    while True:
        path = folder / f"{PREFIX}{secrets.token_hex(8)}"
        stream = path.open("xb")
        fcntl.flock(stream.fileno(), fcntl.LOCK_EX)
        if os.fstat(stream.fileno()).st_nlink:
            break
        stream.close()  # a sweep deleted the file before it was locked
    file = AtomicWrite(path, stream)
    try:
        yield file
    finally:
        # Unlink before close: without the lock a sweep may delete the file, and another writer may use its name.
        with suppress(FileNotFoundError):
            file.path.unlink()
        # After a failed write, closing fails too; the first error is the one to report.
        with suppress(OSError):
            file.stream.close()


def strays(folder: Path, *, remove: bool = False) -> list[Path]:
    """The temporary files in `folder` whose writers have died. remove: whether to delete them."""
    if not folder.is_dir():
        return []
    stray_paths = []
    for path in sorted(folder.iterdir()):
        if path.name.startswith(PREFIX):
            with suppress(OSError), path.open("rb") as stream:
                fcntl.flock(stream.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                if remove:
                    path.unlink()
                stray_paths.append(path)
    return stray_paths


def sweep(folder: Path) -> int:
    """Delete the temporary files in `folder` whose writers have died, and return their number."""
    return len(strays(folder, remove=True))


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
    """Write a file atomically. Raises UnavailableError."""
    with reachable(f"writing {path}"):
        make_folder(path.parent)
        with start_atomic_write(path.parent) as file:
            file.stream.write(data)
            file.commit(path)
