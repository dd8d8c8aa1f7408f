"""How many builds ended how, and how long they took, over the life of a registry: counters that only grow.

A flow's process lives for minutes, too short to be scraped; so each run adds what it has seen to one document, and
`enginery metrics` shows that. The histogram's buckets are Prometheus's: how many took at most so many seconds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from enginery.core import parsing
from enginery.core.codec import encode
from enginery.core.digest import canonical_json
from enginery.core.errors import IntegrityError
from enginery.registry.runs.history import Past
from enginery.registry.store.base import Store
from enginery.registry.store.documents import change
from enginery.registry.store.keys import TOTALS

MAX_BYTES = 4 << 20
# Upper bounds in seconds: from a CPU graph in a second to a large engine that is tuned for hours.
BUCKETS_S = (1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 7200.0)
# Targets are GPU generations and products, backends are installed ones: far fewer. Beyond it nothing new is counted.
MOST_LINES = 2000


@dataclass(frozen=True)
class Tally:
    """Builds of a backend for a target that ended in one state: count, seconds (their sum), and how many took at most
    each of `BUCKETS_S`."""

    state: str
    target: str
    backend: str
    count: int = 0
    seconds: float = 0.0
    buckets: tuple[int, ...] = (0,) * len(BUCKETS_S)

    @property
    def labels(self) -> tuple[str, str, str]:
        """State, target and backend."""
        return self.state, self.target, self.backend

    def and_one_of(self, seconds: float) -> "Tally":
        """With one build more."""
        buckets = tuple(n + (seconds <= bound) for n, bound in zip(self.buckets, BUCKETS_S, strict=True))
        return replace(self, count=self.count + 1, seconds=round(self.seconds + seconds, 3), buckets=buckets)


@dataclass(frozen=True)
class Totals:
    """The document. hits, misses: units that were found built, and that were not."""

    builds: tuple[Tally, ...] = ()
    hits: int = 0
    misses: int = 0
    buckets_s: tuple[float, ...] = BUCKETS_S
    format: int = 1


def remember_totals(store: Store, builds: Mapping[str, Sequence[Past]], hits: int, misses: int) -> None:
    """Add what ended, by backend. A write whose answer was lost may count its builds twice: these are statistics.

    Raises UnavailableError, and ConflictError when the document never stands still.
    """

    def add(data: bytes | None) -> bytes:
        known = read_totals(data)
        tallies = {tally.labels: tally for tally in known.builds}
        for backend, pasts in builds.items():
            for past in pasts:
                new = Tally(past.outcome, past.target, backend)
                if new.labels in tallies or len(tallies) < MOST_LINES:
                    tallies[new.labels] = tallies.get(new.labels, new).and_one_of(past.seconds)
        lines = tuple(tally for _, tally in sorted(tallies.items()))
        return canonical_json(encode(Totals(lines, known.hits + hits, known.misses + misses)))

    change(store, TOTALS, add)


def read_totals(data: bytes | None) -> Totals:
    """What the document says; nothing where it is absent or not what it should be."""
    try:
        found = parsing.parse_as(data, MAX_BYTES, Totals) if data else Totals()
    except IntegrityError:
        return Totals()
    whole = all(len(tally.buckets) == len(BUCKETS_S) for tally in found.builds)
    return found if whole and found.buckets_s == BUCKETS_S else Totals()
