"""The measurements of TVM's MetaSchedule as one file: kernels, and the quickest schedules of each.

TVM keeps two files of JSON lines, one of kernels (`[hash, module]`) and one of measurements (`[number of the kernel,
[trace, seconds, target, arguments]]`), and appends to them. Here they are one JSON document without repetitions, with
at most `_BEST` schedules of a kernel.
"""

import json
from dataclasses import dataclass
from itertools import groupby, islice
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
    """kernels: [hash, module] of each.  measured: by the place of its kernel in `kernels`."""

    kernels: tuple[list[object], ...]
    measured: tuple[Measured, ...]
    format: int = _FORMAT


def bundle(folder: Path) -> bytes:
    """The two files of a folder as one document. Raises IntegrityError for other content."""
    kernels, measured = (_lines(folder / name) for name in FILES)
    return _shorten(decode({"kernels": kernels, "measured": measured}, TuningRecords))


def unbundle(data: bytes, folder: Path) -> None:
    """Write a document as the two files of `folder`. Raises EngineryError when `data` is no such document."""
    found = _parse(data)
    for name, items in zip(FILES, (found.kernels, found.measured), strict=True):
        (folder / name).write_text("".join(json.dumps(item, separators=(",", ":")) + "\n" for item in items))


def merge(older: bytes, newer: bytes) -> bytes:
    """One document with the content of both. Raises EngineryError when one of them is no such document."""
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
    ran = {canonical_json(item): item for at, rest in found.measured if _seconds(item := (new[at], rest)) < _NEVER}
    best = sorted(ran.values(), key=lambda item: (item[0], _seconds(item), canonical_json(item[1])))
    kept = [item for _, same in groupby(best, key=lambda item: item[0]) for item in islice(same, _BEST)]
    return canonical_json(encode(TuningRecords(tuple(known), tuple(kept))))


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
