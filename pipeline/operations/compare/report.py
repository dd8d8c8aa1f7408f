"""A comparison of engines: what was measured of each, of pairs of them, and which one to take."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from enginery.core.reports.latency import MachineKind, Quantile
from enginery.registry.evidence.speeds import Timed

Status = Literal["proven", "unproven", "failed", "refused"]
# Answers sizes beyond the spec's dims, too; every size within them; only some of these.
Shapes = Literal["any", "within", "some"]
SHAPES: tuple[Shapes, ...] = ("some", "within", "any")
# What may take more than so many times as long, by the interval of the pair, is not called as fast.
TIE_FACTOR = 1.25


@dataclass(frozen=True)
class RuntimeMedian:
    """The median of the runtime's own call in seconds, with its 95 % interval."""

    median_s: float
    low_s: float | None
    high_s: float | None

    @classmethod
    def of(cls, quantile: Quantile | None) -> "RuntimeMedian | None":
        """None where it was not measured."""
        return cls(quantile.value, quantile.low, quantile.high) if quantile and quantile.value else None


@dataclass(frozen=True)
class EngineFacts:
    """One unit. Times in seconds, None where nothing ran here.

    reason: why it is no proven engine.  median_s, low_s, high_s: of one run at the bucket that is compared, with the
    95 % interval: what engines are ranked by.  timed: whether that is the runtime's own call, which it is where every
    engine's session gives it, or `Session.run`.  session_s: the median of `Session.run`.  runtime: where it is known.
    load_s: from the runtime's import to a session.  memory_bytes: peak over the process before.
    sqnr_db: the least of the quantization and the engine stage.  covers: of the fleet's targets, those that its backend
    builds this precision for.  shapes: what it answers; None where that was not tried.  busy: why the machine counts as
    busy while it was timed (`enginery.core.reports.latency.SystemLoad`).
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
    runtime: RuntimeMedian | None = None
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


@dataclass(frozen=True)
class Flip:
    """What would make another engine the better choice. axis: 'throughput', 'rebuild', 'start', 'portability',
    'shapes', 'accuracy' or 'memory'."""

    axis: str
    unit: str
    condition: str


@dataclass(frozen=True)
class Recommendation:
    """unit: what to take, None where nothing can be said.  ties: what no difference in speed was shown to."""

    unit: str | None
    reason: str
    ties: tuple[str, ...] = ()
    flips: tuple[Flip, ...] = ()


def rank_alike(facts: Sequence[EngineFacts]) -> list[EngineFacts]:
    """The facts, with the runtimes' own times for what engines are ranked by where all that ran have them."""
    if not all(item.runtime for item in facts if item.runs):
        return list(facts)
    return [
        replace(item, timed="runtime", median_s=own.median_s, low_s=own.low_s, high_s=own.high_s)
        if (own := item.runtime)
        else item
        for item in facts
    ]


@dataclass(frozen=True)
class PairedComparison:
    """The fastest engine, by the times that each had alone, against another, interleaved: the ratio of the medians.

    verdict: on the fastest: 'faster', 'slower', 'no difference shown'; or 'far faster' where the times that each had
    alone left no doubt, and they were not run against each other.  detectable: the share that would have been shown.
    busy: as in `EngineFacts`.
    """

    first: str
    second: str
    verdict: str
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    detectable: float | None = None
    busy: tuple[str, ...] = ()

    def swap(self) -> "PairedComparison":
        """The same runs, told of the second engine."""
        verdict = {"faster": "slower", "slower": "faster"}.get(self.verdict, self.verdict)
        ratio, low, high = (value and 1 / value for value in (self.ratio, self.high, self.low))
        return PairedComparison(self.second, self.first, verdict, ratio, low, high, self.detectable, self.busy)


@dataclass(frozen=True)
class BackendComparison:
    """Engines of one model for one target, at one bucket. fleet: names of the targets to be served.

    original: task metrics of the exported model.  created_at: ISO 8601, UTC.  duels: of the fastest engine, `first` in
    all of them, against the others.
    """

    model: str
    target: str
    bucket: str
    fleet: tuple[str, ...]
    machine: MachineKind
    created_at: str
    original: Mapping[str, float]
    engines: tuple[EngineFacts, ...]
    duels: tuple[PairedComparison, ...]
    recommendation: Recommendation


def is_too_noisy(verdict: str, low: float | None) -> bool:
    """Whether a pair that showed no difference could not have shown a large one either.

    low: the lower bound of the first engine's time as a share of the second's.
    """
    return verdict == "no difference shown" and low is not None and TIE_FACTOR * low < 1


def find_fastest(facts: Sequence[EngineFacts]) -> EngineFacts | None:
    """The engine that ran with the least median of its own; None where none ran."""
    return min((item for item in facts if item.runs), key=lambda item: item.median_s or 0.0, default=None)
