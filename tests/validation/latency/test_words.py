"""What people are told of a latency report, in text and on the page."""

import re

import pytest

from tests.validation.latency.reports import ENGINE, latency_report
from tests.validation.page_data import version_report
from validation.latency.measurement.system_load import Surroundings, Watch
from validation.latency.pictures import roofline_svg
from validation.latency.roofline.diagnosis import Diagnosis
from validation.latency.words import (
    bucket_row,
    count_text,
    diagnosis_text,
    lines,
    node_rows,
    quantile_text,
    race_lines,
    remarks,
)
from validation.reporting.html import render


def test_a_row_shows_intervals_and_what_is_missing():
    row = bucket_row(latency_report()["buckets"][0])
    assert re.fullmatch(r"\S+ µs \(\S+ to \S+\)", row["p50"])
    wide = {"value": 9e-4, "low": 8e-4, "high": 2e-3}
    assert re.fullmatch(r"\S+ µs \(\S+ µs to \S+ ms\)", quantile_text(wide))
    assert (row["p99"], row["p99.9"]) == ("", "")
    assert row["runs"] == "300 (+20 warm-up)" and row["memory"] == "12 MB"


def test_the_diagnosis_comes_with_its_evidence():
    report = latency_report()
    text = diagnosis_text(report["anatomy"])
    assert text.startswith("compute-bound at batch=8: of 8 ms a run, arithmetic at this machine's rate would take ")
    assert "outside of any kernel" in text
    report["anatomy"]["diagnosis"] |= {"clear": False}
    assert diagnosis_text(report["anatomy"]).startswith("no clear bound at batch=8; compute-bound, if any")
    report["anatomy"] |= {"diagnosis": None}
    assert "measured for CPU engines only" in diagnosis_text(report["anatomy"])


def test_what_was_timed_and_what_the_intervals_hold_is_said():
    report = latency_report()
    assert any(line.endswith("at hand") for line in lines(report))
    assert re.fullmatch(r"\S+ µs \(\S+ to \S+\)", bucket_row(report["buckets"][0])["runtime"])
    told = list(lines(report))[1]
    assert told.startswith("runtime: the runtime's own call") and told.endswith(
        "intervals are those of one more process, by 5"
    )
    for bucket in report["buckets"]:
        bucket["runtime"] = None
    told = list(lines({**report, "processes": 1}))[1]
    assert told.startswith("Session.run, with its checks") and told.endswith("within this process alone")
    assert bucket_row(report["buckets"][0])["runtime"] == ""


def test_a_busy_machine_is_said_once_for_each_reason():
    quiet, busy = latency_report(), latency_report(others=0.8)
    busy["buckets"][1]["surroundings"]["busy"] *= 2
    assert "the machine was quiet" in list(lines(quiet))
    (told,) = [line for line in lines(busy) if "busy" in line]
    assert told.count("other processes used 80 % of the 2 cores") == 1
    assert any("/mask/NonZero" in line for line in lines(quiet))


def test_what_a_column_of_times_has_no_place_for_is_a_remark():
    report = latency_report()
    (told,) = remarks(report)
    assert told.startswith("too few runs for p99 at batch=1 (made 300, needs 368), p99.9 at batch=1 (made 300, needs ")
    assert list(remarks(report, ("p50", "p90"))) == []
    assert told in list(lines(report))
    report["buckets"][1]["mean_s"] = 6.8 * report["buckets"][1]["median_s"]
    assert list(remarks(report, ("p50",))) == ["some runs were held up: the mean is 6.8 times the median at batch=8"]
    (busy,) = remarks(latency_report(others=0.8), ("p50",))
    assert busy.startswith("the machine was busy: ")


def test_items_a_second_follow_from_the_median_beside_them():
    for bucket in latency_report()["buckets"]:
        assert bucket["items_per_s"] == pytest.approx(bucket["items"] / bucket["median_s"])
        assert bucket_row(bucket)["items/s"] == count_text(bucket["items"] / bucket["median_s"])


