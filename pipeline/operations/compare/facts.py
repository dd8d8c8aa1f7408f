"""What was measured of one engine in a comparison, and of two against each other."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from enginery.registry.evidence.speeds import Timed

Status = Literal["proven", "unproven", "failed", "refused"]
# Answers sizes beyond the spec's dims, too; every size within them; only some of these.
Shapes = Literal["any", "within", "some"]
SHAPES: tuple[Shapes, ...] = ("some", "within", "any")
# What may take more than so many times as long, by the interval of the duel, is not called as fast.
TIE_FACTOR = 1.25


@dataclass(frozen=True)
class Facts:
    """One unit. Times in seconds, None where nothing ran here.

    reason: why it is no proven engine.  median_s, low_s, high_s: of one run at the bucket that is compared, with the
    95 % interval: what engines are ranked by.  timed: whether that is the runtime's own call, which it is where every
    engine's session gives it, or `Session.run`.  session_s: the median of `Session.run`.  runtime: median_s, low_s and
    high_s of the runtime's own call, where it is known.  load_s: from the runtime's import to a session.
    memory_bytes: peak over the process before.
    sqnr_db: the least of the quantization and the engine joint.  covers: of the fleet's targets, those that its backend
    builds this precision for.  shapes: what it answers; None where that was not tried.  busy: why the machine counts as
    busy while it was timed (`validation.latency.measurement.system_load`).
    """

    unit: str
    backend: str
    precision: str
    status: Status
    reason: str = ""
    median_s: float | None = None
    low_s: float | None = None
    high_s: float | None = None
    timed: Timed = "session"
    session_s: float | None = None
    runtime: Mapping[str, float | None] | None = None
    items_per_s: float | None = None
    load_s: float | None = None
    memory_bytes: int | None = None
    size_bytes: int | None = None
    build_s: float | None = None
    sqnr_db: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    covers: tuple[str, ...] = ()
    shapes: Shapes | None = None
    notes: tuple[str, ...] = ()
    busy: tuple[str, ...] = ()

    @property
    def runs(self) -> bool:
        """Whether it may be recommended: proven, and timed here."""
        return self.status == "proven" and self.median_s is not None

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        return asdict(self)


def ranked_alike(facts: Sequence[Facts]) -> list[Facts]:
    """The facts, with the runtimes' own times for what engines are ranked by where all that ran have them."""
    if not all(item.runtime for item in facts if item.runs):
        return list(facts)
    own: Timed = "runtime"
    return [replace(item, timed=own, **item.runtime) if item.runtime else item for item in facts]  # type: ignore[arg-type]


@dataclass(frozen=True)
class Duel:
    """The fastest engine, by the times that each had alone, against another, interleaved: the ratio of the medians.

    verdict: on the fastest: 'faster', 'slower', 'no difference shown'; or 'far faster' where the times that each had
    alone left no doubt, and they were not run against each other.  detectable: the share that would have been shown.
    busy: as in `Facts`.
    """

    first: str
    second: str
    verdict: str
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    detectable: float | None = None
    busy: tuple[str, ...] = ()

    def turned(self) -> "Duel":
        """The same runs, told of the second engine."""
        verdict = {"faster": "slower", "slower": "faster"}.get(self.verdict, self.verdict)
        ratio, low, high = (value and 1 / value for value in (self.ratio, self.high, self.low))
        return Duel(self.second, self.first, verdict, ratio, low, high, self.detectable, self.busy)

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        return asdict(self)


def too_noisy(verdict: str, low: float | None) -> bool:
    """Whether a duel that showed no difference could not have shown a large one either.

    low: the lower bound of the first engine's time as a share of the second's.
    """
    return verdict == "no difference shown" and low is not None and TIE_FACTOR * low < 1


def fastest(facts: Sequence[Facts]) -> Facts | None:
    """The engine that ran with the least median of its own; None where none ran."""
    return min((item for item in facts if item.runs), key=lambda item: item.median_s or 0.0, default=None)
