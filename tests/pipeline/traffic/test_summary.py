"""Histograms, hours and bursts of traces with known ones; their tables and pictures."""

import re

import numpy as np
import pytest
from matplotlib.figure import Figure

from enginesmith.core.types import Dim
from pipeline.traffic import summary
from pipeline.traffic.place import TrafficAtPlace
from validation.traffic.trace import Trace

MIDNIGHT = 1_772_409_600.0
DIMS = (Dim("batch", 1, 4, 4), Dim("length", 1, 8, 8, (4, 8)))


def traffic(at, lengths, start=MIDNIGHT, sampling=1.0) -> TrafficAtPlace:
    lengths = np.array(lengths)
    sizes = {"batch": 1 + lengths % 2, "length": lengths}
    return TrafficAtPlace(Trace(np.array(at, float), sizes, start), (), sampling)


def test_histograms_are_computed():
    result = summary.summarize(traffic([0, 1, 2, 3], [3, 5, 3, 9]), DIMS)
    assert result.dims["length"].counts == {3: 2, 5: 1, 9: 1} and result.dims["length"].quantiles[0] == 4.0
    assert result.beyond == {"length": 1} and result.requests == 4
    assert summary.dim_rows(result)[1][:5] == ["length", "4", "3", "3", "5"]
    assert "no times of arrival" not in " ".join(summary.describe_traffic(result))
    assert any("length: 1 request beyond the spec's dims (25 %)" in line for line in summary.describe_traffic(result))


def test_hours_have_absolute_names_and_rates_of_what_was_recorded():
    arrays = [*np.arange(0, 3600, 10.0), *np.arange(3600, 5400, 1.0)]
    result = summary.summarize(traffic(arrays, [1] * 360 + [6] * 1800, sampling=0.5), DIMS)
    assert [hour.name for hour in result.hours] == ["2026-03-02 00:00", "2026-03-02 01:00"]
    assert [hour.requests for hour in result.hours] == [360, 1800]
    assert [hour.per_second for hour in result.hours] == pytest.approx([0.2, 2.0], rel=0.01)
    assert result.hours[1].sizes["length"].counts == {6: 1800} and result.per_second == pytest.approx(0.8, rel=0.01)
    columns, rows = summary.hour_table(result)
    assert columns[:3] == ["hour", "requests", "per second"] and rows[1][0] == "2026-03-02 01:00"
    assert re.match(r"recorded in .* s from .*: .* requests per second", [*summary.describe_traffic(result)][1])
    assert "at most 1 within a second" in [*summary.describe_traffic(result)][2]


def test_many_days_are_combined_by_hour():
    days = np.arange(0, 5 * 86400, 600.0)
    result = summary.summarize(traffic(days, 1 + (days // 3600 % 24).astype(int)), DIMS)
    assert len(result.hours) == 24 and result.hours[13].name == "13:00" and result.hours[13].requests == 30
    assert result.hours[13].per_second == pytest.approx(1 / 600, rel=0.01)
    assert result.hours[13].sizes["length"].counts == {14: 30}


def test_relative_times_count_from_the_first_request():
    result = summary.summarize(traffic([0.0, 4000.0], [1, 2], start=5.0), DIMS)
    assert [hour.name for hour in result.hours] == ["hour 0", "hour 1"] and result.start is None


def test_without_times_there_are_no_rates():
    result = summary.summarize(traffic([0.0, 0.0], [1, 2], start=0.0), DIMS)
    assert result.hours == () and result.bursts is None and result.per_second is None
    assert "no times of arrival, or all of them the same: no rates, no hours" in [*summary.describe_traffic(result)]


def test_bursts_are_reported():
    poisson = np.cumsum(np.random.default_rng(0).exponential(0.05, 20_000))
    assert summary.measure_bursts(poisson).dispersion == pytest.approx(1.0, abs=0.15)
    bursts = summary.measure_bursts(np.repeat(np.arange(0, 1000, 10.0), 20) + np.tile(np.arange(20) * 0.01, 100))
    assert bursts.peak_per_second == 20 and bursts.dispersion > 10 and bursts.longest_gap_s == pytest.approx(9.81)


def test_distant_times_use_no_memory_for_the_seconds_between():
    bursts = summary.measure_bursts(np.array([0.0, 0.5, 1.8e9]))
    assert bursts.dispersion == pytest.approx(5 / 3, rel=1e-6) and bursts.longest_gap_s == pytest.approx(1.8e9)


def test_an_hours_rate_covers_all_days():
    array = np.arange(0.0, 72 * 3600.0, 600.0)
    result = summary.summarize(traffic(array.tolist(), [1] * len(array), start=1_772_409_600.0 + 1800.0), DIMS)
    assert len(result.hours) == 24
    assert all(hour.per_second == pytest.approx(1 / 600, rel=0.07) for hour in result.hours)


def test_rows_of_a_histogram_are_the_buckets_if_there_are_some():
    counts = summary.count_sizes(np.array([1, 2, 4, 5, 9]))
    expected = [["1..4", "3", "60 %"], ["5..8", "1", "20 %"], ["9", "1", "20 %"]]
    assert [row[:3] for row in summary.histogram_rows(counts, (4, 8))] == expected
    assert sum(int(row[1]) for row in summary.histogram_rows(summary.count_sizes(np.arange(1, 500)), (500,))) == 499
    rows = summary.histogram_rows(counts, ())
    assert [row[0] for row in rows] == ["1..2", "3..4", "5..6", "7..8", "9"], "equal steps"
    assert [len(row[3]) for row in rows] == [30, 15, 15, 0, 15]


def test_every_request_is_in_a_bar():
    for sizes in (np.array([7]), np.arange(1, 900), np.array([1, 1, 2, 800]), np.array([0, 1, 1, 800])):
        axes = Figure().subplots()
        summary.draw_histogram(axes, "length", summary.count_sizes(sizes), {"present": (1000,)})
        heights, edges, _ = axes.patches[0].get_data()
        assert sum(heights) == len(sizes) and edges[-1] >= sizes.max()


def test_traffic_has_pictures():
    result = summary.summarize(traffic(np.arange(0, 7200, 20.0), 1 + np.arange(360) % 8), DIMS)
    text = summary.draw_traffic(result, {"batch": (4,), "length": (4, 8)})
    titles = {"requests per second": 1, "requests": 4, "batch of a request": 2, "length of a request": 2}
    assert {title: text.count(f">{title}</text>") for title in titles} == titles and "present: up to 8" in text
    assert "requests per second by hour" in text and 'viewBox="0 0 640 1300"' in text
    assert text == summary.draw_traffic(result, {"batch": (4,), "length": (4, 8)})
    hours = ["00:00", "01:00", "UTC, from 2026-03-02T00:00:00+00:00"]
    parts = [f"{part} % up to" for part in (50, 90, 99)]
    assert re.findall(r"<text[^>]*>([^<]*)", text) == [
        *(*"01234", "batch of a request", *("0", "50", "100", "150", "200"), "4", "requests"),
        *(
            "requests",
            "present buckets",
            *"02468",
            "length of a request",
            "0",
            *(f"{n}0" for n in range(1, 6)),
            "8",
            "4",
        ),
        *("requests", "requests", "present buckets"),
        *(*hours, "0", *(f"0.0{n}" for n in range(1, 6)), "requests per second"),
        *(*hours, "0", "0.5", "1", "1.5", "2", "batch of a request", *parts),
        *(*hours, *"02468", "length of a request", *parts),
    ]
