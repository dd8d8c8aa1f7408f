"""What MetaSchedule has measured, as one file: kernels, and the best schedules of each.

TVM keeps two files of JSON lines, one of kernels (`[hash, module]`) and one of measurements (`[number of the kernel,
[trace, seconds, target, arguments]]`), and appends to them. Here they are one JSON document, equal kernels are one, and
of each the quickest schedules are kept.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from enginery.core.codec import decode, encode
from enginery.core.digest import canonical_json
from enginery.core.errors import EngineryError, IntegrityError

FILES = ("database_workload.json", "database_tuning_record.json")
_FORMAT = 1
_BEST = 16
# MetaSchedule's mark of a schedule that did not run, in seconds.
_NEVER = 1e9
# Of a kernel by its number: trace, seconds of each run, target, arguments.
Measured = tuple[int, tuple[object, tuple[float, ...], object, object]]


@dataclass(frozen=True)
class TuningRecords:
    """kernels: hash and module.  measured: of the kernels by their place."""

    kernels: tuple[list[object], ...]
    measured: tuple[Measured, ...]
    format: int = _FORMAT


def bundle(folder: Path) -> bytes:
    """The two files of a folder as one document."""
    kernels, measured = (_lines(folder / name) for name in FILES)
    return _shorten(decode({"kernels": kernels, "measured": measured}, TuningRecords))


def unbundle(data: bytes, folder: Path) -> None:
    """Write the two files. Raises EngineryError when `data` is no such document."""
    found = _parse(data)
    for name, items in zip(FILES, (found.kernels, found.measured), strict=True):
        (folder / name).write_text("".join(json.dumps(item, separators=(",", ":")) + "\n" for item in items))


def merge(older: bytes, newer: bytes) -> bytes:
    """One document with what both know. Raises EngineryError when one is none."""
    first, second = _parse(older), _parse(newer)
    moved = ((len(first.kernels) + at, rest) for at, rest in second.measured)
    return _shorten(TuningRecords((*first.kernels, *second.kernels), (*first.measured, *moved)))


def _shorten(found: TuningRecords) -> bytes:
    """The document, each kernel and measurement once, and of each kernel the quickest measurements."""
    numbers: dict[bytes, int] = {}
    known: list[list[object]] = []
    new: list[int] = []
    for kernel in found.kernels:
        text = canonical_json(kernel)
        if text not in numbers:
            numbers[text] = len(known)
            known.append(kernel)
        new.append(numbers[text])
    best = sorted(_valid(found.measured, new), key=lambda item: (item[0], _seconds(item), canonical_json(item[1])))
    return canonical_json(encode(TuningRecords(tuple(known), tuple(_first(best)))))


def _valid(measured: Sequence[Measured], new: Sequence[int]) -> Iterator[Measured]:
    """What ran, with the kernels' new numbers, each once."""
    seen = set()
    for at, rest in measured:
        item = (new[at], rest)
        if _seconds(item) < _NEVER and (text := canonical_json(item)) not in seen:
            seen.add(text)
            yield item


def _first(best: Sequence[Measured]) -> Iterator[Measured]:
    count: dict[int, int] = {}
    for item in best:
        count[item[0]] = count.get(item[0], 0) + 1
        if count[item[0]] <= _BEST:
            yield item


def _seconds(item: Measured) -> float:
    runs = item[1][1]
    return sum(runs) / len(runs) if runs else _NEVER


def _lines(path: Path) -> list[object]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _parse(data: bytes) -> TuningRecords:
    try:
        found = decode(json.loads(data), TuningRecords)
    except (ValueError, RecursionError, IntegrityError) as error:
        raise EngineryError(f"no records of TVM's tuning: {error}") from error
    fine = all(0 <= at < len(found.kernels) and all(run >= 0.0 for run in rest[1]) for at, rest in found.measured)
    if found.format != _FORMAT or not fine:
        raise EngineryError("no records of TVM's tuning; they are begun anew")
    return found
