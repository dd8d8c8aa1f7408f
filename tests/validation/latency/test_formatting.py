import json
import re
from dataclasses import replace

import pytest

from enginesmith.core.codec import decode, encode
from enginesmith.core.reports.latency import LatencyReport, PairedBenchmark, Quantile, Ratio, SystemLoad
from tests.validation.latency.reports import ENGINE, latency_report
from tests.validation.page_data import version_report
from tests.validation.reporting.test_html import render
from validation.latency.formatting import (
    describe_diagnosis,
    describe_pair,
    describe_report,
    format_bucket,
    format_count,
    format_nodes,
    format_quantile,
    list_remarks,
)
from validation.latency.machine import SystemLoadMonitor
from validation.latency.roofline.breakdown import diagnose


def test_a_row_shows_intervals_and_gaps():
    row = format_bucket(latency_report().buckets[0])
    assert re.fullmatch(r"\S+ µs \(\S+ to \S+\)", row["p50"])
    wide_quantile = Quantile(0.5, 9e-4, 8e-4, 2e-3, 500.0, 6)
    assert re.fullmatch(r"\S+ µs \(\S+ µs to \S+ ms\)", format_quantile(wide_quantile))
    assert (row["p99"], row["p99.9"]) == ("", "")
    assert row["runs"] == "300 (+20 warm-up)" and row["memory"] == "12 MB"


def test_the_diagnosis_shows_its_evidence():
    result = latency_report().anatomy
    text = describe_diagnosis(result)
    assert text.startswith("compute-bound at batch=8: of 8 ms a run, arithmetic at this machine's rate would take ")
    assert "outside of any kernel" in text
    unclear = replace(result, diagnosis=replace(result.diagnosis, clear=False))
    assert describe_diagnosis(unclear).startswith("no clear bound at batch=8; compute-bound, if any")
    assert "measured for CPU engines only" in describe_diagnosis(replace(result, diagnosis=None))


def test_the_page_explains_the_timing_and_its_intervals():
    report = latency_report()
    assert any(", working set " in line for line in describe_report(report))
    for moved_number, end in (
        (750, "25 % saved"),
        (1000, "0 % saved"),
        (1250, "25 % more, for conversions that the runtime added"),
    ):
        traffic = replace(report.anatomy.traffic, unfused_bytes=1000, fused_bytes=moved_number)
        lines = [*describe_report(replace(report, anatomy=replace(report.anatomy, traffic=traffic)))]
        assert any(line.endswith(f" ({end})") for line in lines)
    assert re.fullmatch(r"\S+ µs \(\S+ to \S+\)", format_bucket(report.buckets[0])["runtime"])
    message = list(describe_report(report))[1]
    assert message.startswith("runtime: the runtime's own call") and message.endswith(
        "the 95 % intervals predict one more process; measured over 5 processes"
    )
    alone = replace(report, processes=1, buckets=tuple(replace(bucket, runtime=None) for bucket in report.buckets))
    message = list(describe_report(alone))[1]
    assert message.startswith("Session.run, with its checks") and message.endswith("within this process alone")
    assert format_bucket(alone.buckets[0])["runtime"] == ""


def test_a_busy_machine_is_reported_once_for_each_reason():
    quiet_report, busy_report = latency_report(), latency_report(others=0.8)
    busy_report = replace(busy_report, buckets=busy_report.buckets * 2)
    assert "the machine was quiet" in list(describe_report(quiet_report))
    (message,) = [line for line in describe_report(busy_report) if "busy" in line]
    assert message.count("other processes used 80 % of the 2 cores") == 1
    assert any("/mask/NonZero" in line for line in describe_report(quiet_report))


def test_times_without_a_column_become_remarks():
    report = latency_report()
    (note,) = list_remarks(report)
    assert note.startswith("too few runs for p99 at batch=1 (made 300, needs 368), p99.9 at batch=1 (made 300, needs ")
    assert list(list_remarks(report, ("p50", "p90"))) == []
    assert note in list(describe_report(report))
    first_bucket, second_bucket, bucket = report.buckets
    slow = replace(report, buckets=(first_bucket, replace(second_bucket, mean_s=6.8 * second_bucket.median_s), bucket))
    assert list(list_remarks(slow, ("p50",))) == ["some runs were delayed: the mean is 6.8 times the median at batch=8"]
    (busy_text,) = list_remarks(latency_report(others=0.8), ("p50",))
    assert busy_text.startswith("the machine was busy: ")


def test_items_a_second_follow_from_the_median_beside_them():
    for bucket in latency_report().buckets:
        assert bucket.items_per_s == pytest.approx(bucket.items / bucket.median_s)
        assert format_bucket(bucket)["items/s"] == format_count(bucket.items / bucket.median_s)


