"""Blobs kept on this machine, shared by all its processes: what came over the network once need not come again.

A blob enters verified, under a lock of its own, so that of many processes that want it one fetches it. The cache is
bounded: the blobs that were not used for longest go first, and never one that somebody is reading. Everything in it can
be deleted at any time. What a manifest's BLAKE3 verified is kept under the name of that pair (see `seals`), and becomes
the blob of its SHA-256 only when somebody wants that and it was digested. (`flock`, so: Linux and other Unixes; on NFS
it needs version 4.)
"""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from enginery.core.errors import InputError, IntegrityError
from enginery.registry.store.atomic_write import landing, make_folder, settle, sweep
from enginery.registry.store.blob_digest import Seal
from enginery.registry.store.download import journal_of
from enginery.registry.store.keys import check_digest
from enginery.registry.store.verification_cache import Stamps

DEFAULT_BYTES = 16 << 30
# After a week nobody comes back to a download.
PARTIAL_S = 7 * 24 * 3600.0
# Locks are shared by digests of equal beginning, so that their number has a bound.
_LOCK_DIGITS = 3

# Writes a blob's bytes into a stream and returns the digest of what it wrote.
Download = Callable[[BinaryIO], str]
# Writes a blob's bytes into a file, which may hold some of them, and returns the digest of what is there then.
Bring = Callable[[Path], str]


