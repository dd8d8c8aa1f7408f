"""The flow that proves what is published unproven, on the hardware of whichever worker runs it."""

from dataclasses import asdict
from typing import Any

from prefect import flow, get_run_logger, tags
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from builders.local import LocalExecutor
from pipeline.flows.runner import FlowProgress, PrefectRunner
from pipeline.flows.tables import show_table
from pipeline.pending import pending, prove
from pipeline.registry.store import open_store
from pipeline.run import DEFAULT_REGISTRY, cancelling
from pipeline.workshop import Workshop


@flow(name="validate-pending", flow_run_name="validate pending", persist_result=False)
def validate_pending(registry: str = DEFAULT_REGISTRY) -> State[Any]:
    """Run the unproven engines that can run here, and attach the proof; fails at the end if one of them did."""
    executor, runner = LocalExecutor(), PrefectRunner()
    store = open_store(registry)
    shop = Workshop(store, executor, executor, FlowProgress(get_run_logger()))
    with tags("enginery"), cancelling(executor, signals=False):
        # One version after the other: engines are timed, too, and two at once would time each other.
        found = [proof for item in pending(store) for proof in runner.call(prove, item, shop)]
    show_table("proofs", "Engines proven here", [asdict(item) for item in found])
    message = f"{len(found)} engines were pending here, {sum(item.verdict == 'proven' for item in found)} are proven"
    return (Completed if all(item.good for item in found) else Failed)(message=message, data=found)
