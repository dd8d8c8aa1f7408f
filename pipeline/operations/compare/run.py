"""Builds a model by several backends, and measures them side by side."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from builders.backends import discovery as backends
from enginesmith.core.errors import InputError, StepError
from enginesmith.core.hardware.machine import parse_targets
from enginesmith.core.reports.proof import PASSED, least_sqnr_db
from enginesmith.core.text import now
from enginesmith.core.types import BuildRequest, Precision, Target
from enginesmith.registry.evidence.latencies import read_latency_report
from pipeline.compile.composition import Run
from pipeline.compile.run_context import Work, fail_step
from pipeline.compile.steps.keys import time_engine, time_pair
from pipeline.operations.compare.recommend import recommend
from pipeline.operations.compare.report import (
    BackendComparison,
    EngineFacts,
    PairedComparison,
    RuntimeMedian,
    find_fastest,
    rank_alike,
)
from pipeline.outcome import JudgedUnit
from pipeline.spec.model import ModelSpec
from pipeline.spec.validation import Latency
from pipeline.values import EngineBlob, Exported, Selection
from validation.latency.machine import machine

# The steps are those of a build, with its records: what was built or proven before is not done again. Nothing is
# published and no channel moves. Engines are always timed anew, alone and in pairs: the recommendation rests on it.

# The engine that is fastest alone may be slower in a pair; then the winner is timed against the others, so many rounds.
ROUNDS = 2


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
    engines = rank_alike([measurer.measure(unit) for unit in run_result.units])
    for unit in run_result.plan.refused:
        engines.append(EngineFacts(unit.name, unit.request.backend, unit.request.precision, "refused", unit.reason))
    pairs = measurer.compare_pairs(engines, {unit.built.unit.name: unit for unit in run_result.units})
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
        recommendation=recommend(engines, pairs, fleet),
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
        median, runtime = bucket.middle, bucket.runtime
        return replace(
            facts,
            median_s=bucket.median_s,
            low_s=median.low if median else None,
            high_s=median.high if median else None,
            session_s=bucket.median_s,
            runtime=RuntimeMedian(runtime.value, runtime.low, runtime.high) if runtime and runtime.value else None,
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

    def compare_pairs(self, facts: Sequence[EngineFacts], units: Mapping[str, JudgedUnit]) -> list[PairedComparison]:
        """The fastest engine against each of the others. One that loses makes way for its winner, `ROUNDS` times."""
        lead = find_fastest(facts)
        if lead is None:
            return []
        results: dict[tuple[str, str], PairedComparison] = {}
        pairs: list[PairedComparison] = []
        for _ in range(ROUNDS):
            for rival in facts:
                if rival.runs and rival is not lead and (lead.unit, rival.unit) not in results:
                    pair = self._compare_pair(lead, rival, units[lead.unit].built.blob, units[rival.unit].built.blob)
                    results |= {(lead.unit, rival.unit): pair, (rival.unit, lead.unit): pair.swap()}
            pairs = [pair for (leader, _), pair in results.items() if leader == lead.unit]
            lost_pairs = [pair for pair in pairs if pair.verdict == "slower"]
            if not lost_pairs:
                return pairs
            winner = max(lost_pairs, key=lambda pair: pair.ratio or 0.0).second
            lead = next(engine for engine in facts if engine.unit == winner)
        return pairs

    def _compare_pair(
        self, lead: EngineFacts, rival: EngineFacts, lead_engine: EngineBlob, other_engine: EngineBlob
    ) -> PairedComparison:
        sizes = {dim.name: dim.opt for dim in self.work.spec.named_dims()}
        name, context = f"{lead.unit} against {rival.unit}", self.work.context
        golden, seconds = self.exported.golden, 10 * self.options.seconds
        try:
            comparison = time_pair(name, (lead_engine, other_engine), golden, sizes, seconds, self.work)
        except StepError as error:
            fail_step(name, error, context)
            return _compare_alone(lead, rival)  # two runtimes that cannot live in one process
        median_ratio = next(ratio for ratio in comparison.ratios if ratio.p == 0.5)
        if median_ratio.ratio is None:
            return _compare_alone(lead, rival)
        interval = (median_ratio.ratio, median_ratio.low, median_ratio.high, median_ratio.detectable)
        return PairedComparison(lead.unit, rival.unit, comparison.verdict, *interval, comparison.surroundings.busy)


def _compare_alone(lead: EngineFacts, rival: EngineFacts) -> PairedComparison:
    """Two engines by the times that each had alone: what is left where a pair could not be run, or too few times."""
    is_faster = lead.high_s is not None and rival.low_s is not None and lead.high_s < rival.low_s
    ratio = (lead.median_s or 0.0) / (rival.median_s or 1.0)
    return PairedComparison(lead.unit, rival.unit, "faster" if is_faster else "no difference shown", ratio or None)
