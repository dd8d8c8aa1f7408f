"""How many builds ended how, and how long they took, over the life of a registry: counters that only grow.

A flow's process lives for minutes, too short to be scraped; so each run adds what it has seen to one document, and
`enginery metrics` shows that. The histogram's buckets are Prometheus's: how many took at most so many seconds.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from enginery.core import parsing
from enginery.core.digest import canonical_json
from enginery.registry.runs.history import Past
from enginery.registry.store.base import Store
from enginery.registry.store.documents import change
from enginery.registry.store.keys import TOTALS

MAX_BYTES = 4 << 20
# Upper bounds in seconds: from a CPU graph in a second to a large engine that is tuned for hours.
BUCKETS_S = (1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 7200.0)
# Targets are GPU generations and products, backends are installed ones: far fewer. Beyond it nothing new is counted.
MOST_LINES = 2000
Labels = tuple[str, str, str]


@dataclass(frozen=True)
class Tally:
    """Builds that ended in one state. buckets: how many took at most `BUCKETS_S[i]`.  seconds: the sum."""

    count: int = 0
    seconds: float = 0.0
    buckets: tuple[int, ...] = field(default=(0,) * len(BUCKETS_S))

    def and_one_of(self, seconds: float) -> "Tally":
        """With one build more."""
        buckets = tuple(n + (seconds <= bound) for n, bound in zip(self.buckets, BUCKETS_S, strict=True))
        return Tally(self.count + 1, round(self.seconds + seconds, 3), buckets)


@dataclass(frozen=True)
class Totals:
    """builds: by state, target and backend.  hits, misses: units that were found built, and that were not."""

    builds: Mapping[Labels, Tally] = field(default_factory=dict)
    hits: int = 0
    misses: int = 0


def remember_totals(store: Store, builds: Mapping[str, Sequence[Past]], hits: int, misses: int) -> None:
    """Add what ended, by backend. A write whose answer was lost may count its builds twice: these are statistics.

    Raises UnavailableError, and ConflictError when the document never stands still.
    """
    ended = [
        ((past.outcome, past.target, backend), past.seconds) for backend, pasts in builds.items() for past in pasts
    ]

    def added(data: bytes | None) -> bytes:
        known = read_totals(data)
        return _document(Totals(_added(known.builds, ended), known.hits + hits, known.misses + misses))

    change(store, TOTALS, added)


def read_totals(data: bytes | None) -> Totals:
    """What the document says; nothing where it is absent or not what it should be."""
    if data is None:
        return Totals()
    try:
        document = parsing.parse_json(data, MAX_BYTES)
        lines = parsing.field(document, "builds", parsing.many(_line))
        hits, misses = (parsing.field(document, name, parsing.count) for name in ("hits", "misses"))
        same = parsing.field(document, "buckets_s", parsing.many(parsing.quantity)) == BUCKETS_S
    except parsing.Malformed:
        return Totals()
    return Totals(dict(lines), hits, misses) if same else Totals()


def _added(known: Mapping[Labels, Tally], ended: Iterable[tuple[Labels, float]]) -> dict[Labels, Tally]:
    found = dict(known)
    for labels, seconds in ended:
        if labels in found or len(found) < MOST_LINES:
            found[labels] = found.get(labels, Tally()).and_one_of(seconds)
    return found


def _document(known: Totals) -> bytes:
    lines = [
        {"state": state, "target": target, "backend": backend, **vars(tally), "buckets": list(tally.buckets)}
        for (state, target, backend), tally in sorted(known.builds.items())
    ]
    counts = {"hits": known.hits, "misses": known.misses}
    return canonical_json({"format": 1, "buckets_s": list(BUCKETS_S), "builds": lines, **counts})


def _line(value: Any, path: str) -> tuple[Labels, Tally]:
    data = parsing.mapping(value, path)
    state, target, backend = (parsing.field(data, name, parsing.text, path) for name in ("state", "target", "backend"))
    buckets = parsing.field(data, "buckets", parsing.many(parsing.count), path)
    if len(buckets) != len(BUCKETS_S):
        raise parsing.Malformed(f"{path}.buckets has {len(buckets)} numbers; it must have {len(BUCKETS_S)}")
    count, seconds = (
        parsing.field(data, "count", parsing.count, path),
        parsing.field(data, "seconds", parsing.quantity, path),
    )
    return (state, target, backend), Tally(count, seconds, buckets)
