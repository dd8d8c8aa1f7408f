"""Times as text: ISO 8601 in UTC, as documents hold them."""

from datetime import UTC, datetime

from enginesmith.core.parsing import Malformed, text


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
