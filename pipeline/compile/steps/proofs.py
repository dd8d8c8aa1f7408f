"""The step that proves an engine where it can run, and reaches a verdict."""

from dataclasses import replace

from builders.backends import discovery
from builders.execution.jobs import Job
from enginery.core.codec import encode
from enginery.core.errors import EngineryError, IntegrityError, StepError, UnavailableError
from enginery.core.hardware.cuda import gpus
from enginery.core.hardware.targets import this_kind, why_no_proof
from enginery.core.reports.proof import Check
from enginery.core.text import now
from enginery.core.types import BuildRequest
from pipeline.compile.closure.code import backend_root
from pipeline.compile.run_context import RunContext
from pipeline.compile.steps.engine_jobs import CheckEngine
from pipeline.compile.steps.keys import calls_of, code_key, contract_of, engine_limits, limits_of, metric_of
from pipeline.compile.verdict import JudgedUnit, make_report
from pipeline.progress.events import VerdictReached
from pipeline.spec.model import ModelSpec
from pipeline.values import Built, Exported, Proof


def validate(built: Built, spec: ModelSpec, exported: Exported, context: RunContext) -> JudgedUnit:
    """Judge the checks of a unit's three stages together; an engine that cannot run here stays unproven."""
    if built.failure:
        return JudgedUnit(built)
    request = built.unit.request
    backend = discovery.configure(request.backend, dict(request.options))
    cannot_run = backend.runs(request.target) or why_no_proof(request)
    proofs = [exported.proof, built.unit.graph.proof]
    proofs += [] if cannot_run else [try_to_prove(built, spec, exported.golden, context)]
    judged = JudgedUnit(built, make_report(built, exported.golden, proofs, cannot_run), proofs[-1].metrics)
    context.progress.emit(VerdictReached(built.unit.name, judged.verdict, judged.reason))
    return judged


CRASHED = Check("engine", "runs", "", "all", None, None, False)


def try_to_prove(built: Built, spec: ModelSpec, golden: str, context: RunContext, afresh: bool = False) -> Proof:
    """`prove_engine`, where an engine that cannot be opened or run has failed, and stops nobody else.

    Raises UnavailableError and IntegrityError, which say nothing about the engine, and StepError when cancelled.
    """
    try:
        return prove_engine(built, spec, golden, context, afresh)
    except (UnavailableError, IntegrityError):
        raise
    except EngineryError as error:
        if isinstance(error, StepError) and error.kind == "cancelled":
            raise
        return Proof((replace(CRASHED, note=str(error)),))


def prove_engine(built: Built, spec: ModelSpec, golden: str, context: RunContext, afresh: bool = False) -> Proof:
    """Run an engine against the graph it was built from. afresh: also when the same proof is on record."""
    request = built.unit.request
    check = CheckEngine(
        built.blob,
        golden,
        limits_of(spec, request.precision, "engine"),
        metric_of(spec),
        contract_of(spec),
        calls_of(spec),
    )
    key = {
        **encode(check),
        "engine": built.digest,
        "request": request.key,
        "machine": _machine(request),
        **code_key(CheckEngine, backend_root(request.backend)),
        **({"at": now()} if afresh else {}),
    }

    name = f"prove {built.unit.name}"
    return context.once("check-engine", name, key, Job(name, check, context.store.uri, engine_limits(spec, "proof")))


def _machine(request: BuildRequest) -> list[str]:
    """What a proof depends on of the machine that it was made on."""
    return [this_kind().name] if request.target.is_cpu else sorted({gpu.name for gpu in gpus()})
