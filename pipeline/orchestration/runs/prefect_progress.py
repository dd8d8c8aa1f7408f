"""A run's state as a Prefect progress artifact: the same as `enginery status`, where the flow run is."""

import contextvars
from collections.abc import Callable
from typing import Any
from uuid import UUID

from enginery.registry.runs.state import OVER, RunItem, RunState
from pipeline.orchestration.artifacts import artifact_key, plain_text
from pipeline.orchestration.runs.views import RunView, view_run

# A unit that runs longer than predicted is nearly done, and no more.
_NEARLY = 0.95


class ProgressArtifact:
    """Shows the states of runs, an artifact for each; made in the flow run whose artifacts they are, and called in the
    writers' threads."""

    def __init__(self) -> None:
        # Prefect finds the flow run of an artifact in its context, which another thread does not have.
        self._context = contextvars.copy_context()
        self._known: dict[str, UUID] = {}

    def __call__(self, run: RunState) -> None:
        """Show the state."""
        one = view_run(run)
        # Each its own copy: a context is entered by one thread at a time, and a catalog's runs have a writer each.
        self._context.copy().run(self._show, one, percent(one), description(one))

    def _show(self, one: RunView, done: float, text: str) -> None:
        from prefect.artifacts import create_progress_artifact, update_progress_artifact

        # Each has a twin for coroutines, and says by its type that it may be either.
        create: Callable[..., Any] = create_progress_artifact
        update: Callable[..., Any] = update_progress_artifact
        run = one.run
        if run.id in self._known:
            update(self._known[run.id], done, description=text)
        else:
            self._known[run.id] = create(done, key=artifact_key("progress", run.model), description=text)


def percent(one: RunView) -> float:
    """How far the run is, 0 to 100: the share of its units that are over, and of those that run as predicted."""
    if one.run.state != "running":
        return 100.0
    shares = [_share(one, item) for item in one.run.units]
    return round(100 * sum(shares) / len(shares), 1) if shares else 0.0


def description(one: RunView) -> str:
    """Counts, and a line for each unit that runs."""
    lines = [f"{plain_text(one.run.model)}: {one.state}, {one.counts or 'preparing'}"]
    for item in one.run.units:
        if item.state == "running":
            told = "; ".join(part for part in (item.phase, item.where, one.describe(item)) if part)
            lines.append(f"- {plain_text(item.name)}: {plain_text(told)}")
    return "\n".join(lines)


def _share(one: RunView, item: RunItem) -> float:
    if item.state in OVER:
        return 1.0
    if item.state != "running" or item.predicted is None or not item.predicted.seconds:
        return 0.0
    return min(_NEARLY, (one.elapsed_s(item) or 0.0) / item.predicted.seconds)
