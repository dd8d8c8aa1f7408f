"""The job that runs a new engine and a served one on the same golden set: how far apart their answers are at the ends
of every bucket, and the task metrics of both."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from builders.execution.jobs import WorkerContext
from enginesmith.core.errors import EnginesmithError
from enginesmith.core.reports.proof import Check, name_task_checks
from enginesmith.core.types import Session
from enginesmith.registry.store.base import open_store
from pipeline.compile.steps.blobs import golden_set, open_session
from pipeline.regressions.findings import AnswerDrift
from pipeline.regressions.thresholds import drift_budget
from pipeline.values import EngineBlob
from validation.limits.budget import at_most
from validation.metrics.tasks.terms import TaskMetric

if TYPE_CHECKING:
    from validation.golden.golden_set import GoldenSet


@dataclass(frozen=True)
class ComparedAnswers:
    """drift: the worst check of each case and output.  new, served: task metrics by name."""

    drift: tuple[AnswerDrift, ...]
    new: Mapping[str, float | None]
    served: Mapping[str, float | None]


@dataclass(frozen=True)
class CompareAnswers:
    """Run two engines on the golden set of this digest, which has a case at the ends of every bucket.

    limits: the spec's, of engines of this precision.  metrics: the spec's task metrics.
    """

    new: EngineBlob
    served: EngineBlob
    golden: str
    limits: Mapping[str, float]
    metrics: tuple[TaskMetric, ...]

    def run(self, context: WorkerContext) -> ComparedAnswers:
        """Their drift and metrics. Raises EnginesmithError where one cannot be opened, or the served one not be run."""
        from validation.comparison.sessions import drift_checks

        place = open_store(context.store)
        golden = golden_set(place, self.golden, context.workdir)
        budget = drift_budget((self.new.request.precision, self.served.request.precision), self.limits)
        folders = [context.workdir / name for name in ("new", "served")]
        for folder in folders:
            folder.mkdir()
        with (
            open_session(place, self.served, folders[1]) as served,
            open_session(place, self.new, folders[0]) as new,
        ):
            checks = drift_checks("engine", served, new, golden, budget)
            values = [_measure(session, golden, self.metrics) for session in (new, served)]
        return ComparedAnswers(tuple(worst_of(checks)), *values)


def _measure(session: Session, golden: "GoldenSet", metrics: Sequence[TaskMetric]) -> dict[str, float | None]:
    """The task metrics of an engine by name; None where one cannot be measured."""
    from validation.comparison.tasks import task_checks

    try:
        found = name_task_checks(task_checks(session, golden, metrics))
    except EnginesmithError:
        return {}
    return {name: check.value for name, check in found.items()}


def worst_of(checks: Sequence[Check]) -> list[AnswerDrift]:
    """Of each case and output the check that is furthest beyond its limit, or the nearest to it."""
    worst: dict[tuple[str, str], Check] = {}
    for check in checks:
        key = check.case, check.output
        if key not in worst or _excess(check) > _excess(worst[key]):
            worst[key] = check
    return [
        AnswerDrift(check.case, check.output, check.name, check.value, check.limit, check.passed)
        for check in worst.values()
    ]


def _excess(check: Check) -> tuple[bool, float]:
    """How far a check is beyond its limit, as a share of that; a failed one always outweighs one that passed."""
    if check.value is None or not check.limit:
        return not check.passed, -1.0 if check.passed else 1.0
    beyond = check.value / check.limit if at_most(check.name) else 2.0 - check.value / check.limit
    return not check.passed, beyond
