"""For serving code: a recorder of requests, and a log of their answers' latencies, errors and digests.

    recorder = enginesmith.Recorder("traffic.jsonl", sampling=0.1)
    log = enginesmith.recording.ObservationLog("stable.jsonl", "engines/tiny-3-cpu-int8.json")
    ...
    recorder.append(inputs)
    log.append(latency_s, ok=True, outputs=outputs, request=request_id)

Both append lines to files that many processes may share. `append` never raises: lines that cannot be written are
counted as `lost`, and `failure` has the reason. Recorded inputs are your users' data; the files are readable by their
owner only.
"""

import math
import random
import time
from collections.abc import Callable, Mapping
from numbers import Integral
from pathlib import Path
from types import TracebackType

from enginesmith.core import parsing
from enginesmith.core.errors import DataError, EnginesmithError, InputError, is_digest
from enginesmith.core.text import SelfClosing, describe_error
from enginesmith.core.types import Tensors
from enginesmith.recording.json_lines import LineFile, Record, number_in, text_in, truth_in
from enginesmith.recording.traffic import TRAFFIC, check_timing, digest_of_outputs, encode_inputs

FORMAT = 1
OBSERVATIONS = "enginesmith-observations"
END = "enginesmith-end"
IDENTITY = ("model", "version", "manifest", "engine", "target", "precision", "backend")
MOST_BYTES = 1 << 30
# The maximum number of observations in a file: all are read into memory.
MOST_OBSERVATIONS = 5_000_000
# Maximum seconds (30 years) and score: larger values are no measurements, and their squares may overflow.
MOST_LATENCY, MOST_SCORE = 1e9, 1e30


class _Log(SelfClosing):
    """A file of lines, to which `append` of its subclasses writes."""

    def __init__(self, path: Path | str, header: Mapping[str, object], most_bytes: int) -> None:
        if most_bytes < 1:
            raise InputError(f"max_bytes is {most_bytes}; give a size in bytes")
        self._file = LineFile(Path(path), header, most_bytes)
        self.kept, self.lost, self.full = 0, 0, False
        self.failure: str | None = None

    def _append(self, make: Callable[[], dict[str, object]]) -> bool:
        try:
            is_appended = self._file.append(make())
        except Exception as error:  # errors from the caller's data: a log must not fail a request
            self.failure, is_appended = describe_error(error), False
        else:
            self.full = not is_appended
        self.kept, self.lost = self.kept + is_appended, self.lost + (not is_appended)
        return is_appended

    def close(self) -> None:
        """Close the file; appended requests stay in it."""
        self._file.close()


class Recorder(_Log):
    """Appends a share of the requests, each with its time of arrival, to a file that `enginesmith canary run` replays.

    sampling: the share that is kept, at random, which the file's head states.  max_bytes: the file's maximum size.
    made: the origin of artificial traffic.  model: the name of the requested model.
    kept, lost: numbers of requests.  full: whether the file has its maximum size.  failure: the last error, or None.
    path: the file.  seed: of the random choice; None: a new one each time.
    Raises InputError for a share or size out of range and for a file with other content, UnavailableError for one that
    cannot be opened.
    """

    def __init__(
        self,
        path: Path | str,
        *,
        sampling: float = 1.0,
        max_bytes: int = MOST_BYTES,
        seed: int | None = None,
        made: str = "",
        model: str = "",
    ) -> None:
        if not 0.0 < sampling <= 1.0:
            raise InputError(f"sampling is {sampling}; give a share above 0 and at most 1")
        header: dict[str, object] = {"format": FORMAT, "kind": TRAFFIC, "sampling": sampling}
        header |= {name: value for name, value in (("made", made), ("model", model)) if value}
        super().__init__(path, header, max_bytes)
        self._sampling, self._random = sampling, random.Random(seed)  # noqa: S311 - a sample, not a secret

    def append(self, inputs: Tensors, at: float | None = None, *, latency: float | None = None) -> bool:
        """Record a request, and return whether it was kept. at: its arrival in seconds since the epoch; default: now.
        latency: seconds until its answer; if given for every request, the number of concurrent requests is known."""
        return self._append_sample(at, latency, lambda: encode_inputs(inputs))

    def append_json(
        self, inputs: Mapping[str, object], at: float | None = None, *, latency: float | None = None
    ) -> bool:
        """Like `append`, for inputs that are JSON already, as in a traffic file."""
        return self._append_sample(at, latency, lambda: dict(inputs))

    def _append_sample(self, at: float | None, latency: float | None, make: Callable[[], dict[str, object]]) -> bool:
        if self._sampling < 1.0 and self._random.random() >= self._sampling:
            return False
        time_s = time.time() if at is None else at

        def line() -> dict[str, object]:
            latency_field = {} if latency is None else {"latency": float(latency)}
            record: dict[str, object] = {"at": float(time_s), **latency_field, "inputs": make()}
            check_timing(record)
            return record

        return self._append(line)


