"""Text for messages, and small helpers: commands with a time limit, worker threads, objects that close themselves, zip
files."""

import difflib
import json
import math
import os
import re
import selectors
import signal
import struct
import subprocess
import sys
import time
import unicodedata
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from threading import Thread
from types import TracebackType
from typing import Self

# Maximum bytes kept of a command's output; the rest is dropped while the command continues.
MOST_BYTES = 64 << 10


def run_command(
    words: Sequence[str],
    timeout_s: float,
    *,
    environment: Mapping[str, str] | None = None,
    stdout: int = subprocess.PIPE,
    stderr: int | None = None,
) -> "subprocess.CompletedProcess[bytes]":
    """Run a command in its own process group, and return how it ended, with the first `MOST_BYTES` of its output if
    `stdout` is a pipe.

    words: the program and its arguments.  timeout_s: seconds that it may take.
    stdout, stderr: as for `subprocess.run`.  environment: None means that of this process. Raises OSError if it cannot
    be started, subprocess.TimeoutExpired if it, or another process that holds its pipe, took longer. After a timeout or
    Ctrl-C its process group is killed.
    """
    process = subprocess.Popen(
        words, env=environment, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, start_new_session=True
    )
    try:
        output = _read_output(process, time.monotonic() + timeout_s, timeout_s)
    except BaseException:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # not reaped yet, so the id is still its own
        process.wait()
        raise
    finally:
        if process.stdout:
            process.stdout.close()
    return subprocess.CompletedProcess(words, process.returncode, output)


def _read_output(process: "subprocess.Popen[bytes]", end: float, timeout_s: float) -> bytes:
    """The output of a command until its end. end: the latest time, on the monotonic clock. Raises TimeoutExpired."""
    buffer = bytearray()
    with selectors.DefaultSelector() as selector:
        if process.stdout:
            selector.register(process.stdout, selectors.EVENT_READ)
        while process.stdout:
            if not selector.select(max(0.0, end - time.monotonic())) or time.monotonic() > end:
                raise subprocess.TimeoutExpired(process.args, timeout_s)
            if not (chunk := os.read(process.stdout.fileno(), MOST_BYTES)):
                break
            buffer += chunk[: MOST_BYTES - len(buffer)]
    process.wait(max(0.0, end - time.monotonic()))
    return bytes(buffer)


# Text for messages and documents: suggestions, shortened lists, sizes, counts, the time, and safe text.
#
# Text from elsewhere (names in a model, a compiler's log) may contain control characters: an escape character moves a
# terminal's cursor, a change of direction reorders the displayed text, and XML cannot contain most of them.

# The minimum similarity of two words (difflib's ratio), and the minimum length of a word that counts as a prefix.
_ALIKE, _BEGINNING = 0.7, 3


def find_nearest(word: str, known_words: Iterable[str]) -> str | None:
    """The known word that was probably meant: one that is similar, or that begins with this word, ignoring case. None
    if no word is near: a wrong suggestion is worse than a list."""
    spellings = {name.lower(): name for name in known_words}
    close_matches = difflib.get_close_matches(word.lower(), spellings, n=1, cutoff=_ALIKE)
    completions = [name for name in spellings if len(word) >= _BEGINNING and name.startswith(word.lower())]
    return next((spellings[name] for name in [*close_matches, *sorted(completions, key=len)]), None)


def suggest(word: str, known_words: Iterable[str], otherwise: str | None = None) -> str:
    """'did you mean 'x'?' for the nearest known word; if none is near, `otherwise`, by default 'known: x, y'."""
    word_list = list(known_words)
    if nearest_word := find_nearest(word, word_list):
        return f"did you mean {nearest_word!r}?"
    return f"known: {', '.join(word_list) or 'none'}" if otherwise is None else otherwise


def join_first(items: Sequence[str], limit: int = 3, separator: str = ", ") -> str:
    """The first `limit` items and the number of the others: 'a, b and 3 more', or with '; ' 'a; b; and 3 more'."""
    text, remaining_count = separator.join(items[:limit]), len(items) - limit
    return f"{text}{separator.rstrip(', ')} and {remaining_count} more" if remaining_count > 0 else text


def format_bytes(size: float | None) -> str:
    """A size in bytes as text, in powers of 1024: '512 B', '2.0 KiB', '5.3 MiB', '40.0 GiB'; '' for None."""
    if size is None:
        return ""
    power = next((power for power in (3, 2, 1) if size >= 1024**power), 0)
    return f"{size / 1024**power:.1f} {' KMG'[power]}iB" if power else f"{size:.0f} B"


def format_age(seconds: float) -> str:
    """A time span as text, in the largest unit with a count of at least two: '95 s', '12 min', '3 h', '2 days'."""
    for unit_s, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{seconds:.0f} s"


