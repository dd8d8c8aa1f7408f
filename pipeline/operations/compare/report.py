"""A comparison of engines: what was measured of each, of pairs of them, and which one to take.

A comparison for people: a table, the pairs, and what to take; for a terminal and as Markdown.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

from enginery.core.reports.latency import MachineKind, Quantile
from enginery.core.text import format_bytes
from enginery.registry.evidence.latencies import Timed
from validation.latency.formatting import format_count, join_reasons
from validation.plots.texts import seconds_text

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


COLUMNS = (
    *("engine", "status", "median", "session", "items/s", "start", "memory", "file", "build", "SQNR", "sizes", "fleet"),
)
Number = TypeVar("Number", int, float)
_SIZES = {"any": "any", "within": "all in dims", "some": "some", None: ""}
_AXES = {
    "throughput": "peak throughput",
    "rebuild": "rebuild cost",
    "start": "cold start",
    "portability": "portability",
    "shapes": "uncovered shapes",
    "accuracy": "accuracy",
    "memory": "memory",
}


def format_rows(found: BackendComparison) -> tuple[Sequence[str], list[list[str]]]:
    """Columns and rows; a column for each task metric, none that is empty."""
    metrics = sorted({name for engine in found.engines for name in engine.metrics})
    columns = [*COLUMNS, *metrics]
    table = [_format_row(engine, metrics, len(found.fleet)) for engine in found.engines]
    kept = [index for index in range(len(columns)) if any(row[index] for row in table)]
    return [columns[index] for index in kept], [[row[index] for index in kept] for row in table]


def _format_row(engine: EngineFacts, metrics: Sequence[str], fleet: int) -> list[str]:
    return [
        f"{engine.precision} {engine.backend}",
        engine.status,
        _cell(engine.median_s, seconds_text),
        _cell(engine.session_s if engine.timed == "runtime" else None, seconds_text),
        _cell(engine.items_per_s, format_count),
        _cell(engine.load_s, seconds_text),
        _cell(engine.memory_bytes, format_bytes),
        _cell(engine.size_bytes, format_bytes),
        _cell(engine.build_s, seconds_text),
        _cell(engine.sqnr_db, lambda value: f"{value:.0f} dB"),
        _SIZES[engine.shapes],
        f"{len(engine.covers)} of {fleet}" if engine.status != "refused" else "",
        *(f"{engine.metrics[name]:.4f}" if name in engine.metrics else "" for name in metrics),
    ]


def _cell(value: Number | None, show: Callable[[Number], str]) -> str:
    return "" if value is None else show(value)


def describe_comparison(found: BackendComparison) -> Iterator[str]:
    """Everything but the table."""
    if any(engine.timed == "runtime" for engine in found.engines):
        yield "median: of the runtime's own call, which engines are ranked by; session: of Session.run, with its checks"
    elif any(engine.median_s for engine in found.engines):
        yield "median: of Session.run, with its checks, as not every engine's runtime can be timed alone"
    yield from _describe_reasons(found.engines)
    busy = [reason for engine in found.engines for reason in engine.busy]
    busy += [reason for pair in found.duels for reason in pair.busy]
    if busy:
        yield (
            f"the machine was busy while these times were taken: {join_reasons(busy)}; compare again when it is quiet, "
            "with a larger --seconds: engines that were timed for as long before are not timed again"
        )
    for pair in found.duels:
        yield describe_pair(pair)
    told = found.recommendation
    yield f"take {told.unit}: {told.reason}" if told.unit else f"nothing to take: {told.reason}"
    for flip in told.flips:
        yield f"  {flip.unit} instead, for {_AXES[flip.axis]}: {flip.condition}"


def _describe_reasons(engines: Iterable[EngineFacts]) -> Iterator[str]:
    """Why engines are not proven; those of one reason in one line, as most of a target without its GPU are."""
    together: dict[tuple[str, str], list[str]] = {}
    for engine in engines:
        if engine.reason:
            name = f"{engine.precision} {engine.backend}"
            together.setdefault((engine.status, engine.reason), []).append(name)
    for (status, reason), names in together.items():
        yield f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} {status}: {reason}"


def describe_pair(pair: PairedComparison) -> str:
    """One pair, the verdict first."""
    names = f"{pair.first} against {pair.second}"
    if pair.verdict == "far faster" and pair.ratio:
        return f"far faster: {names}, by the times that each had alone ({1 / pair.ratio:.3g} times)"
    if pair.ratio is None or pair.low is None or pair.high is None or pair.detectable is None:
        return f"{pair.verdict}: {names}; too few runs, or they could not be run side by side"
    digits = 0 if pair.detectable >= 0.1 else 1
    verdict = "too noisy to tell" if is_too_noisy(pair.verdict, pair.low) else pair.verdict
    interval = f"{pair.ratio:.3f} times the time (95 %: {pair.low:.3f} to {pair.high:.3f})"
    unseen = f"a difference of {100 * pair.detectable:,.{digits}f} % would have been shown"
    return f"{verdict}: {names}: {interval}; {unseen}"


def format_heading(found: BackendComparison) -> str:
    """What was compared, and where."""
    return f"{found.model} on {found.target} at {found.bucket}, {found.machine}, {found.created_at}"


def format_markdown(found: BackendComparison) -> str:
    """The comparison as a page."""
    columns, table = format_rows(found)
    said = [f"# {format_heading(found)}", "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    said += [f"| {' | '.join(_escape(item) for item in row)} |" for row in table]
    return "\n".join([*said, "", *(f"- {_escape(line.strip())}" for line in describe_comparison(found))]) + "\n"


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
