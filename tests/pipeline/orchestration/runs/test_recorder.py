import threading
from dataclasses import replace

import pytest

from builders.execution.jobs import Usage
from enginesmith.core.errors import StepError, UnavailableError, UndecidedError
from enginesmith.core.parsing import Presence, this_process
from enginesmith.registry.builds import runs
from enginesmith.registry.builds.build_history import read_pasts, read_totals
from enginesmith.registry.builds.runs import RunState, parse_run
from enginesmith.registry.gc import collect
from enginesmith.registry.store.folder import FileStore
from enginesmith.registry.store.layout import TOTALS, history_key, run_key, run_live_key
from pipeline.orchestration.runs import recorder
from pipeline.orchestration.runs.recorder import RunRecorder, Tracker, new_run, new_tracker, record_run
from pipeline.progress.events import Finished, Planned, Printed, ProcessEnded, Started
from tests.pipeline.orchestration.runs.runs import EXPECTED, OTHER, REFUSED, UNIT, plan, tell_all
from tests.pipeline.projects import raising
from tests.waiting import PATIENCE_S


def begun(store: FileStore) -> RunState:
    return new_run("digits", "digits.yaml", store)


def by_hand(store: FileStore) -> tuple[Tracker, RunRecorder]:
    """A recorder whose rounds a test makes."""
    tracker = new_tracker(begun(store))
    return tracker, RunRecorder(store, tracker)


def the_run(store: FileStore) -> RunState:
    (run,) = runs.run_ids(store)
    actual = runs.read_run(store, run)
    assert actual
    return actual


def test_a_run_names_its_process(store: FileStore) -> None:
    run = parse_run("runs/x.json", begun(store).to_bytes())
    assert Presence(run.host, run.namespace, run.pid, run.began) == this_process()


def test_a_finished_runs_whole_history_is_stored(store: FileStore) -> None:
    with record_run(store, begun(store), lambda _: None) as run_recorder:
        tell_all(run_recorder, log="password=hunter2hunter2\n")
    run = the_run(store)
    assert (run.state, run.model, run.beats_every_s) == ("done", "digits", recorder.BEAT_S) and run.ended_at
    export, unit, other_item, refused_item = run.item("export"), run.item(UNIT), run.item(OTHER), run.item(REFUSED)
    assert export and export.state == "cached" and not export.is_unit
    assert refused_item and (refused_item.state, refused_item.why) == ("refused", "why not")
    assert other_item and other_item.state == "cached"
    assert unit and (unit.state, unit.where, unit.seconds, unit.peak_mib) == ("built", "node-8", 12.346, 512.3)
    assert unit.cpu_s == 20.12 and unit.predicted == EXPECTED and unit.retries == ("killed by SIGSEGV",)
    assert unit.verdict == "unproven: no GPU" and unit.phase == "" and unit.started_at and unit.ended_at
    assert unit.log and store.read_blob(unit.log) == b"password=[hidden]\n" and unit.log_bytes == 18
    assert store.read(run_live_key(run.id)) is None
    assert parse_run("x", run.to_bytes()) == run


def test_a_live_run_shows_the_end_of_its_output(store: FileStore) -> None:
    tracker, writer = by_hand(store)
    tracker.emit(Planned(plan()))
    tracker.emit(Started(UNIT))
    tracker.emit(Printed(UNIT, "first\nsecond"))
    writer._round()
    run = the_run(store)
    assert run.state == "running" and [item.state for item in run.units] == ["running", "planned", "refused"]
    assert runs.read_live(store, run.id) == {UNIT: "first\n"}


def test_unchanged_state_is_rewritten_only_as_heartbeat(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "precise_now", map("2026-11-28T11:00:{:02}.000+00:00".format, range(60)).__next__)
    tracker, writer = by_hand(store)
    tracker.emit(Started("export"))
    writer._round()
    key = run_key(tracker.run)
    first_content = store.read(key)
    writer._heard += 3600
    writer._round()
    assert store.read(key) == first_content
    writer._heard -= 3600 + recorder.BEAT_S + 1
    writer._round()
    assert store.read(key) != first_content


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (KeyboardInterrupt(), "interrupted"),
        (SystemExit(), "interrupted"),
        (StepError("unit: cancelled", "cancelled"), "interrupted"),
        (ValueError("bad"), "failed"),
    ],
)
def test_a_stopped_run_says_so(store: FileStore, error: BaseException, state: str) -> None:
    with pytest.raises(type(error)), record_run(store, begun(store), lambda _: None) as run_recorder:
        run_recorder.emit(Planned(plan()))
        run_recorder.emit(Started(UNIT))
        raise error
    run = the_run(store)
    assert (run.state, run.reason) == (state, "bad" if state == "failed" else "")
    assert [item.state for item in run.units] == ["cancelled", "cancelled", "refused"]


