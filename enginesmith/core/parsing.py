"""Parses untrusted JSON and its times; identifies the writer of a document."""

import getpass
import json
import math
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

from annotated_types import Interval, Predicate, doc

from enginesmith.core.errors import DataError, IntegrityError

# The writer of a document: the user, for histories, and the process, for build locks and the state of runs.
#
# A process number alone does not identify a process: it is reused, and each container counts from 1.


def user() -> str:
    """The current user's name; 'uid 1000' if the uid has no name, as in some containers."""
    try:
        return os.environ.get("USER") or getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"


@dataclass(frozen=True)
class Presence:
    """A process. host: its machine's name.  namespace: the process namespace of `pid`, '' if unknown.  began: its start
    time in seconds since 1970, as text."""

    host: str
    namespace: str
    pid: int
    began: str

    @property
    def has_ended(self) -> bool:
        """Whether the process ran on this machine and has ended; False if this machine cannot know."""
        import psutil

        if (self.host, self.namespace) != _here():
            return False
        try:
            return repr(psutil.Process(self.pid).create_time()) != self.began
        except (psutil.NoSuchProcess, OverflowError):
            return True
        except psutil.AccessDenied:
            return False


def this_process() -> Presence:
    """The calling process."""
    import psutil

    process = psutil.Process()
    return Presence(*_here(), process.pid, repr(process.create_time()))


def _here() -> tuple[str, str]:
    """This machine's name and process namespace, '' if unknown. Containers on one machine may have the same name."""
    try:
        return socket.gethostname(), str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return socket.gethostname(), ""


# Parses untrusted JSON with a size limit, and refuses duplicate keys (`parse_json`; `load_json` for callers with their
# own limit and errors). `codec.parse_as` decodes it to values.
#
# `find`, `read` and `put` take dotted paths ('spec.suspend') into documents of other programs.

T = TypeVar("T")
D = TypeVar("D")

MAX_ITEMS = 10_000
MAX_DEPTH = 64


class Malformed(IntegrityError):  # noqa: N818 - named after the document's state
    """A document with a missing or wrong field; the message starts with the path of the field."""


def find(document: object, path: str, kind: type[T], default: D) -> T | D:
    """The value at a dotted path of a document; `default` if it is absent or null.

    If `kind` is float, an int is converted. Raises DataError for a value of another type.
    """
    value = document
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    if value is None:
        return default
    if kind is float and isinstance(value, int) and abs(value) < 1 << 1023:  # the largest float is smaller
        value = float(value)
    if not isinstance(value, kind):
        raise DataError(f"{path} is {value!r:.80}; {kind.__name__} is needed")
    return value


def read(document: object, path: str, kind: type[T]) -> T:
    """The value at a dotted path of a document. Raises DataError if it is missing or of another type."""
    value = find(document, path, kind, None)
    if value is None:
        raise DataError(f"{path} is missing from {str(document)[:80]}")
    return value


def put(document: Mapping[str, object], path: str, value: object) -> dict[str, object]:
    """A copy of the document with `value` at the dotted path; the input is not changed. Raises DataError."""
    name, _, subpath = path.partition(".")
    return {**document, name: put(find(document, name, dict, {}), subpath, value) if subpath else value}


def load_json(text: str | bytes) -> Any:
    """`json.loads` of an untrusted text. Raises RecursionError, and ValueError, also for a duplicate key, because other
    programs may use its other value."""
    return json.loads(text, object_pairs_hook=without_twins)


def parse_json(data: bytes, limit: int) -> dict[str, object]:
    """Parse a JSON object of at most `limit` bytes, in UTF-8.

    Raises Malformed, also for JSON that parsers read differently: a duplicate key, NaN, a number beyond a double, half
    a surrogate pair, more than MAX_DEPTH levels.
    """
    if len(data) > limit:
        raise Malformed(f"is {len(data)} bytes long; the limit is {limit}")
    try:
        value = _STRICT.decode(data.decode())
        if rb"\ud" in data.lower():  # half a surrogate pair cannot be encoded as UTF-8 (UnicodeEncodeError)
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise Malformed(f"is not JSON ({error})") from error
    if data.count(b"[") + data.count(b"{") > MAX_DEPTH:  # fewer brackets cannot be that deep, and the check is slow
        _check_depth(value)
    if not isinstance(value, dict) or len(value) > MAX_ITEMS:
        raise Malformed(f"document is {str(value)[:80]!r}; it must be an object of at most {MAX_ITEMS} keys")
    return value


def _check_depth(value: object) -> None:
    """Raise Malformed if the nesting is so deep that digesting or copying the value would overflow the stack."""
    level = [value]
    for _ in range(MAX_DEPTH):
        next_level = list[object]()
        for element in level:
            next_level += (
                element.values() if isinstance(element, dict) else element if isinstance(element, list) else ()
            )
        if not (level := [element for element in next_level if type(element) in (dict, list)]):
            return
    raise Malformed(f"is nested more than {MAX_DEPTH} levels deep")


def without_twins(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """A JSON object as a dict. Raises ValueError for a duplicate key."""
    unique_pairs = dict(pairs)
    if len(unique_pairs) < len(pairs):
        previous_keys: set[str] = set()
        duplicate_key = next(key for key, _ in pairs if key in previous_keys or previous_keys.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {duplicate_key[:80]!r} is given twice")
    return unique_pairs


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is too large a number")
    return value


def refuse_constant(text: str) -> None:
    """Raise ValueError for 'NaN' and infinities, which Python's parser would accept."""
    raise ValueError(f"{text} is not JSON")


_STRICT = json.JSONDecoder(parse_constant=refuse_constant, parse_float=_finite, object_pairs_hook=without_twins)


# Times as text (ISO 8601 in UTC, as in documents), and a clock for durations on this machine.

# The longest duration that any option or field accepts, and the range of years that are accepted. A time in this range
# stays representable after such a duration is added or subtracted, in any time zone.
LONGEST = timedelta(days=36_500)
_YEARS = range(1900, 9000)
TIME = f"a time in ISO 8601 with its time zone, in {_YEARS[0]} to {_YEARS[-1]}"


def stamp(moment: datetime) -> str:
    """A time as text: ISO 8601 in UTC, with microseconds."""
    return (moment if moment.tzinfo is UTC else moment.astimezone(UTC)).isoformat(timespec="microseconds")


@lru_cache(1024)
def read_stamp(text: str) -> datetime:
    """Parse a time that `stamp` wrote. Raises ValueError, also if it has no time zone."""
    timestamp = datetime.fromisoformat(text)
    if timestamp.tzinfo is None or timestamp.year not in _YEARS:
        raise ValueError(f"{text[:80]!r} is not {TIME}")
    return timestamp


def is_time(text: str) -> bool:
    """Whether `read_stamp` accepts a text."""
    with suppress(ValueError):
        return bool(read_stamp(text))
    return False


# Types of fields: a time, and a number of whole seconds that `timedelta` accepts.
Timestamp = Annotated[str, Predicate(is_time), doc(TIME)]
_MOST_S = int(LONGEST.total_seconds())
Seconds = Annotated[int, Interval(ge=0, le=_MOST_S), doc(f"a whole number of seconds from 0 to {_MOST_S}")]


def steady_s() -> float:
    """Seconds on a clock that cannot be set and that counts while the machine sleeps (CLOCK_BOOTTIME on Linux)."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
