"""Observations of served requests, as a file of JSON lines, and as a table of columns.

    {"time": 1763640000.2, "latency": 0.0123, "ok": true, "request": 17, "size": 768, "output": sha256, "score": 0.9}

`time` (seconds), `latency` (seconds from arrival to answer) and `ok` are required. The first line may name the engine
(`"kind": "enginesmith-observations"`). A writer that stopped in order ends its observations with their number (`"kind":
"enginesmith-end", "requests": 10000`). Other fields of a line are ignored.
"""

from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from enginesmith.arrays import Array
from enginesmith.core.errors import DataError, is_digest
from enginesmith.recording.json_lines import JsonLinesReader, Record, text_in
from enginesmith.recording.recorder import END, FORMAT, IDENTITY, MOST_OBSERVATIONS, OBSERVATIONS, check_observation
from validation.statistics.rates import Side

# The most bytes of a line.
MOST_LINE_BYTES = 1 << 20
# The greatest share of observations that repeat a request, as after a server's retry.
MOST_REPEATED = 0.001
Name = int | str


@dataclass(frozen=True)
class EngineIdentity:
    """The engine behind the observations, as far as the file names it.

    manifest, engine: digests.
    model, version: of the registry.  target, precision, backend: of the unit.
    Raises ValueError for texts that are no digests.
    """

    model: str | None = None
    version: str | None = None
    manifest: str | None = None
    engine: str | None = None
    target: str | None = None
    precision: str | None = None
    backend: str | None = None

    def __post_init__(self) -> None:
        for name, value in (("manifest", self.manifest), ("engine", self.engine)):
            if value is not None and not is_digest(value):
                raise ValueError(f"{name} is {value[:60]!r}; a SHA-256 is needed")

    @property
    def reference(self) -> str:
        """'digits@4', or '' where the model is not known."""
        return f"{self.model}@{self.version or '?'}" if self.model else ""

    @property
    def unit(self) -> str:
        """'sm_89 int8 tensorrt-rtx'."""
        return " ".join(filter(None, (self.target, self.precision, self.backend)))


@dataclass
class ObservationTable:
    """The observations of one file in order: lists with an entry for each observation, and facts about the file.

    cut: whether an incomplete line at its end was left out.
    planned: number of requests of the complete replay.  accounted: number of requests of writers that stopped in order,
    from their last lines.  died: the end of the engine's process, if a replay saw it.
    sqnr_db, score, size: NaN if unknown.  segment: number of the segment in which a replay sent the request, or None.
    time, latency: arrival and duration in seconds.  ok: whether the request was answered.
    flipped: whether the argmax of a replay's answer differs.  output: digest of the outputs.  error: '' for none.
    """

    path: Path
    identity: EngineIdentity = EngineIdentity()
    digest: str = ""
    cut: bool = False
    planned: int | None = None
    accounted: int = 0
    died: str = ""
    time: list[float] = field(default_factory=list)
    latency: list[float] = field(default_factory=list)
    ok: list[bool] = field(default_factory=list)
    score: list[float] = field(default_factory=list)
    size: list[float] = field(default_factory=list)
    sqnr_db: list[float] = field(default_factory=list)
    flipped: list[bool | None] = field(default_factory=list)
    output: list[str | None] = field(default_factory=list)
    request: list[Name | None] = field(default_factory=list)
    error: list[str] = field(default_factory=list)
    segment: list[int | None] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.ok)

    @property
    def ended(self) -> bool:
        """Whether all writers stopped in order. If not, a process may have died at the end."""
        return self.accounted == len(self)

    def merge_attempts(self, worst: bool) -> "ObservationTable":
        """The table with one row per request, with the worst (or best) value of the request's attempts in each column.

        The candidate's worst and the baseline's best attempt are compared: a retry never favours the candidate. If the
        outputs of a request's attempts differ, the request counts as different from the other side.
        """
        attempts = dict[Name | None, list[int]]()
        for row, name in enumerate(self.request):
            attempts.setdefault(name, []).append(row)
        if len(attempts) == len(self):
            return self
        columns = {name: column for name, column in vars(self).items() if isinstance(column, list)}
        table = replace(self, accounted=self.accounted - len(self) + len(attempts))
        vars(table).update({name: [column[rows[0]] for rows in attempts.values()] for name, column in columns.items()})
        greatest, least = (np.fmax, np.fmin) if worst else (np.fmin, np.fmax)
        for index, rows in enumerate(attempts.values()):
            if len(rows) > 1:
                table.ok[index] = (all if worst else any)(self.ok[row] for row in rows)
                like_rows = [row for row in rows if self.ok[row] == table.ok[index]]
                table.error[index] = self.error[like_rows[0]]
                table.latency[index] = float(greatest.reduce([self.latency[row] for row in like_rows]))
                table.score[index] = float(least.reduce([self.score[row] for row in like_rows]))
                table.sqnr_db[index] = float(np.fmin.reduce([self.sqnr_db[row] for row in like_rows]))
                table.flipped[index] = any(self.flipped[row] for row in like_rows) or table.flipped[index]
                outputs = {self.output[row] for row in like_rows}
                table.output[index] = outputs.pop() if len(outputs) == 1 else f"several, worst {worst}"
        return table

    def side(self, order: Array) -> Side:
        """The entries at the indices `order` (int [n]) as arrays; -1 is a request that was never answered."""
        missing_mask = order < 0
        columns = (self.time, self.latency, self.score)
        time, latency, score = (np.where(missing_mask, np.nan, np.asarray(column, float)[order]) for column in columns)
        size = np.where(missing_mask, np.nan, np.asarray(self.size, float)[order]) if self.size else None
        return Side(time, latency, np.asarray(self.ok, bool)[order] & ~missing_mask, score, size)