def test_no_share_beyond_the_whole_is_shown():
    report = latency_report()
    anatomy = report["anatomy"]
    anatomy["diagnosis"] |= Diagnosis(8e-3, 2.01, 0.1, 2.84).to_json()
    anatomy["profile"]["nodes"][0]["diagnosis"] |= Diagnosis(1e-6, 2.0, 0.1, 0.2).to_json()
    text = diagnosis_text(anatomy)
    assert text.startswith("no diagnosis at batch=8: the machine's limits were measured slower than the run itself")
    assert "%" not in text and node_rows(anatomy)[0]["bound"] == "compute"
    assert "Roofline at batch=8: 28 nodes" in roofline_svg(anatomy)


def test_surroundings_say_why_a_machine_counts_as_busy():
    now = Watch().stop()
    assert now.cores >= 1 and now.seconds > 0
    assert Surroundings(1.0, 0.1, 0.05, 0.0, 10.0, 0, 2).reasons == []
    assert Surroundings(1.0, None, None, None, 0.0, None, 2).reasons == []
    assert Surroundings(1.0, 0.1, 0.05, 0.0, 54_000.0, 0, 2).reasons == []  # its own threads switch each other away
    assert Surroundings(0.1, 0.1, 0.10001, 0.05, 0.0, 0, 2).reasons == []  # one and two ticks of the clock
    assert Surroundings(0.1, 0.1, 0.15, 0.15, 0.0, 0, 2).reasons == [
        "other processes used 15 % of the 2 cores",
        "the hypervisor took 15.0 % of the time",
    ]
    assert len(Surroundings(1.0, 9.0, 0.4, 0.05, 100.0, 2, 2).reasons) == 3


def test_the_slowest_nodes_come_first_with_what_bounds_them():
    rows = node_rows(latency_report()["anatomy"])
    assert len(rows) == 12 and rows[0]["node"].startswith("/encoder/layers.13/")
    assert rows[0]["op"] == "MatMul" and rows[0]["bound"].startswith("compute ")


def test_an_ab_says_what_it_could_have_shown():
    ratios = [
        {"p": 0.5, "ratio": 0.97, "low": 0.95, "high": 0.99, "detectable": 0.028, "note": ""},
        {"p": 0.99, "ratio": None, "low": None, "high": None, "detectable": None, "note": "too few"},
    ]
    race = {"verdict": "faster", "ratios": ratios, "medians_s": [9.7e-5, 1e-4], "runs": 900, "openings": 8}
    first, second, third, _ = race_lines({**race, "bucket": "batch=8", "seed": 3})
    assert first == "faster: 97 µs against 100 µs at batch=8"
    assert "0.9700 times" in second and "a difference of 2.8 % would have been shown" in second
    assert third.endswith("p99: too few")


def test_large_numbers_have_prefixes():
    assert [count_text(value, "B") for value in (12, 2.5e3, 7.31e9)] == ["12 B", "2.5 kB", "7.31 GB"]


def test_the_page_has_a_section_with_table_distribution_and_roofline():
    page = render({**version_report(), "latencies": {ENGINE: [latency_report()]}})
    section = page[page.index("<h2>Latency</h2>") :]
    section = section[: section.index("</section>")]
    assert "compute-bound at batch=8" in section and "too few runs for p99 at batch=1" in section
    assert section.count("<svg") == 2 and "Roofline at batch=8: 28 nodes" in section
    assert "/encoder/layers.13/attention/output/dense/MatMul" in section and "16 more nodes take less" in section
    assert "<h2>Latency</h2>" not in render({**version_report(), "latencies": {}})


def test_what_the_device_itself_takes_is_told_where_it_tells():
    report = latency_report()
    assert not any("device itself" in line for line in lines(report))
    report["buckets"][1]["device_s"] = 2e-3
    (told,) = [line for line in lines(report) if "device itself" in line]
    assert told.startswith("the device itself is busy, without copies: 2 ms of ")
