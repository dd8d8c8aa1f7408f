"""The step that compiles one unit."""

import shlex

from builders.errors import EngineryError, IntegrityError, StepError, UnavailableError
from builders.jobs import Job, Limits
from builders.scrub import scrubber
from builders.types import BuildFailure, BuildRequest
from pipeline.spec.model import ModelSpec
from pipeline.values import Built, Json, Unit
from pipeline.workshop import Workshop


def build(unit: Unit, spec: ModelSpec, shop: Workshop) -> Built:
    """Compile one unit in a process of its own; whatever happens to it, the other units go on."""
    if unit.action == "cached" and (known := recall_engine(unit.request, shop)):
        shop.progress.finished(unit.name, "cached")
        return Built(unit, **known, cached=True)
    expected = shop.history.expected(spec.model, unit.request)
    if expected:
        shop.progress.expects(unit.name, expected)
    try:
        value = shop.shown(shop.executor, unit.name, _build_job(unit, spec, shop))
    except (UnavailableError, IntegrityError):
        raise
    except EngineryError as error:
        return Built(unit, failure=_failure(unit, spec, shop, error))
    shop.progress.finished(unit.name, f"built in {value['seconds']:.1f} s")
    return Built(unit, **_engine_fields(value))


def _failure(unit: Unit, spec: ModelSpec, shop: Workshop, error: EngineryError) -> BuildFailure:
    kind, log = (error.kind, error.log) if isinstance(error, StepError) else ("error", "")
    if kind == "cancelled":
        raise error
    shop.progress.finished(unit.name, f"failed: {str(error).splitlines()[0]}")
    return BuildFailure(unit.name, kind, str(error), scrubber()(log), reproduce(unit, spec, shop.store.uri))


def _build_job(unit: Unit, spec: ModelSpec, shop: Workshop) -> Job:
    limits = Limits(spec.build.timeout_s, spec.build.memory_mib)
    arguments = {"store": shop.store.uri, "request": unit.request.to_json()}
    return Job(unit.name, "pipeline.jobs.engines:build_engine", arguments, limits, needs(unit.request))


def reproduce(unit: Unit, spec: ModelSpec, registry: str) -> str:
    """The command that builds this unit alone, from the steps that are on record in `registry`."""
    request = unit.request
    words = ("enginery", "build", str(spec.path), "--registry", registry, "--targets", request.target.name)
    return shlex.join([*words, "--precisions", request.precision, "--backends", request.backend])


def needs(request: BuildRequest) -> dict[str, str]:
    """Node labels that suit a unit: a GPU generation's own nodes, any node for the CPU."""
    return {} if request.target.is_cpu else {"enginery/sm": request.target.sm}


def recall_engine(request: BuildRequest, shop: Workshop) -> Json | None:
    """The engine on record for a build key, as fields of `Built`."""
    value = shop.recall("build", {"build": request.key})
    return None if value is None else _engine_fields(value)


def _engine_fields(value: Json) -> Json:
    fields = {name: value[name] for name in ("digest", "size_bytes", "suffix", "seconds")}
    return {**fields, "notes": tuple(value["notes"]), "blake3": value.get("blake3")}
