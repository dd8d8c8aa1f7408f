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

from builders.digest import digest_of_file
from pipeline.registry.landing import make_folder

Facts = list[int]

# A file may have several places on several file systems; more are forgotten, oldest first.
_KEPT = 8
# A write within one tick of the kernel's clock leaves the times as they are, so a fresh file rests for some ticks.
_TICKS_S = 0.02


@dataclass(frozen=True)
class Stamps:
    """What was verified, a small file for each digest in `folder`. All may be deleted at any time."""

    folder: Path

    def sound(self, digest: str, path: Path) -> bool:
        """Whether `path` holds the blob: by its stamp, else by its digest. Raises OSError."""
        before = _facts(path)
        if before in self._read(digest):
            return True
        if digest_of_file(path) != digest:
            return False
        if _facts(path)[:4] == before[:4]:
            self.add(digest, path)
        return True

    def add(self, digest: str, path: Path) -> None:
        """Note that `path` was verified just now. What cannot be noted will be digested again."""
        changed = path.stat().st_ctime_ns
        time.sleep(max(0.0, min(_TICKS_S, _TICKS_S - (time.time() - changed / 1e9))))
        found = _facts(path)
        others = [facts for facts in self._read(digest) if facts[:2] != found[:2]]
        with suppress(OSError):
            make_folder(self.folder)
            fresh = self.folder / f".{secrets.token_hex(8)}"
            fresh.write_text(json.dumps([found, *others][:_KEPT]))
            fresh.replace(self.folder / digest)

    def forget(self, digest: str) -> None:
        """Believe nothing that was noted of a blob's files."""
        with suppress(OSError):
            (self.folder / digest).unlink(missing_ok=True)

    def used(self, digest: str) -> None:
        """Note that a blob was used just now."""
        with suppress(OSError):
            make_folder(self.folder)
            (self.folder / digest).touch()

    def last_used(self, digest: str) -> float | None:
        """When that was, in seconds since 1970; None if nothing is known."""
        with suppress(OSError):
            return (self.folder / digest).stat().st_mtime
        return None

    def _read(self, digest: str) -> list[Facts]:
        with suppress(OSError, ValueError, RecursionError):
            found = json.loads((self.folder / digest).read_bytes() or b"[]")
            if isinstance(found, list):
                return [item for item in found if isinstance(item, list) and len(item) == 5]
        return []


def _facts(path: Path) -> Facts:
    facts = os.stat(path)  # noqa: PTH116 - follows links, as reading does
    return [facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns]
