"""Whether a file that was verified is still the same, without reading it again.

Digesting a gigabyte takes seconds; that a file was not written since takes one look: device, inode, size, and the
times of the last change of its content and of its inode, and the latter no program can set back. What differs in any of
them is digested again. (So does git decide which files it looks into.) What this cannot see is a disk that changes bits
by itself: `--rehash` looks into every file.
"""

import json
import os
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from enginery.registry.store.atomic_write import make_folder
from enginery.registry.store.blob_digest import BlobDigest

Facts = list[int]

# A file may have several places on several file systems; more are forgotten, oldest first.
_KEPT = 8
# A write within one tick of the kernel's clock leaves the times as they are, so a fresh file rests for some ticks.
_TICKS_S = 0.02


@dataclass(frozen=True)
class VerificationCache:
    """Records of verified files, one small file in `folder` for each `BlobDigest.name`: a record of a BLAKE3 says
    nothing about the SHA-256 that a manifest pairs it with. All may be deleted at any time."""

    folder: Path

    def is_verified(self, blob: BlobDigest, path: Path) -> bool:
        """Whether a file holds the blob: by its record or its SHA-256's, else by digesting it. Raises OSError."""
        before = _facts(path)
        if before in self._read(blob.name) or before in self._read(blob.sha256_only.name):
            return True
        if not blob.matches(path):
            return False
        if _facts(path)[:4] == before[:4]:
            self.add(blob, path)
        return True

    def add(self, blob: BlobDigest, path: Path) -> None:
        """Record that `path` was verified just now. Where that cannot be written, it will be digested again."""
        changed = path.stat().st_ctime_ns
        time.sleep(max(0.0, min(_TICKS_S, _TICKS_S - (time.time() - changed / 1e9))))
        found = _facts(path)
        others = [facts for facts in self._read(blob.name) if facts[:2] != found[:2]]
        with suppress(OSError):
            make_folder(self.folder)
            fresh = self.folder / f".{secrets.token_hex(8)}"
            fresh.write_text(json.dumps([found, *others][:_KEPT]))
            fresh.replace(self.folder / blob.name)

    def forget(self, blob: BlobDigest) -> None:
        """Delete the records of a blob's files."""
        for name in {blob.name, blob.sha256_only.name}:
            with suppress(OSError):
                (self.folder / name).unlink(missing_ok=True)

    def note_use(self, name: str) -> None:
        """Note that what is kept under a blob's name was used just now."""
        with suppress(OSError):
            make_folder(self.folder)
            (self.folder / name).touch()

    def last_used(self, name: str) -> float | None:
        """When a blob was last used, in seconds since 1970; None if it is unknown."""
        with suppress(OSError):
            return (self.folder / name).stat().st_mtime
        return None

    def _read(self, name: str) -> list[Facts]:
        with suppress(OSError, ValueError, RecursionError):
            found = json.loads((self.folder / name).read_bytes() or b"[]")
            if isinstance(found, list):
                return [item for item in found if isinstance(item, list) and len(item) == 5]
        return []


def _facts(path: Path) -> Facts:
    facts = os.stat(path)  # noqa: PTH116 - follows links, as reading does
    return [facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns]
