"""A registry in a folder, safe for many processes on one machine or one shared file system.

Blobs and documents are written under a temporary name in `tmp/` and renamed (`files.start_atomic_write`). Documents
that may have two writers are compared and swapped under one lock for the whole registry, held for one rename.
"""

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote

from enginesmith.core.errors import (
    InputError,
    IntegrityError,
    UnavailableError,
    check_digest,
    digest_of_bytes,
    digest_of_file,
)
from enginesmith.registry.store import files, layout
from enginesmith.registry.store.download import Fill
from enginesmith.registry.store.layout import Store

_TEMPORARY = "tmp"
_LOCK = "lock"
_DISCARDED = "discarded"
_OWN = frozenset({_TEMPORARY, _LOCK})
_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR})
# The errors of opening a folder, a socket, a link to itself and a link to a missing file.
_NO_FILE = frozenset({errno.EISDIR, errno.ENXIO, errno.ELOOP, errno.ENOENT})


def _open_at_once(path: str, flags: int) -> int:
    """An opener for `open` that does not block on a pipe without a writer."""
    return os.open(path, flags | os.O_NONBLOCK, 0o666)


@dataclass(frozen=True)
class FileStore(Store):
    """The store in the folder `root`, an absolute path (`Store` documents the methods). Created by `open_store`."""

    root: Path
    near = True  # see `Store.near`

    @property
    def uri(self) -> str:
        """'file:///...'."""
        return f"file://{quote(str(self.root))}"

    def locator(self, key: str) -> str:
        """See `Store.locator`."""
        return f"{self.uri}/{layout.check_key(key)}"

    def put_and_digest_file(self, path: Path) -> files.BlobDigest:
        """See `Store.put_and_digest_file`."""
        with (
            files.reachable(f"copying {path} into {self.root}"),
            path.open("rb") as source,
            self._start_write() as file,
        ):
            # One pass: digesting first and copying afterwards would read each new file twice.
            digest = files.digest_stream(source, file.stream)
            if not self._holds(digest.digest):
                self._commit_blob(file, digest.digest)
        return digest

    def put_bytes(self, data: bytes) -> str:
        """See `Store.put_bytes`."""
        digest = digest_of_bytes(data)
        with files.reachable(f"writing {len(data)} bytes into {self.root}"):
            if not self._holds(digest):
                with self._start_write() as file:
                    file.stream.write(data)
                    self._commit_blob(file, digest)
        return digest

    def stored_size(self, digest: str) -> int | None:
        """See `Store.stored_size`."""
        # Strings instead of path objects, here and in `read`: planning a catalog calls this tens of thousands of times.
        path = f"{self.root}/{layout.blob_key(digest)}"
        try:
            file_stat = os.lstat(path)
            # A link counts only if it leads to a file in the registry.
            if stat.S_ISLNK(file_stat.st_mode) and Path(path).resolve().is_relative_to(self.root.resolve()):
                file_stat = os.stat(path)  # noqa: PTH116
        except OSError:
            return None
        return file_stat.st_size if stat.S_ISREG(file_stat.st_mode) else None

    def path(self, digest: str) -> Path:
        """See `Store.path`."""
        blob_path = self._blob(digest)
        if not self.has(digest):
            raise self.lost_error(digest)
        return blob_path

    def fetch(self, digest: str, dest: Path) -> None:
        """See `Store.fetch`."""
        blob_path = self.path(digest)
        with files.reachable(f"copying {blob_path} to {dest}"):
            files.make_folder(dest.parent)
            files.sweep(dest.parent)
            with blob_path.open("rb") as source, files.start_atomic_write(dest.parent) as file:
                self._check(digest, files.copy_hashed(source, file.stream))
                file.commit(dest)

    def read_blob(self, digest: str, max_bytes: int = layout.MAX_DOCUMENT_BYTES) -> bytes:
        """See `Store.read_blob`."""
        blob_path = self.path(digest)
        with files.reachable(f"reading {blob_path}"), blob_path.open("rb") as stream:
            content = stream.read(min(os.fstat(stream.fileno()).st_size, max_bytes) + 1)
        if len(content) > max_bytes:
            raise IntegrityError(f"{blob_path} is over the limit of {max_bytes} bytes")
        self._check(digest, digest_of_bytes(content))
        return content

    @contextmanager
    def open_range(self, digest: str, offset: int, size: int) -> Iterator[Fill]:  # noqa: ARG002 - callers know it
        """See `Store.open_range`."""
        blob_path = self.path(digest)

        def fill(into: memoryview) -> None:
            with files.reachable(f"reading {blob_path}"):
                if stream.readinto(into) != len(into):
                    raise IntegrityError(
                        f"blob {digest} of {self.uri} ends before it should; run `enginesmith registry fsck --repair`"
                    )

        with files.reachable(f"reading {blob_path}"):
            stream = blob_path.open("rb")
        with stream:
            stream.seek(offset)
            yield fill

    def rehash(self, digest: str) -> files.BlobDigest:
        """See `Store.rehash`."""
        blob_path = self.path(digest)
        with files.reachable(f"reading {blob_path}"), blob_path.open("rb") as stream:
            return files.digest_stream(stream)

    def read(self, key: str) -> bytes | None:
        """See `Store.read`."""
        path = f"{self.root}/{layout.check_key(key)}"
        with files.reachable(f"reading {path}"):
            try:
                # A buffer of the file's size: one of 64 MiB costs more than reading a small file.
                with open(path, "rb", buffering=0, opener=_open_at_once) as stream:
                    file_stat = os.fstat(stream.fileno())
                    if not stat.S_ISREG(file_stat.st_mode):
                        raise IsADirectoryError(errno.EISDIR, "a pipe or device")
                    content = stream.read(min(file_stat.st_size, layout.MAX_DOCUMENT_BYTES) + 1)
            except OSError as error:
                if error.errno in _ABSENT and not Path(path).is_symlink():
                    return None
                if error.errno in _NO_FILE:
                    raise IntegrityError(f"{path} is not a regular file; remove it") from error
                raise
        if len(content) > layout.MAX_DOCUMENT_BYTES:
            raise IntegrityError(f"{path} is over the limit of {layout.MAX_DOCUMENT_BYTES} bytes")
        return content

    def read_if_changed(self, key: str, tag: str) -> tuple[bytes | None, str]:
        """See `Store.read_if_changed`. Every write creates a new file: inode number, time and size are the tag."""
        path = self.root / layout.check_key(key)
        with files.reachable(f"reading {path}"):
            try:
                file_stat = path.stat()
            except (FileNotFoundError, NotADirectoryError):
                return None, ""
        current_tag = f"{file_stat.st_ino}-{file_stat.st_mtime_ns}-{file_stat.st_size}"
        if current_tag == tag:
            return None, tag
        # If it was replaced in between, the older tag makes the next call read it again.
        content = self.read(key)
        return content, current_tag if content is not None else ""

    def create(self, key: str, data: bytes) -> bool:
        """See `Store.create`."""
        return self.replace(key, data, None)

    def replace(self, key: str, data: bytes, expected: bytes | None) -> bool:
        """See `Store.replace`."""
        path = self.root / layout.check_key(key)
        with files.reachable(f"writing {path}"), self._start_write() as file:
            file.stream.write(data)
            file.sync()
            with open(self.root / _LOCK, "ab", opener=_open_at_once) as lock_file:
                fcntl.flock(lock_file.fileno(), fcntl.LOCK_EX)
                if self.read(key) != expected:
                    return False
                files.make_folder(path.parent)
                file.commit(path)
        return True

    def remove(self, key: str) -> None:
        """See `Store.remove`. Folders stay, since another process may be about to write into them."""
        path = self.root / layout.check_key(key)
        with files.reachable(f"deleting {path}"), suppress(FileNotFoundError, NotADirectoryError):
            path.unlink()
            files.sync_folder(path.parent)

    def list(self, prefix: str = "") -> Iterator[str]:
        """See `Store.list`."""
        for name in self.children(prefix):
            key = f"{prefix}{name}"
            if name.endswith("/") and layout.is_key(key.removesuffix("/")):
                yield from self.list(key)
            else:
                yield key

    def children(self, prefix: str = "") -> Iterator[str]:
        """See `Store.children`."""
        folder = self.root / layout.check_key(prefix.removesuffix("/")) if prefix else self.root
        entries: list[os.DirEntry[str]] = []
        with files.reachable(f"listing {folder}"), suppress(FileNotFoundError, NotADirectoryError):
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        for entry in entries:
            if prefix or entry.name not in {*_OWN, _DISCARDED}:
                # `entry.is_dir` raises an OSError for a link to itself.
                is_folder = Path(entry).is_dir() if entry.is_symlink() else entry.is_dir()
                yield f"{entry.name}/" if is_folder else entry.name

    def sizes(self, prefix: str) -> Iterator[tuple[str, int]]:
        """See `Store.sizes`."""
        return ((key, file_stat.st_size) for key, file_stat in self._files(prefix))

    def stamps(self, prefix: str) -> Iterator[tuple[str, datetime]]:
        """See `Store.stamps`: the time of the file, from the file server's clock."""
        return ((key, datetime.fromtimestamp(file_stat.st_mtime, UTC)) for key, file_stat in self._files(prefix))

    def now(self) -> datetime:
        """See `Store.now`: the time of a file that is created now. This machine's time if the folder is not writable,
        since no decision depends on it there."""
        if not os.access(self.root, os.W_OK):
            return datetime.now(UTC)
        with files.reachable(f"writing into {self.root}"), self._start_write() as file:
            os.utime(file.stream.fileno())  # sets the time without a write: a full disk has no room for one
            return datetime.fromtimestamp(os.fstat(file.stream.fileno()).st_mtime, UTC)

    def _files(self, prefix: str) -> Iterator[tuple[str, os.stat_result]]:
        folder = self.root / layout.check_key(prefix.removesuffix("/"))
        with files.reachable(f"listing {folder}"):
            for folder_path, _, file_names in os.walk(folder, onerror=_raise_unless_absent):
                folder_key = Path(folder_path).relative_to(self.root).as_posix()
                for name in file_names:
                    with suppress(FileNotFoundError):  # deleted meanwhile
                        file_stat = os.lstat(f"{folder_path}/{name}")
                        if stat.S_ISREG(file_stat.st_mode):
                            yield f"{folder_key}/{name}", file_stat

    def discard(self, digest: str) -> None:
        """See `Store.discard`."""
        blob_path = self._blob(digest)
        with files.reachable(f"moving {blob_path} away"):
            files.make_folder(self.root / _DISCARDED)
            if blob_path.is_file() and not self._holds(digest):
                blob_path.replace(self.root / _DISCARDED / digest)

    def strays(self) -> tuple[str, ...]:
        """See `Store.strays`."""
        return tuple(str(path) for path in files.strays(self.root / _TEMPORARY))

    def sweep(self) -> int:
        """See `Store.sweep`."""
        with files.reachable(f"cleaning {self.root / _TEMPORARY}"):
            return files.sweep(self.root / _TEMPORARY)

    def _blob(self, digest: str) -> Path:
        return self.root / layout.blob_key(check_digest(digest))

    def _holds(self, digest: str) -> bool:
        """Whether a blob is stored and sound. Reading it costs less than writing it, and a corrupt blob is replaced."""
        return self.has(digest) and digest_of_file(self._blob(digest)) == digest

    def _check(self, digest: str, actual_digest: str) -> None:
        if actual_digest != digest:
            raise IntegrityError(
                f"blob {digest} of {self.uri} holds other bytes (their digest is {actual_digest}); "
                "run `enginesmith registry fsck --repair`, then build again"
            )

    def _start_write(self) -> AbstractContextManager[files.AtomicWrite]:
        files.make_folder(self.root / _TEMPORARY)
        return files.start_atomic_write(self.root / _TEMPORARY)

    def _commit_blob(self, file: files.AtomicWrite, digest: str) -> None:
        blob_path = self._blob(digest)
        files.make_folder(blob_path.parent)
        file.commit(blob_path, read_only=True)


