"""Runners for single sizes, compiled by a background thread while other engines answer; a bounded number of them."""

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from threading import Condition

from enginesmith.core.errors import EnginesmithError
from enginesmith.core.types import Tensors
from enginesmith.core.worker_thread import WorkerThread, describe_error
from enginesmith.serving.counts import CompileCounts

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
            if (found := self._ready.get(key)) is not None:
                self._ready.move_to_end(key)
            elif key not in self._failed and len(self._waiting) < self._most:
                with suppress(EnginesmithError):  # other engines answer meanwhile
                    self._ask(key)
            return found

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
