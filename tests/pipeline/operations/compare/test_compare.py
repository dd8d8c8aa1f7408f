"""`enginery compare` on a real project: what is measured, what is said of it, and that nothing is published."""

import json

import pytest

from enginery.core.errors import InputError, UnknownNameError
from enginery.core.hardware.targets import parse_targets
from enginery.core.types import Dim
from pipeline.compile.jobs.shapes import sizes_outside, sizes_within
from pipeline.operations.compare import words
from pipeline.operations.compare.run import Asked, widened
from pipeline.spec.file import load_spec
from tests.pipeline.projects import Project


def asked(target: str, *names: str) -> Asked:
    return Asked(parse_targets(target)[0], names)


def test_engines_are_built_proven_timed_and_one_is_recommended_and_nothing_is_published(built: Project):
    page, versions = built.folder / "page.md", sorted((built.registry / "models").rglob("*"))
    words_of = ("compare", built.spec, "--target", "cpu", "--seconds", "0.02", "--backend", "onnxruntime")
    done = built.run(*words_of, "--json", "--out", page)
    assert done.code == 0, done.err
    found = done.json
    engines = {engine["unit"]: engine for engine in found["engines"]}
    assert engines.keys() >= {"cpu fp32 onnxruntime", "cpu int8 onnxruntime"}
    for unit in ("cpu fp32 onnxruntime", "cpu int8 onnxruntime"):
        engine = engines[unit]
        assert engine["status"] == "proven" and engine["shapes"] == "any" and engine["covers"] == ["cpu"]
        assert engine["timed"] == "runtime" and engine["session_s"] > 0
        assert 0 < engine["low_s"] <= engine["median_s"] <= engine["high_s"]
        assert min(engine[name] for name in ("build_s", "load_s", "items_per_s", "size_bytes", "sqnr_db")) > 0
        assert engine["metrics"]["accuracy"] >= 0.9
    assert found["bucket"] == "batch=4" and found["fleet"] == ["cpu", "sm_75", "sm_89"]
    assert found["recommendation"]["unit"] in engines and len(found["duels"]) == len(engines) - 1
    assert sorted((built.registry / "models").rglob("*")) == versions, "a comparison publishes nothing"
    assert page.read_text() == words.markdown(found)
    again = built.run(*words_of, "--precision", "fp32")
    assert again.code == 0 and "built in" not in done.err + again.err, "what was built is on record"
    assert "take cpu fp32 onnxruntime: the only engine that is proven here" in again.out


def test_where_nothing_runs_it_says_so_and_ends_with_1(project: Project):
    project.change_spec(precisions=["fp32"], calibration=None)
    done = project.run("compare", project.spec, "--target", "sm_89", "--backend", "tensorrt-rtx,tensorrt", "--json")
    assert done.code == 1
    engines = {engine["backend"]: engine for engine in done.json["engines"]}
    assert engines["tensorrt-rtx"]["status"] == "unproven" and engines["tensorrt-rtx"]["build_s"] > 0
    assert engines["tensorrt"]["status"] == "refused" and "pip install" in engines["tensorrt"]["reason"]
    assert done.json["recommendation"]["unit"] is None and done.json["duels"] == []


def test_every_backend_that_serves_the_target_is_taken_with_the_specs_own_options(project: Project):
    project.change_spec(backends={"onnxruntime": {"intra_op_threads": 1}})
    spec = load_spec(project.spec)
    assert widened(spec, asked("cpu")).backends["onnxruntime"] == {"intra_op_threads": 1}
    assert "tensorrt-rtx" not in widened(spec, asked("cpu")).backends
    assert "tensorrt-rtx" in widened(spec, asked("sm_89")).backends
    assert widened(spec, asked("sm_89")).targets == ("sm_89",)


def test_what_cannot_be_compared_is_refused(project: Project):
    spec = load_spec(project.spec)
    with pytest.raises(InputError, match="none of tensorrt-rtx builds for cpu; `enginery backends` says what does"):
        widened(spec, asked("cpu", "tensorrt-rtx"))
    with pytest.raises(UnknownNameError, match="did you mean 'onnxruntime'"):
        widened(spec, asked("cpu", "onnxruntim"))
    done = project.run("compare", project.spec, "--target", "cpu", "--precision", "fp8")
    assert done.code == 2 and "fp8: not in the spec, which has fp32, int8" in done.err
    done = project.run("compare", project.spec, "--target", "cpu", "--precision", "fp33")
    assert done.code == 2 and "fp33: there is none; take of the spec's: fp32, int8" in done.err