def _raise_unless_absent(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


def open_folder(root: Path, *, create: bool) -> FileStore:
    """Open the registry in a folder, or create one there. Raises InputError and UnavailableError; see `open_store`."""
    store = FileStore(Path(os.path.abspath(root.expanduser())))  # noqa: PTH100 - resolve() would follow symlinks
    if not _is_registry(store):
        if not create:
            raise UnavailableError(
                f"there is no registry at {store.root}; `enginesmith build` makes one, or set --registry"
            )
        with files.reachable(f"making a registry at {store.root}"):
            files.make_folder(store.root)
        store.create(layout.MARKER, layout.MARKER_CONTENT)
    if create:
        if not os.access(store.root, os.W_OK | os.X_OK):
            raise UnavailableError(f"registry {store.root} is not writable; give this user access, or set --registry")
        store.sweep()
    return store


def _is_registry(store: FileStore) -> bool:
    """Whether the folder is a registry; False if it is absent or empty. Raises InputError for any other folder."""
    if not store.root.exists():
        return False
    if not store.root.is_dir():
        raise InputError(f"registry {store.root} is a file; give a folder")
    marker = store.read(layout.MARKER)
    if marker is None:
        with files.reachable(f"listing {store.root}"):
            other_names = {path.name for path in store.root.iterdir()} - _OWN
        if not other_names:
            return False
        marker = store.read(layout.MARKER)  # another process may have created the registry since the first read
        if marker is None:
            layout.refuse_other(other_names, str(store.root), "give an empty or a new folder")
    layout.check_format(marker, str(store.root))
    return True
