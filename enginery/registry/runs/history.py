"""What builds took before, and so what the next one will probably take: seconds and memory.

Two kinds of document for each backend: the builds of one model, and the newest of all models. Each is small, bounded,
compared and swapped; a run reads them when it builds its first unit and writes what it has seen in a few batches. So a
prediction costs one or two reads a run, however many records the registry has. A history is only a memory: one that
cannot be read is empty, and one that cannot be written is not.
"""

import math
import statistics
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from enginery.core import parsing
from enginery.core.digest import canonical_json
from enginery.core.errors import EngineryError
from enginery.core.text import pluralize
from enginery.core.types import BuildRequest
from enginery.registry.store.base import Store
from enginery.registry.store.documents import change
from enginery.registry.store.keys import history_key

MAX_BYTES = 4 << 20
# The newest so many of one unit, of one model, and of a backend.
MOST_OF_UNIT = 10
MOST_OF_MODEL = 300
MOST_OF_BACKEND = 200
# How many of the nearest in size stand for a unit that was never built, and how far they are stretched.
NEIGHBOURS = 5
MOST_STRETCH = 8.0


@dataclass(frozen=True)
class Past:
    """One build that ended. graph_bytes: size of its ONNX file.  seconds: wall clock of its process; peak_mib: the most
    memory it held.  outcome: 'built' or 'failed'.  at: ISO 8601, UTC."""

    model: str
    target: str
    precision: str
    graph_bytes: int
    seconds: float
    peak_mib: float
    outcome: str
    at: str

    @property
    def unit(self) -> tuple[str, str, str]:
        """What tells units of one backend apart."""
        return self.model, self.target, self.precision


@dataclass(frozen=True)
class Expectation:
    """A prediction. builds: how many builds it rests on.  basis: which, in words.

    seconds: the middle of theirs, None when none ended well.  peak_mib: the most of theirs.
    """

    seconds: float | None
    peak_mib: float
    builds: int
    basis: str

    def left(self, elapsed_s: float) -> str:
        """'~40 s left (predicted from 3 builds of this unit)'; '' when there is nothing to say."""
        if self.seconds is None:
            return ""
        rest = self.seconds - elapsed_s
        text = f"~{math.ceil(rest)} s left" if rest > 0 else f"{-rest:.0f} s over the prediction"
        return f"{text} (predicted from {self.basis})"

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        return asdict(self)


class History:
    """The history of one registry, as one run sees it: read once. Safe from several threads."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._read: dict[str, tuple[Past, ...]] = {}

    def expected(self, model: str, request: BuildRequest) -> Expectation | None:
        """What building this unit of `model` will probably take; None when nothing like it was built.

        From builds of the same unit, else from those of its backend that are nearest in size of the graph, stretched by
        the ratio of sizes. A store that does not answer is no reason to fail: None.
        """
        try:
            with self._lock:
                return self._same(model, request) or self._near(request)
        except EngineryError:
            return None

    def _same(self, model: str, request: BuildRequest) -> Expectation | None:
        unit = (model, request.target.name, request.precision)
        found = [past for past in self._of(history_key(request.backend, model)) if past.unit == unit]
        count = f"{pluralize(len(found), 'build')} of this unit"
        return _expectation([(past, 1.0) for past in found], count) if found else None

    def _near(self, request: BuildRequest) -> Expectation | None:
        size = max(1, self._store.size(request.model))
        known = [past for past in self._of(history_key(request.backend)) if past.graph_bytes > 0]
        alike = [past for past in known if past.target == request.target.name] or known
        alike = [past for past in alike if past.precision == request.precision] or alike
        alike.sort(key=lambda past: abs(math.log(size / past.graph_bytes)))
        chosen = [(past, _stretch(size / past.graph_bytes)) for past in alike[:NEIGHBOURS]]
        words = f"{pluralize(len(chosen), 'build')} of {request.backend}, scaled by the size of the graph"
        return _expectation(chosen, words) if chosen else None

    def _of(self, key: str) -> tuple[Past, ...]:
        if key not in self._read:
            self._read[key] = read_pasts(self._store.read(key))
        return self._read[key]


def remember_builds(store: Store, builds: Mapping[str, Sequence[Past]]) -> None:
    """Add what ended, by backend. Of concurrent writers each adds to what the other wrote.

    Raises UnavailableError, and ConflictError when a document never stands still.
    """
    for backend, pasts in builds.items():
        by_model: dict[str, list[Past]] = {}
        for past in pasts:
            by_model.setdefault(past.model, []).append(past)
        for model, of_model in by_model.items():
            _add(store, history_key(backend, model), of_model, MOST_OF_MODEL)
        _add(store, history_key(backend), pasts, MOST_OF_BACKEND)


def _add(store: Store, key: str, pasts: Iterable[Past], most: int) -> None:
    new = tuple(pasts)
    # Sets: a write whose answer was lost is tried again, and what it added is there already.
    change(store, key, lambda data: _document(_newest({*read_pasts(data), *new}, most)))


def _newest(pasts: set[Past], most: int) -> list[Past]:
    """The newest of each unit and of all, oldest first."""
    kept: list[Past] = []
    seen: dict[tuple[str, str, str], int] = {}
    for past in sorted(pasts, key=lambda past: (past.at, *past.unit), reverse=True):
        seen[past.unit] = seen.get(past.unit, 0) + 1
        if seen[past.unit] <= MOST_OF_UNIT and len(kept) < most:
            kept.append(past)
    return kept[::-1]


def _document(pasts: Sequence[Past]) -> bytes:
    return canonical_json({"format": 1, "builds": [asdict(past) for past in pasts]})


def read_pasts(data: bytes | None) -> tuple[Past, ...]:
    """The builds in a document; none where it is absent or not what it should be."""
    if data is None:
        return ()
    try:
        return parsing.field(parsing.parse_json(data, MAX_BYTES), "builds", parsing.many(_past))
    except parsing.Malformed:
        return ()


def _past(value: Any, path: str) -> Past:
    data = parsing.mapping(value, path)
    return Past(
        parsing.field(data, "model", parsing.text, path),
        parsing.field(data, "target", parsing.text, path),
        parsing.field(data, "precision", parsing.text, path),
        parsing.field(data, "graph_bytes", parsing.count, path),
        parsing.field(data, "seconds", parsing.quantity, path),
        parsing.field(data, "peak_mib", parsing.quantity, path),
        parsing.field(data, "outcome", parsing.text, path),
        parsing.field(data, "at", parsing.text, path),
    )


def _expectation(found: Sequence[tuple[Past, float]], basis: str) -> Expectation:
    """The middle of the seconds of what was built. The most of the memory, never scaled down: what a compiler holds
    before it sees the model does not shrink with it, and asking for too little costs a killed build."""
    seconds = [past.seconds * ratio for past, ratio in found if past.outcome == "built"]
    peak = max(past.peak_mib * max(1.0, ratio) for past, ratio in found)
    return Expectation(statistics.median(seconds) if seconds else None, round(peak, 1), len(found), basis)


def _stretch(ratio: float) -> float:
    return min(max(ratio, 1 / MOST_STRETCH), MOST_STRETCH)
