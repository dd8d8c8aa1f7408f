"""The flow that acts on the verdicts of canaries: promote, roll back, or nothing."""

from prefect import flow, get_run_logger, runtime
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from enginesmith.core.errors import EnginesmithError
from enginesmith.core.text import pluralize
from enginesmith.registry.store.base import open_store
from enginesmith.registry.store.layout import DEFAULT_REGISTRY
from enginesmith.registry.versions import lookup
from pipeline.canary.settle import settle, settle_newest
from pipeline.orchestration.flows.runner import PrefectRunner


def _run_name() -> str:
    """'settle digits:stable', 'settle every model:stable'."""
    parameters = runtime.flow_run.parameters
    return f"settle {parameters.get('model') or 'every model'}:{parameters.get('channel')}"


@flow(name="settle-canary", flow_run_name=_run_name, persist_result=False)
def settle_canary(
    model: str | None = None, report: str | None = None, registry: str = DEFAULT_REGISTRY, channel: str = "stable"
) -> State[object]:
    """Promote the candidate of a PASS once all targets that count have one; roll back that of a FAIL if it is served.

    report: digest of the canary's report. Without it: of each model, or of `model`, roll back what is served where the
    event of a FAIL was lost, else promote the newest version if it can be by now. A model that is damaged does not stop
    the others; the run then fails at the end.
    """
    logger, store, runner = get_run_logger(), open_store(registry), PrefectRunner()
    if model and report:
        message = runner.call(settle, store, model, channel, report, logger.info)
        return Completed(message=message, data=message)
    report_lines, failure_count = [], 0
    for name in [model] if model else lookup.models(store):
        try:
            report_lines.append(runner.call(settle_newest, store, name, channel, logger.info))
        except EnginesmithError as error:
            failure_count += 1
            report_lines.append(f"not settled: {error}")
        logger.info("%s: %s", name, report_lines[-1])
    if failure_count:
        return Failed(
            message=f"{failure_count} of {pluralize(len(report_lines), 'model')} could not be settled",
            data=report_lines,
        )
    return Completed(message=f"checked {pluralize(len(report_lines), 'model')}", data=report_lines)
