"""The flow that makes the steps of rollouts that are due."""

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from enginesmith.core.errors import UnavailableError
from enginesmith.core.text import pluralize
from enginesmith.registry.store.base import open_store
from enginesmith.registry.store.layout import DEFAULT_REGISTRY
from pipeline.orchestration.watch import send_rollout
from pipeline.rollout.advance import INTERVAL_S, Advance, RolloutFollower


@flow(name="advance-rollouts", flow_run_name="advance rollouts", persist_result=False)
def advance_rollouts(
    registry: str = DEFAULT_REGISTRY, interval_s: float = INTERVAL_S, lasts_s: float = 600.0
) -> State[object]:
    """Poll every unfinished rollout each `interval_s`, for at most `lasts_s`; send an event for each step.

    It ends at once where none runs, so that a schedule may start one every `lasts_s`. Several at once are harmless.
    """
    logger = get_run_logger()

    def send(step: Advance) -> None:
        try:
            send_rollout(step.rollout, step.action, step.why, registry)
        except UnavailableError as error:  # the step succeeded, and is in the rollout's history
            logger.warning("%s", error)

    follower = RolloutFollower(open_store(registry), None, logger.info, send)
    follower.run(interval_s, lasts_s)
    report_lines = [f"{status.rollout.where}: {status.action}: {status.why}" for status in follower.last.values()]
    if follower.failures:
        return Failed(message=f"{pluralize(len(follower.failures), 'rollout')} could not be polled", data=report_lines)
    return Completed(message=f"polled {pluralize(len(follower.last), 'rollout')}", data=report_lines)
