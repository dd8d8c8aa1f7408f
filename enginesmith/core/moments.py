"""Times as text (ISO 8601 in UTC, as documents hold them), and a clock for what lasts on this machine."""

import time
from datetime import UTC, datetime, timedelta
from typing import Annotated

from annotated_types import Interval, Predicate, doc

from enginesmith.core.parsing import Malformed, text

# The longest time that anything is told to wait, keep or last; and the years of times that are read. A time in
# these is still one that computers know after such a time is added or taken off, whatever its zone.
LONGEST = timedelta(days=36_500)
_YEARS = range(1900, 9000)


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
    if found.year not in _YEARS:
        raise Malformed(f"{path} is {str(value)[:80]!r}; its year must be from {_YEARS[0]} to {_YEARS[-1]}")
    return found


def is_time(text: str) -> bool:
    """Whether a text is a time in ISO 8601 that says its time zone, as `read_stamp` reads it."""
    try:
        read_stamp(text, "")
    except Malformed:
        return False
    return True


# A field of documents; and one with whole seconds, which `timedelta` takes.
Timestamp = Annotated[
    str, Predicate(is_time), doc(f"a time in ISO 8601 with its time zone, in {_YEARS[0]} to {_YEARS[-1]}")
]
_MOST_S = int(LONGEST.total_seconds())
Seconds = Annotated[int, Interval(ge=0, le=_MOST_S), doc(f"a whole number of seconds from 0 to {_MOST_S}")]


def steady_s() -> float:
    """Seconds by a clock that nobody sets and that also counts while the machine sleeps (CLOCK_BOOTTIME of Linux)."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
