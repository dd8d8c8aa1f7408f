"""The flow of one model: export, quantize, build, prove, publish, and send the event of a new version."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Literal

from prefect import flow, get_run_logger, runtime
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext
from prefect.settings import PREFECT_API_URL, PREFECT_LOGGING_LEVEL, temporary_settings
from prefect.states import Failed

from enginesmith.core.errors import EnginesmithError, UnavailableError
from pipeline.orchestration import watch
from pipeline.orchestration.artifacts import error_text, show_table
from pipeline.orchestration.catalog import compile_any
from pipeline.orchestration.flows.api import api_in_reach, is_away, start_server
from pipeline.orchestration.flows.runner import FlowProgress, PrefectRunner
from pipeline.orchestration.run import Compiled, RunOptions, start_executors
from pipeline.outcome import Outcome

ENGINE_COLUMNS = ("target", "precision", "backend", "status", "size_bytes", "reason")


def _run_name() -> str:
    """'compile digits.yaml', 'compile digits@8a41c0b2d9e7'."""
    model, separator, digest = str(runtime.flow_run.parameters.get("spec")).removeprefix("registered:").partition("@")
    return f"compile {model}{separator}{digest[:12]}"


@flow(name="compile-model", flow_run_name=_run_name, persist_result=False)
def compile_model(
    spec: str,
    registry: str | None = None,
    targets: str | None = None,
    precisions: str | None = None,
    backends: str | None = None,
    executor: Literal["local", "ray"] = "local",
    jobs: int | None = None,
    ray_address: str | None = None,
    wait_for_nodes_s: float = 0.0,
    gpu_slots: bool = False,
) -> Outcome | State[Outcome]:
    """Export, quantize, build, prove and publish the engines of one spec.

    spec: a path that the worker sees, 'registered:MODEL[@DIGEST]', or a file in a bucket. gpu_slots: see PrefectRunner.
    A deployment's run that cannot reach something ends as Unreachable, and the server starts it again (`deploy`).
    """
    options = RunOptions(registry, targets, precisions, backends, executor, jobs, ray_address, wait_for_nodes_s)
    # Tasks have no tags: for a slot of each, Prefect asks its server once, and a build ended where that did not answer.
    try:
        with start_executors(options, signals=False) as executors:
            result = compile_any(spec, options, PrefectRunner(gpu_slots), FlowProgress(get_run_logger()), executors)
        show(result)
        send_published(result)
    except Exception as error:
        # Not `runtime.deployment.id`: it asks the API, whose failure would hide this error.
        run = FlowRunContext.get()
        of_deployment = run and run.flow_run and run.flow_run.deployment_id
        if not of_deployment or not (isinstance(error, UnavailableError) or is_away(error)):
            raise
        message = f"Prefect's server does not answer ({error_text(error)})" if is_away(error) else str(error)
        return Failed(name="Unreachable", message=message, data=error)
    if result.outcome.version is None:
        return Failed(message="nothing was published, because no engine passed", data=result.outcome)
    return result.outcome


def run_flow(spec: str, options: RunOptions, quiet: bool = False) -> Outcome:
    """Run the flow here, on the configured Prefect API or on a server of its own.

    quiet: whether Prefect logs errors alone.
    Raises UnavailableError when that API does not answer, TypeError for a flow that ends without an outcome, and what
    the run raises.
    """
    quiet_flow = compile_model.with_options(log_prints=False)
    with _terminal_logs(quiet), api_in_reach("start its server, correct PREFECT_API_URL, or use --runner inprocess"):
        if not PREFECT_API_URL.value():
            _start_server_and_ray(options)
        state = quiet_flow(spec, **asdict(options), return_state=True)
    outcome = state.result(raise_on_failure=False)
    if isinstance(outcome, BaseException):
        raise outcome
    if not isinstance(outcome, Outcome):
        raise TypeError(f"the flow returned {type(outcome).__name__} instead of Outcome")
    return outcome


def _start_server_and_ray(options: RunOptions) -> None:
    """Start Prefect's temporary server and, at the same time, the Ray that the run will start for itself, if any."""
    if options.executor != "ray" or options.ray_address or os.environ.get("RAY_ADDRESS"):
        return start_server()
    from builders.execution.ray.task import connect_ahead

    return connect_ahead(options.jobs, start_server)


def show(result: Compiled) -> None:
    """Post a table of the run's engines to the Prefect UI."""
    outcome = result.outcome
    name = f"{outcome.model}@{outcome.version}" if outcome.version else outcome.model
    rows = [{column: getattr(engine.entry, column) for column in ENGINE_COLUMNS} for engine in outcome.engines]
    show_table(f"engines-{outcome.model}", f"Engines of {name}; report: {outcome.page or 'none'}", rows)


def send_published(result: Compiled) -> None:
    """Send the event of a new version once, to a configured server; a temporary one has no deployments."""
    outcome = result.outcome
    if outcome.version is None or outcome.manifest is None or not PREFECT_API_URL.value():
        return
    watch.send_published_once(result.store, outcome.model, outcome.version, outcome.manifest)


@contextmanager
def _terminal_logs(quiet: bool) -> Iterator[None]:
    """Log as Prefect does, but an EnginesmithError by its message, without its traceback. quiet: log errors alone."""
    loggers = [logging.getLogger(f"prefect.{name}") for name in ("flow_runs", "task_runs")]
    for logger in loggers:
        logger.addFilter(_explain)
    settings = {PREFECT_LOGGING_LEVEL: "ERROR"} if quiet else {}
    try:
        with temporary_settings(settings):
            yield
    finally:
        for logger in loggers:
            logger.removeFilter(_explain)


def _explain(record: logging.LogRecord) -> bool:
    """Replace the traceback of an EnginesmithError by its message."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, EnginesmithError):
        record.msg, record.args, record.exc_info = str(error), (), None
    return True
