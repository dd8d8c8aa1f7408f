from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from enginesmith.core.errors import IntegrityError
from enginesmith.core.names import Reference
from enginesmith.core.reports.latency import MachineKind
from enginesmith.exchange.mirror import mirror
from enginesmith.registry import latency_series
from enginesmith.registry.gc import collect
from enginesmith.registry.latency_series import (
    LatencySeries,
    SeriesPoint,
    append_point,
    list_series,
    models_with_series,
    read_series,
)
from enginesmith.registry.store.base import FileStore, Store, open_store
from enginesmith.registry.store.layout import manifest_key
from enginesmith.registry.verification import verify
from tests.enginesmith.registries import engine, on_each_store, publish_engines

SERIES = LatencySeries("digits", "cpu fp32 onnxruntime", "batch=8", MachineKind("a CPU", "avx2", 2, "Linux", ()))


def point(day: int, version: str = "1", relative: float | None = 1.0, **more: object) -> SeriesPoint:
    fields = {"toolchain": {"onnxruntime": "1.30"}, "driver": None, "load": 0.1} | more
    text = f"2026-{1 + day // 28:02}-{1 + day % 28:02}T00:00:00+00:00"
    return SeriesPoint(text, version, "e" * 64, 1e-4, 9e-5, 1.1e-4, relative, 0.99, 1.01, **fields)  # type: ignore[arg-type]


@on_each_store
def test_points_are_added_once_in_the_order_of_time(store: Store) -> None:
    for day in (2, 1, 2):
        append_point(store, SERIES, point(day))
    (result,) = list_series(store, "digits")
    assert result.points == (point(1), point(2)) and read_series(store, SERIES) == result
    append_point(store, replace(SERIES, bucket="batch=1"), point(1))
    assert len(list(list_series(store, "digits"))) == 2 and models_with_series(store) == ["digits"]


def test_a_writer_that_lost_a_race_loses_no_point(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_document, raced_keys = FileStore.replace, list[str]()

    def beaten(self: FileStore, key: str, data: bytes, expected: bytes | None) -> bool:
        if key == SERIES.key and not raced_keys:
            raced_keys.append(key)
            append_point(store, SERIES, point(1))
        return replace_document(self, key, data, expected)

    monkeypatch.setattr(FileStore, "replace", beaten)
    assert append_point(store, SERIES, point(2)).points == (point(1), point(2))


def test_the_oldest_points_are_dropped(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency_series, "MOST_POINTS", 3)
    for day in range(5):
        result = append_point(store, SERIES, point(day))
    assert [item.at for item in result.points] == [point(day).at for day in (2, 3, 4)]


def test_a_new_reference_continues_the_level(tmp_path: Path) -> None:
    points = tuple(point(day, "2", relative) for day, relative in enumerate((1.0, 1.1, 1.3)))
    other_point = point(9, "3", 1.5)
    assert replace(SERIES, points=points).with_reference("2").base == 1.1
    assert replace(SERIES, points=(*points, other_point)).with_reference("3").base == 1.5
    assert SERIES.with_reference("1").base == 1.0


def test_a_damaged_series_is_reported_and_not_overwritten(store: Store, tmp_path: Path) -> None:
    append_point(store, SERIES, point(1))
    assert verify(store).problems == ()
    (tmp_path / "registry" / SERIES.key).write_text('{"format": 1}')
    with pytest.raises(IntegrityError, match="move it away"):
        append_point(store, SERIES, point(2))
    (problem,) = verify(store).problems
    assert problem.what == SERIES.key and not problem.fault


def test_a_series_stays_as_long_as_its_model_has_a_version(store: Store) -> None:
    publish_engines(store, [engine(store)], "a", channel=None)
    append_point(store, SERIES, point(1))
    append_point(store, replace(SERIES, model="gone"), point(1))
    collect(store, grace=timedelta(0), delete=True)
    assert models_with_series(store) == ["digits"]
    store.remove(manifest_key("digits", "1"))
    collect(store, grace=timedelta(0))
    assert models_with_series(store) == ["digits"]
    collection = collect(store, grace=timedelta(0), delete=True)
    assert models_with_series(store) == [] and ("series", SERIES.key) in {
        (item.kind, item.name) for item in collection.items
    }


def test_a_mirror_adds_the_points_of_both_sites(tmp_path: Path) -> None:
    store, other_store = (open_store(tmp_path / name, create=True) for name in ("here", "there"))
    publish_engines(store, [engine(store)], "a", channel=None)
    append_point(store, SERIES, point(1))
    append_point(other_store, SERIES, point(2))
    for _ in range(2):
        mirror(store, [Reference("digits")], other_store)
    assert read_series(other_store, SERIES).points == (point(1), point(2))
    assert read_series(store, SERIES).points == (point(1),)
