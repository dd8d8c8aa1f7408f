"""The flow that deletes a registry's garbage."""

from datetime import timedelta
from typing import Annotated

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.states import Completed
from pydantic import Field

from enginesmith.core.parsing import LONGEST
from enginesmith.core.text import pluralize
from enginesmith.registry.collection.references import Rules
from enginesmith.registry.gc import GRACE, Collected, collect
from enginesmith.registry.store.base import open_store
from enginesmith.registry.store.layout import DEFAULT_REGISTRY
from pipeline.orchestration.artifacts import show_table
from pipeline.orchestration.flows.runner import PrefectRunner


@flow(name="collect-garbage", flow_run_name="collect garbage", persist_result=False)
def collect_garbage(
    registry: str = DEFAULT_REGISTRY,
    delete: bool = False,
    grace_days: Annotated[float, Field(ge=0, le=LONGEST.days)] = float(GRACE.days),
    keep_versions: int = 10,
    keep_moves: int = 5,
) -> State[object]:
    """List what nothing needs; with `delete`, mark it, and delete what was marked `grace_days` ago."""
    logger = get_run_logger()

    def collection() -> Collected:
        rules, grace = Rules(keep_versions, keep_moves), timedelta(days=grace_days)
        return collect(
            open_store(registry), rules, grace, delete=delete, say=lambda name: logger.info("deleting %s", name)
        )

    gc_report = PrefectRunner().call(collection)
    show_table(
        "garbage",
        "What nothing needs any more",
        [
            {**vars(entry), "due": entry.due.isoformat(timespec="minutes") if entry.due else ""}
            for entry in gc_report.items
        ],
    )
    freed_bytes, garbage_bytes = gc_report.size_bytes("deleted"), gc_report.size_bytes("new", "waiting", "due", "held")
    return Completed(
        message=(
            f"{pluralize(len(gc_report.kept), 'version')} kept; {freed_bytes} bytes deleted, "
            f"{garbage_bytes} bytes are garbage"
        )
    )
