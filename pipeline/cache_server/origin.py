"""The registry that a cache reads from: opened at first use, asked from threads, one request for one question.

A cache starts and serves what it keeps while its registry is out of reach.
"""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from enginesmith.core.errors import EnginesmithError, IntegrityError
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.nearest import Say, open_nearest
from pipeline.cache_server.counts import CacheCounts

Value = TypeVar("Value")

# Requests to the registry at the same time, beside the fetches of blobs.
_AT_ONCE = 32


class NotServedError(Exception):
    """Why a request gets no object. status: of HTTP."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Origin:
    """uri: one place or several, as `open_nearest` takes them.  say: called when one stops to answer."""

    def __init__(self, uri: str, counts: CacheCounts, say: Say) -> None:
        self.uri = uri
        self._counts, self._say = counts, say
        self._threads = ThreadPoolExecutor(_AT_ONCE, "origin")
        self._store: Store | None = None

    def store(self) -> Store:
        """The registry, opened. Raises InputError and UnavailableError, and tries again next time."""
        if self._store is None:
            self._store = open_nearest(self.uri, self._say)
        return self._store

    async def ask(self, kind: str, question: Callable[[Store], Value]) -> Value:
        """What the registry answers; kind: for the count. Raises NotServedError."""
        self._counts.origin_requests.labels(kind).inc()
        try:
            return await self.run(lambda: question(self.store()))
        except EnginesmithError as error:
            self._counts.origin_errors.labels(kind).inc()
            raise explain_error(error) from error

    async def run(self, work: Callable[[], Value]) -> Value:
        """What `work` returns in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        """Start no more requests."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def explain_error(error: Exception) -> NotServedError:
    """The answer to a client for a registry's error: 422 for damage there, 503 where it cannot be asked."""
    return NotServedError(422 if isinstance(error, IntegrityError) else 503, str(error).partition("\n")[0])


class SingleFlight(Generic[Value]):
    """Answers to equal questions that come while one of them is under way: all get that one's answer."""

    def __init__(self) -> None:
        self._running: dict[str, asyncio.Task[Value]] = {}

    async def once(self, name: str, work: Callable[[], Coroutine[Any, Any, Value]]) -> Value:
        """What `work` gives, which runs unless one of this name runs. It goes on when a client goes away."""
        task = self._running.get(name)
        if task is None:
            task = self._running[name] = asyncio.create_task(work())
            task.add_done_callback(lambda done: self._forget(name, done))
        return await asyncio.shield(task)

    def _forget(self, name: str, done: asyncio.Task[Value]) -> None:
        self._running.pop(name, None)
        if not done.cancelled():
            done.exception()  # whoever asked has it; a client that went away leaves none to ask
