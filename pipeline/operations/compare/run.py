"""Builds a model by several backends, and measures them side by side."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from builders.backends import discovery as backends
from enginesmith.core.errors import InputError, StepError
from enginesmith.core.hardware.machine import parse_targets
from enginesmith.core.reports.proof import PASSED, least_sqnr_db
from enginesmith.core.text import format_metrics, format_plain, now
from enginesmith.core.types import BuildRequest, Precision, Target
from enginesmith.registry.evidence.latencies import read_latency_report
from pipeline.compile.composition import Run
from pipeline.compile.run_context import Work, fail_step
from pipeline.compile.steps.keys import time_engine, time_pair
from pipeline.operations.compare.report import (
    BackendComparison,
    EngineFacts,
    PairedComparison,
    Recommendation,
    RuntimeMedian,
    find_fastest,
    rank_alike,
)
from pipeline.outcome import JudgedUnit
from pipeline.spec.model import ModelSpec
from pipeline.spec.validation import Latency
from pipeline.values import EngineBlob, Exported, Selection
from validation.latency.machine import machine
from validation.limits.budget import at_most
from validation.plotting import seconds_text

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


# Smaller differences decide nothing: of a task metric, of the SQNR in dB (one bit), and as a factor of cost.
METRIC_STEP, SQNR_STEP_DB, COST_FACTOR = 1e-4, 6.0, 2.0


def recommend(facts: Sequence[EngineFacts], pairs: Sequence[PairedComparison], fleet: Sequence[str]) -> Recommendation:
    """The engine to take. pairs: of the fastest engine, `first` in all of them, with each of the others.  fleet: names
    of the targets to serve."""
    candidates = [engine for engine in facts if engine.runs]
    leader = next((engine for engine in candidates if pairs and engine.unit == pairs[0].first), find_fastest(facts))
    if leader is None:
        return Recommendation(None, _why_nothing(facts))
    pairs_by_rival = {pair.second: pair for pair in pairs}
    peers = {pair.second for pair in pairs if pair.verdict in ("no difference shown", "slower") and not pair.too_noisy}
    fast_engines = [engine for engine in candidates if engine is leader or engine.unit in peers]
    winner, axis = _narrow(fast_engines, leader)
    tied_units = tuple(engine.unit for engine in fast_engines if engine is not winner)
    return Recommendation(winner.unit, _reason(winner, tied_units, axis, pairs_by_rival, fleet), tied_units)


def _why_nothing(facts: Sequence[EngineFacts]) -> str:
    if not facts:
        return "no installed backend builds for this target; `enginesmith backends list` shows backends that do"
    engines = [engine for engine in facts if engine.status == "unproven"]
    if engines:
        return f"nothing runs here: {engines[0].unit}: {engines[0].reason}; compare on a node that has it"
    return f"no engine passed: {facts[0].unit}: {facts[0].reason}"


def _narrow(as_fast: list[EngineFacts], lead: EngineFacts) -> tuple[EngineFacts, str | None]:
    """The best of the engines that are equally fast, and the axis that decided; None where nothing but speed did."""
    candidates = as_fast
    for axis, score, step in AXES:
        best_score = max(map(score, candidates))
        leaders = [engine for engine in candidates if score(engine) > best_score - step]
        if len(leaders) < len(candidates) and len(leaders) == 1:
            return leaders[0], axis
        candidates = leaders
    # Nothing tells them apart: take the one with the least median of its own, which proves nothing.
    return (lead if lead in candidates else candidates[0]), None


def _goodness(name: str, value: float) -> float:
    """A task metric's value where more is better, in units of which METRIC_STEP decides nothing."""
    if name.endswith("_db"):
        return value * METRIC_STEP / SQNR_STEP_DB
    return -value if at_most(name) else value


# Name, score of an engine (more is better), and the difference of scores that decides. For a rebuild a difference of 1
# is a factor of COST_FACTOR in its time.
Axis = tuple[str, Callable[[EngineFacts], float], float]
AXES: tuple[Axis, ...] = (
    ("portability", lambda engine: float(len(engine.covers)), 1.0),
    ("accuracy", lambda engine: sum(_goodness(*pair) for pair in engine.metrics.items()), METRIC_STEP),
    ("accuracy", lambda engine: engine.sqnr_db if engine.sqnr_db is not None else 0.0, SQNR_STEP_DB),
    ("rebuild", lambda engine: -math.log(max(engine.build_s or 0.0, 1e-3), COST_FACTOR), 1.0),
)


def _reason(
    winner: EngineFacts, ties: Sequence[str], axis: str | None, pairs: dict[str, PairedComparison], fleet: Sequence[str]
) -> str:
    speed = f"{seconds_text(winner.median_s or 0.0)} per run"
    if not ties:
        if noisy_units := ", ".join(pair.second for pair in pairs.values() if pair.too_noisy):
            return f"the least median, {speed}; the runs were too noisy to tell whether {noisy_units} may be as fast"
        wins = [pair for pair in pairs.values() if pair.verdict == "faster"]
        return f"the fastest, {speed}{_lead(wins)}" if wins else f"the only engine that is proven here, {speed}"
    reason = f"{speed}; no difference in speed shown to {', '.join(ties)}"
    if axis is None:
        return f"{reason}, and they are equal otherwise: use either"
    accuracy = [format_metrics(winner.metrics)] if winner.metrics else []
    accuracy += [] if winner.sqnr_db is None else [f"SQNR {winner.sqnr_db:.0f} dB"]
    advantage = {
        "portability": f"it builds for {len(winner.covers)} of the fleet's {len(fleet)} targets",
        "accuracy": f"it is nearer to the original ({', '.join(accuracy)})",
        "rebuild": f"it builds in {seconds_text(winner.build_s or 0.0)}, in half the time or less",
    }[axis]
    return f"{reason}, and {advantage}"


def _lead(beaten: Sequence[PairedComparison]) -> str:
    """By how much the fastest engine leads, told of the next one."""
    runner_up = max((pair for pair in beaten if pair.ratio is not None), key=lambda pair: pair.ratio or 0, default=None)
    if runner_up is None or not runner_up.ratio:
        return ""
    evidence = "by the times that each had alone"
    if runner_up.low and runner_up.high:
        evidence = f"95 %: {format_plain(1 / runner_up.high)} to {format_plain(1 / runner_up.low)}"
    return f"; the next, {runner_up.second}, takes {format_plain(1 / runner_up.ratio)} times as long ({evidence})"