def format_checks(checks: Mapping[str, int]) -> str:
    """'38/40': the number of passed checks and of all checks; '' without checks. checks: counts by outcome."""
    check_count = sum(checks.values())
    return f"{checks['passed']}/{check_count}" if check_count else ""


def format_plain(value: float) -> str:
    """A number with three significant digits and without an exponent: '1.54', '2,330', '0.00012'."""
    rounded_value = float(f"{value:.3g}")
    if not 0 < abs(rounded_value) < math.inf:
        return f"{rounded_value:g}"
    decimals = max(0, 2 - math.floor(math.log10(abs(rounded_value))))
    text = f"{rounded_value:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def format_metric(name: str, value: float) -> str:
    """The value of a task metric as text: '0.9833', or '41.2 dB' for a name that ends with '_db'."""
    return f"{value:.1f} dB" if name.endswith("_db") else f"{value:.4f}"


def format_metrics(values: Mapping[str, float]) -> str:
    """Task metrics by name, in one line: 'accuracy 0.9833, character_error 0.0010'."""
    return ", ".join(f"{name} {format_metric(name, value)}" for name, value in values.items())


def pluralize(count: int, noun: str, plural: str = "") -> str:
    """'1 model', '2 models': a count with its noun. plural: for a noun whose plural is not noun + 's'."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


# Control characters that JSON leaves unescaped and a terminal may obey. In JSON they occur only in strings.
_UNESCAPED = re.compile("[\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]")


def visible(text: str, allow: str = "\n\t") -> str:
    r"""The text with each non-printable character, but those of `allow` and spaces, as its escape: '\x1b', '\u202e'."""
    if text.isprintable():
        return text
    return "".join(
        char
        if char.isprintable() or char in allow or unicodedata.category(char) == "Zs"
        else char.encode("unicode_escape").decode()
        for char in text
    )


def visible_json(text: str) -> str:
    r"""JSON text of the same value, with characters that control a terminal as escapes: '\u009b'."""
    return _UNESCAPED.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def now() -> str:
    """The current time in UTC to the second, in ISO 8601: '2026-11-20T18:23:01+00:00'."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def precise_now() -> str:
    """The current time in UTC to the millisecond, in ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def format_line(event: str, level: str = "info", **fields: object) -> str:
    """A log line: a JSON object with the time, the level, the event and the fields that are not None."""
    present_fields = {name: value for name, value in fields.items() if value is not None}
    line = {"time": precise_now(), "level": level, "event": event, **present_fields}
    return visible_json(json.dumps(line, ensure_ascii=False))


def write_line(event: str, level: str = "info", **fields: object) -> None:
    """Write a log line (`format_line`) to stderr."""
    print(format_line(event, level, **fields), file=sys.stderr, flush=True)


# A daemon thread whose owner answers all that wait for it, however the thread's work ends.
#
# A thread may end with an error that is no Exception: a plug-in's SystemExit, a panic of a Rust library (pyo3's
# PanicException is a BaseException). Python then ends only that thread, and all futures and conditions that wait for it
# would wait for ever.


class WorkerThread(Thread):
    """A daemon thread that runs `work`. fail: called in the thread with any exception that `work` raised."""

    def __init__(self, name: str, work: Callable[[], object], fail: Callable[[BaseException], object]) -> None:
        super().__init__(name=name, daemon=True)
        self._work, self._fail = work, fail

    def run(self) -> None:
        """Run `work`; if it raises, call `fail`."""
        try:
            self._work()
        except BaseException as error:
            self._fail(error)


class SelfClosing(ABC):
    """A context manager that calls its own `close` at the end of the block."""

    @abstractmethod
    def close(self) -> None:
        """Release its resources."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def describe_error(error: BaseException) -> str:
    """'ValueError: why'; only the class if the error's own `str` raises."""
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException:
        return type(error).__name__


# Untrusted zip files: the errors that reading one may raise, and the compressions that are accepted.
#
# Python also reads bzip2, LZMA and, from 3.14 on, Zstandard. These raise other errors, and nothing here writes them.

# Raised when a zip file is opened, or a stored or deflated member is read, if it is damaged or of another kind.
DAMAGED = (
    OSError, EOFError, ValueError, OverflowError, RuntimeError, zipfile.BadZipFile, zlib.error, struct.error,
)  # fmt: skip
_METHODS = {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}


def check_compression(archive: zipfile.ZipFile) -> None:
    """Raise BadZipFile if a member is neither stored nor deflated."""
    for member in archive.infolist():
        if member.compress_type not in _METHODS:
            raise zipfile.BadZipFile(
                f"{member.filename[:80]!r} is compressed by method {member.compress_type}; only deflate is read"
            )
