"""The kit's JSON: what was there, what was tried, what came of it.

kind, format, created_at      'enginery-gpu-results', 1, ISO 8601 in UTC
device, host, software        what was measured, and with what
peaks                         the roofs, measured by torch
models                        the kit's own: operations and compulsory bytes of a run at each batch
tries                         each with kind ('engine', 'other generation', 'any generation', 'peer'), outcome, reason,
                              checks, latency, races
skipped                       what was not tried, and why
carried                       published engines: what they are, and their answers, for `enginery validate --import`
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from enginery.core.digest import canonical_json
from enginery.core.errors import IntegrityError

KIND, FORMAT = "enginery-gpu-results", 1
# Answers of carried engines are in it.
MAX_BYTES = 1 << 30
Json = dict[str, Any]
_LISTS = ("models", "tries", "skipped", "carried")
_MAPPINGS = ("device", "host", "software")


@dataclass(frozen=True)
class Results:
    """See the module's words. seconds: of each latency.  size: of the kit's models."""

    created_at: str
    device: Json
    host: Json
    software: Json
    peaks: Json | None
    models: list[Json]
    tries: list[Json]
    skipped: list[Json]
    carried: list[Json]
    seconds: float
    size: str
    kind: str = KIND
    format: int = FORMAT

    def to_bytes(self) -> bytes:
        """Canonical JSON, keys sorted; a number that JSON cannot hold is written as 'nan', 'inf' or '-inf'."""
        return canonical_json(_writable(asdict(self)))

    @classmethod
    def from_json(cls, document: Any) -> "Results":
        """Read what `to_bytes` wrote, parsed. Raises IntegrityError for anything else."""
        if not isinstance(document, dict) or document.get("kind") != KIND:
            raise IntegrityError("no results of the GPU kit; `python -m validation.gpu --out FILE` writes them")
        if document.get("format") != FORMAT:
            raise IntegrityError(f"results of format {str(document.get('format'))[:40]}; this version reads {FORMAT}")
        if document.keys() != set(cls.__dataclass_fields__) or not _is_whole(document):
            raise IntegrityError("these results of the GPU kit are not whole; run the kit again")
        return cls(**document)

    @classmethod
    def load(cls, path: Path) -> "Results":
        """Read a file of this machine's own. Raises IntegrityError for what is none."""
        try:
            return cls.from_json(json.loads(path.read_bytes()))
        except (ValueError, RecursionError) as error:
            raise IntegrityError(f"{path}: no results of the GPU kit: {str(error)[:120]}") from error


def now() -> str:
    """The time, ISO 8601, UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _writable(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _writable(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_writable(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _is_whole(document: Mapping[str, Any]) -> bool:
    lists = all(_of(document[name], list) and all(_of(item, dict) for item in document[name]) for name in _LISTS)
    mappings = all(_of(document[name], dict) for name in _MAPPINGS)
    peaks = document["peaks"] is None or _of(document["peaks"], dict)
    return lists and mappings and peaks and _of(document["created_at"], str) and _of(document["size"], str)


def _of(value: Any, kind: type) -> bool:
    return isinstance(value, kind)
