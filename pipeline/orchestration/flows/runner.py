"""Steps as Prefect tasks: named after their unit, retried where that can help, limited by slots per GPU generation."""

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.concurrency.asyncio import ConcurrencySlotAcquisitionError
from prefect.concurrency.sync import concurrency
from prefect.runtime import flow_run
from prefect.tasks import exponential_backoff

from builders.execution.local import QUEUED
from enginesmith.core.errors import EnginesmithError, UnavailableError
from enginesmith.core.text import visible
from pipeline.compile.run_context import Work
from pipeline.orchestration.flows.api import is_away
from pipeline.progress import Progress
from pipeline.progress.display import Clocks
from pipeline.progress.events import Event, Finished, Started, VerdictReached, VersionSettled, Waiting
from pipeline.values import Unit

Item = TypeVar("Item")
Value = TypeVar("Value")
P = ParamSpec("P")

# After 2, 4 and 8 s, each up to half longer at random, so that tasks that one outage stopped do not all return at once.
RETRIES = 3
_BACKOFF_S = 2.0
_JITTER = 0.5
# Seconds until the slot of a killed holder is free again.
_SLOT_S = 120.0
# Seconds in which a free slot is assigned; a longer wait is shown.
_AT_ONCE_S = 2.0


@dataclass(frozen=True)
class PrefectRunner:
    """Runs each step as a Prefect task.

    gpu_slots: whether the build of a unit for a GPU generation holds a slot of `enginesmith-gpu-sm_NN`; `enginesmith
    deploy` makes these limits, and a run fails where one is missing.
    """

    gpu_slots: bool = False

    def call(self, step: Callable[P, Value], *arguments: P.args, **named: P.kwargs) -> Value:
        """Run the step as a task and wait for it."""
        return as_task(step, step.__name__, *arguments, **named)()

    def map(
        self, step: Callable[Concatenate[Item, P], Value], items: Iterable[Item], *arguments: P.args, **named: P.kwargs
    ) -> list[Value]:
        """Submit a task for each item and wait for all."""
        futures = [
            as_task(self._with_slot(step, item), f"{step.__name__} {name_of(item)}", item, *arguments, **named).submit()
            for item in items
        ]
        return [future.result() for future in futures]

    def _with_slot(self, step: Callable[..., Value], item: object) -> Callable[..., Value]:
        """The step, in a slot of its GPU generation if it builds for one."""
        if not (self.gpu_slots and step.__name__ == "build" and isinstance(item, Unit) and item.action == "build"):
            return step
        target = item.request.target
        return step if target.compute_capability is None else _in_slot(step, limit_name(target.sm))


def limit_name(generation: str) -> str:
    """The name of the concurrency limit of a GPU generation ('sm_89')."""
    return f"enginesmith-gpu-{generation}"


def name_of(item: object) -> str:
    """The name of a unit or a graph variant, of a value that has one, or the value's own."""
    return str(getattr(getattr(item, "unit", item), "name", item))


def helps(_task: Task[..., object], _run: TaskRun, state: State[object]) -> bool:
    """Whether a retry can help: it can where something was out of reach, and not where a spec or a model is wrong."""
    return isinstance(state.result(raise_on_failure=False), UnavailableError)


def as_task(step: Callable[P, Value], name: str, *arguments: P.args, **named: P.kwargs) -> Task[[], Value]:
    """The step with its arguments as a task without parameters: in those Prefect would look for futures."""

    def run() -> Value:
        return step(*arguments, **named)

    run.__doc__ = step.__doc__
    prefect_task = task(
        name=step.__name__,
        task_run_name=name,
        cache_policy=NO_CACHE,
        persist_result=False,
        retries=RETRIES,
        retry_delay_seconds=exponential_backoff(_BACKOFF_S),
        retry_jitter_factor=_JITTER,
        retry_condition_fn=helps,
    )
    return prefect_task(run)


def _in_slot(step: Callable[..., Value], limit: str) -> Callable[..., Value]:
    @wraps(step)
    def run(unit: Unit, work: Work) -> Value:
        notice_timer = threading.Timer(
            _AT_ONCE_S, work.context.progress.emit, (Waiting(unit.name, f"a slot of {limit} on the Prefect server"),)
        )
        notice_timer.daemon = True
        notice_timer.start()
        try:
            # Without the last, a lease that could not be renewed would end an hour of compiling.
            with concurrency(limit, strict=True, lease_duration=_SLOT_S, raise_on_lease_renewal_failure=False):
                notice_timer.cancel()
                return step(unit, work)
        except ConcurrencySlotAcquisitionError as error:
            if is_away(error):
                raise UnavailableError(f"{limit}: {error}; the Prefect server is down or too busy") from error
            remedy = "`enginesmith prefect deploy` makes the limit of each GPU generation"
            reason = "the Prefect server refuses it" if error.__cause__ else remedy
            raise EnginesmithError(f"{limit}: {error}; {reason}") from error
        finally:
            notice_timer.cancel()

    return run


class FlowProgress(Progress):
    """Progress as lines of a flow run's log. It is made inside of the flow run."""

    def __init__(self, logger: "logging.Logger | logging.LoggerAdapter[logging.Logger]") -> None:
        self._logger = logger
        self.by = f"Prefect flow run {flow_run.name}"
        self._clocks = Clocks()

    def emit(self, event: Event) -> None:
        """Log how a step or unit ended, and once what it waits for, unless that is its place in the queue."""
        match event:
            case Waiting(name, why):
                if why != QUEUED and self._clocks.note_wait(name, why, once=True):
                    self._logger.info("%s: waiting: %s", name, visible(why))
            case Started(name):  # its task says it
                self._clocks.stop(name)
            case Finished(name):
                self._clocks.stop(name)
                self._logger.info("%s: %s", name, visible(event.outcome))
            case VerdictReached(name):
                self._logger.info("verdict on %s: %s", name, visible(event.outcome))
            case VersionSettled(name, text):
                self._logger.info("%s: %s", name, text)
