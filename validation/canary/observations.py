"""Observations of production: what became of each request, one JSON line each.

    {"time": 1763640000.2, "latency": 0.0123, "ok": true, "request": 17, "output": sha256, "score": 0.9}

`time` (seconds), `latency` (seconds from arrival to answer) and `ok` are needed. The first line may say which engine
they are of (`"kind": "enginery-observations"`). Whatever else a line holds is left alone.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from builders.digest import digest_of_file, is_digest
from builders.errors import DataError
from validation.canary.evidence import Array, Evidence, Side
from validation.canary.lines import JsonLines, Record, number_in, text_in, truth_in
from validation.canary.outputs import EQUAL_DB
from validation.canary.recorder import FORMAT, IDENTITY, OBSERVATIONS

MOST_LINE_BYTES = 1 << 20
MOST_OBSERVATIONS = 5_000_000
DIGESTS = ("manifest", "engine")
Name = int | str


@dataclass
class Observations:
    """The columns of one file, in its order. sqnr_db, score: NaN where there is none; flipped: None likewise.

    identity: which engine they are of.  digest: of the file.  cut: whether a half line at the end was left out.
    planned: how many requests a replay is to have in the end.
    """

    path: Path
    identity: dict[str, str] = field(default_factory=dict)
    digest: str = ""
    cut: bool = False
    planned: int | None = None
    time: list[float] = field(default_factory=list)
    latency: list[float] = field(default_factory=list)
    ok: list[bool] = field(default_factory=list)
    score: list[float] = field(default_factory=list)
    sqnr_db: list[float] = field(default_factory=list)
    flipped: list[bool | None] = field(default_factory=list)
    output: list[str | None] = field(default_factory=list)
    request: list[Name | None] = field(default_factory=list)
    error: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.ok)

    def side(self, order: Array) -> Side:
        """The entries at `order`, as a side; an index of -1 stands for a request that was never answered."""
        gone = order < 0
        time, latency, score = (
            np.where(gone, np.nan, np.asarray(column, float)[order]) for column in (self.time, self.latency, self.score)
        )
        return Side(time, latency, np.asarray(self.ok, bool)[order] & ~gone, score)


def read_observations(path: Path) -> Observations:
    """Read and check a file of observations. Raises DataError naming the line, what is wrong and what is needed."""
    found, lines = Observations(path), JsonLines(path, MOST_LINE_BYTES)
    for number, record in lines:
        try:
            if "kind" in record:
                found.identity = _identity(record, found)
            else:
                add_to(found, record)
        except (ValueError, OverflowError) as error:
            raise lines.error(number, str(error)) from None
        if len(found) > MOST_OBSERVATIONS:
            raise lines.error(number, f"more than {MOST_OBSERVATIONS} observations; judge a part of them")
    if not len(found):
        raise DataError(f"{path} holds no observations; `enginery.ObservationLog` writes them")
    names = Counter(name for name in found.request if name is not None)
    if (twice := next((name for name, count in names.items() if count > 1), None)) is not None:
        raise DataError(f"{path}: request {str(twice)[:60]!r} was observed twice; each needs a name of its own")
    found.cut, found.digest = lines.cut, digest_of_file(path)
    return found


def read_head(path: Path) -> dict[str, str]:
    """Which engine a file of observations is of, without reading the rest; empty when it does not say. DataError."""
    lines = JsonLines(path, MOST_LINE_BYTES)
    for number, record in lines:
        try:
            return _identity(record, Observations(path)) if "kind" in record else {}
        except ValueError as error:
            raise lines.error(number, str(error)) from None
    return {}


def _identity(record: Record, found: Observations) -> dict[str, str]:
    if record.get("kind") != OBSERVATIONS or record.get("format") != FORMAT:
        kind = str(record.get("kind"))[:60]
        raise ValueError(f"is the head of {kind!r}; observations of format {FORMAT} are needed")
    planned = record.get("planned")
    if planned is not None and (type(planned) is not int or planned < 1):
        raise ValueError(f"planned is {str(planned)[:60]!r}; a number of requests is needed")
    found.planned = planned
    identity = {name: text_in(record, name, 200) for name in IDENTITY if name in record}
    for name in DIGESTS:
        if name in identity and not is_digest(identity[name]):
            raise ValueError(f"{name} is {identity[name][:60]!r}; a SHA-256 is needed")
    if len(found) or (found.identity and found.identity != identity):
        raise ValueError("is a second head; a file holds the observations of one engine")
    return identity


def add_to(found: Observations, record: Record) -> None:
    """Add one observation. Raises ValueError that names the field."""
    ok = truth_in(record, "ok")
    values = {
        "time": number_in(record, "time"),
        "latency": number_in(record, "latency", above=0.0) if ok or "latency" in record else float("nan"),
        "ok": ok,
        "score": _optional(record, "score"),
        "sqnr_db": _optional(record, "sqnr_db"),
        "flipped": truth_in(record, "flipped") if record.get("flipped") is not None else None,
        "output": _output(record),
        "request": _name(record),
        "error": text_in(record, "error"),
    }
    for name, value in values.items():
        getattr(found, name).append(value)


def _optional(record: Record, name: str) -> float:
    return float("nan") if record.get(name) is None else number_in(record, name)


def _output(record: Record) -> str | None:
    text = text_in(record, "output", 65)
    if text and not is_digest(text):
        raise ValueError(f"output is {text[:60]!r}; the SHA-256 of the answer is needed")
    return text or None


def _name(record: Record) -> Name | None:
    name = record.get("request")
    if name is None or type(name) is int or (isinstance(name, str) and 0 < len(name) <= 200):
        return name
    raise ValueError(f"request is {str(name)[:60]!r}; a whole number or a text of at most 200 characters is needed")


def evidence_of(
    candidate: Observations, baseline: Observations, sqnr_db: float, *, ignore_missing: bool = False
) -> tuple[Evidence, tuple[str, ...]]:
    """What two files say together, and remarks on how they were read.

    They are paired when each observation on both sides names its request. A request that only one side observed counts
    as one that the other failed, or is left out with `ignore_missing`; those behind the last common one are always left
    out, because there a run was interrupted. sqnr_db: answers nearer to each other than that are the same.
    """
    notes = [f"{one.path.name}: half a line at its end was left out" for one in (candidate, baseline) if one.cut]
    if None in candidate.request or None in baseline.request:
        orders = [np.argsort(np.asarray(one.time), kind="stable") for one in (candidate, baseline)]
        sides = [one.side(order) for one, order in zip((candidate, baseline), orders, strict=True)]
        return Evidence(sides[0], sides[1], paired=False), (*notes, "the two sides answered different requests")
    pairs, lonely, behind = _pairs(candidate, baseline)
    if not len(pairs):
        raise DataError(f"{candidate.path.name} and {baseline.path.name} have no request in common; were they swapped?")
    if lonely and ignore_missing:
        pairs = pairs[(pairs >= 0).all(1)]
        notes.append(f"{lonely} requests were observed on one side only, and are left out, as was asked for")
    elif lonely:
        notes.append(
            f"{lonely} requests were observed on one side only, and count as failed on the other; "
            "--missing ignored leaves them out"
        )
    if behind:
        notes.append(f"{behind} requests at the end were observed on one side only, and are left out")
    ours, theirs = candidate.side(pairs[:, 0]), baseline.side(pairs[:, 1])
    both = ours.ok & theirs.ok
    differs, flipped = _answers(candidate, baseline, pairs[both], sqnr_db)
    return Evidence(ours, theirs, True, differs, flipped), tuple(notes)


def _pairs(candidate: Observations, baseline: Observations) -> tuple[Array, int, int]:
    """Index pairs in the order of arrival, -1 where one side is missing; how many miss one; how many were left out."""
    ours = {name: index for index, name in enumerate(candidate.request)}
    theirs = {name: index for index, name in enumerate(baseline.request)}
    arrivals: dict[Name | None, float] = {name: baseline.time[index] for name, index in theirs.items()}
    arrivals |= {name: candidate.time[index] for name, index in ours.items()}
    common = [arrivals[name] for name in ours.keys() & theirs.keys()]
    last = max(common, default=-np.inf)
    kept = sorted((name for name in arrivals if arrivals[name] <= last), key=lambda name: (arrivals[name], str(name)))
    pairs = np.asarray([(ours.get(name, -1), theirs.get(name, -1)) for name in kept], dtype=np.int64).reshape(-1, 2)
    return pairs, int((pairs < 0).any(1).sum()), len(arrivals) - len(kept)


def _answers(
    candidate: Observations, baseline: Observations, pairs: Array, sqnr_db: float
) -> tuple[Array | None, Array | None]:
    """Whether each answer is another one: by the distance that was measured, else by the digests."""
    measured = np.asarray(candidate.sqnr_db)[pairs[:, 0]]
    ours = [candidate.output[index] for index in pairs[:, 0]]
    theirs = [baseline.output[index] for index in pairs[:, 1]]
    same = np.asarray([a == b for a, b in zip(ours, theirs, strict=True)], bool)
    known = np.asarray([a is not None and b is not None for a, b in zip(ours, theirs, strict=True)], bool)
    distance = np.where(np.isnan(measured), np.where(same, EQUAL_DB, -np.inf), measured)
    differs = distance < sqnr_db
    flips = [candidate.flipped[index] for index in pairs[:, 0]]
    flipped = None if None in flips or not flips else np.asarray(flips, bool)
    return (differs if len(pairs) and bool((known | ~np.isnan(measured)).all()) else None), flipped


def identity_of(values: Mapping[str, Any]) -> dict[str, str]:
    """The fields of an identity among others, as texts."""
    return {name: str(values[name]) for name in IDENTITY if values.get(name) is not None}