@dataclass(frozen=True)
class BlobCache:
    """A cache in `folder` of at most `limit_bytes`, of which only a blob that is being used may go beyond."""

    folder: Path
    limit_bytes: int = DEFAULT_BYTES

    @contextmanager
    def held(self, digest: str, download: Download) -> Iterator[Path]:
        """A blob's file, to be read only, which stays while this is open; `download` is called where it is absent.

        The file was verified when it came. Raises IntegrityError when other bytes came, OSError when the cache's disk
        is full or read-only, and whatever `download` raises.
        """
        path = self._blob(check_digest(digest))
        stream = _shared(path) or self._filled(digest, path, download)
        try:
            self.stamps.used(digest)
            yield path
        finally:
            stream.close()

    @contextmanager
    def verified(self, seal: Seal, bring: Bring, *, rehash: bool = False) -> Iterator[tuple[Path, Seal]]:
        """Like `held`, of a file that is the blob's for certain: what changed since it was verified is digested again.

        Gives the file, and the seal it was verified by: `seal`, or its SHA-256. It may be linked to while this is open,
        under a lock of the digest's own. `bring` is given the file to write to, which is kept with what it holds when
        `bring` fails, and returns the digest of what is there.
        """
        for folder in ("blobs", "locks", "partial"):
            make_folder(self.folder / folder)
        with self._locked(seal.digest):
            if rehash:
                self.stamps.forget(seal)
            found = self._sound(seal)
            if found is None:
                self._bring(seal, bring)
                found = seal
            self.stamps.used(found.name)
            yield self._blob(found.name), found
        self._evict()

    @property
    def stamps(self) -> Stamps:
        """What is known of files that were verified."""
        return Stamps(self.folder / "stamps")

    def holds(self, digest: str) -> bool:
        """Whether a blob is here."""
        return self._blob(check_digest(digest)).is_file()

    def drop(self, digest: str) -> None:
        """Forget a blob, as when its file turns out to be damaged."""
        with suppress(FileNotFoundError):
            self._blob(check_digest(digest)).unlink()

    def give_up(self, seal: Seal) -> None:
        """Delete what came of a blob until now."""
        partial = self.folder / "partial" / seal.name
        for path in (partial, journal_of(partial)):
            with suppress(OSError):
                path.unlink()

    def _blob(self, name: str) -> Path:
        return self.folder / "blobs" / name

    def _sound(self, seal: Seal) -> Seal | None:
        """The seal under which the blob is here, sound: its SHA-256's if need be. What is damaged goes."""
        for known in dict.fromkeys((seal.named, seal)):
            path = self._blob(known.name)
            if path.is_file():
                if self.stamps.sound(known, path):
                    return known
                path.unlink()
        return seal if seal == seal.named and self._adopted(seal) else None

    def _adopted(self, seal: Seal) -> bool:
        """Whether a file that came by some manifest's BLAKE3 has this SHA-256; from now on it is the blob."""
        for path in sorted((self.folder / "blobs").glob(f"{seal.name}-*")):
            if seal.holds(path):
                path.replace(self._blob(seal.name))
                self.stamps.add(seal, self._blob(seal.name))
                return True
        return False

    def _filled(self, digest: str, path: Path, download: Download) -> BinaryIO:
        """The blob's file, locked against eviction; downloaded unless another process just did that."""
        for folder in ("blobs", "locks", "tmp"):
            make_folder(self.folder / folder)
        with self._locked(digest):
            # Again, because another process may have brought it, or have evicted it right after this one did.
            while (stream := _shared(path)) is None:
                if not self._adopted(Seal(digest)):
                    self._download(digest, path, download)
        self._evict()
        return stream

    @contextmanager
    def _locked(self, digest: str) -> Iterator[None]:
        with (self.folder / "locks" / digest[:_LOCK_DIGITS]).open("ab") as lock:
            fcntl.flock(lock.fileno(), fcntl.LOCK_EX)
            yield

    def _bring(self, seal: Seal, bring: Bring) -> None:
        partial, path = self.folder / "partial" / seal.name, self._blob(seal.name)
        self._forget_partials(seal.name)
        found = bring(partial)
        if found != seal.expected:
            raise IntegrityError(
                f"blob {seal.digest} came as other bytes (their {seal.algorithm} is {found}); it was not kept"
            )
        settle(partial, path, read_only=True)
        self.stamps.add(seal, path)

    def _forget_partials(self, but: str) -> None:
        """Delete what of other blobs was given up: nobody added to it for a week."""
        for entry in os.scandir(self.folder / "partial"):
            with suppress(FileNotFoundError):
                if not entry.name.startswith(but) and entry.stat().st_mtime < time.time() - PARTIAL_S:
                    Path(entry.path).unlink()

    def _download(self, digest: str, path: Path, download: Download) -> None:
        sweep(self.folder / "tmp")
        with landing(self.folder / "tmp") as file:
            found = download(file.stream)
            if found != digest:
                raise IntegrityError(f"blob {digest} came as other bytes (their digest is {found}); it was not kept")
            file.land(path, read_only=True)

    def _entries(self) -> Iterator[tuple[float, int, Path]]:
        """When each blob was last used, its size, and its file."""
        for entry in os.scandir(self.folder / "blobs"):
            with suppress(FileNotFoundError):
                facts, used = entry.stat(), self.stamps.last_used(entry.name)
                yield facts.st_mtime if used is None else used, facts.st_size, Path(entry.path)

    def _evict(self) -> None:
        """Delete what was not used for longest until the rest fits; what is being read is left."""
        found = sorted(self._entries())
        excess = sum(size for _, size, _ in found) - self.limit_bytes
        for _, size, path in found:
            if excess <= 0:
                return
            excess -= size if _unused_and_deleted(path) else 0


def local_cache() -> BlobCache | None:
    """This machine's cache: in ENGINERY_CACHE, else $XDG_CACHE_HOME/enginery, else ~/.cache/enginery, of at most
    ENGINERY_CACHE_BYTES (default 16 GiB). None when that is 0. Raises InputError when it is no number."""
    text = os.environ.get("ENGINERY_CACHE_BYTES", "").strip()
    if text and not text.isdecimal():
        raise InputError(f"ENGINERY_CACHE_BYTES is {text!r}; give a number of bytes, or 0 for no cache")
    limit = int(text) if text else DEFAULT_BYTES
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = os.environ.get("ENGINERY_CACHE") or f"{home}/enginery"
    return BlobCache(Path(os.path.abspath(os.path.expanduser(folder))), limit) if limit else None  # noqa: PTH100, PTH111


def _shared(path: Path) -> BinaryIO | None:
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


def _unused_and_deleted(path: Path) -> bool:
    with suppress(OSError), path.open("rb") as stream:
        fcntl.flock(stream.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
        return True
    return False