def read_both(candidate: Path, baseline: Path) -> tuple[ObservationTable, ObservationTable]:
    """Read two files up to their sizes at the start of the call. Raises as `read_observations`."""
    sizes = [path.stat().st_size if path.is_file() else None for path in (candidate, baseline)]
    return read_observations(candidate, sizes[0]), read_observations(baseline, sizes[1])


def read_observations(path: Path, size: int | None = None) -> ObservationTable:
    """Read and check the first `size` bytes of a file of observations; None: all of it.

    Raises DataError with the line, the fault and the expected form.
    """
    observations, reader = ObservationTable(path), JsonLinesReader(path, MOST_LINE_BYTES, size)
    for number, record in reader:
        try:
            if record.get("kind") == END:  # the last line of a writer
                requests = record.get("requests")
                if type(requests) is not int or not 0 <= requests <= MOST_OBSERVATIONS:
                    raise ValueError(f"requests is {str(requests)[:60]!r}; the number of observations is needed")
                observations.accounted += requests
                observations.died = text_in(record, "died", 200) or observations.died
            elif "kind" in record:
                observations.identity = _identity(record, observations)
            else:
                add_to(observations, record)
        except (ValueError, OverflowError) as error:
            raise reader.error(number, str(error)) from None
        if len(observations) > MOST_OBSERVATIONS:
            raise reader.error(number, f"more than {MOST_OBSERVATIONS} observations; judge a part of them")
    if not len(observations):
        raise DataError(f"{path} holds no observations; `enginesmith.recording.ObservationLog` writes them")
    names = Counter(name for name in observations.request if name is not None)
    repeats = names.total() - len(names)
    if repeats > MOST_REPEATED * names.total():
        raise DataError(
            f"{path}: request {str(names.most_common(1)[0][0])[:60]!r} was observed again; {repeats} of "
            f"{names.total()} observations repeat a request, over {100 * MOST_REPEATED:g} %; log each request once, "
            "as its user saw it"
        )
    observations.cut, observations.digest = reader.cut, reader.digest
    return observations


def read_head(path: Path) -> EngineIdentity:
    """The engine that a file of observations names on its first line. Raises DataError."""
    reader = JsonLinesReader(path, MOST_LINE_BYTES)
    for number, record in reader:
        try:
            return _identity(record, ObservationTable(path)) if "kind" in record else EngineIdentity()
        except ValueError as error:
            raise reader.error(number, str(error)) from None
    return EngineIdentity()


def _identity(record: Record, table: ObservationTable) -> EngineIdentity:
    """The engine that the head of a file names; sets `table.planned`. Raises ValueError that names the field."""
    if record.get("kind") != OBSERVATIONS or record.get("format") != FORMAT:
        kind = str(record.get("kind"))[:60]
        found_text = f"{kind!r} in format {str(record.get('format'))[:20]}"
        raise ValueError(
            f"is the head of a file of {found_text}; this version reads {OBSERVATIONS!r} in format {FORMAT}"
        )
    planned_requests = record.get("planned")
    if planned_requests is not None and (type(planned_requests) is not int or planned_requests < 1):
        raise ValueError(f"planned is {str(planned_requests)[:60]!r}; a number of requests is needed")
    table.planned = planned_requests
    identity = EngineIdentity(**{name: text_in(record, name, 200) for name in IDENTITY if name in record})
    if len(table) or table.identity not in (EngineIdentity(), identity):
        raise ValueError("is a second head; a file holds the observations of one engine")
    return identity


def add_to(table: ObservationTable, record: Record) -> None:
    """Add one observation. Raises ValueError that names the field."""
    for column, value in check_observation(record).items():
        getattr(table, column).append(value)
