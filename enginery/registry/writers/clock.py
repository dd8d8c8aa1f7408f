"""The clock of leases and of the grace period, in one place so that tests can replace it.

Only these compare times of two machines, whose clocks may differ by `SKEW`: others treat a lease as held for that much
longer than it says, and its holder relies on it for that much shorter.
"""

from datetime import UTC, datetime, timedelta

from enginery.core.parsing import Malformed, text

SKEW = timedelta(minutes=5)


def now() -> datetime:
    """The current time in UTC."""
    return datetime.now(UTC)


def stamp(moment: datetime) -> str:
    """A time as text: ISO 8601 in UTC, with microseconds."""
    return moment.astimezone(UTC).isoformat(timespec="microseconds")


def read_stamp(value: object, path: str) -> datetime:
    """Read a time that `stamp` wrote. Raises Malformed, also for a time without a time zone."""
    try:
        found = datetime.fromisoformat(text(value, path))
    except ValueError:
        raise Malformed(f"{path} is {str(value)[:80]!r}; it must be a time in ISO 8601") from None
    if found.tzinfo is None:
        raise Malformed(f"{path} is {str(value)[:80]!r}; it must say its time zone")
    return found
