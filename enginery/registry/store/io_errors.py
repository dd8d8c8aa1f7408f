"""How often a registry failed or had to be asked again, in this process: two numbers that only grow.

Counted where every request passes (`atomic_write.reachable` for folders, `s3.retries` for buckets); read by metrics.
"""

import threading

_LOCK = threading.Lock()
_SEEN = {"errors": 0, "retries": 0}


def failed() -> None:
    """A request failed for good."""
    with _LOCK:
        _SEEN["errors"] += 1


def repeated() -> None:
    """A request is sent again."""
    with _LOCK:
        _SEEN["retries"] += 1


def seen() -> dict[str, int]:
    """'errors' and 'retries' since this process began."""
    with _LOCK:
        return dict(_SEEN)
