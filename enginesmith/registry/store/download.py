"""Downloads a blob over several connections, digests it on the way, and resumes after a killed process.

The blob is divided into parts of 8 MiB. A connection requests a *span* of several parts at once, because each request
has a latency; spans shrink towards the end, so that all connections finish at about the same time. Parts arrive in any
order and are digested in ascending order: a part that arrives early is kept in memory while there is room
(`KEPT_PARTS`), and is otherwise read back from the file, most likely from the page cache. So memory is bounded, and no
connection waits.

A journal beside the file lists the complete parts; a later download of the same blob reads those from the disk. The
journal is not trusted: the caller compares the digest of the whole, and starts anew if it differs.

The download starts with 4 connections, because few are fastest if the machine's cores or a shared link are the limit.
One connection to S3 reaches at most 85 to 90 MB/s
(https://docs.aws.amazon.com/AmazonS3/latest/userguide/optimizing-performance-guidelines.html). So if each gives no more
than that, they are doubled, up to 16, as long as that raises the rate.
"""

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from enginesmith.registry.store.files import BlobDigest

PART_BYTES = 8 << 20
SPAN_PARTS = 16
# Parts that are kept in memory until all earlier ones are digested: 96 MiB.
KEPT_PARTS = 12
_BLOCK_BYTES = 1 << 18
# How long a failed or cancelled download waits for its connections to end.
_PATIENCE_S = 2.0

CONNECTIONS = 4
MOST_CONNECTIONS = 16
SLOW_BYTES_S = 90e6
# The least gain in rate from doubling the connections that is not attributed to chance.
_GAIN = 1.25

# Fills a view with the next bytes, or raises.
Fill = Callable[[memoryview], None]
# Opens the blob at an offset for a number of bytes; called from many threads.
RangeOpener = Callable[[int, int], AbstractContextManager[Fill]]
# Called with the bytes that are downloaded and digested.
ProgressListener = Callable[[int], object]


@dataclass(frozen=True)
class BlobPart:
    """A part of a blob: `size` bytes from `offset`."""

    number: int
    offset: int
    size: int


def parts_of(size_bytes: int, part_bytes: int = PART_BYTES) -> list[BlobPart]:
    """The parts of a blob of `size_bytes`, in order; empty for an empty blob."""
    offsets = range(0, size_bytes, part_bytes)
    return [BlobPart(number, offset, min(part_bytes, size_bytes - offset)) for number, offset in enumerate(offsets)]


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
    beside: int = 1,
) -> str:
    """Download the parts of a blob that are missing from the file `path`, and return the digest of its content by the
    blob's algorithm.

    listener: called with the number of bytes digested so far.  beside: number of simultaneous downloads, including this
    one, which share the connections and the memory of one. The caller holds a lock, so that one process at a time
    writes to `path`. Raises what `source` raises, and OSError; complete parts are kept.
    """
    parts = parts_of(size_bytes, part)
    header: dict[str, object] = {"digest": blob.name, "size_bytes": size_bytes, "part_bytes": part}
    with _open_journal(journal_of(path), header) as (done_numbers, journal):
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            os.ftruncate(fd, size_bytes)
            missing_parts = [blob_part for blob_part in parts if blob_part.number not in done_numbers]
            hasher, done_bytes = blob.hasher(), 0
            with _Arrivals(fd, missing_parts, source, journal, beside) as arrivals:
                for blob_part in parts:
                    for block in arrivals.wait_for(blob_part) if blob_part in arrivals else _blocks(fd, blob_part):
                        hasher.update(block)
                    done_bytes += blob_part.size
                    listener(done_bytes)
            return hasher.hexdigest()
        finally:
            os.close(fd)


def _blocks(fd: int, part: BlobPart) -> Iterator[bytes]:
    """The bytes of a part in the file, in blocks."""
    end = part.offset + part.size
    for offset in range(part.offset, end, _BLOCK_BYTES):
        yield os.pread(fd, min(_BLOCK_BYTES, end - offset), offset)


@contextmanager
def _open_journal(path: Path, facts: dict[str, object]) -> Iterator[tuple[set[int], int]]:
    """Open the journal of the blob with these facts; gives the numbers of complete parts, and a descriptor to append
    to.

    The first line is `facts` as JSON, each further line a number; an incomplete last line is ignored. It is not synced:
    the final digest detects losses.
    """
    header_line, done_numbers = json.dumps(facts, sort_keys=True), set[int]()
    with suppress(FileNotFoundError):
        first_line, *lines = path.read_text(errors="replace").split("\n")
        if first_line == header_line:
            done_numbers = {int(line) for line in lines[:-1] if line.isdecimal() and len(line) < 20}
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
    try:
        os.write(fd, "\n".join([header_line, *map(str, sorted(done_numbers)), ""]).encode())
        yield done_numbers, fd
    finally:
        os.close(fd)


