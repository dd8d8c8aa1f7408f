"""Counts of a router: requests of each bucket, padding, and fallbacks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from threading import Lock


@dataclass(frozen=True)
class BucketCount:
    """The requests of a bucket. elements: of their inputs as given.  padding: elements that were added to those."""

    name: str
    requests: int
    elements: int
    padding: int


@dataclass(frozen=True)
class RouterCounts:
    """What a router counted since it was made. fallbacks: name of a fallback -> requests that it answered.

    unanswered: requests that no bucket held and no fallback answered.  errors: requests whose engine raised an error.
    padding_share: of all elements that engines ran on in buckets, those that were padding.  fallback_rate: share of
    the requests that no bucket held.
    """

    buckets: tuple[BucketCount, ...]
    fallbacks: Mapping[str, int]
    unanswered: int
    errors: int
    requests: int = field(init=False)
    padding_share: float = field(init=False)
    fallback_rate: float = field(init=False)

    def __post_init__(self) -> None:
        unbucketed_count = sum(self.fallbacks.values()) + self.unanswered
        request_count = sum(bucket.requests for bucket in self.buckets) + unbucketed_count
        padding_elements = sum(bucket.padding for bucket in self.buckets)
        elements = padding_elements + sum(bucket.elements for bucket in self.buckets)
        object.__setattr__(self, "requests", request_count)
        object.__setattr__(self, "padding_share", padding_elements / elements if elements else 0.0)
        object.__setattr__(self, "fallback_rate", unbucketed_count / request_count if request_count else 0.0)


class RequestCounter:
    """Counts the requests of a router; for several threads at once. buckets, fallbacks: their names."""

    def __init__(self, buckets: tuple[str, ...], fallbacks: tuple[str, ...]) -> None:
        self._lock = Lock()
        self._names, self._rows = buckets, [[0, 0, 0] for _ in buckets]
        self._fallbacks = dict.fromkeys(fallbacks, 0)
        self._unanswered = self._errors = 0

    def add(self, bucket: int, elements: int, padded: int, requests: int = 1) -> None:
        """Count requests that bucket number `bucket` holds: elements as given, and as run."""
        with self._lock:
            counters = self._rows[bucket]
            counters[0] += requests
            counters[1] += elements
            counters[2] += padded - elements

    def add_fallback(self, name: str | None, requests: int = 1) -> None:
        """Count requests that no bucket holds, with the fallback that answered them, if any."""
        with self._lock:
            if name is None:
                self._unanswered += requests
            else:
                self._fallbacks[name] += requests

    def add_error(self) -> None:
        """Count an error of an engine."""
        with self._lock:
            self._errors += 1

    def counts(self) -> RouterCounts:
        """All of it as a value."""
        with self._lock:
            bucket_counts = tuple(BucketCount(name, *row) for name, row in zip(self._names, self._rows, strict=True))
            fallbacks = dict(self._fallbacks)
            return RouterCounts(bucket_counts, fallbacks, self._unanswered, self._errors)
