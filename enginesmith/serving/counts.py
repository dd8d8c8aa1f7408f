"""Counts of a router, and compiles in the background."""

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Condition, Lock

from enginesmith.core.errors import EnginesmithError
from enginesmith.core.text import WorkerThread, describe_error
from enginesmith.core.types import Tensors
from enginesmith.serving.drift import RateDrift, RateDriftDetector

# What a router counted: requests of each bucket, padding, fallbacks, and the time that compiles took.


@dataclass(frozen=True)
class BucketCount:
    """The requests of a bucket. elements: of their inputs as given.  padding: elements that were added to those."""

    name: str
    requests: int
    elements: int
    padding: int


@dataclass(frozen=True)
class CompileCounts:
    """What compiling for single sizes came to. failed: compiles that gave an error.  held: compiled sizes that are
    held now.  evicted: those that made room for others.

    seconds: of all compiles, in the background.  waited_s: seconds that requests waited for one.  reason: why the last
    one that failed did; '' where none did.
    """

    compiled: int = 0
    failed: int = 0
    held: int = 0
    evicted: int = 0
    seconds: float = 0.0
    waited_s: float = 0.0
    reason: str = ""


@dataclass(frozen=True)
class RouterCounts:
    """What a router counted since it was made. fallbacks: name of a fallback -> requests that it answered.

    unanswered: requests that no bucket held and no fallback answered.  errors: requests whose engine raised an error.
    padding_share: of all elements that engines ran on in buckets, those that were padding.  fallback_rate: share of
    the requests that no bucket held.  drift: the alarm on that rate; None where there was none.
    """

    buckets: tuple[BucketCount, ...]
    fallbacks: Mapping[str, int]
    unanswered: int
    errors: int
    compiles: CompileCounts
    drift: RateDrift | None
    requests: int = field(init=False)
    padding_share: float = field(init=False)
    fallback_rate: float = field(init=False)

    def __post_init__(self) -> None:
        fallen = sum(self.fallbacks.values()) + self.unanswered
        requests = sum(bucket.requests for bucket in self.buckets) + fallen
        padding = sum(bucket.padding for bucket in self.buckets)
        elements = padding + sum(bucket.elements for bucket in self.buckets)
        object.__setattr__(self, "requests", requests)
        object.__setattr__(self, "padding_share", padding / elements if elements else 0.0)
        object.__setattr__(self, "fallback_rate", fallen / requests if requests else 0.0)


class RequestCounter:
    """Counts the requests of a router; for several threads at once. buckets, fallbacks: their names."""

    def __init__(self, buckets: tuple[str, ...], fallbacks: tuple[str, ...], detector: RateDriftDetector) -> None:
        self._lock, self._detector = Lock(), detector
        self._names, self._rows = buckets, [[0, 0, 0] for _ in buckets]
        self._fallbacks = dict.fromkeys(fallbacks, 0)
        self._unanswered = self._errors = 0

    def add(self, bucket: int, own: int, padded: int, requests: int = 1) -> RateDrift | None:
        """Count requests that bucket number `bucket` holds: elements as given, and as run; the alarm, if they raise
        one."""
        with self._lock:
            row = self._rows[bucket]
            row[0] += requests
            row[1] += own
            row[2] += padded - own
            return self._detector.add(False) if requests == 1 else self._detect(False, requests)

    def add_fallback(self, name: str | None, requests: int = 1) -> RateDrift | None:
        """Count requests that no bucket holds, with the fallback that answered them, if any; the alarm, if they raise
        one."""
        with self._lock:
            if name is None:
                self._unanswered += requests
            else:
                self._fallbacks[name] += requests
            return self._detect(True, requests)

    def _detect(self, counts: bool, requests: int) -> RateDrift | None:
        """The alarm of these requests, if any."""
        return next(filter(None, [self._detector.add(counts) for _ in range(requests)]), None)

    def add_error(self) -> None:
        """Count an error of an engine."""
        with self._lock:
            self._errors += 1

    def counts(self, compiles: CompileCounts) -> RouterCounts:
        """All of it as a value."""
        with self._lock:
            buckets = tuple(BucketCount(name, *row) for name, row in zip(self._names, self._rows, strict=True))
            fallbacks = dict(self._fallbacks)
            return RouterCounts(buckets, fallbacks, self._unanswered, self._errors, compiles, self._detector.drift)


# Runners for single sizes, compiled by a background thread while other engines answer; a bounded number of them.


