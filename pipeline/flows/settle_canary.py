"""The flow that does what a canary's verdict asks for: promote, roll back, or nothing."""

from typing import Any

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.states import Completed

from pipeline.canary.automatic import settle
from pipeline.flows.runner import PrefectRunner
from pipeline.registry import DEFAULT_REGISTRY
from pipeline.registry.store import open_store


@flow(name="settle-canary", flow_run_name="settle {model}:{channel}", persist_result=False)
def settle_canary(model: str, report: str, registry: str = DEFAULT_REGISTRY, channel: str = "stable") -> State[Any]:
    """Promote the candidate of a PASS, roll back that of a FAIL if it is served. report: digest of the canary's."""
    logger = get_run_logger()
    said = PrefectRunner().call(settle, open_store(registry), model, channel, report, logger.info)
    return Completed(message=said, data=said)
