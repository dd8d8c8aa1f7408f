"""A comparison of engines: what was measured of each and of pairs, which one to take; and its texts and its table."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from enginesmith.core.reports.latency import MachineKind, Timed
from enginesmith.core.reports.proof import PASSED
from enginesmith.core.text import format_bytes, format_metric, format_plain
from enginesmith.registry.manifest import Status
from validation.latency.formatting import format_count, join_reasons
from validation.plotting import seconds_text

# An engine that may take more than so many times as long, by the interval of the pair, does not count as equally fast.
TIE_FACTOR = 1.25


@dataclass(frozen=True)
class RuntimeMedian:
    """The median of the runtime's own call in seconds, with its 95 % interval."""

    median_s: float
    low_s: float | None
    high_s: float | None


@dataclass(frozen=True)
class EngineFacts:
    """What is known of one unit. Times in seconds, None where nothing ran here.

    reason: why it is not proven.  median_s, low_s, high_s: median and 95 % interval of one run at the bucket that is
    compared, by which engines are ranked.  timed: whether that is `Session.run` or the runtime's own call, which it is
    where every engine's session measures it.  session_s: the median of `Session.run`.  runtime: of the runtime's own
    call, where it is known.  load_s: from the runtime's import to a session.  memory_bytes: peak above that of the
    process before.  sqnr_db: the least of the quantization and the engine stage.  covers: of the fleet's targets, those
    that its backend builds this precision for.  busy: why the machine counts as busy while it was timed
    (`enginesmith.core.reports.latency.SystemLoad`).
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
    notes: tuple[str, ...] = ()
    busy: tuple[str, ...] = ()

    @property
    def runs(self) -> bool:
        """Whether it may be recommended: proven, and timed here."""
        return self.status in PASSED and self.median_s is not None


@dataclass(frozen=True)
class Recommendation:
    """The engine that a comparison recommends. unit: the one to take, None where there is none.  ties: units to which
    no difference in speed was shown."""

    unit: str | None
    reason: str
    ties: tuple[str, ...] = ()


def rank_alike(facts: Sequence[EngineFacts]) -> list[EngineFacts]:
    """The facts, ranked by the times of the runtimes' own calls where all engines that ran have them."""
    if not all(engine.runtime for engine in facts if engine.runs):
        return list(facts)
    return [replace(engine, timed="runtime", **vars(engine.runtime)) if engine.runtime else engine for engine in facts]


@dataclass(frozen=True)
class PairedComparison:
    """Two engines timed in turns. ratio: of their medians, the first's over the second's, with its 95 % interval.

    verdict: on the first: 'faster', 'slower', 'no difference shown'. Where they could not be timed in turns often
    enough it is by the times that each had alone, and the ratio has no interval.  detectable: the difference, as a
    share, that would have been shown.  busy: as in `EngineFacts`.
    """

    first: str
    second: str
    verdict: str
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    detectable: float | None = None
    busy: tuple[str, ...] = ()

    @property
    def too_noisy(self) -> bool:
        """Whether it showed no difference, and could not have shown a large one either."""
        return self.verdict == "no difference shown" and self.low is not None and TIE_FACTOR * self.low < 1

    def swap(self) -> "PairedComparison":
        """The same runs, as a verdict on the second engine."""
        verdict = {"faster": "slower", "slower": "faster"}.get(self.verdict, self.verdict)
        ratio, low, high = (value and 1 / value for value in (self.ratio, self.high, self.low))
        return PairedComparison(self.second, self.first, verdict, ratio, low, high, self.detectable, self.busy)


@dataclass(frozen=True)
class BackendComparison:
    """Engines of one model for one target, at one bucket. fleet: names of the targets to serve.

    original: task metrics of the exported model.  created_at: ISO 8601, UTC.  duels: pairs of the fastest engine,
    `first` in all of them, with the others.
    machine: where they were timed.  engines: refused ones last.  recommendation: which to serve, and why.
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


def find_fastest(facts: Sequence[EngineFacts]) -> EngineFacts | None:
    """The engine that ran with the least median of its own; None where none ran."""
    return min((engine for engine in facts if engine.runs), key=lambda engine: engine.median_s or 0.0, default=None)


COLUMNS = ("engine", "status", "median", "session", "items/s", "load", "memory", "file", "build", "SQNR", "targets")
Number = TypeVar("Number", int, float)


def format_rows(comparison: BackendComparison) -> tuple[Sequence[str], list[list[str]]]:
    """The headings and the rows of cells, one per engine; a column for each task metric, none that is empty."""
    metrics = sorted({name for engine in comparison.engines for name in engine.metrics})
    columns = [*COLUMNS, *metrics]
    rows = [
        [
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
            f"{len(engine.covers)} of {len(comparison.fleet)}" if engine.status != "refused" else "",
            *(format_metric(name, engine.metrics[name]) if name in engine.metrics else "" for name in metrics),
        ]
        for engine in comparison.engines
    ]
    column_indices = [index for index in range(len(columns)) if any(row[index] for row in rows)]
    return [columns[index] for index in column_indices], [[row[index] for index in column_indices] for row in rows]


def _cell(value: Number | None, show: Callable[[Number], str]) -> str:
    return "" if value is None else show(value)


def describe_comparison(comparison: BackendComparison) -> Iterator[str]:
    """The lines below the table: how times were taken, why engines are not proven, the pairs, and which to take."""
    if any(engine.timed == "runtime" for engine in comparison.engines):
        yield "median: of the runtime's own call, which engines are ranked by; session: of Session.run, with its checks"
    elif any(engine.median_s for engine in comparison.engines):
        yield "median: of Session.run, with its checks, as not every engine's runtime can be timed alone"
    groups: dict[tuple[str, str], list[str]] = {}
    for engine in comparison.engines:
        if engine.reason:
            groups.setdefault((engine.status, engine.reason), []).append(f"{engine.precision} {engine.backend}")
    for (status, reason), names in groups.items():
        yield f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} {status}: {reason}"
    busy_reasons = [reason for engine in comparison.engines for reason in engine.busy]
    busy_reasons += [reason for pair in comparison.duels for reason in pair.busy]
    if busy_reasons:
        yield (
            f"the machine was busy while these times were taken: {join_reasons(busy_reasons)}; compare again "
            "when it is quiet, or with a larger --seconds"
        )
    for pair in comparison.duels:
        yield describe_pair(pair)
    recommendation = comparison.recommendation
    yield (
        f"recommended: {recommendation.unit}: {recommendation.reason}"
        if recommendation.unit
        else f"no recommendation: {recommendation.reason}"
    )


def describe_pair(pair: PairedComparison) -> str:
    """A pair in one line, the verdict first."""
    title = f"{pair.first} against {pair.second}"
    if pair.ratio is None:
        return f"{pair.verdict}: {title}; too few runs, or they could not be run side by side"
    if pair.low is None or pair.high is None or pair.detectable is None:
        return f"{pair.verdict}: {title}, by the times that each had alone ({format_plain(1 / pair.ratio)} times)"
    digits = 0 if pair.detectable >= 0.1 else 1
    verdict = "too noisy to tell" if pair.too_noisy else pair.verdict
    ratio_text = f"{pair.ratio:.3f} times the time (95 %: {pair.low:.3f} to {pair.high:.3f})"
    detectable_text = f"a difference of {100 * pair.detectable:,.{digits}f} % would have been shown"
    return f"{verdict}: {title}: {ratio_text}; {detectable_text}"
