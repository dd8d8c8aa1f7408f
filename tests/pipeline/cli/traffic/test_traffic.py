import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from enginesmith.recording.recorder import Recorder
from tests.pipeline.projects import Project, exit_code

EPOCH = 1_772_409_600.0
SPEC = """\
# What words cost.
model: words
source: {onnx: words.onnx}
inputs: {x: {dtype: float32, shape: [batch, length]}}
dims:
  batch: {min: 1, opt: 2, max: 2}
  length: {min: 1, opt: 32, max: 64}   # words of a text
targets: [cpu]
"""


def record(path: Path, lengths, at=None, **head) -> Path:
    with Recorder(path, **head) as recorder:
        for index, length in enumerate(lengths):
            when_epoch = EPOCH + 0.01 * index if at is None else at[index]
            recorder.append({"x": np.ones((1, length), np.float32)}, when_epoch)
    return path


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """The path of the spec."""
    model = onnx.parser.parse_model(
        """
        <ir_version: 10, opset_import: ["" : 20]>
        words (float[batch, length] x) => (float[batch] y) {
            axis = Constant <value = int64[1] {1}> ()
            e = Exp(x)
            y = ReduceSum <keepdims = 0> (e, axis)
        }
        """
    )
    onnx.save(model, tmp_path / "words.onnx")
    path = tmp_path / "words.yaml"
    path.write_text(SPEC)
    return path


@pytest.fixture
def run(tmp_path, capsys):
    return Project(tmp_path, capsys).run


def test_traffic_prints_histograms_rates_and_a_picture(words, tmp_path, run):
    place = record(tmp_path / "traffic.jsonl", [3] * 60 + [40] * 20 + [70])
    result = run("traffic", "show", place, "--model", words, "--out", tmp_path / "traffic.svg")
    assert result.code == 0 and "81 requests" in result.out and "requests per second" in result.out
    assert re.search(r"^length +81 +3 +3 .* 70$", result.out, re.MULTILINE), result.out
    assert "length: 1 request beyond the spec's dims (1.23 %)" in result.out and "wrote" in result.err
    assert "requests by length" in (tmp_path / "traffic.svg").read_text()
    actual = run("traffic", "show", place, "--model", words, "--json").json
    expected = {"3": 60, "40": 20, "70": 1}
    assert actual["histograms"]["length"] == expected and actual["start"] == "2026-03-02T00:00:00+00:00"
    assert actual["per_second"] == pytest.approx(100.0) and actual["beyond"] == {"length": 1}


def test_unsuitable_traffic_is_an_error(words, tmp_path, run):
    place = record(tmp_path / "a.jsonl", [1, 2], at=[1.8, 1.9])
    place.write_text(place.read_text().replace('"at":1.8', '"at":1.8e12'))
    result = run("traffic", "show", place, "--model", words)
    assert result.code == 2 and "at is 1.8e+12; give seconds" in result.err and "Traceback" not in result.err


def test_the_model_must_be_named(words, tmp_path, run):
    place = record(tmp_path / "a.jsonl", [1, 2])
    result = run("traffic", "show", place)
    assert (
        result.code == 2 and "does not name the model of the requests; give --model SPEC or --model REF" in result.err
    )
    result = run("traffic", "show", place, "--model", words, "--out", tmp_path / "a.gif")
    assert result.code == 2 and "written as .svg" in result.err


COMMAND = [sys.executable, "-m", "enginesmith", "traffic", "record"]


