"""Times as text (ISO 8601 in UTC, as documents hold them), and a clock for what lasts on this machine."""

import time
from datetime import UTC, datetime
from typing import Annotated

from annotated_types import Predicate, doc

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


def is_time(text: str) -> bool:
    """Whether a text is a time in ISO 8601 that says its time zone."""
    try:
        return datetime.fromisoformat(text).tzinfo is not None
    except ValueError:
        return False


# A field of documents.
Timestamp = Annotated[str, Predicate(is_time), doc("a time in ISO 8601 with its time zone")]


def steady_s() -> float:
    """Seconds by a clock that nobody sets and that also counts while the machine sleeps (CLOCK_BOOTTIME of Linux)."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
