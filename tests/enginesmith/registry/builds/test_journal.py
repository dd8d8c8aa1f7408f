from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest

from enginesmith.core.errors import IntegrityError, UnknownNameError
from enginesmith.registry.builds import runs as journal
from enginesmith.registry.gc import collect
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.layout import run_key, run_live_key
from tests.enginesmith.registry.memory import MemoryStore
from tests.pipeline.orchestration.runs.runs import run_state, running, written


def test_runs_are_listed_newest_first(store: Store) -> None:
    first_model, second_model = written(store, run_state(1)), written(store, run_state(2, "mini-lm.v2"))
    store.create("runs/nonsense.json", b"{}")
    assert journal.run_ids(store) == [second_model.id, first_model.id]
    assert journal.model_of(second_model.id) == "mini-lm.v2" and journal.model_of(journal.new_id("a.b")) == "a.b"


def test_names_of_one_second_sort_by_time_too(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = [datetime(2026, 11, 28, 12, 0, 0, number * 1000, UTC) for number in (0, 1, 9, 10, 999)]
    clock = iter(moments)
    monkeypatch.setattr(journal, "datetime", SimpleNamespace(now=lambda _: next(clock)))
    names = [journal.new_id("digits") for _ in moments]
    assert names == sorted(names) and all(journal.model_of(name) == "digits" for name in names)


def test_a_run_is_found_by_its_name_and_by_its_model(store: Store) -> None:
    first_model, second_model = written(store, run_state(1)), written(store, run_state(2))
    assert journal.find_run(store, first_model.id) == first_model and journal.find_run(store, "digits") == second_model
    with pytest.raises(UnknownNameError, match=r"no run or model 'other'.*models with runs: digits"):
        journal.find_run(store, "other")


def test_a_damaged_run_hides_no_other(store: Store) -> None:
    written(store, run_state(1))
    store.create(run_key(run_state(2).id), b"{")
    assert [run.id for run in journal.read_runs(store, journal.run_ids(store))] == [run_state(1).id]
    with pytest.raises(IntegrityError, match=r"runs/.*delete it"):
        journal.find_run(store, "digits")


def test_runs_beyond_the_newest_of_a_model_are_deleted(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "MOST_OF_MODEL", 2)
    runs = [written(store, run_state(number)) for number in range(4)]
    other_model = written(store, run_state(0, "other"))
    store.create(run_live_key(runs[0].id), b"{}")
    assert [(item.kind, item.name, item.state) for item in collect(store).items] == [
        ("run", runs[0].id, "due"),
        ("run", runs[1].id, "due"),
    ]
    assert journal.run_ids(store), "looking deletes nothing"
    assert {item.state for item in collect(store, delete=True).items} == {"deleted"}
    assert journal.run_ids(store) == [runs[3].id, runs[2].id, other_model.id]
    assert store.read(run_live_key(runs[0].id)) is None


def test_the_total_number_of_runs_is_limited(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "MOST", 3)
    for number in range(5):
        written(store, run_state(number, f"m{number}"))
    assert journal.prune(store) == [run_state(0, "m0").id, run_state(1, "m1").id]


def test_a_live_run_is_not_pruned_and_a_long_dead_one_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the clocks of their machines say: the names of these runs are months old."""
    monkeypatch.setattr(journal, "MOST_OF_MODEL", 1)
    memory = MemoryStore()
    old_model, new_model = written(memory, running(1)), written(memory, run_state(2))
    memory.clock.now += timedelta(seconds=journal.LONGEST_RUN_S)
    assert journal.prune(memory) == []
    memory.clock.now += timedelta(seconds=1)
    assert journal.prune(memory) == [old_model.id] and journal.run_ids(memory) == [new_model.id]
