"""The flow that proves what is published unproven, on the hardware of whichever worker runs it."""

from dataclasses import asdict
from typing import Any

from prefect import flow, get_run_logger, runtime, tags
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from builders.local import LocalExecutor
from pipeline.flows.runner import FlowProgress, PrefectRunner
from pipeline.flows.tables import show_table
from pipeline.pending import pending, pending_of, prove, why_nothing
from pipeline.registry import DEFAULT_REGISTRY
from pipeline.registry.store import open_store
from pipeline.run import cancelling
from pipeline.workshop import Workshop


def _run_name() -> str:
    """'validate pending', 'validate digits@4 for sm_90'."""
    given = runtime.flow_run.parameters
    model, version, target = (given.get(name) for name in ("model", "version", "target"))
    what = f"{model}@{version}" if model and version else model or "pending"
    return f"validate {what}" + (f" for {target}" if target else "")


@flow(name="validate-pending", flow_run_name=_run_name, persist_result=False)
def validate_pending(
    registry: str = DEFAULT_REGISTRY, model: str | None = None, version: str | None = None, target: str | None = None
) -> State[Any]:
    """Run the unproven engines that can run here, and attach the proof; fails at the end if one of them did.

    model: that one alone.  version: of it, whichever it is; without, the newest, and what channels serve.
    target: of the version's engines, those for it.
    """
    executor, runner = LocalExecutor(), PrefectRunner()
    store = open_store(registry)
    shop = Workshop(store, executor, executor, FlowProgress(get_run_logger()))
    asked = pending_of(store, model, version, target) if model and version else None
    if asked and not asked.engines:
        return Completed(name="Skipped", message=why_nothing(store, asked, target))
    with tags("enginery"), cancelling(executor, signals=False):
        # One version after the other: engines are timed, too, and two at once would time each other.
        items = [asked] if asked else pending(store, model)
        found = [proof for item in items for proof in runner.call(prove, item, shop)]
    show_table("proofs", "Engines proven here", [asdict(item) for item in found])
    message = f"{len(found)} engines were pending here, {sum(item.verdict == 'proven' for item in found)} are proven"
    return (Completed if all(item.good for item in found) else Failed)(message=message, data=found)
