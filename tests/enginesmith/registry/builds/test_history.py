from dataclasses import replace
from functools import partial

import pytest

from enginesmith.core.errors import UnavailableError
from enginesmith.core.types import BuildRequest, Target
from enginesmith.registry.builds import build_history
from enginesmith.registry.builds.build_history import (
    BUCKETS_S,
    Expectation,
    History,
    Past,
    read_pasts,
    read_totals,
    remember_builds,
    remember_totals,
)
from enginesmith.registry.store.base import Store
from enginesmith.registry.store.layout import TOTALS, history_key
from tests.waiting import run_threads

PAST = Past("digits", "sm_89", "fp16", 1000, 10.0, 500.0, "built", "2026-01-01T00:00:00.000+00:00")


def at(number: int, **fields: object) -> Past:
    return replace(PAST, at=f"2026-01-01T00:{number // 60:02d}:{number % 60:02d}.000+00:00", **fields)  # type: ignore[arg-type]


def request(graph: str, target: str = "sm_89") -> BuildRequest:
    return BuildRequest(graph, "fp16", Target(target, (8, 9)), "rtx", (), (), ())


def expected(store: Store, size: int, model: str = "digits", target: str = "sm_89") -> Expectation | None:
    return History(store).predict(model, request(store.put_bytes(bytes(size)), target))


def test_an_empty_history_predicts_nothing(store: Store) -> None:
    assert expected(store, 1000) is None


def test_the_same_unit_has_priority_with_median_time_and_largest_memory(store: Store) -> None:
    pasts = [at(1), at(2, seconds=30.0), at(3, seconds=12.0, peak_mib=900.0)]
    others = [at(4, model="other", seconds=900.0, peak_mib=1e6), at(5, precision="int8", seconds=800.0, peak_mib=1e6)]
    remember_builds(store, {"rtx": [*pasts, *others]})
    assert expected(store, 5) == Expectation(12.0, 900.0, 3, "3 builds of this unit")


def test_failures_count_for_memory_and_not_for_time(store: Store) -> None:
    remember_builds(store, {"rtx": [at(1), at(2, outcome="failed", seconds=1.0, peak_mib=8192.0)]})
    assert expected(store, 5) == Expectation(10.0, 8192.0, 2, "2 builds of this unit")
    remember_builds(store, {"tvm": [at(3, outcome="failed")]})
    only_failed = History(store).predict("digits", replace(request(store.put_bytes(b"x")), backend="tvm"))
    assert only_failed and only_failed.seconds is None and only_failed.describe_left(1.0) == ""


def test_a_new_unit_is_predicted_from_the_nearest_in_size_scaled(store: Store) -> None:
    remember_builds(store, {"rtx": [at(1, model=f"m{n}", graph_bytes=10**n, seconds=float(n)) for n in range(1, 8)]})
    result = expected(store, 2000, "new")
    assert result and result.builds == build_history.NEIGHBOURS and "scaled by the size of the graph" in result.basis
    assert result.seconds == 6.0, "the middle of m1 to m5, each stretched eightfold at most"
    remember_builds(store, {"tvm": [at(1, model="old", graph_bytes=1000, seconds=10.0, peak_mib=400.0)]})
    doubled_prediction = History(store).predict("new", replace(request(store.put_bytes(bytes(2000))), backend="tvm"))
    prediction = History(store).predict("new", replace(request(store.put_bytes(bytes(500))), backend="tvm"), 1500)
    assert prediction == doubled_prediction
    half = History(store).predict("new", replace(request(store.put_bytes(bytes(500))), backend="tvm"))
    assert doubled_prediction and (doubled_prediction.seconds, doubled_prediction.peak_mib) == (20.0, 800.0)
    assert half and (half.seconds, half.peak_mib) == (5.0, 400.0), "memory is never scaled down"


def test_builds_for_the_same_target_have_priority(store: Store) -> None:
    remember_builds(store, {"rtx": [at(1, model="a", target="sm_75", seconds=99.0), at(2, model="b")]})
    result = expected(store, 1000, "new")
    assert result and result.seconds == 10.0 and result.builds == 1


def test_documents_are_bounded_and_keep_the_newest(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    remember_builds(store, {"rtx": [at(n, seconds=float(n)) for n in range(40)]})
    assert [duration.seconds for duration in read_pasts(store.read(history_key("rtx", "digits")))] == [
        *map(float, range(30, 40))
    ]
    monkeypatch.setattr(build_history, "MOST_OF_BACKEND", 5)
    remember_builds(store, {"rtx": [at(100 + n, model=f"m{n}") for n in range(9)]})
    assert [duration.model for duration in read_pasts(store.read(history_key("rtx")))] == [f"m{n}" for n in range(4, 9)]


def test_concurrent_writers_lose_nothing(store: Store) -> None:
    def write(number: int) -> None:
        remember_builds(store, {"rtx": [at(number, model=f"m{number}")]})
        remember_totals(store, {"rtx": [at(number)]}, hits=1, misses=2)

    run_threads(partial(write, number) for number in range(8))
    assert {past.model for past in read_pasts(store.read(history_key("rtx")))} == {f"m{n}" for n in range(8)}
    totals = read_totals(store.read(TOTALS))
    assert [tally.count for tally in totals.builds] == [8] and (totals.hits, totals.misses) == (8, 16)


def test_a_prediction_reads_one_or_two_documents_a_run(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    remember_builds(store, {"rtx": [at(n, model=f"m{n}") for n in range(20)]})
    graph = store.put_bytes(bytes(1000))
    reads: list[str] = []
    true_read = type(store).read
    monkeypatch.setattr(type(store), "read", lambda self, key: reads.append(key) or true_read(self, key))
    history = History(store)
    for _ in range(10):
        history.predict("m3", request(graph))
        history.predict("m3", request(graph, "sm_75"))
    assert reads == [history_key("rtx", "m3"), history_key("rtx")]


def test_a_damaged_history_is_empty_and_is_replaced(store: Store) -> None:
    store.create(history_key("rtx"), b"{nonsense")
    store.create(TOTALS, b'{"format":1,"builds":[],"buckets_s":[1],"hits":0,"misses":0}')
    assert expected(store, 1000, "new") is None
    remember_builds(store, {"rtx": [PAST]})
    remember_totals(store, {"rtx": [PAST]}, 0, 1)
    assert read_pasts(store.read(history_key("rtx"))) == (PAST,)
    assert read_totals(store.read(TOTALS)).misses == 1


def test_an_unreachable_store_predicts_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> bytes:
        raise UnavailableError("down")

    monkeypatch.setattr(type(store), "read", refuse)
    assert expected(store, 1000) is None


def test_the_remaining_time_is_shown_as_a_prediction() -> None:
    expectation = Expectation(70.0, 1.0, 3, "3 builds of this unit")
    assert expectation.describe_left(30.0) == "~40 s left (predicted from 3 builds of this unit)"
    assert expectation.describe_left(75.0) == "5 s over the prediction (predicted from 3 builds of this unit)"


def test_the_histogram_is_cumulative(store: Store) -> None:
    remember_totals(store, {"rtx": [at(1, seconds=2.0), at(2, seconds=20.0), at(3, seconds=1e6)]}, 0, 3)
    (tally,) = read_totals(store.read(TOTALS)).builds
    assert tally.labels == ("built", "sm_89", "rtx")
    bounds = dict(zip(BUCKETS_S, tally.buckets, strict=True))
    assert (bounds[1.0], bounds[2.5], bounds[30.0], bounds[7200.0]) == (0, 1, 2, 2)
    assert tally.count == 3 and tally.seconds == 1000022.0
