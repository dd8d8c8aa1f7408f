"""A checked reader and a shared writer of JSON Lines files. The first line describes the file's content.

Files may come from other programs, so lines are read one at a time, within a limit. Several threads and processes may
append at once: every line is one write to a file opened for appending, under a lock (`flock`; on NFS that needs version
4). The next writer removes half a line that a killed writer left.
"""

import fcntl
import hashlib
import json
import math
import os
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from enginesmith.core import parsing
from enginesmith.core.errors import DataError, InputError, UnavailableError

Record = Mapping[str, object]


class JsonLinesReader:
    """The objects of a file, with their line numbers. cut: whether its last line was half written, and left out.
    size: bytes to read, for a file that may grow meanwhile; default: all.
    Iterating raises DataError for a line that is longer than `most_bytes`, is no JSON object, or contains NaN."""

    def __init__(self, path: Path, most_bytes: int, size: int | None = None) -> None:
        self.path, self._most, self.cut = path, most_bytes, False
        self._left, self._hash = sys.maxsize if size is None else size, hashlib.sha256()

    @property
    def digest(self) -> str:
        """SHA-256 of the bytes that were read so far."""
        return self._hash.hexdigest()

    def __iter__(self) -> Iterator[tuple[int, Record]]:
        try:
            with self.path.open("rb") as stream:
                yield from self.of(stream)
        except OSError as error:
            raise DataError(f"{self.path} cannot be read: {error.strerror or error}") from None

    def of(self, stream: BinaryIO) -> Iterator[tuple[int, Record]]:
        """The objects of an open file, with their line numbers. Raises DataError."""
        line_number = 0
        while line := stream.readline(min(self._most + 1, self._left)):
            line_number += 1
            self._left -= len(line)
            self._hash.update(line)
            if len(line) > self._most:
                raise self.error(line_number, f"is longer than {self._most} bytes")
            if line.strip() and (record := self._read(line, line_number)) is not None:
                yield line_number, record

    def error(self, number: int, what: str) -> DataError:
        """The error to raise about a line."""
        return DataError(f"{self.path}:{number}: {what}")

    def _read(self, line: bytes, number: int) -> Record | None:
        try:
            record = json.loads(line, parse_constant=parsing.refuse_constant, object_pairs_hook=parsing.without_twins)
        except (ValueError, RecursionError) as error:
            is_wrong_value = type(error) is ValueError  # a wrong key or number, even in half a line
            if not line.endswith(b"\n") and not is_wrong_value:  # its writer was killed
                self.cut = True
                return None
            raise self.error(number, f"is not JSON ({str(error)[:120]}); remove the line") from None
        if not isinstance(record, dict):
            raise self.error(number, f"is {type(record).__name__}; an object is needed")
        return record


def number_in(record: Record, name: str, *, above: float = -math.inf, most: float = math.inf) -> float:
    """A finite number in a record that is greater than `above`, and at most `most`. Raises ValueError with its name."""
    value = record.get(name)
    if value is None:
        raise ValueError(f"{name} is missing")
    if isinstance(value, bool) or not isinstance(value, int | float) or not -1e300 < value < 1e300:
        raise ValueError(f"{name} is {_shorten(value)}; a finite number is needed")
    if not value > above:
        raise ValueError(f"{name} is {_shorten(value)}; it must be above {above:g}")
    if value > most:
        raise ValueError(f"{name} is {_shorten(value)}; it must be at most {most:g}")
    return float(value)


def truth_in(record: Record, name: str) -> bool:
    """A boolean in a record. Raises ValueError with its name."""
    value = record.get(name)
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {_shorten(value)}; true or false is needed")
    return value


def text_in(record: Record, name: str, max_length: int = 1000) -> str:
    """A text in a record, cut to `max_length` characters; '' if there is none. Raises ValueError."""
    value = record.get(name, "")
    if not isinstance(value, str):
        raise ValueError(f"{name} is {_shorten(value)}; a text is needed")
    return value[:max_length]


def _shorten(value: object) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**20 else "a huge number"
    return text if len(text) <= 60 else text[:57] + "..."


# The beginning of a JSON Lines file; its first object may be half written.
_FIRST_LINE = re.compile(rb'\s*(\{[ \t]*("|\Z)|\Z)')


class LineFile:
    """A file of JSON lines to append to, created readable by its owner only (mode 600). header: its first line.
    most_bytes: the file's maximum size.

    Raises UnavailableError if it cannot be written, InputError for a file with other content, which stays unchanged.
    """

    def __init__(self, path: Path, header: Mapping[str, object], most_bytes: int) -> None:
        self.path = path
        self._header = _line(header)
        self._most = most_bytes
        self._appended = 0
        self._lock = threading.Lock()
        self._pid, self._fd = os.getpid(), self._open()

    @property
    def line_count(self) -> int:
        """The number of lines that this process appended; a forked child's count starts at zero."""
        return self._appended if self._pid == os.getpid() else 0

    @property
    def is_closed(self) -> bool:
        """Whether the file is closed for appending."""
        return self._fd < 0

    def append(self, value: Mapping[str, object]) -> bool:
        """Add a line; False when the file is full. Raises ValueError for NaN, UnavailableError."""
        line_bytes = _line(value)
        with self._lock:
            if self._pid != os.getpid():  # a child must not share its parent's lock
                self._pid, self._fd, self._appended = os.getpid(), self._open(), 0
            try:
                is_appended = self._append(line_bytes)
            except OSError as error:
                raise UnavailableError(f"writing {self.path}: {error.strerror or error}") from error
            self._appended += is_appended
            return is_appended

    def close(self) -> None:
        """Close the file; appended lines stay in it."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def _open(self) -> int:
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UnavailableError(f"opening {self.path}: {error.strerror or error}; name another file") from error
        if os.fstat(fd).st_size and not _FIRST_LINE.match(os.pread(fd, 100, 0)):
            os.close(fd)
            raise InputError(f"{self.path} is not a file of JSON lines, and is left as it is; name another file")
        return fd

    def _append(self, data: bytes) -> bool:
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            size = _cut_half_line(self._fd)
            data = data if size else self._header + data
            if size + len(data) > self._most:
                return False
            if (byte_count := os.write(self._fd, data)) != len(data):
                os.ftruncate(self._fd, size)
                raise OSError(f"only {byte_count} of {len(data)} bytes were written; is the disk full?")
            return True
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)


def _cut_half_line(fd: int) -> int:
    """Remove half a line at the end of a file, if there is one; return the resulting size in bytes."""
    size = os.fstat(fd).st_size
    if size == 0 or os.pread(fd, 1, size - 1) == b"\n":
        return size
    end = size
    while end > 0:
        block_start = max(0, end - (1 << 16))
        if (newline_index := os.pread(fd, end - block_start, block_start).rfind(b"\n")) >= 0:
            end = block_start + newline_index + 1
            break
        end = block_start
    os.ftruncate(fd, end)
    return end


def _line(value: Mapping[str, object]) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode() + b"\n"
