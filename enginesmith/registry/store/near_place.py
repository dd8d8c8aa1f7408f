"""One of the places that a registry is read from: opened at first use, and left alone for a while after a failure."""

import random
import threading
import time
from collections.abc import Callable

from enginesmith.registry.store.base import Store, open_store

# Seconds for which a place that was out of reach is left alone: the first time, and at most; a fifth more or less.
FIRST_AWAY_S = 30.0
LONGEST_AWAY_S = 300.0
_JITTER = 0.2
# Requests to a cache before the next place is asked.
_ATTEMPTS = 2


class NearPlace:
    """One place: opened at first use, and left alone for a while after it was out of reach."""

    def __init__(self, uri: str, last: bool) -> None:
        self.uri, self.last = uri, last
        self._store: Store | None = None
        self._lock = threading.Lock()
        self._failures, self._until = 0, 0.0

    def open(self) -> Store:
        """The store. Raises InputError and UnavailableError."""
        with self._lock:
            if self._store is None:
                self._store = self._open()
            return self._store

    def _open(self) -> Store:
        if not self.last and self.uri.startswith(("http://", "https://")):
            from enginesmith.registry.store.http.store import open_http

            return open_http(self.uri, create=False, attempts=_ATTEMPTS)
        return open_store(self.uri)

    @property
    def locator(self) -> Callable[[str], str]:
        """Where a key is, for messages."""
        return self._store.locator if self._store is not None else lambda key: f"{self.uri.partition('?')[0]}/{key}"

    @property
    def away(self) -> bool:
        """Whether it is left alone now."""
        return time.monotonic() < self._until

    def note_failure(self) -> float | None:
        """Leave it alone for a while; the seconds if it answered before, else None."""
        with self._lock:
            first, self._failures = not self._failures, self._failures + 1
            wait = min(FIRST_AWAY_S * 2 ** min(self._failures - 1, 10), LONGEST_AWAY_S)
            wait *= random.uniform(1 - _JITTER, 1 + _JITTER)  # noqa: S311 - no secret
            self._until = time.monotonic() + wait
            return wait if first else None

    def note_answer(self) -> bool:
        """Note that it answers; whether it did not before."""
        if not self._failures:
            return False
        with self._lock:
            back, self._failures, self._until = bool(self._failures), 0, 0.0
            return back
