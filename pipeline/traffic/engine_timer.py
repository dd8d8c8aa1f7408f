"""An engine that is timed at sizes asked for: one of a version, or the fp32 graph of a spec, built for this CPU."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from builders.execution.jobs import Job, Needs
from enginesmith.core.errors import EnginesmithError, InputError
from enginesmith.core.hardware.targets import parse_targets
from enginesmith.core.reports.latency import LatencyReport, LatencyTerms
from enginesmith.registry.evidence.latencies import latencies, read_latency_report
from pipeline.canary.engines import ChosenEngine
from pipeline.compile.composition import Run
from pipeline.compile.plan import candidates
from pipeline.compile.run_context import RunContext, Work
from pipeline.compile.steps.engines import build, recall_engine
from pipeline.compile.steps.keys import engine_limits, model_shapes
from pipeline.compile.steps.latency import MeasureEngine
from pipeline.operations.revalidate import as_built, spec_of
from pipeline.spec.sections import DEFAULT_BACKENDS
from pipeline.values import Built, EngineBlob, Selection

if TYPE_CHECKING:
    from pipeline.spec.model import ModelSpec


@dataclass(frozen=True)
class EngineTimer:
    """Times an engine. name: of it, for people.  spec: the one it was built from.  golden: digest of the set that its
    inputs are made from.  build_s: seconds that its compiler took for each profile; None where that is not on record.
    """

    name: str
    engine: EngineBlob
    golden: str
    spec: "ModelSpec"
    build_s: float | None
    context: RunContext

    @classmethod
    def of_published(cls, chosen: ChosenEngine, context: RunContext) -> "EngineTimer":
        """Of an engine of a version."""
        manifest, built = chosen.manifest, as_built(chosen.entry)
        record = recall_engine(built.unit.request, context)
        seconds = record.seconds if record else None
        name = f"{manifest.model}@{manifest.version} {chosen.entry.unit}"
        return cls(name, built.blob, manifest.golden, spec_of(manifest), _for_each(seconds, built), context)

    @classmethod
    def of_graph(cls, work: Work) -> "EngineTimer":
        """Of the spec's fp32 graph, built for this CPU unless that is on record.

        Raises EnginesmithError where it cannot be built.
        """
        spec, context = work.spec, work.context
        plain = spec.model_copy(update={"targets": ("cpu",), "precisions": ("fp32",)})
        selection = Selection(tuple(parse_targets("cpu")), ("fp32",))
        if not candidates(plain, selection):
            plain = plain.model_copy(update={"backends": DEFAULT_BACKENDS})
        run = Run(plain, context, selection)
        batches = list(run.prepare())
        units = [unit for batch in batches for unit in batch.plan.units]
        for unit in units:
            if unit.action in ("build", "cached"):
                built = build(unit, run)
                if built.failure:
                    raise EnginesmithError(f"{unit.name} cannot be built: {built.failure.reason}")
                seconds = _for_each(built.record.seconds if built.record else None, built)
                return cls(unit.name, built.blob, batches[-1].exported.golden, plain, seconds, context)
        reasons = "; ".join(unit.reason for unit in units)
        raise InputError(f"no fp32 engine of {spec.model} can be timed here: {reasons}; give --engine REF")

    def measure(self, sizes: Sequence[Mapping[str, int]], seconds: float) -> LatencyReport:
        """The latency report of the engine at these sizes. seconds: of timing for each."""
        terms = LatencyTerms(seconds, tuple(dict(each) for each in sizes))
        work = MeasureEngine(self.engine, self.golden, model_shapes(self.spec), terms)
        name = f"time {self.name}"
        job = Job(name, work, self.context.store.uri, engine_limits(self.spec, "latency"), Needs(alone=True))
        return read_latency_report(self.context.store, self.context.run_job(self.context.local, name, job).latency)


def _for_each(seconds: float | None, built: Built) -> float | None:
    """Seconds for each profile of an engine."""
    return None if seconds is None else seconds / max(len(built.unit.request.profiles), 1)


def recorded_report(chosen: ChosenEngine, context: RunContext) -> LatencyReport:
    """The newest latency report of an engine of a version. Raises InputError without one."""
    manifest, entry = chosen.manifest, chosen.entry
    found = latencies(context.store, manifest).get(str(entry.digest), [])
    if not found:
        what = f"{manifest.model}@{manifest.version}"
        raise InputError(
            f"{what}: no latency report of {entry.unit} is on record; ask for one with validation.latency in the spec, "
            f"or time the engine now: --engine {what}"
        )
    return found[0]
