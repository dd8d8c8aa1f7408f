"""The current time as text for documents, reports and logs. Times that machines compare: `registry.writers.clock`."""

from datetime import UTC, datetime


def now() -> str:
    """The current time in UTC to the second, in ISO 8601: '2026-11-20T18:23:01+00:00'."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def precise_now() -> str:
    """The current time in UTC to the millisecond, in ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")