def test_requests_are_read_from_stdin(tmp_path):
    path, other_path = tmp_path / "traffic.jsonl", tmp_path / "other.jsonl"
    lines = [{"at": 3, "inputs": {"x": [[1, 2]]}}, {"inputs": {"x": [[3, 4]]}}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    result = subprocess.run([*COMMAND, path], input=text, text=True, capture_output=True, check=True)
    assert "2 requests recorded" in result.stderr
    head, first, second = map(json.loads, path.read_text().splitlines())
    assert head["kind"] == "enginesmith-traffic" and first == lines[0] and second["at"] > 1e9
    for words, typed_text, code, output in (
        ([path], '{"inputs": 3}\n', 2, "inputs is missing"),
        ([other_path], "[]\n", 2, "an object is needed"),
        ([path, "--samples", path, "--per-second", "1"], "", 2, "error: " + str(path) + " is not empty"),
        (["/dev/full"], text, 3, "error: writing /dev/full: No space left on device"),
    ):
        bad_result = subprocess.run([*COMMAND, *words], input=typed_text, text=True, capture_output=True)
        assert bad_result.returncode == code and output in bad_result.stderr
    assert not other_path.exists()


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"x": np.zeros((3, 2)), "z": np.zeros((4, 2))}, "all inputs need the same number"),
        ({"x": np.array(["a", "b"])}, "numbers and truth values can be recorded"),
        ({"x": np.array(1.0)}, "has no axes"),
        (None, "cannot be read as .npz or .npy"),
    ],
)
def test_a_mistake_in_the_first_request_leaves_no_file(tmp_path, capsys, arrays, words):
    samples, path = tmp_path / "samples.npz", tmp_path / "traffic.jsonl"
    np.savez(samples, **arrays) if arrays else samples.write_bytes(b"")
    assert exit_code("traffic", "record", path, "--samples", samples, "--per-second", "5") == 2
    output = capsys.readouterr().err
    assert words in output and output.count("\n") == 1
    assert not path.exists()


QUICK = ("--seconds", "0.002", "--profile-price", "0")


def test_chosen_buckets_are_written_into_the_spec(words, tmp_path, run):
    place = record(tmp_path / "traffic.jsonl", [3, 4, 5] * 30 + [40] * 20 + [70])
    path = tmp_path / "buckets.svg"
    call = run("traffic", "buckets", words, "--traffic", place, "--most", 3, *QUICK, "--out", path, "--write", "--json")
    assert call.code == 0, call.err
    edges = call.json["buckets"]["length"]
    assert 1 <= len(edges) <= 3 and edges[-1] == 64
    assert call.json["beyond"] == {"length": {"70": 1}} and call.json["fallback_share"] == pytest.approx(1 / 111)
    plans = {plan["name"]: plan for plan in call.json["choice"]["plans"]}
    assert [*plans] == ["chosen", "one profile", "powers of two", "present"]
    assert plans["one profile"]["saved"]["low"] <= plans["one profile"]["saved"]["value"]
    assert "chosen: up to 64" in path.read_text()
    assert words.read_text() == SPEC.replace("opt: 32, max: 64", f"buckets: [{', '.join(map(str, edges))}]")

    result = run("traffic", "buckets", words, "--traffic", place, "--most", 1, *QUICK)
    assert (
        result.code == 0 and "length: buckets [64]" in result.out and "fallback: 0.901 % of the requests" in result.out
    )
    assert "price of a profile: 0 engine seconds per day (as given)" in result.out


@pytest.mark.slow
def test_recorded_and_measured_times_are_used(words, tmp_path, run):
    words.write_text(SPEC + "validation: {latency: {seconds: 0.005, buckets: all}}\n")
    assert run("build", words).code == 0
    place = record(tmp_path / "traffic.jsonl", [3, 4, 5] * 30 + [40] * 20)
    actual = run("traffic", "buckets", words, "--traffic", place, "--latencies", "words", "--json")
    assert actual.code == 0 and actual.json["engine"] == "words@1 cpu fp32 onnxruntime"
    assert actual.json["choice"]["timed"] > 2
    assert "of compiling a day" in actual.json["price"]["words"]
    actual = run(
        "traffic", "buckets", words, "--traffic", place, "--engine", "words@1", "--batch", "1", *QUICK, "--json"
    )
    assert actual.code == 0 and actual.json["choice"]["plans"][0]["batch"] == 1.0
    words.write_text(SPEC.replace("model: words", "model: others"))
    result = run("traffic", "buckets", words, "--traffic", place, "--engine", "words")
    assert result.code == 2 and "words is an engine of words, but SPEC is of others" in result.err
    assert run("traffic", "show", place, "--model", "words").code == 0


@pytest.mark.parametrize(
    ("options", "words_of_error"),
    [
        (("--engine", "words", "--latencies", "words"), "give --engine to time it, or --latencies"),
        (("--latencies", "nothing"), "nothing"),
        (("--out", "picture.txt"), "pictures are written as .svg"),
        (("--most", "0"), "--most"),
    ],
)
def test_contradictory_options_are_refused(words, tmp_path, run, options, words_of_error):
    place = record(tmp_path / "traffic.jsonl", [3, 4, 5])
    result = run("traffic", "buckets", words, "--traffic", place, *options)
    assert result.code == 2 and words_of_error in result.err and "Traceback" not in result.err
