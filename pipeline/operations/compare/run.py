"""Builds a model with every backend that can, proves and times what runs here, and puts the engines side by side.

The steps are those of a build, with its records: what was built, proven or timed before is not again. Nothing is
published and no channel moves. Only the pairs are run anew: they are what the recommendation rests on.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from builders.backends import discovery as backends
from builders.execution.jobs import Job, Needs
from enginery.core.codec import encode
from enginery.core.errors import EngineryError, InputError, StepError, UnavailableError
from enginery.core.reports.latency import LatencyReport
from enginery.core.text import now
from enginery.core.types import BuildRequest, Precision, Target
from enginery.registry.evidence.latencies import read_latency_report
from pipeline.compile.closure.code import backend_root
from pipeline.compile.composition import Prepared, StepRunner, prepare
from pipeline.compile.plan import Selection
from pipeline.compile.run_context import RunContext
from pipeline.compile.steps.engines import build
from pipeline.compile.steps.keys import code_key, engine_limits, model_shapes
from pipeline.compile.steps.latency import BenchmarkPair, time_engine
from pipeline.compile.steps.proofs import validate
from pipeline.compile.steps.shapes import ProbeShapes
from pipeline.operations.compare.recommend import recommend
from pipeline.operations.compare.report import (
    BackendComparison,
    EngineFacts,
    PairedComparison,
    RuntimeMedian,
    Shapes,
    find_fastest,
    rank_alike,
)
from pipeline.outcome import JudgedUnit
from pipeline.progress.events import Finished
from pipeline.spec.model import ModelSpec
from pipeline.spec.validation import Latency
from pipeline.values import Exported, Unit
from validation.latency.machine import machine

# Decibels: beyond what a float32 tells apart, an output is a copy.
MOST_DB = 200.0
# An engine whose times, alone, were all slower than so many times the fastest one's is not run against it.
FAR = 2.0
# The fastest of the times that each had alone may lose its pairs; then the winner is run against the others, so often.
ROUNDS = 2


@dataclass(frozen=True)
class CompareOptions:
    """target: the only one.  backends, precisions: empty means all that are installed, all of the spec.  seconds: for
    each bucket, and for each pair ten times as long; seed: of the order in pairs."""

    target: Target
    backends: tuple[str, ...] = ()
    precisions: tuple[Precision, ...] = ()
    seconds: float = 0.2
    seed: int = 0


def widen_spec(spec: ModelSpec, options: CompareOptions) -> ModelSpec:
    """The spec for the one target, with every backend that is asked for; the spec's own keep their options.

    Raises InputError where none of them is for this target, UnknownNameError for one that is not known.
    """
    names = options.backends or tuple(name for name in backends.names() if backends.configure(name, {}).versions())
    chosen = {name: spec.backends.get(name, {}) for name in names}
    serving = {name: given for name, given in chosen.items() if backends.configure(name, given).serves(options.target)}
    if not serving:
        raise InputError(
            f"none of {', '.join(names)} builds for {options.target.name}; `enginery backends` says what does"
        )
    return spec.model_copy(update={"backends": serving, "targets": (options.target.name,)})


def compare(spec: ModelSpec, options: CompareOptions, context: RunContext, run: StepRunner) -> BackendComparison:
    """Build, prove and time every engine; compare the fastest with each of the others, and recommend one.

    Raises what exporting and quantizing raise; an engine that is refused or fails is one of the engines.
    """
    wide = widen_spec(spec, options)
    ready = prepare(wide, Selection(precisions=options.precisions), context, run)
    built = run.map(build, ready.plan.wanted, wide, context)
    judged = run.map(validate, built, wide, ready.exported, context)
    fleet = tuple(dict.fromkeys((*(target.name for target in spec.target_list()), options.target.name)))
    facts = rank_alike([_measure(item, wide, ready, options, fleet, context) for item in judged])
    facts += [_refuse(unit) for unit in ready.plan.refused]
    by_unit = {item.built.unit.name: item for item in judged}
    pairs = _compare_pairs(facts, by_unit, wide, ready.exported, options, context)
    return BackendComparison(
        model=spec.model,
        target=options.target.name,
        bucket=bucket_name(wide),
        fleet=fleet,
        machine=machine(),
        created_at=now(),
        original=dict(ready.exported.proof.metrics),
        engines=tuple(facts),
        duels=tuple(pairs),
        recommendation=recommend(facts, pairs, fleet),
    )


def bucket_name(spec: ModelSpec) -> str:
    """The sizes that engines are compared at: what the dims are tuned for."""
    return " ".join(f"{dim.name}={dim.opt}" for dim in spec.named_dims()) or "static"


def _refuse(unit: Unit) -> EngineFacts:
    return EngineFacts(unit.name, unit.request.backend, unit.request.precision, "refused", unit.reason)


def _measure(
    item: JudgedUnit,
    spec: ModelSpec,
    ready: Prepared,
    options: CompareOptions,
    fleet: Sequence[str],
    context: RunContext,
) -> EngineFacts:
    request, built = item.built.unit.request, item.built
    known = EngineFacts(
        unit=request.unit,
        backend=request.backend,
        precision=request.precision,
        status=item.verdict,
        reason="" if item.verdict == "proven" else item.reason,
        size_bytes=built.size_bytes or None,
        build_s=built.seconds if built.digest else None,
        sqnr_db=_least_sqnr(item),
        metrics=dict(item.metrics),
        covers=list_covered(request, spec, fleet),
        notes=built.notes,
    )
    if item.verdict != "proven":
        return known
    latency = Latency(seconds=options.seconds, buckets="few")
    report = time_engine(built, spec, latency, ready.exported.golden, context)
    if report is None:
        return replace(known, reason="it could not be timed")
    timed = _with_times(known, read_latency_report(context.store, report), spec)
    return replace(timed, shapes=_shapes(item, spec, ready.exported, context))


def _with_times(known: EngineFacts, report: LatencyReport, spec: ModelSpec) -> EngineFacts:
    bucket = next((item for item in report.buckets if item.name == bucket_name(spec)), report.buckets[-1])
    middle = bucket.middle
    return replace(
        known,
        median_s=bucket.median_s,
        low_s=middle.low if middle else None,
        high_s=middle.high if middle else None,
        session_s=bucket.median_s,
        runtime=RuntimeMedian.of(bucket.runtime),
        items_per_s=bucket.items_per_s,
        load_s=report.load_s + (report.import_s or 0.0),
        memory_bytes=bucket.memory_bytes,
        busy=bucket.surroundings.busy,
    )


def _least_sqnr(item: JudgedUnit) -> float | None:
    checks = item.report.checks if item.report else ()
    values = [
        min(check.value, MOST_DB)
        for check in checks
        if check.name == "sqnr_db" and check.joint in ("quantization", "engine") and check.value is not None
    ]
    return min(values, default=None)


def list_covered(request: BuildRequest, spec: ModelSpec, fleet: Sequence[str]) -> tuple[str, ...]:
    """Of the fleet's targets, those that the request's backend does not refuse, for this precision."""
    from enginery.core.hardware.targets import parse_targets

    backend = backends.configure(request.backend, spec.backends.get(request.backend, {}))
    wanted = [(name, parse_targets(name)[0]) for name in fleet]
    return tuple(
        name
        for name, target in wanted
        if backend.serves(target) and backend.refuses(replace(request, target=target)) is None
    )


def _shapes(item: JudgedUnit, spec: ModelSpec, exported: Exported, context: RunContext) -> Shapes | None:
    """From the record, or tried now; None for a model without dynamic dims, and where it could not be tried."""
    if not spec.named_dims():
        return None
    probe = ProbeShapes(item.built.blob, exported.golden, model_shapes(spec))
    name = f"shapes {item.built.unit.name}"
    key = {**encode(probe), **code_key(ProbeShapes, backend_root(item.built.unit.request.backend))}

    try:
        found = context.once("shapes", name, key, Job(name, probe, context.store.uri, engine_limits(spec, "latency")))
    except UnavailableError:
        raise
    except EngineryError as error:
        if isinstance(error, StepError) and error.kind == "cancelled":
            raise
        context.progress.emit(Finished(name, "failed", str(error).splitlines()[0]))
        return None
    if found.within is False:
        return "some"
    return "any" if found.outside else "within"


def _compare_pairs(
    facts: Sequence[EngineFacts],
    judged: dict[str, JudgedUnit],
    spec: ModelSpec,
    exported: Exported,
    options: CompareOptions,
    context: RunContext,
) -> list[PairedComparison]:
    """The fastest against each of the others. One that loses makes way for its best opponent, `ROUNDS` times."""
    lead = find_fastest(facts)
    met: dict[tuple[str, str], PairedComparison] = {}
    for _ in range(ROUNDS):
        if lead is None:
            return []
        for other in facts:
            if other.runs and other is not lead and (lead.unit, other.unit) not in met:
                pair = _compare_pair(lead, other, judged, spec, exported, options, context)
                met |= {(lead.unit, other.unit): pair, (other.unit, lead.unit): pair.swap()}
        pairs = [pair for (first, _), pair in met.items() if first == lead.unit]
        lost = [pair for pair in pairs if pair.verdict == "slower"]
        if not lost:
            return pairs
        winner = max(lost, key=lambda pair: pair.ratio or 0.0).second
        lead = next(item for item in facts if item.unit == winner)
    return pairs


def _compare_pair(
    lead: EngineFacts,
    other: EngineFacts,
    judged: dict[str, JudgedUnit],
    spec: ModelSpec,
    exported: Exported,
    options: CompareOptions,
    context: RunContext,
) -> PairedComparison:
    if lead.high_s is not None and other.low_s is not None and other.low_s > FAR * lead.high_s:
        return PairedComparison(lead.unit, other.unit, "far faster", (lead.median_s or 0.0) / (other.median_s or 1.0))
    first, second = (judged[item.unit].built.blob for item in (lead, other))
    sizes = {dim.name: dim.opt for dim in spec.named_dims()}
    pair = BenchmarkPair(first, second, exported.golden, model_shapes(spec), sizes, 10 * options.seconds, options.seed)
    name = f"{lead.unit} against {other.unit}"
    job = Job(name, pair, context.store.uri, engine_limits(spec, "latency"), Needs(alone=True))
    try:
        found = context.run_job(context.local, name, job)
    except StepError as error:
        if error.kind == "cancelled":
            raise
        # Two runtimes that cannot live in one process: what is left are the times that each had alone.
        context.progress.emit(Finished(name, "failed", str(error).splitlines()[0]))
        apart = lead.high_s is not None and other.low_s is not None and lead.high_s < other.low_s
        return PairedComparison(lead.unit, other.unit, "faster" if apart else "no difference shown")
    context.progress.emit(Finished(name, words=found.verdict))
    middle = next(item for item in found.ratios if item.p == 0.5)
    return PairedComparison(
        first=lead.unit,
        second=other.unit,
        verdict=found.verdict,
        ratio=middle.ratio,
        low=middle.low,
        high=middle.high,
        detectable=middle.detectable,
        busy=found.surroundings.busy,
    )
