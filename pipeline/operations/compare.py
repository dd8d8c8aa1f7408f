"""`enginesmith backends compare`: builds a model by every backend that can, side by side on one target, and recommends
one.

The steps are those of a build, with its records: what was built or proven before is not done again. Nothing is
published and no channel moves. Engines are always timed anew, alone and in pairs: the recommendation is based on these
times.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from builders.backends import discovery as backends
from enginesmith.core.errors import InputError, StepError
from enginesmith.core.hardware.machine import parse_targets
from enginesmith.core.reports.latency import MachineKind
from enginesmith.core.reports.proof import PASSED, least_sqnr_db
from enginesmith.core.text import format_bytes, format_metric, format_plain, now
from enginesmith.core.types import BuildRequest, Precision, Target
from enginesmith.registry.evidence.latencies import read_latency_report
from enginesmith.registry.manifest import Status
from pipeline.compile.composition import Run
from pipeline.compile.run_context import Work, fail_step
from pipeline.compile.steps.keys import time_engine, time_pair
from pipeline.outcome import JudgedUnit
from pipeline.spec.model import ModelSpec
from pipeline.spec.validation import Latency
from pipeline.values import EngineBlob, Exported, Selection
from validation.latency.formatting import format_count, join_reasons
from validation.latency.machine import machine
from validation.plotting import seconds_text

# If this times the lower end of the pair's interval is below 1, the measurement is too noisy to rank the two.
TIE_FACTOR = 1.25


@dataclass(frozen=True)
class CompareOptions:
    """What is compared, and for how long. target: the only one.  backends, precisions: empty means all that are
    installed, and all of the spec.

    seconds: of timing for each bucket, and for each pair ten times as long.
    """

    target: Target
    backends: tuple[str, ...] = ()
    precisions: tuple[Precision, ...] = ()
    seconds: float = 0.2


@dataclass(frozen=True)
class EngineFacts:
    """Facts about one unit. Times in seconds, None if it did not run here.

    reason: why it is not proven.  median_s, low_s, high_s: median and 95 % interval of one `Session.run` at the bucket
    that is compared.  load_s: from the runtime's import to a session.  memory_bytes: peak above that of the process
    before.  sqnr_db: the least of the quantization and the engine stage.  covers: of the fleet's targets, those that
    its backend builds this precision for.  busy: why the machine counts as busy while it was timed
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


@dataclass(frozen=True)
class Recommendation:
    """The engine that a comparison recommends. unit: the one to take, None where there is none.  ties: units to which
    no difference in speed was shown."""

    unit: str | None
    reason: str
    ties: tuple[str, ...] = ()