def test_no_share_exceeds_the_whole():
    result = latency_report().anatomy
    first_node, *rest = result.profile.nodes
    nodes = (replace(first_node, diagnosis=diagnose(1e-6, 2.0, 0.1, 0.2)), *rest)
    profile = replace(result.profile, nodes=nodes)
    result = replace(result, diagnosis=diagnose(8e-3, 2.01, 0.1, 2.84), profile=profile)
    text = describe_diagnosis(result)
    assert text.startswith("no diagnosis at batch=8: the machine's limits were measured slower than the run itself")
    assert "%" not in text and format_nodes(result)[0]["bound"] == "compute"


def test_surroundings_give_the_reason_for_a_busy_machine():
    current_duration = SystemLoadMonitor().stop()
    assert current_duration.cores >= 1 and current_duration.seconds > 0
    assert SystemLoad(1.0, 0.1, 0.05, 0.0, 10.0, 0, 2).busy == ()
    assert SystemLoad(1.0, None, None, None, 0.0, None, 2).busy == ()
    assert SystemLoad(1.0, 0.1, 0.05, 0.0, 54_000.0, 0, 2).busy == ()  # its own threads switch each other away
    assert SystemLoad(0.1, 0.1, 0.10001, 0.05, 0.0, 0, 2).busy == ()  # one and two ticks of the clock
    assert SystemLoad(0.1, 0.1, 0.15, 0.15, 0.0, 0, 2).busy == (
        "other processes used 15 % of the 2 cores",
        "the hypervisor took 15.0 % of the time",
    )
    assert len(SystemLoad(1.0, 9.0, 0.4, 0.05, 100.0, 2, 2).busy) == 3


def test_the_slowest_nodes_come_first_with_their_bounds():
    rows = format_nodes(latency_report().anatomy)
    assert len(rows) == 12 and rows[0]["node"].startswith("/encoder/layers.13/")
    assert rows[0]["op"] == "MatMul" and rows[0]["bound"].startswith("compute ")


def test_a_comparison_gives_the_detectable_difference():
    ratios = (Ratio(0.5, 0.97, 0.95, 0.99, 0.028), Ratio(0.99, None, None, None, None, "too few"))
    quiet_load = SystemLoad(1.0, 0.1, 0.0, 0.0, 0.0, 0, 2)
    paired_benchmark = PairedBenchmark(
        verdict="faster", ratios=ratios, medians_s=(9.7e-5, 1e-4), runs=900, openings=8,
        bucket="batch=8", items=8, seed=3, surroundings=quiet_load,
    )  # fmt: skip
    first_text, second_text, third_text, _ = describe_pair(paired_benchmark)
    assert first_text == "faster: 97 µs against 100 µs at batch=8"
    assert "0.9700 times" in second_text and "a difference of 2.8 % would have been shown" in second_text
    assert third_text.endswith("p99: too few")
    noisy = replace(paired_benchmark, ratios=(replace(ratios[0], detectable=3.72),))
    assert "a difference of 372 % would have been shown" in list(describe_pair(noisy))[1]


def test_large_numbers_have_prefixes():
    assert [format_count(value, "B") for value in (12, 2.5e3, 7.31e9)] == ["12 B", "2.5 kB", "7.31 GB"]


def test_the_page_has_a_section_with_table_and_distribution():
    page = render({**version_report(), "latencies": {ENGINE: [encode(latency_report())]}})
    section = page[page.index("<h2>Latency</h2>") :]
    section = section[: section.index("</section>")]
    assert "compute-bound at batch=8" in section and "too few runs for p99 at batch=1" in section
    assert section.count("<svg") == 1 and ">latency of a run, logarithmic<" in section
    assert "/encoder/layers.13/attention/output/dense/MatMul" in section and "16 more nodes take less" in section
    assert "<h2>Latency</h2>" not in render({**version_report(), "latencies": {}})


def test_device_time_is_reported_where_the_device_measures_it():
    report = latency_report()
    assert not any("device itself" in line for line in describe_report(report))
    first_bucket, second_bucket, third_bucket = report.buckets
    report = replace(report, buckets=(first_bucket, replace(second_bucket, device_s=2e-3), third_bucket))
    (message,) = [line for line in describe_report(report) if "device itself" in line]
    assert message.startswith("the device itself is busy, without copies: 2 ms of ")


def test_a_report_survives_json():
    report = latency_report()
    document = json.loads(json.dumps(encode(report), allow_nan=False))
    assert decode(document, LatencyReport) == report
    bucket = document["buckets"][0]
    assert {"median_s", "items_per_s", "surroundings"} <= bucket.keys() and bucket["surroundings"]["busy"] == []
    assert {"saved", "source"} <= document["anatomy"]["traffic"].keys()
    assert {"intensity", "macs", "by_dtype", "unsized"} <= document["anatomy"]["graph"].keys()
    # What follows from other numbers cannot be made to say something else.
    bucket["items_per_s"] = 1e9
    assert decode(document, LatencyReport) == report
