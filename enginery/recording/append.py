"""Lines added to a file by several threads and processes at once, each whole or not at all.

Every line is one write to a file opened for appending, under a lock (`flock`; on NFS that needs version 4). What a
killed writer left of a line is taken back by the next one. The first line says what the file holds.
"""

import fcntl
import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from enginery.core.errors import UnavailableError

_LOOK_BACK = 1 << 16


class LineFile:
    """A file of JSON lines, made for its owner's eyes only (mode 600). most_bytes: it never grows beyond that.

    Raises UnavailableError where it cannot be written.
    """

    def __init__(self, path: Path, header: Mapping[str, Any], most_bytes: int) -> None:
        self.path = path
        self._header = _line(header)
        self._most = most_bytes
        self._appended = 0
        self._lock = threading.Lock()
        self._pid, self._fd = os.getpid(), self._open()

    @property
    def appended(self) -> int:
        """How many lines this process appended; a forked child's count starts at zero."""
        return self._appended if self._pid == os.getpid() else 0

    @property
    def closed(self) -> bool:
        """Whether nothing can be appended any more."""
        return self._fd < 0

    def append(self, value: Mapping[str, Any]) -> bool:
        """Add a line; False when the file is full. Raises ValueError for NaN, UnavailableError."""
        data = _line(value)
        with self._lock:
            if self._pid != os.getpid():  # a child must not share its parent's lock
                self._pid, self._fd, self._appended = os.getpid(), self._open(), 0
            try:
                kept = self._append(data)
            except OSError as error:
                raise UnavailableError(f"writing {self.path}: {error.strerror or error}") from error
            self._appended += kept
            return kept

    def close(self) -> None:
        """Close the file; what was appended stays."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def _open(self) -> int:
        try:
            return os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UnavailableError(f"opening {self.path}: {error.strerror or error}; name another file") from error

    def _append(self, data: bytes) -> bool:
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            size = _whole_lines(self._fd)
            data = data if size else self._header + data
            if size + len(data) > self._most:
                return False
            if (written := os.write(self._fd, data)) != len(data):
                os.ftruncate(self._fd, size)
                raise OSError(f"only {written} of {len(data)} bytes were written; is the disk full?")
            return True
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)


def _whole_lines(fd: int) -> int:
    """The file's size once half a line at its end is cut off."""
    size = os.fstat(fd).st_size
    if size == 0 or os.pread(fd, 1, size - 1) == b"\n":
        return size
    end = size
    while end > 0:
        start = max(0, end - _LOOK_BACK)
        if (found := os.pread(fd, end - start, start).rfind(b"\n")) >= 0:
            end = start + found + 1
            break
        end = start
    os.ftruncate(fd, end)
    return end


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode() + b"\n"
