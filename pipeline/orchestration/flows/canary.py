"""The flow that sets a published version against what a channel serves, and tells the verdict."""

from typing import Any, Literal

from prefect import flow, get_run_logger, runtime
from prefect.client.schemas.objects import State
from prefect.settings import PREFECT_API_URL
from prefect.states import Completed

from enginery.registry import DEFAULT_REGISTRY
from enginery.registry.store.base import open_store
from pipeline.canary.automatic import Wanted
from pipeline.canary.automatic import canary as run_canary
from pipeline.compile.run_context import Workshop
from pipeline.orchestration import events
from pipeline.orchestration.artifacts import show_document
from pipeline.orchestration.flows.runner import FlowProgress, PrefectRunner
from pipeline.orchestration.gpu_workers import canary_on_worker
from pipeline.orchestration.run import RunOptions, started


def _run_name() -> str:
    """'canary digits@4'."""
    given = runtime.flow_run.parameters
    return f"canary {given['model']}@{given['version']}"


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
) -> State[Any]:
    """Replay recorded traffic against a version and the one that a channel serves; tell the verdict.

    traffic: a folder or s3:// prefix with MODEL.jsonl or MODEL.npz. Without it, or without anything to compare with,
    the run says so and ends well.  target: with the executor ray, the GPU (`l4`, `sm_89`) of the worker that runs both
    versions; a worker is asked for where there is something to compare, and not before.
    """
    logger, store = get_run_logger(), open_store(registry)
    wanted = Wanted(model, version, channel, traffic, target, scale, duration)
    options = RunOptions(executor=executor, ray_address=ray_address, wait_for_nodes_s=wait_for_nodes_s)
    with started(options, signals=False) as executors:
        if executor == "ray":
            shop = Workshop(store, executors.local, executors.builder, FlowProgress(logger))
            done = PrefectRunner().call(canary_on_worker, wanted, shop, logger.info)
        else:
            done = PrefectRunner().call(run_canary, store, wanted, logger.info)
    if done.verdict is None or done.report is None or done.document is None:
        return Completed(name="Skipped", message=done.reason)
    show_document(done.document, None)
    if PREFECT_API_URL.value():
        events.judged(store, model, version, channel, done.document["target"], done.verdict, done.report)
    return Completed(message=f"{done.verdict} on {done.document['target']}: {done.reason}", data=done.verdict)
