import json
import re
import sys
from dataclasses import replace

import numpy as np
import pytest

from enginesmith.registry.evidence.latencies import latency_reports
from enginesmith.registry.latency_series import LatencySeries, SeriesPoint, list_series, merged
from enginesmith.registry.store.files import write_whole
from enginesmith.registry.versions.lookup import load
from pipeline.regressions.trend import describe_change, draw_trend, find_trend, list_differences
from tests.enginesmith.registry.test_latency_series import SERIES, point
from tests.pipeline.projects import Project, exit_code


def stepped(at: int, count: int = 60, **after: object) -> LatencySeries:
    noise = np.exp(np.random.default_rng(0).normal(0, 0.005, count))
    points = [point(day, relative=float(value)) for day, value in enumerate(noise)]
    points[at:] = [replace(item, relative=(item.relative or 1.0) * 1.05, **after) for item in points[at:]]
    return replace(SERIES, reference="1", points=tuple(points))


def test_a_change_lists_the_differences_at_that_point() -> None:
    (change,) = find_trend(stepped(40, version="2", toolchain={"onnxruntime": "1.31"}, driver="580.1")).changes
    assert change.index == 40 and change.value == "relative" and change.ratio == pytest.approx(1.05, abs=0.01)
    assert change.came_with == ("version 1 -> 2", "onnxruntime 1.30 -> 1.31", "driver none -> 580.1")
    assert " % slower, with version 1 -> 2" in describe_change(change)


def test_a_change_without_recorded_differences_says_so() -> None:
    (change,) = find_trend(stepped(40)).changes
    assert describe_change(change).endswith("with nothing that is recorded")
    assert list_differences(point(1), replace(point(2), engine="f" * 64)) == ["engine rebuilt"]


def test_without_the_changes_package_the_series_is_shown_with_a_note(store, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ruptures", None)
    for bucket in ("batch=32", "batch=8"):
        series = replace(stepped(10, 20), bucket=bucket)
        write_whole(store.root / series.key, merged(series, series.points))
    assert find_trend(series).changes is None and "20 points" in draw_trend(find_trend(series))
    assert exit_code("profile", "--series", "digits", "--registry", store.uri) == 0
    output = capsys.readouterr()
    assert output.out.index("batch=8") < output.out.index("batch=32")
    assert "pip install '.[trend]' in a clone" in output.err
    assert [item.bucket for item in list_series(store, "digits")] == ["batch=8", "batch=32"]


def test_only_medians_of_quiet_machines_count() -> None:
    series = stepped(40)
    slow_items = [
        replace(item, relative=None, median_s=item.median_s * (1.5 if day >= 30 else 1.0))
        for day, item in enumerate(series.points)
    ]
    (change,) = find_trend(replace(series, points=tuple(slow_items))).changes
    assert change.value == "median" and change.index == 30
    loaded_items = tuple(replace(item, busy=("other processes used 90 % of the 2 cores",)) for item in slow_items)
    assert find_trend(replace(series, points=loaded_items)).changes == ()


def test_the_picture_has_points_levels_and_the_changes_causes() -> None:
    trend = find_trend(stepped(40, version="2"))
    picture = draw_trend(trend)
    assert picture.startswith("<svg") and "60 points" in picture
    assert re.findall(r'<text[^>]* y="[\d.]+">([^<]*)', picture) == [
        *("2026-01-01", "2026-02-02", "2026-03-04", "0.980", "1.000", "1.020", "1.040", "1.060"),
        *("+5.3 %: version 1 -&gt; 2", "times the reference"),
    ]
    groups = re.findall(r'<g class="([^"]*)"', picture)
    assert [groups.count(kind) for kind in ("point", "interval", "level", "change")] == [60, 60, 2, 1]
    hostile_trend = replace(trend, series=replace(trend.series, unit="<script>alert(1)</script>"))
    assert "<script>" not in draw_trend(hostile_trend)


def test_the_command_prints_draws_and_refuses(built: Project) -> None:
    series = replace(stepped(40, version="2"), model="tiny")
    write_whole(built.registry / series.key, merged(series, ()))
    result = built.run("profile", "--series", "tiny")
    assert result.code == 0 and "with version 1 -> 2" in result.out and "60 (60 quiet)" in result.out
    (actual,) = built.run("profile", "--series", "tiny", "--json").json
    assert built.run("profile", "--series", "tiny", "--bucket", actual["series"]["bucket"].replace(" ", ",")).code == 0
    assert actual["changes"][0]["came_with"] == ["version 1 -> 2"] and len(actual["series"]["points"]) == 60
    more_series = replace(series, bucket="batch=1")
    write_whole(built.registry / more_series.key, merged(more_series, ()))
    picture = built.folder / "trend.svg"
    drawn_result = built.run("profile", "--series", "tiny", "--out", picture)
    assert drawn_result.code == 0 and "the first of 2" in drawn_result.err and "<svg" in picture.read_text()
    for words in (
        ("other",),
        ("tiny", "--bucket", "batch=9"),
        ("tiny", "--out", "trend.png"),
        ("../x",),
        ("tiny", "--record"),
    ):
        wrong_result = built.run("profile", "--series", *words)
        assert wrong_result.code == 2 and "Traceback" not in wrong_result.err


@pytest.mark.slow
def test_profile_adds_a_point_for_each_bucket_and_keeps_its_reference(built: Project) -> None:
    words = ("profile", "tiny@1", "--precision", "fp32", "--bucket", "batch=4", "--seconds", "0.02", "--record")
    for count in (1, 2):
        result = built.run(*words, "--json")
        assert result.code == 0 and f"point {count}" in result.err, result.err
        assert json.loads(result.out)["unit"] == "cpu fp32 onnxruntime"
    (series,) = list_series(built.store, "tiny")
    assert series.reference == "1" and series.base == 1.0 and series.bucket == "batch=4"
    point: SeriesPoint = series.points[0]
    assert point.version == "1" and point.relative and 0.2 < point.relative < 5 and point.driver is None
    assert any(name.startswith("now onnxruntime") for name in point.toolchain)
    store = built.store
    assert len(list(latency_reports(store, load(store, "tiny", "1")))) == 2, "what `enginesmith traffic capacity` reads"
    assert built.run(*words, "--against", "tiny@1").code == 2
