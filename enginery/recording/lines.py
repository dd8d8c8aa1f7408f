"""JSON lines that somebody else may have written: read one at a time, within a limit, errors with the line number."""

import hashlib
import json
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from enginery.core.errors import DataError

Record = Mapping[str, object]


class JsonLinesReader:
    """The objects of a file, with their line numbers. `cut`: whether its last line was half written, and left out.

    size: bytes to read, for a file that may grow meanwhile; default: all.  `digest`: SHA-256 of what was read.
    Raises DataError for a line that is longer than `most_bytes`, is no JSON object, or holds NaN.
    """

    def __init__(self, path: Path, most_bytes: int, size: int | None = None) -> None:
        self.path, self._most, self.cut = path, most_bytes, False
        self._left, self._hash = sys.maxsize if size is None else size, hashlib.sha256()

    @property
    def digest(self) -> str:
        """Of the bytes that were read so far."""
        return self._hash.hexdigest()

    def __iter__(self) -> Iterator[tuple[int, Record]]:
        try:
            with self.path.open("rb") as stream:
                yield from self.of(stream)
        except OSError as error:
            raise DataError(f"{self.path} cannot be read: {error.strerror or error}") from None

    def of(self, stream: BinaryIO) -> Iterator[tuple[int, Record]]:
        """The same, of an open file."""
        number = 0
        while line := stream.readline(min(self._most + 1, self._left)):
            number += 1
            self._left -= len(line)
            self._hash.update(line)
            if len(line) > self._most:
                raise self.error(number, f"is longer than {self._most} bytes")
            if line.strip() and (found := self._read(line, number)) is not None:
                yield number, found

    def error(self, number: int, what: str) -> DataError:
        """The error about a line."""
        return DataError(f"{self.path}:{number}: {what}")

    def _read(self, line: bytes, number: int) -> Record | None:
        try:
            found = json.loads(line, parse_constant=_refuse)
        except (ValueError, RecursionError) as error:
            if not line.endswith(b"\n"):  # whoever wrote it was killed
                self.cut = True
                return None
            raise self.error(number, f"is not JSON ({str(error)[:120]}); remove the line") from None
        if not isinstance(found, dict):
            raise self.error(number, f"is {type(found).__name__}; an object is needed")
        return found


def number_in(record: Record, name: str, *, above: float = -math.inf, most: float = math.inf) -> float:
    """A finite number of a record that is greater than `above`, and `most` or less. Raises ValueError that names it."""
    value = record.get(name)
    if value is None:
        raise ValueError(f"{name} is missing")
    if isinstance(value, bool) or not isinstance(value, int | float) or not -1e300 < value < 1e300:
        raise ValueError(f"{name} is {_shorten(value)}; a finite number is needed")
    if not value > above:
        raise ValueError(f"{name} is {_shorten(value)}; it must be above {above:g}")
    if value > most:
        raise ValueError(f"{name} is {_shorten(value)}; it must be at most {most:g}")
    return float(value)


def truth_in(record: Record, name: str) -> bool:
    """True or false of a record. Raises ValueError that names it."""
    value = record.get(name)
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {_shorten(value)}; true or false is needed")
    return value


def text_in(record: Record, name: str, most: int = 1000) -> str:
    """A text of a record, cut to `most` characters; '' where there is none. Raises ValueError."""
    value = record.get(name, "")
    if not isinstance(value, str):
        raise ValueError(f"{name} is {_shorten(value)}; a text is needed")
    return value[:most]


def _shorten(value: object) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**20 else "a huge number"
    return text if len(text) <= 60 else text[:57] + "..."


def _refuse(text: str) -> None:
    raise ValueError(f"{text} is not JSON")