@dataclass(frozen=True)
class BackendComparison:
    """Engines of one model for one target, at one bucket. fleet: names of the targets to serve.

    original: task metrics of the exported model.  created_at: ISO 8601, UTC.  duels: pairs of the engine with the least
    median, `first` in all of them, with the others.
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


def widen_spec(spec: ModelSpec, options: CompareOptions) -> ModelSpec:
    """The spec for the one target, with every backend that is asked for; the spec's own keep their options. No unit is
    required: one that is refused is a row of the comparison.

    Raises InputError where none of them is for this target, UnknownNameError for one that is not known.
    """
    names = options.backends or tuple(name for name in backends.names() if backends.configure(name, {}).versions())
    backend_options = {name: spec.backends.get(name, {}) for name in names}
    serving_options = {
        name: settings
        for name, settings in backend_options.items()
        if backends.configure(name, settings).serves(options.target)
    }
    if not serving_options:
        raise InputError(
            f"none of {', '.join(names)} builds for {options.target.name}; `enginesmith backends list` says what does"
        )
    build = spec.build.model_copy(update={"required": ()})
    return spec.model_copy(update={"backends": serving_options, "targets": (options.target.name,), "build": build})


def compare(run: Run, options: CompareOptions) -> BackendComparison:
    """Build, prove and time every engine; compare the fastest with each of the others, and recommend one.

    Raises what exporting and quantizing raise; an engine that is refused or fails is one of the engines.
    """
    spec = run.spec
    wide_run = replace(run, spec=widen_spec(spec, options), selection=Selection(precisions=options.precisions))
    run_result = wide_run.build_and_prove(wide_run.prepare())
    fleet = tuple(dict.fromkeys((*(target.name for target in spec.target_list()), options.target.name)))
    measurer = _Measuring(wide_run, run_result.exported, options, fleet)
    engines = [measurer.measure(unit) for unit in run_result.units]
    for unit in run_result.plan.refused:
        engines.append(EngineFacts(unit.name, unit.request.backend, unit.request.precision, "refused", unit.reason))
    blobs = {unit.built.unit.name: unit.built.blob for unit in run_result.units if unit.built.digest}
    pairs = measurer.compare_pairs([engine for engine in engines if engine.runs], blobs)
    return BackendComparison(
        model=spec.model,
        target=options.target.name,
        bucket=measurer.bucket,
        fleet=fleet,
        machine=machine(),
        created_at=now(),
        original=dict(run_result.exported.proof.metrics),
        engines=tuple(engines),
        duels=tuple(pairs),
        recommendation=recommend(engines, pairs),
    )


@dataclass(frozen=True)
class _Measuring:
    """What every measurement of a comparison needs. work: of the widened spec.  fleet: names of targets to serve."""

    work: Work
    exported: Exported
    options: CompareOptions
    fleet: Sequence[str]

    @property
    def bucket(self) -> str:
        """The sizes that engines are compared at, which the dims are tuned for: 'batch=8', or 'static'."""
        return " ".join(f"{dim.name}={dim.opt}" for dim in self.work.spec.named_dims()) or "static"

    def measure(self, unit: JudgedUnit) -> EngineFacts:
        """All that is known of a unit; its times where it is proven."""
        request, build, checks = unit.built.unit.request, unit.built, unit.report.checks if unit.report else ()
        unit_facts = EngineFacts(
            unit=request.unit,
            backend=request.backend,
            precision=request.precision,
            status=unit.entry.status,
            reason="" if unit.entry.status in PASSED else unit.entry.reason,
            size_bytes=build.record.size_bytes if build.record else None,
            build_s=build.record.seconds if build.record else None,
            sqnr_db=least_sqnr_db(checks),
            metrics=dict(unit.metrics),
            covers=self._list_covered(request),
            notes=build.notes,
        )
        return self._with_times(unit_facts, unit) if unit.entry.status in PASSED else unit_facts

    def _with_times(self, facts: EngineFacts, unit: JudgedUnit) -> EngineFacts:
        latency = Latency(seconds=self.options.seconds, buckets="few")
        digest = time_engine(unit.built.blob, latency, self.exported.golden, self.work, afresh=True)
        if digest is None:
            return replace(facts, reason="it could not be timed")
        report = read_latency_report(self.work.context.store, digest)
        buckets = {bucket.name: bucket for bucket in report.buckets}
        bucket = buckets.get(self.bucket, report.buckets[-1])
        return replace(
            facts,
            median_s=bucket.median_s,
            low_s=bucket.middle.low if bucket.middle else None,
            high_s=bucket.middle.high if bucket.middle else None,
            items_per_s=bucket.items_per_s,
            load_s=report.load_s + (report.import_s or 0.0),
            memory_bytes=bucket.memory_bytes,
            busy=bucket.surroundings.busy,
        )

    def _list_covered(self, request: BuildRequest) -> tuple[str, ...]:
        """Of the fleet's targets, those that the request's backend does not refuse in its precision."""
        backend = backends.configure(request.backend, self.work.spec.backends.get(request.backend, {}))
        fleet_targets = [(name, parse_targets(name)[0]) for name in self.fleet]
        return tuple(
            name
            for name, target in fleet_targets
            if backend.serves(target) and backend.refuses(replace(request, target=target)) is None
        )

    def compare_pairs(self, engines: Sequence[EngineFacts], blobs: Mapping[str, EngineBlob]) -> list[PairedComparison]:
        """The engine with the least median of its own against each of the others. engines: those that ran."""
        if not engines:
            return []
        lead = min(engines, key=lambda engine: engine.median_s or 0.0)
        rivals = [engine for engine in engines if engine is not lead]
        return [self._compare_pair(lead, rival, (blobs[lead.unit], blobs[rival.unit])) for rival in rivals]

    def _compare_pair(
        self, lead: EngineFacts, rival: EngineFacts, blobs: tuple[EngineBlob, EngineBlob]
    ) -> PairedComparison:
        sizes = {dim.name: dim.opt for dim in self.work.spec.named_dims()}
        name, seconds = f"{lead.unit} against {rival.unit}", 10 * self.options.seconds
        try:
            comparison = time_pair(name, blobs, self.exported.golden, sizes, seconds, self.work)
        except StepError as error:
            fail_step(name, error, self.work.context)
            return compare_alone(lead, rival)  # two runtimes that cannot live in one process
        median_ratio = next(ratio for ratio in comparison.ratios if ratio.p == 0.5)
        if median_ratio.ratio is None:
            return compare_alone(lead, rival)
        interval = (median_ratio.ratio, median_ratio.low, median_ratio.high, median_ratio.detectable)
        return PairedComparison(lead.unit, rival.unit, comparison.verdict, *interval, comparison.surroundings.busy)


def compare_alone(lead: EngineFacts, rival: EngineFacts) -> PairedComparison:
    """Two engines by the times of each alone: for a pair that could not be run, or not often enough."""
    is_faster = lead.high_s is not None and rival.low_s is not None and lead.high_s < rival.low_s
    ratio = (lead.median_s or 0.0) / (rival.median_s or 1.0)
    return PairedComparison(lead.unit, rival.unit, "faster" if is_faster else "no difference shown", ratio or None)


def recommend(engines: Sequence[EngineFacts], pairs: Sequence[PairedComparison]) -> Recommendation:
    """The recommended engine: the fastest; of equally fast ones, the one whose backend builds for most targets of the
    fleet, then the one with the highest SQNR if all have one (outputs of ids have none), else the first.
    pairs: of one engine, `first` in all of them, with each other engine."""
    candidates = {engine.unit: engine for engine in engines if engine.runs}
    if not candidates:
        return Recommendation(None, _why_nothing(engines))
    lead = pairs[0].first if pairs else next(iter(candidates))
    faster_pairs = [pair for pair in pairs if pair.verdict == "slower"]
    if faster_pairs:
        winner = max(faster_pairs, key=lambda pair: pair.ratio or 0.0)
        speed = f"{seconds_text(candidates[winner.second].median_s or 0.0)} per run"
        longer = _times_as_long(winner.ratio or 0.0, winner.low, winner.high)
        return Recommendation(winner.second, f"{speed}; {winner.first}, with the least median alone, takes {longer}")
    tied_pairs = [pair for pair in pairs if pair.verdict != "faster" and not pair.too_noisy]
    fast_engines = [candidates[unit] for unit in (lead, *(pair.second for pair in tied_pairs))]
    most_targets = max(len(engine.covers) for engine in fast_engines)
    widest = [engine for engine in fast_engines if len(engine.covers) == most_targets]
    are_measured = all(engine.sqnr_db is not None for engine in widest)
    best = max(widest, key=lambda engine: engine.sqnr_db or 0.0) if are_measured else widest[0]
    ties = tuple(engine.unit for engine in fast_engines if engine is not best)
    return Recommendation(best.unit, _reason(best, ties, pairs), ties)


def _why_nothing(engines: Sequence[EngineFacts]) -> str:
    if not engines:
        return "no installed backend builds for this target; `enginesmith backends list` shows backends that do"
    if unproven := next((engine for engine in engines if engine.status == "unproven"), None):
        return f"nothing runs here: {unproven.unit}: {unproven.reason}; compare on a node that has it"
    return f"no engine passed: {engines[0].unit}: {engines[0].reason}"


def _reason(best: EngineFacts, ties: Sequence[str], pairs: Sequence[PairedComparison]) -> str:
    speed = f"{seconds_text(best.median_s or 0.0)} per run"
    if ties:
        targets = f"it builds for {len(best.covers)} of the fleet's targets"
        sqnr = "" if best.sqnr_db is None else f", SQNR {best.sqnr_db:.0f} dB"
        return f"{speed}; no difference in speed shown to {', '.join(ties)}; {targets}{sqnr}"
    if noisy_units := ", ".join(pair.second for pair in pairs if pair.too_noisy):
        return f"the least median, {speed}; the runs were too noisy to tell whether {noisy_units} may be as fast"
    runner_up = max((pair for pair in pairs if pair.ratio), key=lambda pair: pair.ratio or 0.0, default=None)
    if runner_up is None or not runner_up.ratio:
        return f"the {'fastest' if pairs else 'only engine that is proven here'}, {speed}"
    bounds = (1 / runner_up.high, 1 / runner_up.low) if runner_up.low and runner_up.high else (None, None)
    return f"the fastest, {speed}; the next, {runner_up.second}, takes {_times_as_long(1 / runner_up.ratio, *bounds)}"


def _times_as_long(ratio: float, low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return f"{format_plain(ratio)} times as long (by the times of each engine alone)"
    return f"{format_plain(ratio)} times as long (95 %: {format_plain(low)} to {format_plain(high)})"


COLUMNS = ("engine", "status", "median", "items/s", "load", "memory", "file", "build", "SQNR", "targets")
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
    """The lines below the table: why engines are not proven, the pairs, and which to take."""
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
        return f"{pair.verdict}: {title}, by the times of each alone ({format_plain(1 / pair.ratio)} times)"
    digits = 0 if pair.detectable >= 0.1 else 1
    verdict = "too noisy to tell" if pair.too_noisy else pair.verdict
    ratio_text = f"{pair.ratio:.3f} times the time (95 %: {pair.low:.3f} to {pair.high:.3f})"
    detectable_text = f"a difference of {100 * pair.detectable:,.{digits}f} % would have been shown"
    return f"{verdict}: {title}: {ratio_text}; {detectable_text}"
