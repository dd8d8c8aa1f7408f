"""Downloads a blob over several connections, digests it on the way, and resumes after a killed process.

A connection asks for a *span* of parts at once, because a request costs time at the server and on the way; the span
shrinks towards the end, so that no connection is left with much while the others are done. Digests are sequential:
parts come in any order, and are digested in theirs. What comes early is kept in memory as far as there is room, and
read back from the file where there is none (it was written a moment ago, and is still the kernel's). So memory is
bounded, and nobody waits for it.

Beside the file lies a journal of the parts that are complete; whoever takes it up reads those from the disk. The
journal is believed only as far as the digest of the whole, at the end, agrees: the caller compares, and starts anew
where it does not.

How many connections a download is worth.

Few are fastest where a machine's own cores are the limit, or a link that they share. A single connection to S3 gives 85
to 90 MB/s at best (https://docs.aws.amazon.com/AmazonS3/latest/userguide/optimizing-performance-guidelines.html), so
where each brings no more than that they are doubled, and doubled again while that pays.
"""

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path

from enginery.registry.store.files import BlobDigest

PART_BYTES = 8 << 20
SPAN_PARTS = 16
# Parts that wait in memory for those before them: 96 MiB.
KEPT_PARTS = 12
_BLOCK_BYTES = 1 << 18
# How long a failed or cancelled download waits for its connections.
_PATIENCE_S = 2.0

# Fills a view with the next bytes, or raises.
Fill = Callable[[memoryview], None]
# Opens the blob at an offset, for so many bytes; called from many threads.
RangeOpener = Callable[[int, int], AbstractContextManager[Fill]]
# Called with the bytes that are downloaded and digested.
ProgressListener = Callable[[int], object]


@dataclass(frozen=True)
class BlobPart:
    """A part of a blob: `size` bytes from offset `start`."""

    number: int
    start: int
    size: int


def parts_of(size_bytes: int, part_bytes: int = PART_BYTES) -> list[BlobPart]:
    """The parts of a blob of `size_bytes`, in order; none for an empty one."""
    starts = range(0, size_bytes, part_bytes)
    return [BlobPart(number, start, min(part_bytes, size_bytes - start)) for number, start in enumerate(starts)]


def journal_of(path: Path) -> Path:
    """The path of the journal of a file that is being downloaded."""
    return path.with_name(f"{path.name}.journal")


def download(
    path: Path,
    blob: BlobDigest,
    size_bytes: int,
    source: RangeOpener,
    listener: ProgressListener,
    *,
    part: int = PART_BYTES,
) -> str:
    """Fill the file `path` with the blob, from what its journal says on, and return the digest of what is there, by the
    blob's algorithm.

    The caller holds a lock: one process at a time works on `path`. Raises what `source` raises, and OSError; what came
    until then is kept.
    """
    parts = parts_of(size_bytes, part)
    with _Journal(journal_of(path), {"digest": blob.name, "size_bytes": size_bytes, "part_bytes": part}) as journal:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            os.ftruncate(fd, size_bytes)
            missing = [item for item in parts if item.number not in journal.done]
            hasher, there = blob.hasher(), 0
            with _Arrivals(fd, missing, source, journal) as arrivals:
                for item in parts:
                    for block in arrivals.wait_for(item) if item in arrivals else _blocks(fd, item):
                        hasher.update(block)
                    there += item.size
                    listener(there)
            return hasher.hexdigest()
        finally:
            os.close(fd)


