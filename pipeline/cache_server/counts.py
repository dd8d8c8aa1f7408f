"""The metrics of a cache: what was asked, what came from the registry, and how much lies on the disk."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge


class CacheCounts:
    """The counters of one cache, in a Prometheus registry of their own.

    Results of requests: 'hit' (kept here), 'shared' (a fetch or question of another request answered it), 'miss',
    'stale' (the registry was out of reach), 'absent', 'refused' (no such key is served, or no token).
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.requests = self._counter(
            "enginesmith_cache_requests", "Requests by kind (blob, document, list) and result.", ("kind", "result")
        )
        self.client_bytes = self._counter("enginesmith_cache_client_bytes", "Bytes of blobs that were sent to clients.")
        self.origin_bytes = self._counter(
            "enginesmith_cache_origin_bytes", "Bytes of blobs that came from the registry."
        )
        self.origin_requests = self._counter(
            "enginesmith_cache_origin_requests",
            "Questions to the registry by kind (blob, document, list, size).",
            ("kind",),
        )
        self.origin_errors = self._counter(
            "enginesmith_cache_origin_errors", "Questions that the registry did not answer, or with damage.", ("kind",)
        )
        self.damaged = self._counter(
            "enginesmith_cache_damaged", "Blobs whose bytes were others than their digest says."
        )
        self.fetching = Gauge("enginesmith_cache_fetching", "Blobs that are being fetched now.", registry=self.registry)

    def watch_disk(self, folder: Path, limit_bytes: int) -> None:
        """Tell how many bytes of blobs are in the cache's folder, and its bound."""
        self._gauge("enginesmith_cache_disk_bytes", "Bytes of whole blobs on the disk.", lambda: _bytes_in(folder))
        self._gauge("enginesmith_cache_limit_bytes", "Bound of these bytes.", lambda: float(limit_bytes))

    def _counter(self, name: str, meaning: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(name, meaning, labels, registry=self.registry)

    def _gauge(self, name: str, meaning: str, value: Callable[[], float]) -> None:
        Gauge(name, meaning, registry=self.registry).set_function(value)


def _bytes_in(folder: Path) -> float:
    found = 0
    with suppress(OSError):
        for entry in os.scandir(folder):
            with suppress(OSError):
                found += entry.stat().st_size
    return float(found)