class _Arrivals:
    """The missing parts, which several connections download at once.

    fd, journal: descriptors of the file and its journal. Threads are daemons with their own descriptors. A thread that
    hangs on a dead connection delays the process's end by at most `_PATIENCE_S`; if it writes later, it writes the same
    bytes at the same offset.
    """

    def __init__(self, fd: int, parts: list[BlobPart], source: RangeOpener, journal: int, beside: int = 1) -> None:
        self._missing = {part.number for part in parts}
        self._part_bytes = max((part.size for part in parts), default=0)
        self._todo = deque(parts)
        self._source = source
        self._fd, self._marks = os.dup(fd), os.dup(journal)
        self._changed = threading.Condition()
        # Number of each part that has arrived -> its bytes, or None if there was no room for them.
        self._came: dict[int, memoryview | None] = {}
        self._room = min(max(1, KEPT_PARTS // beside), len(parts))
        # Shorter requests show the rate sooner, since each download begins with few connections.
        self._span = max(1, SPAN_PARTS // beside)
        self._spare: list[memoryview] = []
        self._error: BaseException | None = None
        self._stop = False
        count = min(max(1, CONNECTIONS // beside), len(parts))
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(count)]
        self._pace = ConnectionScaler(time.monotonic(), max(1, MOST_CONNECTIONS // beside))

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
        """The bytes of a part, in blocks that are valid until the next one is requested. Raises what a connection
        raised."""
        with self._changed:
            self._changed.wait_for(lambda: self._error or part.number in self._came)
            if self._error:
                raise self._error
            part_buffer = self._came.pop(part.number)
        if part_buffer is None:
            yield from _blocks(self._fd, part)
            return
        yield part_buffer[: part.size]
        with self._changed:
            self._spare.append(part_buffer)

    def _work(self) -> None:
        try:
            block = memoryview(bytearray(min(_BLOCK_BYTES, self._part_bytes)))
            while span := self._next_span():
                span_bytes = sum(part.size for part in span)
                with self._source(span[0].offset, span_bytes) as fill:
                    for part in span:
                        if self._stop:
                            return
                        self._bring(part, fill, block)
                self._hire(span_bytes)
        except BaseException as error:  # `wait_for` raises it again
            with self._changed:
                self._error = self._error or error
                self._stop = True
                self._changed.notify()

    def _next_span(self) -> list[BlobPart]:
        """The next adjacent missing parts; empty if there are none, or the download was stopped."""
        with self._changed:
            if self._stop:
                return []
            span_limit = -(-len(self._todo) // (2 * len(self._threads)))
            span: list[BlobPart] = []
            while self._todo and len(span) < min(self._span, span_limit):
                if span and self._todo[0].number != span[-1].number + 1:
                    break
                span.append(self._todo.popleft())
            return span

    def _bring(self, part: BlobPart, fill: Fill, block: memoryview) -> None:
        part_buffer = self._memory()
        for part_offset in range(0, part.size, len(block)):
            size = min(len(block), part.size - part_offset)
            view = block[:size] if part_buffer is None else part_buffer[part_offset : part_offset + size]
            fill(view)
            _write(self._fd, view, part.offset + part_offset)
        os.write(self._marks, b"%d\n" % part.number)
        with self._changed:
            self._came[part.number] = part_buffer
            self._changed.notify()

    def _memory(self) -> memoryview | None:
        """Memory for one part; None if `KEPT_PARTS` are kept already."""
        with self._changed:
            if self._spare:
                return self._spare.pop()
            if not self._room:
                return None
            self._room -= 1
        return memoryview(bytearray(self._part_bytes))

    def _hire(self, size: int) -> None:
        """Start more connections if that raises the rate. size: of the span that just arrived, in bytes."""
        with self._changed:
            count = self._pace.more(size, time.monotonic(), len(self._threads))
            for _ in range(0 if self._stop else min(count, len(self._todo))):
                thread = threading.Thread(target=self._work, daemon=True)
                # Under the lock, so that `__exit__` finds only threads that were started.
                with suppress(RuntimeError):  # the machine allows no more threads: the others continue
                    thread.start()
                    self._threads.append(thread)


def _write(fd: int, data: memoryview, offset: int) -> None:
    byte_count = 0
    while byte_count < len(data):
        byte_count += os.pwrite(fd, data[byte_count:], offset + byte_count)


class ConnectionScaler:
    """Decides from the rate of finished requests how many connections to add. began: time in seconds on any clock."""

    def __init__(self, began: float, max_connections: int = MOST_CONNECTIONS) -> None:
        self._most = max_connections
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
        is_faster = rate >= _GAIN * self._best
        self._since, self._bytes, self._requests, self._best = now, 0, 0, max(rate, self._best)
        is_slow = rate < connections * SLOW_BYTES_S
        return min(connections, self._most - connections) if is_faster and is_slow else 0
