"""The time of leases and of the grace period, in one place so that tests can move it.

Nothing but those two compares times of two machines. Their clocks may differ by `SKEW`: a lease counts as held for so
much longer than it says, and its holder counts on it for so much shorter.
"""

from datetime import UTC, datetime, timedelta

from enginery.core.parsing import Malformed, text

SKEW = timedelta(minutes=5)


def now() -> datetime:
    """This moment, in UTC."""
    return datetime.now(UTC)


def stamp(moment: datetime) -> str:
    """ISO 8601 with microseconds."""
    return moment.astimezone(UTC).isoformat(timespec="microseconds")


def read_stamp(value: object, path: str) -> datetime:
    """A moment that `stamp` wrote. Raises Malformed."""
    try:
        found = datetime.fromisoformat(text(value, path))
    except ValueError:
        raise Malformed(f"{path} is {str(value)[:80]!r}; it must be a time in ISO 8601") from None
    if found.tzinfo is None:
        raise Malformed(f"{path} is {str(value)[:80]!r}; it must say its time zone")
    return found
