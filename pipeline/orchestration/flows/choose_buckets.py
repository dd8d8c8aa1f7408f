"""The flow that answers drifted traffic: new buckets, and the event that builds a candidate with them."""

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.settings import PREFECT_API_URL
from prefect.states import Completed

from enginesmith.registry.store.base import open_store
from enginesmith.registry.store.layout import DEFAULT_REGISTRY
from pipeline.orchestration import watch
from pipeline.orchestration.flows.runner import FlowProgress, PrefectRunner
from pipeline.orchestration.rebucketing import DriftAnswer, DriftRequest, answer_drift
from pipeline.orchestration.run import RunOptions, start_executors
from pipeline.traffic.place import BucketOptions


@flow(name="choose-buckets", flow_run_name="buckets for {model}", persist_result=False)
def choose_buckets(
    model: str,
    registry: str = DEFAULT_REGISTRY,
    traffic: str | None = None,
    most: int | None = None,
    batch: int | None = None,
    wait_ms: float = 0.0,
) -> State[object]:
    """Choose buckets from recorded traffic, register the model's spec with them, and send the event of that, on which
    a candidate is built and its canary runs.

    traffic: a folder or bucket's prefix with MODEL.jsonl or MODEL.npz.  most: profiles at most, 8 without it.
    batch, wait_ms: of the server's batcher. The run ends as Skipped, with the reason, where nothing is registered.
    """
    logger = get_run_logger()
    options = BucketOptions(max_profiles=most, batch=batch, wait_s=wait_ms / 1000)
    with start_executors(RunOptions(registry=registry), signals=False) as executors:

        def answer() -> DriftAnswer:
            drift_request = DriftRequest(model, registry, traffic, options)
            return answer_drift(drift_request, FlowProgress(logger), executors, logger.info)

        drift_answer = PrefectRunner().call(answer)
    logger.info("%s: %s", model, drift_answer.reason)
    if drift_answer.registration is None:
        return Completed(name="Skipped", message=drift_answer.reason)
    if PREFECT_API_URL.value():
        watch.send_registered(open_store(registry), drift_answer.registration)
    return Completed(message=f"{model}: {drift_answer.reason}", data=dict(drift_answer.edges))
