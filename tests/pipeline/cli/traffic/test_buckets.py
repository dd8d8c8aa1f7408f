"""`enginesmith traffic buckets` as a user calls it: an engine is built and timed, and the spec is written."""

import json

import pytest

from tests.pipeline.cli.traffic.conftest import SPEC, record
from tests.pipeline.projects import Project

QUICK = ("--seconds", "0.002", "--profile-price", "0")


@pytest.fixture
def run(tmp_path, capsys):
    return Project(tmp_path, capsys).run


def test_the_buckets_of_traffic_are_written_into_the_spec(words, tmp_path, run):
    place = record(tmp_path / "traffic.jsonl", [3, 4, 5] * 30 + [40] * 20 + [70])
    out = tmp_path / "buckets.svg"
    found = run("traffic", "buckets", words, "--traffic", place, "--most", 3, *QUICK, "--out", out, "--write", "--json")
    assert found.code == 0, found.err
    edges = found.json["buckets"]["length"]
    assert 1 <= len(edges) <= 3 and edges[-1] == 64
    assert found.json["beyond"] == {"length": {"70": 1}} and found.json["fallback_share"] == pytest.approx(1 / 111)
    plans = {plan["name"]: plan for plan in found.json["choice"]["plans"]}
    assert [*plans] == ["chosen", "one profile", "powers of two", "present"]
    assert plans["one profile"]["saved"]["low"] <= plans["one profile"]["saved"]["value"]
    assert "chosen: up to 64" in out.read_text()
    assert words.read_text() == SPEC.replace("opt: 32, max: 64", f"buckets: [{', '.join(map(str, edges))}]")

    shown = run("traffic", "buckets", words, "--traffic", place, "--most", 1, *QUICK)
    assert shown.code == 0 and "length: buckets [64]" in shown.out and "fallback: 0.901 % of the requests" in shown.out
    assert "price of a profile: 0 engine seconds per day (as given)" in shown.out


def test_times_of_a_version_on_record_and_measured(words, tmp_path, run):
    words.write_text(SPEC + "validation: {latency: {seconds: 0.005, buckets: all}}\n")
    assert run("build", words).code == 0
    place = record(tmp_path / "traffic.jsonl", [3, 4, 5] * 30 + [40] * 20)
    found = run("traffic", "buckets", words, "--traffic", place, "--latencies", "words", "--json")
    assert (
        found.code == 0 and found.json["engine"] == "words@1 cpu fp32 onnxruntime" and found.json["choice"]["timed"] > 2
    )
    assert "of compiling a day" in found.json["price"]["words"]
    found = run(
        "traffic", "buckets", words, "--traffic", place, "--engine", "words@1", "--batch", "1", *QUICK, "--json"
    )
    assert found.code == 0 and found.json["choice"]["plans"][0]["batch"] == 1.0
    words.write_text(SPEC.replace("model: words", "model: others"))
    done = run("traffic", "buckets", words, "--traffic", place, "--engine", "words")
    assert done.code == 2 and "words is an engine of words, and SPEC is others" in done.err
    assert run("traffic", "show", place, "--model", "words").code == 0


@pytest.mark.parametrize(
    ("options", "words_of_error"),
    [
        (("--dim", "width"), "'width' is no dynamic dim"),
        (("--batch", "3"), "--batch 3 is more than dims.batch takes"),
        (("--engine", "words", "--latencies", "words"), "give --engine, to time it, or --latencies"),
        (("--latencies", "nothing"), "nothing"),
        (("--out", "picture.txt"), "pictures are written as .svg"),
        (("--most", "0"), "--most"),
    ],
)
def test_options_that_do_not_fit(words, tmp_path, run, options, words_of_error):
    place = record(tmp_path / "traffic.jsonl", [3, 4, 5])
    done = run("traffic", "buckets", words, "--traffic", place, *options)
    assert done.code == 2 and words_of_error in done.err and "Traceback" not in done.err


def test_traffic_without_times(words, tmp_path, run):
    place = tmp_path / "traffic.jsonl"
    place.write_text('{"inputs": {"x": [[1, 2]]}}\n' * 3)
    done = run("traffic", "buckets", words, "--traffic", place, "--batch", "2")
    assert done.code == 2 and "no times of arrival, so how batches form is not known" in done.err
    done = run("traffic", "buckets", words, "--traffic", place)
    assert done.code == 2 and "give --most" in done.err
    place.write_text(json.dumps({"inputs": {"x": [[1] * 65]}}) + "\n")
    done = run("traffic", "buckets", words, "--traffic", place)
    assert done.code == 2 and "none of the 1 request is within the dims" in done.err
