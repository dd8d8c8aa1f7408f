"""The Prefect flow over the main job: order, retries and visibility are Prefect's, the work is `pipeline.compile`'s."""

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, TypeVar

# Without a server Prefect starts one for the run; on a loaded machine that takes longer than its default of 20 s.
os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "120")
os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
os.environ.setdefault("DO_NOT_TRACK", "1")

import httpx
from prefect import Task, flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL, PREFECT_LOGGING_LEVEL, temporary_settings

from builders.errors import EngineryError, UnavailableError
from pipeline.artifacts import show_document
from pipeline.compile import compile_model as compile_steps
from pipeline.pages import published_document
from pipeline.prefect_server import start_server
from pipeline.progress import Silent
from pipeline.publication import Outcome
from pipeline.published_page import failed_document
from pipeline.registry.store import Store
from pipeline.registry.versions import load
from pipeline.run import RunOptions, opened
from pipeline.runs.prefect_progress import ProgressArtifact
from pipeline.runs.state import RunState
from pipeline.values import Json

Item = TypeVar("Item")
Value = TypeVar("Value")


@flow(name="compile-model", flow_run_name="compile {spec}", persist_result=False)
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
) -> Outcome:
    """Export, quantize, build, prove and publish the engines of one spec."""
    options = RunOptions(registry, targets, precisions, backends, executor, jobs, ray_address, wait_for_nodes_s)
    with opened(spec, options, FlowProgress(get_run_logger())) as run:
        outcome = compile_steps(run.spec, run.selection, run.shop, PrefectRunner())
        _show(outcome, run.shop.store)
    return outcome


def run_flow(spec: Path, options: RunOptions, quiet: bool = False) -> Outcome:
    """Run the flow here, on the configured Prefect API or on a server of its own.

    Raises UnavailableError when that API does not answer.
    """
    chosen = compile_model.with_options(log_prints=False)
    with _terminal_logs(quiet), _api_in_reach():
        if not PREFECT_API_URL.value():
            start_server()
        outcome: Outcome = chosen(str(spec), **asdict(options))
    return outcome


@contextmanager
def _api_in_reach() -> Iterator[None]:
    """Prefect says by a bare RuntimeError that its API does not answer."""
    try:
        yield
    except RuntimeError as error:
        if not str(error).startswith("Failed to reach API"):
            raise
        remedy = "start its server, correct PREFECT_API_URL, or use --runner inprocess"
        raise UnavailableError(f"Prefect: {error}; {remedy}") from error


class PrefectRunner:
    """Carries out each step as a Prefect task; what a step remembers is the store's business, not Prefect's cache."""

    def call(self, step: Callable[..., Value], *arguments: Any) -> Value:
        """Run the step as a task and wait for it."""
        return _as_task(step, step.__name__, *arguments)()

    def map(self, step: Callable[..., Value], items: Iterable[Item], *arguments: Any) -> list[Value]:
        """Submit a task for each item and wait for all."""
        futures = [_as_task(step, f"{step.__name__} {name_of(item)}", item, *arguments).submit() for item in items]
        return [future.result() for future in futures]


def name_of(item: Any) -> str:
    """What a person calls a unit or a flavour."""
    return str(getattr(getattr(item, "unit", item), "name", item))


def _as_task(step: Callable[..., Value], name: str, *arguments: Any) -> Task[[], Value]:
    """A task without parameters: Prefect would otherwise look through stores and executors for futures."""

    def run() -> Value:
        return step(*arguments)

    run.__doc__ = step.__doc__
    return task(name=step.__name__, task_run_name=name, cache_policy=NO_CACHE, persist_result=False)(run)


class FlowProgress(Silent):
    """Progress as lines of the flow run's log, and as a progress artifact of it; made in the flow run."""

    def __init__(self, logger: "logging.Logger | logging.LoggerAdapter[logging.Logger]") -> None:
        self._logger = logger
        self.by = f"Prefect flow run {flow_run.name}"
        self._artifact = ProgressArtifact()

    def recorded(self, run: RunState) -> None:
        """Show it as a progress artifact."""
        self._artifact(run)

    def finished(self, name: str, outcome: str) -> None:
        """Log how it ended."""
        self._logger.info("%s: %s", name, outcome)


def show_report(document: Json, page: str) -> list[str]:
    """Leave a version's or a canary's report (`pipeline.pages`) on the Prefect server; the keys of its artifacts.

    page: address of the HTML. Raises UnavailableError without a server, or when it does not answer.
    """
    if not PREFECT_API_URL.value():
        raise UnavailableError(
            "no Prefect server is configured; set PREFECT_API_URL to the one that shall have the report"
        )
    try:
        with _api_in_reach():
            return show_document(document, page)
    except httpx.HTTPError as error:
        raise UnavailableError(
            f"Prefect: {PREFECT_API_URL.value()} does not answer ({error}); start its server"
        ) from error


def _show(outcome: Outcome, store: Store) -> None:
    """Leave the report in the Prefect UI: of the version, or of the run that published none."""
    if outcome.version is None:
        document = failed_document(store, outcome.model)
    else:
        document = published_document(store, load(store, outcome.model, outcome.version))
    page = outcome.page if outcome.page is None or "://" in outcome.page else Path(outcome.page).as_uri()
    show_document(document, page)


@contextmanager
def _terminal_logs(quiet: bool) -> Iterator[None]:
    """Prefect's log as a person wants it on a terminal: no traceback for an error that explains itself."""
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
    """Put our own error's message in the place of its traceback."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, EngineryError):
        record.msg, record.args, record.exc_info = str(error), (), None
    return True
