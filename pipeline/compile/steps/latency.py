"""The step that times an engine where it runs: after everything else, one engine at a time, on a machine left alone."""

from dataclasses import replace

from builders.backends import discovery
from builders.execution.jobs import Job, Needs
from enginery.core.codec import encode
from enginery.core.errors import EngineryError, StepError, UnavailableError
from enginery.core.hardware.cpu_kinds import why_no_proof
from enginery.core.origin.moment import now
from enginery.core.reports.latency import LatencyTerms
from pipeline.compile.closure.code import backend_root
from pipeline.compile.jobs.latency import MeasureEngine
from pipeline.compile.run_context import RunContext
from pipeline.compile.steps.keys import code_key, engine_limits, model_shapes
from pipeline.compile.verdict import JudgedUnit
from pipeline.progress.events import Finished
from pipeline.spec.limits import Latency
from pipeline.spec.model import ModelSpec
from pipeline.values import Built, Exported
from validation.latency.machine import machine


def measure(item: JudgedUnit, spec: ModelSpec, exported: Exported, context: RunContext) -> JudgedUnit:
    """Time a unit's engine, where the spec asks for it, the engine runs here and did not fail."""
    asked = spec.validation.latency
    if asked is None or item.built.digest is None or item.verdict == "failed":
        return item
    request = item.built.unit.request
    backend = discovery.configure(request.backend, dict(request.options))
    if backend.runs(request.target) or why_no_proof(request):
        return item
    return replace(item, latency=time_engine(item.built, spec, asked, exported.golden, context))


def time_engine(
    built: Built, spec: ModelSpec, asked: Latency, golden: str, context: RunContext, afresh: bool = False
) -> str | None:
    """Digest of the latency report of an engine on this kind of machine, from the record or measured now.

    None where it could not be timed, which says nothing about whether it is right, and stops nobody.
    Raises UnavailableError, and StepError when cancelled.
    """
    name = f"latency {built.unit.name}"
    measure = MeasureEngine(built.blob, golden, model_shapes(spec), LatencyTerms(asked.seconds, asked.buckets))
    key = {
        **encode(measure),
        "machine": encode(machine()),
        **code_key(MeasureEngine, backend_root(built.unit.request.backend)),
        **({"at": now()} if afresh else {}),
    }

    job = Job(name, measure, context.store.uri, engine_limits(spec, "latency"), Needs(alone=True))
    try:
        return context.once("latency", name, key, job, lambda timed: [timed.latency]).latency
    except UnavailableError:
        raise
    except EngineryError as error:
        if isinstance(error, StepError) and error.kind == "cancelled":
            raise
        context.progress.emit(Finished(name, "failed", str(error).splitlines()[0]))
        return None
