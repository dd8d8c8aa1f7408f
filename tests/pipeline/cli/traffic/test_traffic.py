"""`enginesmith traffic show` as a user calls it."""

import json
import re

import pytest

from tests.pipeline.cli.traffic.conftest import record
from tests.pipeline.projects import Project


@pytest.fixture
def run(tmp_path, capsys):
    return Project(tmp_path, capsys).run


def test_histograms_rates_and_a_picture(words, tmp_path, run):
    place = record(tmp_path / "traffic.jsonl", [3] * 60 + [40] * 20 + [70])
    done = run("traffic", "show", place, "--model", words, "--out", tmp_path / "traffic.svg")
    assert done.code == 0 and "81 requests" in done.out and "requests per second" in done.out
    assert re.search(r"^length +81 +3 +3 .* 70$", done.out, re.MULTILINE), done.out
    assert "length: 1 request beyond the spec's dims (1.23 %)" in done.out and "wrote" in done.err
    assert "requests by length" in (tmp_path / "traffic.svg").read_text()
    found = run("traffic", "show", place, "--model", words, "--json").json
    expected = {"3": 60, "40": 20, "70": 1}
    assert found["histograms"]["length"] == expected and found["start"] == "2026-03-02T00:00:00+00:00"
    assert found["per_second"] == pytest.approx(100.0) and found["beyond"] == {"length": 1}


@pytest.mark.parametrize(
    ("make", "words_of_error"),
    [
        (lambda folder: folder / "none.jsonl", "does not exist"),
        (lambda folder: (folder / "empty").mkdir() or folder / "empty", "holds no traffic"),
        (lambda folder: record(folder / "a.jsonl", [1], model="other"), "traffic of 'other', and this is 'words'"),
        (lambda folder: record(folder / "a.jsonl", [1, 2], at=[1.8e12, 1.9e12]), "at is 1.8e+12; give seconds"),
    ],
)
def test_traffic_that_does_not_fit_is_an_error(words, tmp_path, run, make, words_of_error):
    done = run("traffic", "show", make(tmp_path), "--model", words)
    assert done.code == 2 and words_of_error in done.err and "Traceback" not in done.err


def test_requests_of_another_model_name_the_line(words, tmp_path, run):
    (tmp_path / "other.jsonl").write_text(json.dumps({"inputs": {"ids": [[1]]}}) + "\n")
    done = run("traffic", "show", tmp_path / "other.jsonl", "--model", words)
    assert done.code == 2 and "other.jsonl:1" in done.err and "'ids'" in done.err


def test_the_model_must_be_known(words, tmp_path, run):
    place = record(tmp_path / "a.jsonl", [1, 2])
    done = run("traffic", "show", place)
    assert done.code == 2 and "does not name the model of the requests; give --model SPEC or --model REF" in done.err
    done = run("traffic", "show", place, "--model", words, "--out", tmp_path / "a.gif")
    assert done.code == 2 and "written as .svg" in done.err