class ObservationLog(_Log):
    """Appends the latency and outcome of requests to a file that `enginesmith canary judge` reads.

    `close` adds a line which states that this process stopped in order, and the number of requests: a file without it
    may be from a process that died. It is left out if an error ends the `with` block, and if lines were lost.

    description: the JSON that `enginesmith pull` wrote beside the engine; it identifies the observed engine. Raises
    DataError for another file, UnavailableError for a file that cannot be opened.
    """

    def __init__(self, path: Path | str, description: Path | str | None = None, *, max_bytes: int = MOST_BYTES) -> None:
        super().__init__(path, header_of(_read_description(description)), max_bytes)

    def append(
        self,
        latency: float | None,
        *,
        ok: bool = True,
        time_s: float | None = None,
        request: int | str | None = None,
        outputs: Tensors | None = None,
        score: float | None = None,
        size: float | None = None,
        error: str = "",
    ) -> bool:
        """Log a request, and return whether it was kept.

        latency: seconds from its arrival to its answer; if `ok` is False any number, or None.
        ok: whether the answer was a good one; False counts as a failed request.
        time_s: its arrival in seconds since the epoch; None: now.
        request: a name that is equal for the same request to the other engine.
        outputs: only their digest is stored.
        score: quality by your own measure, higher is better.
        size: of the request, in any unit above 0 (tokens, rows): large requests are then compared with large ones.
        error: describes a failure, cut after 1000 characters; '' if none.
        """
        arrival_s = time.time() if time_s is None else time_s

        def line() -> dict[str, object]:
            record: dict[str, object] = {"time": float(arrival_s), "ok": bool(ok)}
            optional_fields = {
                "latency": float(latency) if latency is not None and (ok or 0.0 < latency <= MOST_LATENCY) else None,
                "request": int(request) if isinstance(request, Integral) else request,
                "score": None if score is None else float(score),
                "size": None if size is None else float(size),
                "error": str(error or "")[:1000].encode(errors="replace").decode() or None,
                "output": None if outputs is None else digest_of_outputs(outputs),
            }
            record |= {key: value for key, value in optional_fields.items() if value is not None}
            check_observation(record)
            return record

        return self._append(line)

    def close(self) -> None:
        """Append the line which states that this process stopped in order, and close the file."""
        if self._file.line_count and not self.lost and not self._file.is_closed:
            try:
                self._file.append(end_of(self._file.line_count))
            except EnginesmithError as error:
                self.failure = f"{type(error).__name__}: {error}"
        super().close()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if isinstance(error, Exception):
            super().close()
        else:
            self.close()


def check_observation(record: Record) -> dict[str, object]:
    """The columns of an observation, each with its value. Raises ValueError with the field's name."""

    def number(name: str, **limits: float) -> float:
        return math.nan if record.get(name) is None else number_in(record, name, **limits)

    output, name, segment = text_in(record, "output", 65), record.get("request"), record.get("segment")
    if output and not is_digest(output):
        raise ValueError(f"output is {output[:60]!r}; the SHA-256 of the answer is needed")
    if name is not None and type(name) is not int and not (isinstance(name, str) and 0 < len(name) <= 200):
        raise ValueError(f"request is {str(name)[:60]!r}; a whole number or a text of at most 200 characters is needed")
    if segment is not None and not (type(segment) is int and 0 <= segment < MOST_OBSERVATIONS):
        raise ValueError(
            f"segment is {str(segment)[:60]!r}; a whole number from 0 to {MOST_OBSERVATIONS - 1} is needed"
        )
    columns: dict[str, object] = {"output": output or None, "request": name, "segment": segment}
    columns |= {"time": number_in(record, "time"), "ok": truth_in(record, "ok"), "error": text_in(record, "error")}
    columns["latency"] = latency = number("latency", above=0.0, most=MOST_LATENCY)
    if columns["ok"] and math.isnan(latency):
        raise ValueError("latency is missing")
    columns |= {"score": number("score", above=-MOST_SCORE, most=MOST_SCORE), "size": number("size", above=0.0)}
    flipped = None if record.get("flipped") is None else truth_in(record, "flipped")
    return columns | {"sqnr_db": number("sqnr_db"), "flipped": flipped}


def end_of(requests: int, died: str = "") -> dict[str, object]:
    """The last line of a file of observations, written by a process that logged `requests` and stopped in order.

    died: the reason why the observed engine's process ended, if known.
    """
    return {"kind": END, "requests": requests, **({"died": died} if died else {})}


def header_of(identity: Mapping[str, object], planned: int | None = None) -> dict[str, object]:
    """The first line of a file of observations. planned: the number of coming requests, if known."""
    identity_fields = {name: identity[name] for name in IDENTITY if identity.get(name) is not None}
    return {"format": FORMAT, "kind": OBSERVATIONS, **identity_fields, **({"planned": planned} if planned else {})}


def _read_description(path: Path | str | None) -> dict[str, object]:
    if path is None:
        return {}
    try:
        description = parsing.load_json(Path(path).read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as the description of an engine: {error}") from None
    if not isinstance(description, dict) or not {"model", "version", "manifest", "digest"} <= description.keys():
        raise DataError(f"{path} is not the description of an engine; give the JSON that `enginesmith pull` wrote")
    return {**description, "engine": description.get("digest")}
