"""Text for messages and documents: suggestions, shortened lists, sizes, counts, the time, and safe text.

Text from elsewhere (names in a model, a compiler's log) may hold control characters: an escape character moves a
terminal's cursor, a change of direction reorders what a person reads, and XML cannot hold most of them at all.
"""

import difflib
import json
import math
import re
import sys
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime

# Share of two words that must be alike (difflib's ratio), and the least length of one that may begin the other.
_ALIKE, _BEGINNING = 0.7, 3


def find_nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that was probably meant: one that is nearly the same, or that this one begins; upper and lower
    case are alike. None where no word is near: a wrong suggestion is worse than a list."""
    names = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), names, n=1, cutoff=_ALIKE)
    begun = [name for name in names if len(word) >= _BEGINNING and name.startswith(word.lower())]
    return next((names[name] for name in [*near, *sorted(begun, key=len)]), None)


def suggest(word: str, known: Iterable[str], otherwise: str | None = None) -> str:
    """'did you mean 'x'?' for the nearest known word; without one `otherwise`, by default 'known: x, y'."""
    names = list(known)
    if near := find_nearest(word, names):
        return f"did you mean {near!r}?"
    return f"known: {', '.join(names) or 'none'}" if otherwise is None else otherwise


def join_first(items: Sequence[str], most: int = 3, separator: str = ", ") -> str:
    """'a, b and 3 more': the first `most` of the items, and how many are left. With '; ' it is 'a; b; and 3 more'."""
    shown, rest = separator.join(items[:most]), len(items) - most
    return f"{shown}{separator.rstrip(', ')} and {rest} more" if rest > 0 else shown


def format_bytes(size: float | None) -> str:
    """'512 B', '2.0 KiB', '5.3 MiB', '40.0 GiB': a size in bytes, in powers of 1024; '' for None."""
    if size is None:
        return ""
    power = next((power for power in (3, 2, 1) if size >= 1024**power), 0)
    return f"{size / 1024**power:.1f} {' KMG'[power]}iB" if power else f"{size:.0f} B"


def format_plain(value: float) -> str:
    """A number with three significant digits and without an exponent: '1.54', '2,330', '0.00012'."""
    rounded = float(f"{value:.3g}")
    if not 0 < abs(rounded) < math.inf:
        return f"{rounded:g}"
    digits = max(0, 2 - math.floor(math.log10(abs(rounded))))
    text = f"{rounded:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def format_metric(name: str, value: float) -> str:
    """The value of a task metric: '0.9833', or '41.2 dB' of one whose name ends in '_db'."""
    return f"{value:.1f} dB" if name.endswith("_db") else f"{value:.4f}"


def format_metrics(values: Mapping[str, float]) -> str:
    """Task metrics by name, in one line: 'accuracy 0.9833, character_error 0.0010'."""
    return ", ".join(f"{name} {format_metric(name, value)}" for name, value in values.items())


def pluralize(count: int, noun: str, plural: str = "") -> str:
    """'1 model', '2 models': a count with its noun. plural: where it is not the noun and an s."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


# Control characters that JSON does not escape and a terminal may obey. They occur within JSON's strings only.
_UNESCAPED = re.compile("[\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]")


def visible(text: str) -> str:
    r"""The text with each non-printable character, but line ends, tabs and spaces, as its escape: '\x1b', '\u202e'."""
    if text.isprintable():
        return text
    return "".join(
        char
        if char.isprintable() or char in "\n\t" or unicodedata.category(char) == "Zs"
        else char.encode("unicode_escape").decode()
        for char in text
    )


def visible_json(text: str) -> str:
    r"""JSON text of the same value, with characters that control a terminal as escapes: '\u009b'."""
    return _UNESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def now() -> str:
    """The current time in UTC to the second, in ISO 8601: '2026-11-20T18:23:01+00:00'."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def precise_now() -> str:
    """The current time in UTC to the millisecond, in ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def format_line(event: str, level: str = "info", **fields: object) -> str:
    """One line: a JSON object with the time, the level, the event and the fields that are not None."""
    given = {name: value for name, value in fields.items() if value is not None}
    line = {"time": precise_now(), "level": level, "event": event, **given}
    return visible_json(json.dumps(line, ensure_ascii=False))


def write_line(event: str, level: str = "info", **fields: object) -> None:
    """Write such a line on stderr."""
    print(format_line(event, level, **fields), file=sys.stderr, flush=True)