Runner = Callable[[Tensors], Tensors]
# Makes a runner for these sizes of all dims.
CompileSizes = Callable[[Mapping[str, int]], Runner]
_Key = tuple[tuple[str, int], ...]
# Errors that are remembered, so that what failed is not compiled again for each request.
_MOST_FAILED = 256


class JustInTime:
    """Compiled runners by the sizes of the dims, for several threads at once.

    compiles: makes a runner for some sizes; its errors are kept as the reason why there is none, and what is no
    Exception (SystemExit, a panic of Rust) ends all compiling.  most: runners that are held, and sizes that wait for
    the one thread that compiles; of more, the runner that was not used for longest is dropped.
    """

    def __init__(self, compiles: CompileSizes, most: int = 8) -> None:
        self._compiles, self._most = compiles, most
        self._changed = Condition()
        self._ready: OrderedDict[_Key, Runner] = OrderedDict()
        self._failed: OrderedDict[_Key, str] = OrderedDict()
        self._waiting: deque[_Key] = deque()
        self._active: _Key | None = None
        self._thread: WorkerThread | None = None
        self._ended = ""
        self._compiled = self._failures = self._evicted = 0
        self._seconds, self._waited_s, self._reason = 0.0, 0.0, ""

    def find(self, sizes: Mapping[str, int]) -> Runner | None:
        """The runner for these sizes; None while it is compiled, which begins with this call."""
        key = tuple(sizes.items())
        with self._changed:
            if (runner := self._ready.get(key)) is not None:
                self._ready.move_to_end(key)
            elif key not in self._failed and len(self._waiting) < self._most:
                with suppress(EnginesmithError):  # other engines answer meanwhile
                    self._ask(key)
            return runner

    def wait(self, sizes: Mapping[str, int]) -> Runner:
        """The runner for these sizes, compiled before this returns. Raises EnginesmithError with the compiler's reason,
        and where the router is closed or its compiler ended."""
        key, begun = tuple(sizes.items()), time.perf_counter()
        with self._changed:
            while key not in self._ready and key not in self._failed and not self._ended:
                self._ask(key)
                self._changed.wait()
            self._waited_s += time.perf_counter() - begun
            if key in self._ready:
                return self._ready[key]
            raise EnginesmithError(self._ended or self._failed[key])

    def counts(self) -> CompileCounts:
        """What was compiled so far."""
        with self._changed:
            numbers = self._compiled, self._failures, len(self._ready), self._evicted
            return CompileCounts(*numbers, self._seconds, self._waited_s, self._reason)

    def close(self) -> None:
        """End the thread, after the compile that it is at, and drop all runners."""
        with self._changed:
            self._end("the router is closed")
            thread = self._thread
        if thread is not None:
            thread.wait_for_end()
        with self._changed:
            self._ready.clear()

    def _ask(self, key: _Key) -> None:
        if self._ended:
            return
        if self._thread is None or not self._thread.is_alive():  # after a fork it is in the other process
            thread = WorkerThread("enginesmith-compile", self._work, self._fail)
            try:
                thread.start()
            except RuntimeError as error:
                raise EnginesmithError(f"nothing is compiled: {error}") from error
            self._thread, self._active = thread, None
        if key != self._active and key not in self._waiting:
            self._waiting.append(key)
            self._changed.notify_all()

    def _work(self) -> None:
        while (key := self._next()) is not None:
            begun, runner, reason = time.perf_counter(), None, ""
            try:
                runner = self._compiles(dict(key))
            except Exception as error:  # whatever a compiler raises
                reason = describe_error(error)
            with self._changed:
                self._seconds += time.perf_counter() - begun
                self._active = None
                self._keep(key, runner, reason)
                self._changed.notify_all()

    def _next(self) -> _Key | None:
        with self._changed:
            while not self._waiting and not self._ended:
                self._changed.wait()
            self._active = None if self._ended else self._waiting.popleft()
            return self._active

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._failures, self._reason = self._failures + 1, describe_error(error)
            self._end(f"the compiler ended: {self._reason}")

    def _end(self, why: str) -> None:
        self._ended = self._ended or why
        self._waiting.clear()
        self._changed.notify_all()

    def _keep(self, key: _Key, runner: Runner | None, reason: str) -> None:
        if runner is None:
            self._failures += 1
            self._reason = reason
            self._failed[key] = reason
            if len(self._failed) > _MOST_FAILED:
                self._failed.popitem(last=False)
            return
        self._compiled += 1
        self._ready[key] = runner
        if len(self._ready) > self._most:
            self._ready.popitem(last=False)
            self._evicted += 1
