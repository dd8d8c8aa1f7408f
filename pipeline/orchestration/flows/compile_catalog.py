"""The flow of many models: compiles several at a time; a failed model does not stop the others."""

from typing import Literal

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from enginesmith.core.codec import encode
from pipeline.orchestration.artifacts import show_table
from pipeline.orchestration.catalog import compile_all, gather_specs, words
from pipeline.orchestration.flows.compile_model import send_published, show
from pipeline.orchestration.flows.runner import FlowProgress, PrefectRunner
from pipeline.orchestration.run import Compiled, RunOptions, start_executors


@flow(name="compile-catalog", flow_run_name="catalog {specs}", persist_result=False)
def compile_catalog(
    specs: str = "registered",
    registry: str | None = None,
    targets: str | None = None,
    precisions: str | None = None,
    backends: str | None = None,
    executor: Literal["local", "ray"] = "local",
    jobs: int | None = None,
    ray_address: str | None = None,
    wait_for_nodes_s: float = 0.0,
    gpu_slots: bool = False,
) -> State[object]:
    """Compile every spec of a place, and leave a table with a row for each; fails at the end if any of them did.

    specs: a folder that the worker sees, a file:// URI or a bucket's prefix, or 'registered': the newest of each model.
    """
    options = RunOptions(registry, targets, precisions, backends, executor, jobs, ray_address, wait_for_nodes_s)
    progress = FlowProgress(get_run_logger())
    with gather_specs(specs, registry) as addresses, start_executors(options, signals=False) as executors:
        rows = compile_all(addresses, options, PrefectRunner(gpu_slots), progress, executors, _report)
    show_table("catalog", f"{specs}: {words(rows)}", [encode(row) for row in rows])
    end_state = Completed if all(row.good for row in rows) else Failed
    return end_state(message=words(rows), data=rows)


def _report(result: Compiled) -> None:
    show(result)
    send_published(result)
