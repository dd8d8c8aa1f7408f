"""The flow that proves unproven engines, on the hardware of the worker that runs it, or on Ray's GPUs."""

from typing import Literal

from prefect import flow, get_run_logger, runtime
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from enginesmith.core.text import pluralize
from enginesmith.registry.store.base import open_store
from enginesmith.registry.store.layout import DEFAULT_REGISTRY
from pipeline.compile.run_context import RunContext
from pipeline.operations.validate import Validated, list_pending, pending_of, why_nothing
from pipeline.operations.validate import validate_pending as prove
from pipeline.orchestration.artifacts import show_table
from pipeline.orchestration.flows.runner import FlowProgress, PrefectRunner
from pipeline.orchestration.gpu_workers import gpu_named, validate_on_worker
from pipeline.orchestration.run import RunOptions, start_executors


def _run_name() -> str:
    """'validate pending', 'validate digits@4 for sm_90'."""
    parameters = runtime.flow_run.parameters
    model, version, target = (parameters.get(name) for name in ("model", "version", "target"))
    version_text = f"{model}@{version}" if model and version else model or "pending"
    return f"validate {version_text}" + (f" for {target}" if target else "")


@flow(name="validate-pending", flow_run_name=_run_name, persist_result=False)
def validate_pending(
    registry: str = DEFAULT_REGISTRY,
    model: str | None = None,
    version: str | None = None,
    target: str | None = None,
    on: str = "auto",
    executor: Literal["local", "ray"] = "local",
    ray_address: str | None = None,
    wait_for_nodes_s: float = 0.0,
) -> State[object]:
    """Run the unproven engines that can run here, and attach the proofs; fails at the end if one of them did.

    model: that one alone.  version: that of the model; None for the newest and those that channels serve.  target: only
    the version's engines for it.  on: with the executor ray, the GPU (`l4`, `sm_89`) of the workers that run them; a
    worker is asked for once an engine waits.
    """
    store, gpu = open_store(registry), gpu_named(on) if executor == "ray" else None
    pending_version = pending_of(store, model, version, target, gpu) if model and version else None
    if pending_version and not pending_version.engines:
        return Completed(name="Skipped", message=why_nothing(store, pending_version, target, gpu))
    options = RunOptions(executor=executor, ray_address=ray_address, wait_for_nodes_s=wait_for_nodes_s)
    with start_executors(options, signals=False) as executors:
        context = RunContext(store, executors.local, executors.builder, FlowProgress(get_run_logger()))
        # One version at a time: engines are timed, and concurrent ones would disturb each other.
        pending_list = [pending_version] if pending_version else list_pending(store, model, gpu)
        runner = PrefectRunner()
        proofs: list[Validated] = []
        for item in pending_list:
            proofs += runner.call(validate_on_worker, item, gpu, context) if gpu else runner.call(prove, item, context)
    location_text = f"for {gpu.name}" if gpu else "here"
    columns = ("reference", "unit", "verdict", "reason")
    rows = [{name: getattr(proof, name) for name in columns} for proof in proofs]
    show_table("proofs", f"Engines proven {location_text}", rows)
    proven_count = sum(proof.verdict == "proven" for proof in proofs)
    message = f"{pluralize(len(proofs), 'engine')} pending {location_text}, {proven_count} proven"
    return (Completed if all(proof.good for proof in proofs) else Failed)(message=message, data=proofs)