def _blocks(fd: int, part: BlobPart) -> Iterator[bytes]:
    """What is on disk of a part."""
    end = part.start + part.size
    for start in range(part.start, end, _BLOCK_BYTES):
        yield os.pread(fd, min(_BLOCK_BYTES, end - start), start)


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
    """The missing parts, coming over several connections.

    Threads are daemons with files of their own: one that hangs on a dead connection keeps nobody from ending, and what
    it writes in the end is the same bytes at the same place.
    """

    def __init__(self, fd: int, missing: list[BlobPart], source: RangeOpener, journal: _Journal) -> None:
        self._missing = {part.number for part in missing}
        self._part_bytes = max((part.size for part in missing), default=0)
        self._todo = deque(missing)
        self._source = source
        self._fd, self._marks = os.dup(fd), os.dup(journal.fileno())
        self._changed = threading.Condition()
        # A part that came, and its bytes where there was room for them.
        self._came: dict[int, memoryview | None] = {}
        self._room = min(KEPT_PARTS, len(missing))
        self._spare: list[memoryview] = []
        self._error: BaseException | None = None
        self._stop = False
        count = min(CONNECTIONS, len(missing))
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(count)]
        self._pace = ConnectionScaler(time.monotonic())

    def __contains__(self, part: BlobPart) -> bool:
        return part.number in self._missing

    def __enter__(self) -> "_Arrivals":
        for thread in tuple(self._threads):
            thread.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        with self._changed:
            self._stop = True
        for thread in self._threads:
            thread.join(None if kind is None else _PATIENCE_S / len(self._threads))
        if not any(thread.is_alive() for thread in self._threads):
            os.close(self._fd)
            os.close(self._marks)

    def wait_for(self, part: BlobPart) -> Iterator[memoryview | bytes]:
        """The bytes of a part, which may be looked at until the next step."""
        with self._changed:
            self._changed.wait_for(lambda: self._error or part.number in self._came)
            if self._error:
                raise self._error
            kept = self._came.pop(part.number)
        if kept is None:
            yield from _blocks(self._fd, part)
            return
        yield kept[: part.size]
        with self._changed:
            self._spare.append(kept)

    def _work(self) -> None:
        try:
            block = memoryview(bytearray(min(_BLOCK_BYTES, self._part_bytes)))
            while span := self._next_span():
                size = sum(part.size for part in span)
                with self._source(span[0].start, size) as fill:
                    for part in span:
                        if self._stop:
                            return
                        self._bring(part, fill, block)
                self._hire(size)
        except BaseException as error:  # raised again by who waits
            with self._changed:
                self._error = self._error or error
                self._stop = True
                self._changed.notify()

    def _next_span(self) -> list[BlobPart]:
        """The next missing parts that lie together; none when there are none, or it is over."""
        with self._changed:
            if self._stop:
                return []
            share = -(-len(self._todo) // (2 * len(self._threads)))
            span: list[BlobPart] = []
            while self._todo and len(span) < min(SPAN_PARTS, share):
                if span and self._todo[0].number != span[-1].number + 1:
                    break
                span.append(self._todo.popleft())
            return span

    def _bring(self, part: BlobPart, fill: Fill, block: memoryview) -> None:
        kept = self._memory()
        for at in range(0, part.size, len(block)):
            size = min(len(block), part.size - at)
            view = block[:size] if kept is None else kept[at : at + size]
            fill(view)
            _write(self._fd, view, part.start + at)
        os.write(self._marks, b"%d\n" % part.number)
        with self._changed:
            self._came[part.number] = kept
            self._changed.notify()

    def _memory(self) -> memoryview | None:
        """Room for a part, if there is any."""
        with self._changed:
            if self._spare:
                return self._spare.pop()
            if not self._room:
                return None
            self._room -= 1
        return memoryview(bytearray(self._part_bytes))

    def _hire(self, size: int) -> None:
        """More connections, if that pays. size: of the span that just came."""
        with self._changed:
            count = self._pace.more(size, time.monotonic(), len(self._threads))
            for _ in range(0 if self._stop else min(count, len(self._todo))):
                thread = threading.Thread(target=self._work, daemon=True)
                try:
                    # Under the lock, so that whoever ends it all finds only threads that were started.
                    thread.start()
                except RuntimeError:  # no more threads on this machine: those that there are do it
                    return
                self._threads.append(thread)


def _write(fd: int, data: memoryview, at: int) -> None:
    written = 0
    while written < len(data):
        written += os.pwrite(fd, data[written:], at + written)


CONNECTIONS = 4
MOST_CONNECTIONS = 16
SLOW_BYTES_S = 90e6
# Less than this is no gain from twice the connections, but chance.
_GAIN = 1.25


class ConnectionScaler:
    """Decides how many connections to add from the rate of finished requests. began: time in seconds of any clock."""

    def __init__(self, began: float) -> None:
        self._since, self._bytes, self._requests = began, 0, 0
        self._best = 0.0

    def more(self, size: int, now: float, connections: int) -> int:
        """The number of connections to add, after one of `connections` received `size` bytes at the time `now` (s).

        0 until as many requests have finished as there are connections.
        """
        self._bytes, self._requests = self._bytes + size, self._requests + 1
        if self._requests < connections:
            return 0
        rate = self._bytes / max(now - self._since, 1e-9)
        pays = rate >= _GAIN * self._best
        self._since, self._bytes, self._requests, self._best = now, 0, 0, max(rate, self._best)
        slow = rate < connections * SLOW_BYTES_S
        return min(connections, MOST_CONNECTIONS - connections) if pays and slow else 0
