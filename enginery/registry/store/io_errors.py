"""Counters of registry I/O errors and retries in this process; they only increase.

Counted where every request passes (`atomic_write.reachable` for folders, `s3.retries` for buckets); read by metrics.
"""

import threading

_LOCK = threading.Lock()
_SEEN = {"errors": 0, "retries": 0}


def count_error() -> None:
    """Count a request that failed for good."""
    with _LOCK:
        _SEEN["errors"] += 1


def count_retry() -> None:
    """Count a request that is sent again."""
    with _LOCK:
        _SEEN["retries"] += 1


def read_counts() -> dict[str, int]:
    """'errors' and 'retries' since this process began."""
    with _LOCK:
        return dict(_SEEN)
