"""Files that appear whole or not at all.

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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from enginery.core.digest import CHUNK_BYTES
from enginery.core.errors import UnavailableError
from enginery.registry.store import io_errors
from enginery.registry.store.blob_digest import Hasher

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
        io_errors.count_error()
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
