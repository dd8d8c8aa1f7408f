"""This moment, as documents, reports and logs have it; what machines compare is `registry.writers.clock`'s."""

from datetime import UTC, datetime


def now() -> str:
    """To the second, ISO 8601, UTC: '2026-11-20T18:23:01+00:00'."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def precise_now() -> str:
    """To the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")
