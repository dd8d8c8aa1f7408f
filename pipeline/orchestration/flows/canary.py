"""The flow that compares a published version with what a channel serves, and sends the event of the verdict."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Literal

from prefect import flow, get_run_logger, runtime
from prefect.client.schemas.objects import State
from prefect.settings import PREFECT_API_URL
from prefect.states import Completed, Failed

from enginesmith.core.errors import EnginesmithError
from enginesmith.core.hardware.machine import target_named
from enginesmith.core.text import join_first, pluralize
from enginesmith.registry.store.base import Store, open_store
from enginesmith.registry.store.layout import DEFAULT_REGISTRY
from enginesmith.registry.versions import lookup
from pipeline.canary.automatic import CanaryOutcome, CanaryRequest, missed_version
from pipeline.canary.automatic import canary as run_canary
from pipeline.compile.run_context import RunContext
from pipeline.orchestration import watch
from pipeline.orchestration.flows.runner import FlowProgress, PrefectRunner
from pipeline.orchestration.gpu_workers import canary_on_worker
from pipeline.orchestration.run import RunOptions, start_executors

# A version that is younger may have its canary running, or waiting for a worker.
GRACE_S = 3600.0
Run = Callable[[CanaryRequest], CanaryOutcome]


def _run_name() -> str:
    """'canary digits@4', 'canary of missed versions'."""
    parameters = runtime.flow_run.parameters
    return (
        f"canary {parameters['model']}@{parameters['version']}"
        if parameters.get("version")
        else "canary of missed versions"
    )


@flow(name="canary", flow_run_name=_run_name, persist_result=False)
def canary(
    model: str | None = None,
    version: str | None = None,
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

    Without a version: of each model, or of `model`, the newest version if its canary was lost with its event
    (`missed_version`). One that cannot be run does not stop the others; the run then fails at the end.

    traffic: a folder or bucket's prefix with MODEL.jsonl or MODEL.npz. Without it, or without anything to compare with,
    the run ends as Skipped with the reason.  target: with the executor ray, the GPU (`l4`, `sm_89`) of the worker that
    runs both versions; a worker is asked for once there is something to compare.
    """
    logger, store = get_run_logger(), open_store(registry)
    canary_request = CanaryRequest(model or "", version or "", channel, traffic, target, scale, duration)
    options = RunOptions(executor=executor, ray_address=ray_address, wait_for_nodes_s=wait_for_nodes_s)
    with start_executors(options, signals=False) as executors:
        context = RunContext(store, executors.local, executors.builder, FlowProgress(logger))

        def run(request: CanaryRequest) -> CanaryOutcome:
            if executor == "ray":
                outcome = PrefectRunner().call(canary_on_worker, request, context, logger.info)
            else:
                outcome = PrefectRunner().call(run_canary, store, request, logger.info)
            if outcome.report and outcome.blob and PREFECT_API_URL.value():
                watch.send_judged(store, request, outcome.report, outcome.blob)
            return outcome

        if version:
            return _state(run(canary_request))
        return _run_missed(store, [model] if model else lookup.models(store), canary_request, run)


def _state(outcome: CanaryOutcome) -> State[object]:
    if outcome.report is None:
        return Completed(name="Skipped", message=outcome.reason)
    message = f"{outcome.report.verdict} on {outcome.report.target}: {outcome.report.reason}"
    return Completed(message=message, data=outcome.report.verdict)


def _run_missed(store: Store, models: Sequence[str], like: CanaryRequest, run: Run) -> State[object]:
    """Run the canaries that were lost, one after the other, because timing must not run in parallel."""
    logger, target = get_run_logger(), target_named(like.target)
    grace = timedelta(seconds=GRACE_S + 2 * (like.duration or 0.0))
    report_lines, failure_count = [], 0
    for model in models:
        try:
            if version := missed_version(store, model, like.channel, target, grace):
                outcome = run(replace(like, model=model, version=version))
                report_lines.append(
                    f"{model}@{version}: {outcome.report.verdict if outcome.report else outcome.reason}"
                )
                logger.info("%s", report_lines[-1])
        except EnginesmithError as error:
            failure_count += 1
            report_lines.append(f"{model}: {error}")
            logger.error("%s", report_lines[-1])
    message = f"checked {pluralize(len(models), 'model')}: {join_first(report_lines, 5) or 'none was missed'}"
    end_state = Failed if failure_count else Completed
    return end_state(message=message, data=report_lines)
