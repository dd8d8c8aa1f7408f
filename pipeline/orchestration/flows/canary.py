"""The flow that compares a published version with what a channel serves, and sends the event of the verdict."""

from typing import Literal

from prefect import flow, get_run_logger, runtime
from prefect.client.schemas.objects import State
from prefect.settings import PREFECT_API_URL
from prefect.states import Completed

from enginery.registry.store.base import open_store
from enginery.registry.store.layout import DEFAULT_REGISTRY
from pipeline.canary.automatic import CanaryRequest
from pipeline.canary.automatic import canary as run_canary
from pipeline.compile.run_context import RunContext
from pipeline.orchestration import events
from pipeline.orchestration.artifacts import show_document
from pipeline.orchestration.flows.runner import FlowProgress, PrefectRunner
from pipeline.orchestration.gpu_workers import canary_on_worker
from pipeline.orchestration.run import RunOptions, start_executors


def _run_name() -> str:
    """'canary digits@4'."""
    given = runtime.flow_run.parameters
    return f"canary {given.get('model')}@{given.get('version')}"


@flow(name="canary", flow_run_name=_run_name, persist_result=False)
def canary(
    model: str,
    version: str,
    registry: str = DEFAULT_REGISTRY,
    channel: str = "stable",
    traffic: str | None = None,
    target: str = "auto",
    scale: float = 1.0,
    duration: float | None = None,
    executor: Literal["local", "ray"] = "local",
    ray_address: str | None = None,
    wait_for_nodes_s: float = 0.0,
) -> State[object]:
    """Replay recorded traffic against a version and the one that a channel serves; send the event of the verdict.

    traffic: a folder or s3:// prefix with MODEL.jsonl or MODEL.npz. Without it, or without anything to compare with,
    the run ends as Skipped with the reason.  target: with the executor ray, the GPU (`l4`, `sm_89`) of the worker that
    runs both versions; a worker is asked for once there is something to compare.
    """
    logger, store = get_run_logger(), open_store(registry)
    wanted = CanaryRequest(model, version, channel, traffic, target, scale, duration)
    options = RunOptions(executor=executor, ray_address=ray_address, wait_for_nodes_s=wait_for_nodes_s)
    with start_executors(options, signals=False) as executors:
        if executor == "ray":
            context = RunContext(store, executors.local, executors.builder, FlowProgress(logger))
            done = PrefectRunner().call(canary_on_worker, wanted, context, logger.info)
        else:
            done = PrefectRunner().call(run_canary, store, wanted, logger.info)
    report = done.report
    if report is None or done.blob is None:
        return Completed(name="Skipped", message=done.reason)
    show_document(report, None)
    if PREFECT_API_URL.value():
        events.send_judged(store, model, version, channel, str(report.target), report.verdict, done.blob)
    return Completed(message=f"{report.verdict} on {report.target}: {report.reason}", data=report.verdict)
