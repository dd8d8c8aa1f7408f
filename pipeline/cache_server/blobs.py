"""The blobs that a cache keeps on its disk: each is fetched from the registry once, however many clients ask for it.

The first request for a blob starts a *fetch*: `enginesmith.registry.store.download` writes it into the partial file of
a `BlobCache`, under that cache's lock of the digest, so that of several processes one fetches. Requests read the file
as far as it has come; they get bytes before the digest of the whole is known, which harms nobody, because every client
verifies what it gets. The file is kept only if it has the blob's digest: of other bytes the connections that read them
are cut, they are fetched once more, and after that the blob is refused for a while.

A kept blob whose file changed since it was verified is digested before it is served (`BlobCache.open_sound`).
"""

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from enginesmith.core.errors import EnginesmithError, IntegrityError
from enginesmith.registry.store.base import Doubting
from enginesmith.registry.store.cache import BlobCache
from enginesmith.registry.store.download import Fill, download, journal_of
from enginesmith.registry.store.files import BlobDigest
from pipeline.cache_server.counts import CacheCounts
from pipeline.cache_server.origin import NotServedError, Origin, SingleFlight, explain_error

# Blobs that are fetched at the same time; each has half of the connections and of the memory of a single download.
FETCHES = 4
_BESIDE = 2
# How long a blob is refused that the registry gave twice with other bytes.
_REFUSED_S = 30.0
# A kept file is digested again, because a client got other bytes, at most once in so long.
_RECHECK_S = 60.0
_MOST_SIZES = 100_000


class BrokenOffError(Exception):
    """A fetch ended before the bytes that a request waits for came, or they were not the blob's."""


