"""The step that proves an engine where it can run, and reaches a verdict."""

from builders import backends
from builders.cpu_kinds import this_kind, why_no_proof
from builders.cuda import gpus
from builders.errors import EngineryError, IntegrityError, StepError, UnavailableError
from builders.jobs import Job
from builders.types import BuildRequest
from pipeline.closure.code import backend_root
from pipeline.moment import now
from pipeline.spec.model import ModelSpec, overrides
from pipeline.steps.keys import CHECK_ENGINE, calls_of, code_key, contract_of, engine_limits, metric_of
from pipeline.values import Built, Exported, Proof
from pipeline.verdict import Judged, make_report
from pipeline.workshop import Workshop


def validate(built: Built, spec: ModelSpec, exported: Exported, shop: Workshop) -> Judged:
    """Put a unit's three joints side by side and reach a verdict; an engine that cannot run here stays unproven."""
    if built.failure:
        return Judged(built)
    request = built.unit.request
    backend = backends.configure(request.backend, dict(request.options))
    cannot_run = backend.runs(request.target) or why_no_proof(request)
    proofs = [exported.proof, built.unit.graph.proof]
    proofs += [] if cannot_run else [try_to_prove(built, spec, exported.golden, shop)]
    judged = Judged(built, make_report(built, exported.golden, proofs, cannot_run), proofs[-1].metrics)
    shop.progress.finished(f"verdict on {built.unit.name}", f"{judged.verdict}: {judged.reason}")
    return judged


CRASHED = {
    "joint": "engine",
    "name": "runs",
    "output": "",
    "case": "all",
    "value": None,
    "limit": None,
    "passed": False,
}


def try_to_prove(built: Built, spec: ModelSpec, golden: str, shop: Workshop, afresh: bool = False) -> Proof:
    """`prove_engine`, where an engine that cannot be opened or run has failed, and stops nobody else.

    Raises UnavailableError and IntegrityError, which say nothing about the engine, and StepError when cancelled.
    """
    try:
        return prove_engine(built, spec, golden, shop, afresh)
    except (UnavailableError, IntegrityError):
        raise
    except EngineryError as error:
        if isinstance(error, StepError) and error.kind == "cancelled":
            raise
        return Proof(({**CRASHED, "note": str(error)},))


def prove_engine(built: Built, spec: ModelSpec, golden: str, shop: Workshop, afresh: bool = False) -> Proof:
    """Run an engine against the graph it was built from. afresh: also when the same proof is on record."""
    request = built.unit.request
    arguments = {
        "engine": built.digest,
        "golden": golden,
        "limits": dict(overrides(spec, request.precision, "engine")),
        "metric": metric_of(spec),
        "contract": contract_of(spec),
        "calls": calls_of(spec),
    }
    key = {
        **arguments,
        "request": request.key,
        "machine": _machine(request),
        **code_key(CHECK_ENGINE, backend_root(request.backend)),
        **({"at": now()} if afresh else {}),
    }

    def job() -> Job:
        limits = engine_limits(spec, "proof")
        known = {"store": shop.store.uri, "request": request.to_json(), "suffix": built.suffix}
        return Job(f"prove {built.unit.name}", CHECK_ENGINE, {**known, **arguments}, limits)

    return Proof.from_json(shop.once("check-engine", f"prove {built.unit.name}", key, job, lambda _: []))


def _machine(request: BuildRequest) -> list[str]:
    """What a proof depends on of the machine that it was made on."""
    return [this_kind().name] if request.target.is_cpu else sorted({gpu.name for gpu in gpus()})
