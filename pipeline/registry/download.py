"""A blob over several connections, digested while it comes, and taken up again where a killed process left it.

SHA-256 is sequential: parts come in any order, and are digested in theirs, from memory, while later ones are on their
way. Memory is bounded by the buffers that the parts come into. Beside the file lies a journal of the parts that are
complete; whoever takes it up reads those from the disk. The journal is believed only as far as the digest of the whole,
at the end, agrees: the caller compares, and starts anew where it does not.
"""

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

PART_BYTES = 8 << 20
CONNECTIONS = 8
# More than connections, so that they go on while the oldest part is digested: 10 of 8 MiB.
_SPARE = 2
# How long a failed or cancelled download waits for its connections.
_PATIENCE_S = 2.0

# Fills a view with the blob's bytes from an offset on, or raises; called from many threads.
Source = Callable[[int, memoryview], None]
# Is told the bytes that are there and digested.
Told = Callable[[int], object]


@dataclass(frozen=True)
class Part:
    """A piece of the blob: `size` bytes from `start`."""

    number: int
    start: int
    size: int


def parts_of(size_bytes: int, part_bytes: int = PART_BYTES) -> list[Part]:
    """The parts of a blob, in order; none of an empty one."""
    starts = range(0, size_bytes, part_bytes)
    return [Part(number, start, min(part_bytes, size_bytes - start)) for number, start in enumerate(starts)]


def journal_of(path: Path) -> Path:
    """The journal beside a file that is being downloaded."""
    return path.with_name(f"{path.name}.journal")


def download(path: Path, digest: str, size_bytes: int, source: Source, told: Told, *, part: int = PART_BYTES) -> str:
    """Fill the file `path` with the blob, from what its journal says on, and return the digest of what is there.

    The caller holds a lock: one process at a time works on `path`. Raises what `source` raises, and OSError; what came
    until then is kept.
    """
    parts = parts_of(size_bytes, part)
    with _Journal(journal_of(path), {"digest": digest, "size_bytes": size_bytes, "part_bytes": part}) as journal:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            os.ftruncate(fd, size_bytes)
            missing = [item for item in parts if item.number not in journal.done]
            sha, there = hashlib.sha256(), 0
            with _Arrivals(fd, missing, source, journal, part) as arrivals:
                for item in parts:
                    for block in arrivals.wait_for(item) if item in arrivals else _blocks(fd, item):
                        sha.update(block)
                    there += item.size
                    told(there)
            return sha.hexdigest()
        finally:
            os.close(fd)


def _blocks(fd: int, part: Part, block_bytes: int = 1 << 20) -> Iterator[bytes]:
    """What is on disk of a part."""
    end = part.start + part.size
    for start in range(part.start, end, block_bytes):
        yield os.pread(fd, min(block_bytes, end - start), start)


class _Journal:
    """Which parts are complete: a line of JSON that says of what, then a number a line. A torn last line is no number.

    Not synced: what a power cut makes of it, the digest finds.
    """

    def __init__(self, path: Path, about: dict[str, object]) -> None:
        self._path = path
        self._head = json.dumps(about, sort_keys=True)
        self.done: set[int] = set()

    def __enter__(self) -> "_Journal":
        with suppress(FileNotFoundError):
            head, *lines = self._path.read_text(errors="replace").split("\n")
            self.done = (
                {int(line) for line in lines[:-1] if line.isdecimal() and len(line) < 20}
                if head == self._head
                else set()
            )
        self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
        os.write(self._fd, "\n".join([self._head, *map(str, sorted(self.done)), ""]).encode())
        return self

    def fileno(self) -> int:
        """Where a line is added by one write."""
        return self._fd

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


class _Arrivals:
    """The missing parts, coming over several connections, each into a buffer that is used again.

    A buffer is taken before a part is, and parts are taken in order, so the oldest missing one always has a buffer.
    Threads are daemons with files of their own: one that hangs on a dead connection keeps nobody from ending, and what
    it writes in the end is the same bytes at the same place.
    """

    def __init__(self, fd: int, missing: list[Part], source: Source, journal: _Journal, part_bytes: int) -> None:
        self._missing = {part.number for part in missing}
        self._todo = iter(missing)
        self._source = source
        self._fd, self._marks = os.dup(fd), os.dup(journal.fileno())
        self._changed = threading.Condition()
        self._came: dict[int, memoryview] = {}
        self._error: BaseException | None = None
        self._stop = False
        threads = min(CONNECTIONS, len(missing))
        self._buffers: SimpleQueue[memoryview | None] = SimpleQueue()
        for _ in range(min(threads + _SPARE, len(missing))):
            self._buffers.put(memoryview(bytearray(min(part_bytes, max(part.size for part in missing)))))
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(threads)]

    def __contains__(self, part: Part) -> bool:
        return part.number in self._missing

    def __enter__(self) -> "_Arrivals":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        with self._changed:
            self._stop = True
        for _thread in self._threads:
            self._buffers.put(None)
        for thread in self._threads:
            thread.join(None if kind is None else _PATIENCE_S / len(self._threads))
        if not any(thread.is_alive() for thread in self._threads):
            os.close(self._fd)
            os.close(self._marks)

    def wait_for(self, part: Part) -> Iterator[memoryview]:
        """The bytes of a part, which may be looked at until the next step."""
        with self._changed:
            self._changed.wait_for(lambda: self._error or part.number in self._came)
            if self._error:
                raise self._error
            buffer = self._came.pop(part.number)
        yield buffer[: part.size]
        self._buffers.put(buffer)

    def _work(self) -> None:
        while (buffer := self._buffers.get()) is not None:
            with self._changed:
                part = None if self._stop else next(self._todo, None)
            if part is None:
                return
            try:
                self._bring(part, buffer[: part.size])
            except BaseException as error:  # raised again by who waits
                with self._changed:
                    self._error = self._error or error
                    self._stop = True
                    self._changed.notify()
                return
            with self._changed:
                self._came[part.number] = buffer
                self._changed.notify()

    def _bring(self, part: Part, view: memoryview) -> None:
        self._source(part.start, view)
        written = 0
        while written < part.size:
            written += os.pwrite(self._fd, view[written:], part.start + written)
        os.write(self._marks, b"%d\n" % part.number)