class Fetch:
    """A blob on its way into the cache. All but `_post` is of the loop's thread."""

    def __init__(self, size: int) -> None:
        self.size, self.there = size, 0
        self.fd: int | None = None
        self.over = False
        self.failure: NotServedError | None = None
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def begin(self, partial: Path) -> None:
        """From the fetching thread: this is the file that the bytes go to."""
        fd = os.open(partial, os.O_RDWR | os.O_CREAT, 0o644)
        self._post(lambda: self._take_file(fd))

    def advance(self, there: int) -> None:
        """From the fetching thread: so many bytes from the beginning are in the file."""
        self._post(lambda: self._note_progress(there))

    def end(self, failure: NotServedError | None = None) -> None:
        """No more bytes come; all have, if there is no failure."""
        self.over, self.failure = True, failure
        self._release()
        self._wake()

    async def wait(self) -> None:
        """Wait until something changes."""
        await self._changed.wait()

    def _post(self, change: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(change)

    def _take_file(self, fd: int) -> None:
        self._release()  # a second attempt writes to a new file
        self.fd, self.there = fd, 0
        self._wake()

    def _note_progress(self, there: int) -> None:
        self.there = there
        self._wake()

    def _release(self) -> None:
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class OpenBlob:
    """A blob that is being read: a descriptor of its own, and the fetch where it is not whole yet.

    result: 'hit', 'shared' or 'miss', for the count.
    """

    def __init__(self, fd: int, size: int, result: str, fetch: Fetch | None = None) -> None:
        self.fd, self.size, self.result = fd, size, result
        self._fetch, self._source = fetch, None if fetch is None else fetch.fd

    async def reach(self, start: int) -> int:
        """The end of the bytes that are there, once that is beyond `start`. Raises BrokenOffError."""
        while (fetch := self._fetch) is not None:
            if fetch.over and fetch.failure is None:
                break
            if fetch.over or fetch.fd != self._source:
                raise BrokenOffError
            if fetch.there > start:
                return fetch.there
            await fetch.wait()
        return self.size

    def close(self) -> None:
        """Let the file be evicted."""
        os.close(self.fd)


class Blobs:
    """cache: where whole blobs lie, within its bound; what is being fetched comes on top of that."""

    def __init__(self, origin: Origin, cache: BlobCache, counts: CacheCounts) -> None:
        self._origin, self._cache, self._counts = origin, cache, counts
        self._threads = ThreadPoolExecutor(FETCHES, "fetch")
        self._fetches: dict[str, Fetch] = {}
        self._sizes: dict[str, int] = {}
        self._refused: dict[str, tuple[float, NotServedError]] = {}
        self._rechecked: dict[str, float] = {}
        self._questions = SingleFlight[int | None]()
        self._stopping = False

    async def size(self, digest: str) -> int:
        """Size of a blob in bytes. Raises NotServedError: 404 if the registry does not have it."""
        if (kept := await self._origin.run(lambda: self._cache.size_of(digest))) is not None:
            return kept
        if (known := self._sizes.get(digest)) is not None:
            return known
        found = await self._questions.once(
            digest, lambda: self._origin.ask("size", lambda store: store.stored_size(digest))
        )
        if found is None:
            raise NotServedError(404, "the registry does not have this blob")
        if len(self._sizes) >= _MOST_SIZES:
            self._sizes.clear()
        self._sizes[digest] = found
        return found

    async def open(self, digest: str) -> OpenBlob:
        """Open a blob, which is fetched if it is not kept. Raises NotServedError."""
        result = "hit"
        while True:
            stream = await self._origin.run(lambda: self._cache.open_sound(digest, self._counts.damaged.inc))
            if stream is not None:
                with stream:
                    return OpenBlob(os.dup(stream.fileno()), os.fstat(stream.fileno()).st_size, result)
            fetch, result = self._fetches.get(digest), "shared"
            if fetch is None:
                size, result = await self._fetchable_size(digest), "miss"
                # Another request may have started it meanwhile.
                fetch = self._fetches.get(digest) or self._start(digest, size)
            while fetch.fd is None and not fetch.over:
                await fetch.wait()
            if fetch.failure is not None:
                raise fetch.failure
            if fetch.fd is not None:
                return OpenBlob(os.dup(fetch.fd), fetch.size, result, fetch)

    async def recheck(self, digest: str) -> None:
        """Digest a kept blob's file again, and delete it if it holds other bytes."""
        now = time.monotonic()
        if now - self._rechecked.get(digest, -_RECHECK_S) < _RECHECK_S:
            return
        if len(self._rechecked) >= _MOST_SIZES:
            self._rechecked.clear()
        self._rechecked[digest] = now
        if await self._origin.run(lambda: self._is_damaged(digest)):
            self._counts.damaged.inc()

    def stop(self) -> None:
        """End the fetches; what has come of them is taken up by the next process."""
        self._stopping = True
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _is_damaged(self, digest: str) -> bool:
        if self._cache.size_of(digest) is None:
            return False
        self._cache.verifications.forget(BlobDigest(digest))
        if (stream := self._cache.open_sound(digest)) is None:
            return True
        stream.close()
        return False

    async def _fetchable_size(self, digest: str) -> int:
        until, failure = self._refused.get(digest, (0.0, NotServedError(0, "")))
        if time.monotonic() < until:
            raise failure
        size = await self.size(digest)
        if size > self._cache.limit_bytes:
            raise NotServedError(413, f"this blob has {size} bytes, and this cache keeps {self._cache.limit_bytes}")
        return size

    def _start(self, digest: str, size: int) -> Fetch:
        fetch = self._fetches[digest] = Fetch(size)
        self._counts.fetching.inc()
        loop = asyncio.get_running_loop()
        running = loop.run_in_executor(self._threads, lambda: self._fetch(digest, fetch))

        def finish(done: "asyncio.Future[None]") -> None:
            self._fetches.pop(digest, None)
            self._counts.fetching.dec()
            fetch.end(self._failure(digest, None if done.cancelled() else done.exception()))

        running.add_done_callback(finish)
        return fetch

    def _failure(self, digest: str, error: BaseException | None) -> NotServedError | None:
        if error is None:
            return None
        self._counts.origin_errors.labels("blob").inc()
        if isinstance(error, EnginesmithError):
            found = explain_error(error)
        else:  # a full disk, a stop
            found = NotServedError(503, f"the cache cannot keep this blob: {getattr(error, 'strerror', None) or error}")
        if isinstance(error, IntegrityError):
            now = time.monotonic()
            self._refused = {name: known for name, known in self._refused.items() if known[0] > now}
            self._refused[digest] = now + _REFUSED_S, found
        return found

    def _fetch(self, digest: str, fetch: Fetch) -> None:
        """In a thread: bring the blob into the cache, unless another process has done so meanwhile."""
        with self._cache.hold_verified(BlobDigest(digest), lambda partial: self._bring(digest, fetch, partial)):
            pass

    def _bring(self, digest: str, fetch: Fetch, partial: Path) -> str:
        """Download the blob to `partial`, once more where other bytes came; returns the digest of what is there."""
        store, found = self._origin.store(), ""
        for _ in range(2):
            fetch.begin(partial)
            self._counts.origin_requests.labels("blob").inc()
            found = download(
                partial,
                BlobDigest(digest),
                fetch.size,
                lambda start, size: self._count_range(digest, start, size),
                lambda there: self._advance(fetch, there),
                beside=_BESIDE,
            )
            journal_of(partial).unlink()
            if found == digest:
                return found
            self._counts.damaged.inc()
            partial.unlink()
            if isinstance(store, Doubting):
                store.doubt(digest)
        raise IntegrityError(f"the registry gives other bytes of this blob (their digest is {found})")

    def _advance(self, fetch: Fetch, there: int) -> None:
        if self._stopping:
            raise BrokenOffError("it is stopping")
        fetch.advance(there)

    @contextmanager
    def _count_range(self, digest: str, start: int, size: int) -> Iterator[Fill]:
        with self._origin.store().open_range(digest, start, size) as fill:

            def count(into: memoryview) -> None:
                fill(into)
                self._counts.origin_bytes.inc(len(into))

            yield count
