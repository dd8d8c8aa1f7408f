"""Work folders that go away, even after a SIGKILL: the next one made on the same host removes those left behind.

The process that uses a folder holds a lock (flock(2)) on a file in it, which the kernel drops when that process dies,
however it dies. So a folder whose lock can be taken is in use by no process.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from enginesmith.core.errors import UnavailableError

_PREFIX = "enginesmith-"
_LOCK = ".in-use"


@contextmanager
def workdir() -> Iterator[Path]:
    """A fresh folder under the system's temporary folder, removed at the end. Raises UnavailableError without room."""
    try:
        folder, lock = _make()
    except OSError as error:
        raise UnavailableError(f"cannot make a work folder: {error}; free some space or set TMPDIR") from error
    try:
        remove_left_behind(folder.parent)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def require_plain(folder: Path, title: str) -> None:
    """Raise UnavailableError for a path with white space, for compilers that give their linker a line of words."""
    if any(char.isspace() for char in str(folder)):
        raise UnavailableError(
            f"{title} cannot work in {str(folder)!r}, whose path has a space; set TMPDIR to one without"
        )


def remove_left_behind(parent: Path) -> None:
    """Remove the work folders under `parent` whose process is gone; other users' are left alone."""
    for lock_path in parent.glob(f"{_PREFIX}*/{_LOCK}"):
        try:
            lock = os.open(lock_path, os.O_RDWR)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock_path.parent, ignore_errors=True)
        except BlockingIOError:
            continue  # in use
        finally:
            os.close(lock)


def _make() -> tuple[Path, int]:
    """A new folder, and the lock on it. Until it is locked another process may remove it as one left behind."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / _LOCK).exists():
            return folder, lock
        os.close(lock)
