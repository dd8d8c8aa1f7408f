"""The step that compiles one unit."""

import math
import shlex
from dataclasses import replace

from builders.backends import discovery
from builders.execution.jobs import Job, Needs, ReducedRequest
from builders.execution.scrub import scrubber
from enginery.core.errors import EngineryError, IntegrityError, StepError, UnavailableError
from enginery.core.types import BuildFailure, BuildRequest, Target
from enginery.registry.build_history import Expectation
from pipeline.compile.run_context import RunContext
from pipeline.compile.steps.engine_jobs import BuildEngine
from pipeline.compile.steps.keys import engine_limits
from pipeline.progress.events import Finished, Predicted
from pipeline.spec.model import ModelSpec
from pipeline.values import Built, EngineRecord, ReducedWorkspace, Unit

# What compilers of small and middling models take.
USUAL_MEMORY_MIB = 1024
# No compiler takes less.
LEAST_MEMORY_MIB = 256
# Of memory, over the most that such builds took.
HEADROOM = 1.25
# Instead of no limit.
LEAN_WORKSPACE_MIB = 1024


def build(unit: Unit, spec: ModelSpec, context: RunContext) -> Built:
    """Compile one unit in a process of its own; whatever happens to it, the other units go on."""
    if unit.action == "cached" and (known := recall_engine(unit.request, context)):
        context.progress.emit(Finished(unit.name, "cached"))
        return Built.from_record(unit, known, cached=True)
    expected = context.history.predict(spec.model, unit.request)
    if expected:
        context.progress.emit(Predicted(unit.name, expected))
    try:
        record = context.run_job(context.executor, unit.name, _build_job(unit, spec, context, expected))
    except (UnavailableError, IntegrityError):
        raise
    except EngineryError as error:
        return Built(unit, failure=_failure(unit, spec, context, error))
    context.progress.emit(Finished(unit.name, "built", words=f"built in {record.seconds:.1f} s"))
    return Built.from_record(replace(unit, request=record.request), record)


def _failure(unit: Unit, spec: ModelSpec, context: RunContext, error: EngineryError) -> BuildFailure:
    kind, log = (error.kind, error.log) if isinstance(error, StepError) else ("error", "")
    if kind == "cancelled":
        raise error
    reason = str(error).removeprefix(f"{unit.name}: ")  # who shows it names the unit
    context.progress.emit(Finished(unit.name, "failed", reason.splitlines()[0]))
    return BuildFailure(unit.name, kind, reason, scrubber()(log), reproduce(unit, spec, context.store.uri))


def _build_job(unit: Unit, spec: ModelSpec, context: RunContext, expected: Expectation | None) -> Job[EngineRecord]:
    limits = engine_limits(spec, "build")
    needed = needs(unit.request, memory_request(spec, expected))
    request = BuildEngine(unit.request)
    return Job(unit.name, request, context.store.uri, limits, needed, reduce_workspace(request))


def reproduce(unit: Unit, spec: ModelSpec, registry: str) -> str:
    """The command that builds this unit alone, from the steps that are on record in `registry`."""
    request = unit.request
    words = ("enginery", "build", spec.address, "--registry", registry, "--target", request.target.name)
    return shlex.join([*words, "--precision", request.precision, "--backend", request.backend])


def needs(request: BuildRequest, memory_mib: int) -> Needs:
    """Where a unit is built: on its own generation (and product) with a GPU to itself if the compiler tunes there, else
    preferably there. A unit for the CPU is built anywhere."""
    target = request.target
    if target.is_cpu:
        return Needs(memory_mib=memory_mib)
    tunes = discovery.capabilities_of(request.backend).tunes_on_target
    return Needs(gpu_labels(target), required=tunes, gpus=int(tunes), memory_mib=memory_mib)


def gpu_labels(target: Target) -> dict[str, str]:
    """Labels of the nodes that have a GPU: its generation, and its product where one is named."""
    return {"enginery/sm": target.sm, **({"enginery/product": target.product} if target.product else {})}


def memory_request(spec: ModelSpec, expected: Expectation | None = None) -> int:
    """MiB that a cluster sets aside for a build: what such builds took and a quarter more, never over the limit.

    Where none of them ended well (what failed early says nothing) it is the limit that the spec sets, else a modest
    guess.
    """
    limit = spec.build.memory_mib
    if expected is not None and expected.seconds is not None:
        return min(limit, max(LEAST_MEMORY_MIB, math.ceil(HEADROOM * expected.peak_mib)))
    return limit if "memory_mib" in spec.build.model_fields_set else USUAL_MEMORY_MIB


def reduce_workspace(build: BuildEngine) -> ReducedRequest[EngineRecord] | None:
    """What is built when memory ran out: half the compiler's scratch memory in MiB, where it has an option for that. It
    is another request, with a build key of its own (`recall_reduced`)."""
    option = discovery.capabilities_of(build.request.backend).options.workspace_mib
    workspace = dict(build.request.options).get(option)
    if workspace is None:
        return None
    mib = max(1, int(workspace) // 2) if workspace else LEAN_WORKSPACE_MIB
    smaller = build.request.with_option(option, mib)
    return ReducedRequest(BuildEngine(smaller, instead_of=build.request), f"with {option} {mib}")


def recall_reduced(request: BuildRequest, context: RunContext) -> BuildRequest | None:
    """The request with a smaller workspace that was built in place of this one, which had run out of memory."""
    found = context.recall("reduced-workspace", {"build": request.key}, ReducedWorkspace)
    return found.request if found else None


def recall_engine(request: BuildRequest, context: RunContext) -> EngineRecord | None:
    """The engine on record for a build key; None where its blob is missing or cut, or the record cannot be read."""
    return context.recall("build", {"build": request.key}, EngineRecord, lambda found: {found.digest: found.size_bytes})
