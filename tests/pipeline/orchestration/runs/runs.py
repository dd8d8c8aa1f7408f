"""Runs for tests: one that is told by hand."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from builders.execution.jobs import Usage
from enginesmith.registry.builds.build_history import Expectation
from enginesmith.registry.builds.runs import RunItem, RunState
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.layout import run_key
from pipeline.orchestration.runs.recorder import Tracker
from pipeline.progress.events import (
    Finished,
    PhaseEntered,
    Planned,
    Predicted,
    Printed,
    ProcessEnded,
    Retrying,
    Started,
    VerdictReached,
    Waiting,
)
from pipeline.values import BuildPlan, Graph, GraphVariant, Unit
from tests.builders import graphs

EXPECTED = Expectation(70.0, 500.0, 3, "3 builds of this unit")
BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
UNIT, OTHER, REFUSED = "sm_89 fp16 tensorrt-rtx", "sm_75 fp16 tensorrt-rtx", "sm_80 fp16 tensorrt-rtx"


def stamp(seconds: float) -> str:
    return (BEGAN + timedelta(seconds=seconds)).isoformat(timespec="milliseconds")


def run_state(number: int = 0, model: str = "digits", **fields: object) -> RunState:
    """A run of this model that began `number` seconds into 2026."""
    start_time = BEGAN + timedelta(seconds=number)
    name = f"{start_time:%Y%m%dT%H%M%SZ}.{model}.{number:06x}"
    state = RunState(name, model, "digits.yaml", "done", stamp(number), stamp(number), 10.0, "far", 1, "me")
    return replace(state, **fields)


def written(store: Store, run: RunState) -> RunState:
    store.create(run_key(run.id), run.to_bytes())
    return run


def unit(name: str, action: str = "build", graph: str = "a" * 64) -> Unit:
    target, precision, _ = name.split()
    request = replace(graphs.request(target, precision), model=graph)
    assert request.unit == name
    return Unit(request, Graph(GraphVariant("fp16"), graph, (), ()), action, "why not" if action == "refused" else "")


def plan(graph: str = "a" * 64) -> BuildPlan:
    names = ((UNIT, "build"), (OTHER, "cached"), (REFUSED, "refused"))
    return BuildPlan("digits", tuple(unit(name, action, graph) for name, action in names))


def tell_all(tracker: Tracker, log: str = "compiling\n") -> None:
    """One unit is built, another was, a third is refused."""
    tracker.emit(Finished("export", "cached"))
    tracker.emit(Planned(plan()))
    tracker.emit(Finished(OTHER, "cached"))
    tracker.emit(Predicted(UNIT, EXPECTED))
    tracker.emit(Waiting(UNIT, "for a slot"))
    tracker.emit(Started(UNIT, "node-7"))
    tracker.emit(PhaseEntered(UNIT, "compiling"))
    tracker.emit(Printed(UNIT, log))
    tracker.emit(Retrying(UNIT, "killed by SIGSEGV"))
    tracker.emit(Started(UNIT, "node-8"))
    tracker.emit(ProcessEnded(UNIT, Usage(12.3456, 512.34, 20.1234)))
    tracker.emit(Finished(UNIT, "built", words="built in 12.0 s"))
    tracker.emit(VerdictReached(UNIT, "unproven", "no GPU"))


def running(number: int = 0, **item: object) -> RunState:
    """A run in which one unit was started 30 seconds after its begin."""
    one = RunItem(UNIT, "running", "sm_89", "fp16", "tensorrt-rtx", "compiling", "here", started_at=stamp(number + 30))
    return run_state(number, state="running", items=(replace(one, **item),))