def failing(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    for name in names:
        monkeypatch.setattr(FileStore, name, raising(UnavailableError("No space left on device")))


def test_a_failing_registry_costs_one_warning_and_no_build(store, monkeypatch, capsys):
    failing(monkeypatch, "replace", "put_bytes", "read", "remove", "children", "size")
    tracker, writer = by_hand(store)
    tell_all(tracker)
    for _ in range(3):
        writer._round()
    writer._round(last=True)
    warned_errors = capsys.readouterr().err
    assert warned_errors.count("warning:") == 1 and "No space left on device" in warned_errors
    assert tracker.snapshot("").item(UNIT), "and the run knows what it knew"


def test_a_hanging_registry_does_not_block_the_end_of_a_run(store, monkeypatch, capsys):
    hangs_event = threading.Event()
    monkeypatch.setattr(recorder, "PATIENCE_S", 0.05)
    monkeypatch.setattr(FileStore, "replace", lambda *_: hangs_event.wait(PATIENCE_S))
    try:
        with record_run(store, begun(store), lambda _: None) as run_recorder:
            run_recorder.emit(Started("export"))
        assert "has not answered for 0.05 s" in capsys.readouterr().err
    finally:
        hangs_event.set()


def test_a_write_with_a_lost_answer_is_repeated(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker, writer = by_hand(store)
    true_replace, lost_flags = FileStore.replace, [True, False, True]

    def replace(self: FileStore, key: str, data: bytes, expected: bytes | None) -> bool:
        result = true_replace(self, key, data, expected)
        if lost_flags and lost_flags.pop(0):
            raise UndecidedError("the answer was lost")
        return result

    monkeypatch.setattr(FileStore, "replace", replace)
    for number in range(3):
        tracker.emit(Started(f"step {number}"))
        writer._state(last=False)
    assert len(the_run(store).items) == 3


def test_build_times_are_recorded_and_cached_units_are_counted(store: FileStore) -> None:
    graph = store.put_bytes(b"graph")
    with record_run(store, begun(store), lambda _: None) as run_recorder:
        units = [replace(unit, graph=replace(unit.graph, shards=(("s", 70),))) for unit in plan(graph).units]
        run_recorder.emit(Planned(replace(plan(graph), units=tuple(units))))
        run_recorder.emit(Finished(OTHER, "cached"))
        run_recorder.emit(Started(UNIT))
        run_recorder.emit(ProcessEnded(UNIT, Usage(5.0, 50.0)))
        run_recorder.emit(Finished(UNIT, "built", words="built in 4 s"))
    (duration,) = read_pasts(store.read(history_key("tensorrt-rtx", "digits")))
    assert (duration.seconds, duration.peak_mib, duration.graph_bytes, duration.outcome) == (5.0, 50.0, 75, "built")
    totals = read_totals(store.read(TOTALS))
    assert (totals.hits, totals.misses) == (1, 1) and [tally.count for tally in totals.builds] == [1]


def test_of_too_many_units_the_important_ones_are_reported(store, monkeypatch):
    monkeypatch.setattr("enginesmith.registry.builds.runs.MOST_ITEMS", 3)
    tracker, writer = by_hand(store)
    for number in range(5):
        tracker.emit(Started(f"unit {number}"))
        tracker.emit(Finished(f"unit {number}", "built" if number != 3 else "failed"))
    tracker.emit(Started("unit 5"))
    writer._round()
    run = the_run(store)
    assert [item.name for item in run.items] == ["unit 3", "unit 5", "unit 0"] and run.left_out == 3


def test_garbage_collection_keeps_logs_of_kept_runs(store: FileStore) -> None:
    with record_run(store, begun(store), lambda _: None) as run_recorder:
        run_recorder.emit(Started("export"))
        run_recorder.emit(Printed("export", "printed\n"))
        run_recorder.emit(ProcessEnded("export", Usage(1.0, 1.0)))
    item = the_run(store).item("export")
    loose_digest = store.put_bytes(b"loose")
    assert item and item.log
    assert [result.name for result in collect(store).items] == [loose_digest]
    store.remove(run_key(the_run(store).id))
    assert {result.name for result in collect(store).items} == {loose_digest, item.log}