def test_a_page_that_cannot_be_written_is_refused_before_anything_is_built(project: Project):
    done = project.run("compare", project.spec, "--target", "cpu", "--out", project.spec / "page.md")
    assert done.code == 3 and "writing" in done.err and "Traceback" not in done.err
    assert not project.registry.exists()


def test_a_page_gets_its_folder(built: Project):
    page = built.folder / "new" / "page.md"
    words_of = ("--target", "sm_89", "--backend", "tensorrt", "--precision", "fp32", "--out", page)
    assert built.run("compare", built.spec, *words_of).code == 1
    assert page.read_text().startswith("# tiny on sm_89")


def test_engines_of_one_reason_are_named_together():
    refused = FOUND["engines"][1]
    others = [{**refused, "precision": "int8"}, {**refused, "precision": "fp16", "reason": "c"}]
    told = [*words.lines({**FOUND, "engines": [*FOUND["engines"], *others]})]
    assert told[1:3] == ["fp32 b, int8 b are refused: a | b", "fp16 b is refused: c"]


def test_sizes_are_tried_that_no_bucket_ends_at_and_beyond_the_last():
    dims = (Dim("n", 1, 4, 8), Dim("t", 1, 64, 64, (32, 64)))
    within = sizes_within(dims)
    assert within[0]["n"] not in (1, 4, 8) and within[1]["t"] not in (1, 32, 33, 64)
    assert sizes_within((Dim("n", 1, 1, 2),)) == [] and sizes_within((Dim("n", 3, 3, 3),)) == []
    assert sizes_outside(dims) == [{"n": 9, "t": 64}, {"n": 4, "t": 65}]


FOUND = {
    "model": "m", "target": "cpu", "bucket": "n=4", "fleet": ["cpu", "sm_89"], "created_at": "now",
    "machine": {"cpu": "C", "kind": "k", "cores": 2, "gpus": []},
    "engines": [
        {"unit": "cpu fp32 a", "precision": "fp32", "backend": "a", "status": "proven", "reason": "", "median_s": 1e-3,
         "timed": "runtime", "session_s": 1.1e-3,
         "items_per_s": 1000.0, "load_s": 0.1, "memory_bytes": 1 << 20, "size_bytes": 1 << 20, "build_s": 1.0,
         "sqnr_db": 99.0, "metrics": {}, "covers": ["cpu"], "shapes": None,
         "busy": []},
        {"unit": "cpu fp32 b", "precision": "fp32", "backend": "b", "status": "refused", "reason": "a | b",
         "median_s": None, "timed": "session", "session_s": None, "items_per_s": None,
         "load_s": None, "memory_bytes": None, "size_bytes": None,
         "build_s": None, "sqnr_db": None, "metrics": {}, "covers": [], "shapes": None, "busy": []},
    ],
    "duels": [
        {"first": "x", "second": "y", "verdict": "faster", "ratio": None, "low": None, "high": None,
         "detectable": None, "busy": []},
        {"first": "x", "second": "z", "verdict": "far faster", "ratio": 0.1, "low": None, "high": None,
         "detectable": None, "busy": []},
    ],
    "recommendation": {"unit": "cpu fp32 a", "reason": "because", "ties": [],
                       "flips": [{"axis": "start", "unit": "cpu fp32 c", "condition": "if so"}]},
}  # fmt: skip


def test_the_words_leave_out_what_nobody_has_and_hide_nothing():
    columns, table = words.rows(FOUND)
    assert "sizes" not in columns and "SQNR" in columns
    assert table[0][0] == "fp32 a" and "1 of 2" in table[0]
    text = "\n".join(words.lines(json.loads(json.dumps(FOUND))))
    assert "session" in columns and text.startswith("median: of the runtime's own call")
    assert "fp32 b is refused: a | b" in text and "take cpu fp32 a: because" in text
    assert "cpu fp32 c instead, for cold start: if so" in text
    assert "faster: x against y; too few runs" in text and "far faster: x against z, by the times" in text
    assert "a \\| b" in words.markdown(FOUND)


def test_a_busy_machine_is_said_once_with_the_remedy():
    noisy = json.loads(json.dumps(FOUND))
    noisy["engines"][0]["busy"] = ["other processes used 31 % of the 2 cores"]
    noisy["duels"][0]["busy"] = ["other processes used 44 % of the 2 cores", "60 involuntary context switches a second"]
    (said,) = (line for line in words.lines(noisy) if "busy" in line)
    assert "other processes used 44 % of the 2 cores; 60 involuntary" in said and "a larger --seconds" in said
    assert not any("busy" in line for line in words.lines(FOUND))
