from dataclasses import asdict, replace
from datetime import timedelta

from enginesmith.core.parsing import this_process
from enginesmith.registry.builds.runs import RunItem, RunState
from enginesmith.registry.store.layout import run_key
from pipeline.orchestration.runs.views import RunView, StepTime, view_runs
from tests.enginesmith.registry.memory import MemoryStore
from tests.pipeline.orchestration.runs.runs import BEGAN, EXPECTED, run_state, running, stamp


def at(run: RunState, seconds: float) -> RunView:
    return RunView(run, BEGAN + timedelta(seconds=seconds))


def test_a_slow_driver_is_not_dead() -> None:
    assert at(running(), 29).state == "running"
    silent_run = at(running(), 100)
    assert silent_run.state == "lost" and silent_run.lost == (
        "no sign of life since 2026-01-01 00:00:00 UTC, 100 s ago: its driver (process 1 on far) died, or does not "
        "reach the registry"
    )
    assert silent_run.counts == "1 lost"
    assert at(run_state(), 10**6).lost == "", "what is over is not lost"


def test_a_heartbeat_ages_on_the_stores_clock() -> None:
    """The run says what the clock of its machine says; months lie between that, the store's and this machine's."""
    store, run = MemoryStore(), running()
    store.create(run_key(run.id), run.to_bytes())
    store.clock.now += timedelta(seconds=29)
    (view,) = view_runs(store, [run])
    assert (view.state, view.silent_s, view.took_s) == ("running", 29, 29)
    store.clock.now += timedelta(seconds=71)
    assert view_runs(store, [run])[0].lost.startswith("no sign of life since 2026-01-01 00:00:00 UTC, 100 s ago")


def test_a_dead_local_driver_is_lost_at_its_first_missed_heartbeat() -> None:
    local_run = replace(running(), **asdict(this_process()))
    assert at(local_run, 15).state == "running"
    # Its number may be another's by now, as a turn's holder's may: that is told by when the process began.
    for process in (replace(local_run, pid=2**22 + 1), replace(local_run, began="1.0")):
        assert at(process, 15).state == "lost"
        assert at(process, 15).lost.endswith(f"(process {process.pid} on {process.host}) is not running any more")
        assert at(process, 9).state == "running", "it may have ended well just now"
    remote_run = replace(local_run, pid=2**22 + 1, namespace="pid:[1]")
    assert at(remote_run, 15).state == "running", "a container counts from 1, whatever this machine calls its processes"


def test_the_remaining_time_is_predicted_for_running_units() -> None:
    run_state = at(running(predicted=EXPECTED), 25)
    item = replace(run_state.run.items[0], started_at=stamp(-15))
    assert run_state.format_remaining(item) == "~30 s left (predicted from 3 builds of this unit)"
    assert run_state.format_remaining(replace(item, state="built")) == ""
    assert at(run_state.run, 500).format_remaining(item) == "", "nothing is predicted of what is lost"


def test_elapsed_times_stop_when_a_unit_or_its_driver_ends() -> None:
    run = running(started_at=stamp(-10))
    (item,) = run.items
    assert at(run, 20).elapsed_s(item) == 30 and at(run, 500).elapsed_s(item) == 10
    assert at(run, 20).elapsed_s(replace(item, ended_at=stamp(5))) == 15
    assert at(run, 20).elapsed_s(replace(item, state="built", seconds=3.0)) == 3
    assert at(run, 20).elapsed_s(replace(item, started_at=None)) is None
    assert at(replace(run, started_at="garbage"), 20).took_s > 0


def test_a_runs_time_is_listed_by_kind_of_step() -> None:
    (unit,) = running().items
    unit = replace(unit, seconds=3.0, cpu_s=4.0)
    steps = [("export", 1.0, 0.5), ("prove a", 2.0, 2.5), ("prove b", 5.0, None), ("latency a", None, None)]
    items = [RunItem(name, "done", seconds=seconds, cpu_s=cpu_s) for name, seconds, cpu_s in steps]
    assert at(replace(running(), items=(unit, *items)), 20).spent() == [
        StepTime("prove", 2, 7.0, 2.5),
        StepTime("build", 1, 3.0, 4.0),
        StepTime("export", 1, 1.0, 0.5),
    ]


def test_all_known_facts_of_a_unit_are_reported() -> None:
    run = running(predicted=EXPECTED, why="x", retries=("killed",), verdict="proven: 3 checks", started_at=stamp(0))
    expected = "~60 s left (predicted from 3 builds of this unit); x; proven: 3 checks; started 2 times: killed"
    assert at(run, 10).describe(run.items[0]) == expected
    row = at(run, 10).to_json()["items"][0]
    assert row["elapsed_s"] == 10 and row["remaining"].startswith("~60 s left") and row["state"] == "running"
