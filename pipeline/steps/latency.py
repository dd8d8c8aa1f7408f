"""The step that times an engine where it runs: after everything else, one engine at a time, on a machine left alone."""

from dataclasses import replace

from builders import backends
from builders.cpu_kinds import why_no_proof
from builders.errors import EngineryError, StepError, UnavailableError
from builders.jobs import Job, Needs
from pipeline.closure.code import backend_root
from pipeline.moment import now
from pipeline.spec.limits import Latency
from pipeline.spec.model import ModelSpec
from pipeline.steps.keys import MEASURE_LATENCY, code_key, engine_limits, shapes_of
from pipeline.values import Built, Exported, Json
from pipeline.verdict import Judged
from pipeline.workshop import Workshop
from validation.latency.machine import machine


def measure(item: Judged, spec: ModelSpec, exported: Exported, shop: Workshop) -> Judged:
    """Time a unit's engine, where the spec asks for it, the engine runs here and did not fail."""
    asked = spec.validation.latency
    if asked is None or item.built.digest is None or item.verdict == "failed":
        return item
    request = item.built.unit.request
    backend = backends.configure(request.backend, dict(request.options))
    if backend.runs(request.target) or why_no_proof(request):
        return item
    return replace(item, latency=time_engine(item.built, spec, asked, exported.golden, shop))


def time_engine(
    built: Built, spec: ModelSpec, asked: Latency, golden: str, shop: Workshop, afresh: bool = False
) -> str | None:
    """Digest of the latency report of an engine on this kind of machine, from the record or measured now.

    None where it could not be timed, which says nothing about whether it is right, and stops nobody.
    Raises UnavailableError, and StepError when cancelled.
    """
    name = f"latency {built.unit.name}"
    arguments = arguments_of(built, spec, golden) | {"asked": {**asked.model_dump(), "streams": 1}}
    key = {
        **arguments,
        "machine": machine(),
        **code_key(MEASURE_LATENCY, backend_root(built.unit.request.backend)),
        **({"at": now()} if afresh else {}),
    }

    def job() -> Job:
        limits = engine_limits(spec, "latency")
        given = {"store": shop.store.uri, **arguments}
        return Job(name, MEASURE_LATENCY, given, limits, Needs(alone=True))

    try:
        return str(shop.once("latency", name, key, job, lambda value: [value["latency"]])["latency"])
    except UnavailableError:
        raise
    except EngineryError as error:
        if isinstance(error, StepError) and error.kind == "cancelled":
            raise
        shop.progress.finished(name, f"failed: {str(error).splitlines()[0]}")
        return None


def arguments_of(built: Built, spec: ModelSpec, golden: str) -> Json:
    """What a job that times an engine is given, but for what was asked and where the store is."""
    shapes = shapes_of(spec)
    return {
        "request": built.unit.request.to_json(),
        "suffix": built.suffix,
        "engine": built.digest,
        "golden": golden,
        "model": {"inputs": shapes["inputs"], "dims": shapes["dims"]},
    }
