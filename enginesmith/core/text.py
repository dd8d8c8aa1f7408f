"""Text for messages, and small helpers of the standard library: commands with a time limit, worker threads, objects
that close themselves, zip files."""

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

# Of what a command prints; it may go on, and the rest is dropped.
MOST_BYTES = 64 << 10


def run_command(
    words: Sequence[str],
    timeout_s: float,
    *,
    environment: Mapping[str, str] | None = None,
    stdout: int = subprocess.PIPE,
    stderr: int | None = None,
) -> "subprocess.CompletedProcess[bytes]":
    """How a command ended, with the first `MOST_BYTES` that it printed if `stdout` is a pipe. It has a process group of
    its own.

    words: the program and its arguments.  timeout_s: seconds that it may take.
    stdout, stderr: as for `subprocess.run`.  environment: None is that of this process. Raises OSError where it cannot
    be started, subprocess.TimeoutExpired where it, or whatever holds its pipe, took longer; then, and after Ctrl-C, its
    process group was killed.
    """
    process = subprocess.Popen(
        words, env=environment, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, start_new_session=True
    )
    try:
        output = _read_output(process, time.monotonic() + timeout_s, timeout_s)
    except BaseException:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # nobody has waited for its first process, so that this is its group
        process.wait()
        raise
    finally:
        if process.stdout:
            process.stdout.close()
    return subprocess.CompletedProcess(words, process.returncode, output)


def _read_output(process: "subprocess.Popen[bytes]", end: float, timeout_s: float) -> bytes:
    """What a command prints until its end. end: the latest, by the monotonic clock. Raises TimeoutExpired."""
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
# Text from elsewhere (names in a model, a compiler's log) may hold control characters: an escape character moves a
# terminal's cursor, a change of direction reorders what a person reads, and XML cannot hold most of them at all.

# Share of two words that must be alike (difflib's ratio), and the least length of one that may begin the other.
_ALIKE, _BEGINNING = 0.7, 3


def find_nearest(word: str, known_words: Iterable[str]) -> str | None:
    """The known word that was probably meant: one that is nearly the same, or that this one begins; upper and lower
    case are alike. None where no word is near: a wrong suggestion is worse than a list."""
    spellings = {name.lower(): name for name in known_words}
    close_matches = difflib.get_close_matches(word.lower(), spellings, n=1, cutoff=_ALIKE)
    completions = [name for name in spellings if len(word) >= _BEGINNING and name.startswith(word.lower())]
    return next((spellings[name] for name in [*close_matches, *sorted(completions, key=len)]), None)


def suggest(word: str, known_words: Iterable[str], otherwise: str | None = None) -> str:
    """'did you mean 'x'?' for the nearest known word; without one `otherwise`, by default 'known: x, y'."""
    word_list = list(known_words)
    if nearest_word := find_nearest(word, word_list):
        return f"did you mean {nearest_word!r}?"
    return f"known: {', '.join(word_list) or 'none'}" if otherwise is None else otherwise


def join_first(items: Sequence[str], limit: int = 3, separator: str = ", ") -> str:
    """'a, b and 3 more': the first `limit` of the items, and how many are left. With '; ' it is 'a; b; and 3 more'."""
    text, remaining_count = separator.join(items[:limit]), len(items) - limit
    return f"{text}{separator.rstrip(', ')} and {remaining_count} more" if remaining_count > 0 else text


def format_bytes(size: float | None) -> str:
    """'512 B', '2.0 KiB', '5.3 MiB', '40.0 GiB': a size in bytes, in powers of 1024; '' for None."""
    if size is None:
        return ""
    power = next((power for power in (3, 2, 1) if size >= 1024**power), 0)
    return f"{size / 1024**power:.1f} {' KMG'[power]}iB" if power else f"{size:.0f} B"


def format_age(seconds: float) -> str:
    """'95 s', '12 min', '3 h', '2 days': a time span in seconds, in the largest unit of which it has two."""
    for unit_s, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{seconds:.0f} s"


def format_checks(checks: Mapping[str, int]) -> str:
    """'38/40': how many checks passed of all that there were; '' without any. checks: counts by outcome."""
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
    return _UNESCAPED.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def now() -> str:
    """The current time in UTC to the second, in ISO 8601: '2026-11-20T18:23:01+00:00'."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def precise_now() -> str:
    """The current time in UTC to the millisecond, in ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def format_line(event: str, level: str = "info", **fields: object) -> str:
    """One line: a JSON object with the time, the level, the event and the fields that are not None."""
    present_fields = {name: value for name, value in fields.items() if value is not None}
    line = {"time": precise_now(), "level": level, "event": event, **present_fields}
    return visible_json(json.dumps(line, ensure_ascii=False))


def write_line(event: str, level: str = "info", **fields: object) -> None:
    """Write such a line on stderr."""
    print(format_line(event, level, **fields), file=sys.stderr, flush=True)


# A daemon thread that others wait for: whatever ends its work, its owner answers those who wait.
#
# A thread may end by more than an Exception: SystemExit of a plug-in, a panic of a library in Rust (pyo3's
# PanicException is a BaseException). Python then ends that thread alone, and every future and condition that it was to
# serve would wait for ever.


class WorkerThread(Thread):
    """A daemon thread that runs `work`. fail: called in the thread with what `work` raised, of any class."""

    def __init__(self, name: str, work: Callable[[], object], fail: Callable[[BaseException], object]) -> None:
        super().__init__(name=name, daemon=True)
        self._work, self._fail = work, fail

    def run(self) -> None:
        """Run `work`, and `fail` where it raises."""
        try:
            self._work()
        except BaseException as error:
            self._fail(error)


class SelfClosing(ABC):
    """A context manager that calls its own `close` at the end of the block."""

    @abstractmethod
    def close(self) -> None:
        """Release what it holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def describe_error(error: BaseException) -> str:
    """'ValueError: why'; the class alone where `str`, which is the error's own code, raises itself."""
    try:
        return f"{type(error).__name__}: {error}"
    except BaseException:
        return type(error).__name__


# Zip files that come from elsewhere: what reading one may raise, and which compression is read.
#
# Python reads bzip2, LZMA and, from 3.14 on, Zstandard too. Each has errors of its own, and nothing here writes them.

# What opening a zip file, or reading a stored or deflated member, raises where it is damaged or of another kind.
DAMAGED = (
    OSError, EOFError, ValueError, OverflowError, RuntimeError, zipfile.BadZipFile, zlib.error, struct.error,
)  # fmt: skip
_METHODS = {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}


def check_compression(archive: zipfile.ZipFile) -> None:
    """Raise BadZipFile for a member that is neither stored nor deflated."""
    for member in archive.infolist():
        if member.compress_type not in _METHODS:
            raise zipfile.BadZipFile(
                f"{member.filename[:80]!r} is compressed by method {member.compress_type}; only deflate is read"
            )
