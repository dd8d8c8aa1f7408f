"""The flow that compares a cluster's nodes with the registry, and sends events for what is missing."""

from pathlib import Path

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from enginesmith.registry.builds.build_history import History
from enginesmith.registry.store.base import open_store
from enginesmith.registry.store.layout import DEFAULT_REGISTRY
from pipeline.fleet.inventory import Access
from pipeline.orchestration.artifacts import show_table
from pipeline.orchestration.fleet import FleetSources, Reconciled, messages, reconcile
from pipeline.orchestration.flows.runner import PrefectRunner
from pipeline.orchestration.watch import send_event


@flow(name="reconcile-fleet", flow_run_name="reconcile fleet", persist_result=False)
def reconcile_fleet(
    registry: str = DEFAULT_REGISTRY,
    catalog: str | None = None,
    inventory: str | None = None,
    context: str | None = None,
    apply: bool = False,
) -> State[object]:
    """List what the fleet lacks, and with `apply` send the events that build and prove it. Failed while it lacks any.

    catalog, inventory: paths that the worker sees; without an inventory the nodes of its cluster are read.
    """
    logger, runner = get_run_logger(), PrefectRunner()
    sources = FleetSources(
        Path(inventory) if inventory else None, Access(context=context), Path(catalog) if catalog else None
    )

    def comparison() -> Reconciled:
        store = open_store(registry)
        return reconcile(store, sources, History(store).predict)

    reconciliation = runner.call(comparison)
    for message in messages(reconciliation.work, reconciliation.registry) if apply else ():
        sent_event = runner.call(send_event, message.event, message.model, message.payload)
        logger.info("sent %s of %s: %s", message.event, message.model, sent_event.id)
    unserved_standings = [coverage for coverage in reconciliation.standings if not coverage.serves]
    show_table(
        "fleet",
        "What the fleet lacks",
        [
            {
                "on": coverage.group.name,
                "model": str(coverage.demand.reference),
                "state": coverage.state,
                "why": coverage.reason,
            }
            for coverage in unserved_standings
        ],
    )
    counts = ", ".join(f"{count} {state}" for state, count in reconciliation.counts.items()) or "nothing is wanted"
    return (Completed if reconciliation.good else Failed)(message=counts, data=reconciliation.to_json())
