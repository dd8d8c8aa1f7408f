"""What MetaSchedule has measured, as one file: kernels, and the best schedules of each.

TVM keeps two files of JSON lines, one of kernels (`[hash, module]`) and one of measurements (`[number of the kernel,
[trace, seconds, target, arguments]]`), and appends to them. Here they are one JSON document, equal kernels are one, and
of each the quickest schedules are kept.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from enginery.core.digest import canonical_json
from enginery.core.errors import EngineryError

FILES = ("database_workload.json", "database_tuning_record.json")
_FORMAT = 1
_BEST = 16
# MetaSchedule's mark of a schedule that did not run, in seconds.
_NEVER = 1e9


def bundle(folder: Path) -> bytes:
    """The two files of a folder as one document."""
    kernels, measured = (_lines(folder / name) for name in FILES)
    return _document(kernels, measured)


def unbundle(data: bytes, folder: Path) -> None:
    """Write the two files. Raises EngineryError when `data` is no such document."""
    kernels, measured = _parsed(data)
    for name, items in zip(FILES, (kernels, measured), strict=True):
        (folder / name).write_text("".join(json.dumps(item, separators=(",", ":")) + "\n" for item in items))


def merged(older: bytes, newer: bytes) -> bytes:
    """One document with what both know. Raises EngineryError when one is none."""
    kernels, measured = _parsed(older)
    more_kernels, more = _parsed(newer)
    return _document([*kernels, *more_kernels], [*measured, *([len(kernels) + at, rest] for at, rest in more)])


def _document(kernels: Sequence[Any], measured: Sequence[Any]) -> bytes:
    numbers: dict[bytes, int] = {}
    known: list[Any] = []
    new: list[int] = []
    for kernel in kernels:
        text = canonical_json(kernel)
        if text not in numbers:
            numbers[text] = len(known)
            known.append(kernel)
        new.append(numbers[text])
    best = sorted(_valid(measured, new), key=lambda item: (item[0], _seconds(item), canonical_json(item[1])))
    return canonical_json({"format": _FORMAT, "kernels": known, "measured": list(_first(best))})


def _valid(measured: Sequence[Any], new: Sequence[int]) -> Iterator[list[Any]]:
    """What ran, with the kernels' new numbers, each once."""
    seen = set()
    for at, rest in measured:
        item = [new[at], rest]
        if _seconds(item) < _NEVER and (text := canonical_json(item)) not in seen:
            seen.add(text)
            yield item


def _first(best: Sequence[list[Any]]) -> Iterator[list[Any]]:
    count: dict[int, int] = {}
    for item in best:
        count[item[0]] = count.get(item[0], 0) + 1
        if count[item[0]] <= _BEST:
            yield item


def _seconds(item: Sequence[Any]) -> float:
    runs = item[1][1]
    return sum(runs) / len(runs) if runs else _NEVER


def _lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _parsed(data: bytes) -> tuple[list[Any], list[Any]]:
    try:
        value = json.loads(data)
        kernels, measured = value["kernels"], value["measured"]
        fine = value["format"] == _FORMAT and all(isinstance(kernel, list) for kernel in kernels)
        for at, rest in measured:
            fine = fine and 0 <= at < len(kernels) and all(float(second) >= 0 for second in rest[1])
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise EngineryError(f"no records of TVM's tuning: {error}") from error
    if not fine:
        raise EngineryError("no records of TVM's tuning; they are begun anew")
    return kernels, measured
