"""Times as text (ISO 8601 in UTC, as documents hold them), and a clock for what lasts on this machine."""

import time
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Annotated

from annotated_types import Interval, Predicate, doc

# The longest time that anything is told to wait, keep or last; and the years of times that are read. A time in
# these is still one that computers know after such a time is added or taken off, whatever its zone.
LONGEST = timedelta(days=36_500)
_YEARS = range(1900, 9000)
TIME = f"a time in ISO 8601 with its time zone, in {_YEARS[0]} to {_YEARS[-1]}"


def stamp(moment: datetime) -> str:
    """A time as text: ISO 8601 in UTC, with microseconds."""
    return moment.astimezone(UTC).isoformat(timespec="microseconds")


@lru_cache(1024)
def read_stamp(text: str) -> datetime:
    """The time that `stamp` wrote. Raises ValueError, also for a time without a time zone."""
    found = datetime.fromisoformat(text)
    if found.tzinfo is None or found.year not in _YEARS:
        raise ValueError(f"{text[:80]!r} is not {TIME}")
    return found


def is_time(text: str) -> bool:
    """Whether a text is a time that `read_stamp` reads."""
    with suppress(ValueError):
        return bool(read_stamp(text))
    return False


# A field of documents; and one with whole seconds, which `timedelta` takes.
Timestamp = Annotated[str, Predicate(is_time), doc(TIME)]
_MOST_S = int(LONGEST.total_seconds())
Seconds = Annotated[int, Interval(ge=0, le=_MOST_S), doc(f"a whole number of seconds from 0 to {_MOST_S}")]


def steady_s() -> float:
    """Seconds by a clock that nobody sets and that also counts while the machine sleeps (CLOCK_BOOTTIME of Linux)."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
