"""`enginesmith backends compare` on a real project: what is measured and said of it, and that nothing is published."""

import json
from dataclasses import replace

import pytest

from enginesmith.core.codec import decode, encode
from enginesmith.core.errors import InputError, UnknownNameError
from enginesmith.core.hardware.machine import parse_targets
from enginesmith.core.reports.latency import MachineKind
from pipeline.operations.compare import (
    BackendComparison,
    CompareOptions,
    EngineFacts,
    PairedComparison,
    Recommendation,
    describe_comparison,
    format_rows,
    widen_spec,
)
from pipeline.spec.model import load_spec
from tests.pipeline.projects import Project


def asked(target: str, *names: str) -> CompareOptions:
    return CompareOptions(parse_targets(target)[0], names)


def test_engines_are_built_proven_timed_and_recommended_without_publication(built: Project):
    versions = sorted((built.registry / "models").rglob("*"))
    words_of = ("backends", "compare", built.spec, "--target", "cpu", "--seconds", "0.02", "--backend", "onnxruntime")
    result = built.run(*words_of, "--json")
    assert result.code == 0, result.err
    actual = result.json
    engines = {engine["unit"]: engine for engine in actual["engines"]}
    assert engines.keys() >= {"cpu fp32 onnxruntime", "cpu int8 onnxruntime"}
    for unit in ("cpu fp32 onnxruntime", "cpu int8 onnxruntime"):
        engine = engines[unit]
        assert engine["status"] == "proven" and engine["covers"] == ["cpu"]
        assert 0 < engine["low_s"] <= engine["median_s"] <= engine["high_s"]
        assert min(engine[name] for name in ("build_s", "load_s", "items_per_s", "size_bytes", "sqnr_db")) > 0
        assert engine["metrics"]["accuracy"] >= 0.9
    assert actual["bucket"] == "batch=4" and actual["fleet"] == ["cpu", "sm_75", "sm_89"]
    assert actual["recommendation"]["unit"] in engines and len(actual["duels"]) == len(engines) - 1
    assert sorted((built.registry / "models").rglob("*")) == versions, "a comparison publishes nothing"
    again = built.run(*words_of, "--precision", "fp32")
    assert again.code == 0 and "built in" not in result.err + again.err, "what was built is on record"
    assert "latency cpu fp32 onnxruntime: cached" not in again.err, "a time of another moment is compared with nothing"
    assert "recommended: cpu fp32 onnxruntime: the only engine that is proven here" in again.out


def test_every_backend_for_the_target_uses_the_specs_options(project: Project):
    project.change_spec(backends={"onnxruntime": {"intra_op_threads": 1}})
    spec = load_spec(project.spec)
    assert widen_spec(spec, asked("cpu")).backends["onnxruntime"] == {"intra_op_threads": 1}
    assert "tensorrt-rtx" not in widen_spec(spec, asked("cpu")).backends
    assert "tensorrt-rtx" in widen_spec(spec, asked("sm_89")).backends
    assert widen_spec(spec, asked("sm_89")).targets == ("sm_89",)
    project.change_spec(build={"required": ["cpu fp32"]})
    assert not widen_spec(load_spec(project.spec), asked("sm_89")).build.required, "a refusal is a row, not an error"


def test_engines_with_one_reason_are_named_together():
    refused_engine = FOUND.engines[1]
    other_engines = (replace(refused_engine, precision="int8"), replace(refused_engine, precision="fp16", reason="c"))
    messages = [*describe_comparison(replace(FOUND, engines=(*FOUND.engines, *other_engines)))]
    assert messages[:2] == ["fp32 b, int8 b are refused: a | b", "fp16 b is refused: c"]


FOUND = BackendComparison(
    model="m", target="cpu", bucket="n=4", fleet=("cpu", "sm_89"), machine=MachineKind("C", "k", 2, "Linux", ()),
    created_at="now", original={},
    engines=(
        EngineFacts(
            "cpu fp32 a", "a", "fp32", "proven", median_s=1e-3, items_per_s=1000.0,
            load_s=0.1, memory_bytes=1 << 20, size_bytes=1 << 20, build_s=1.0, sqnr_db=99.0, covers=("cpu",),
        ),
        EngineFacts("cpu fp32 b", "b", "fp32", "refused", "a | b"),
    ),
    duels=(PairedComparison("x", "y", "faster"), PairedComparison("x", "z", "faster", 1 / 2334)),
    recommendation=Recommendation("cpu fp32 a", "because"),
)  # fmt: skip


def test_common_gaps_are_left_out_of_the_text():
    columns, table = format_rows(FOUND)
    assert "sizes" not in columns and "SQNR" in columns
    assert table[0][0] == "fp32 a" and "1 of 2" in table[0]
    text = "\n".join(describe_comparison(decode(json.loads(json.dumps(encode(FOUND))), BackendComparison)))
    assert "fp32 b is refused: a | b" in text and "recommended: cpu fp32 a: because" in text
    assert "faster: x against y; too few runs" in text
    assert "faster: x against z, by the times of each alone (2,330 times)" in text


def test_a_busy_machine_is_reported_once_with_the_remedy():
    first_engine, *engines = FOUND.engines
    duel, *duels = FOUND.duels
    noisy = replace(
        FOUND,
        engines=(replace(first_engine, busy=("other processes used 31 % of the 2 cores",)), *engines),
        duels=(replace(duel, busy=("other processes used 44 % of the 2 cores", "60 switches a second")), *duels),
    )
    (output,) = (line for line in describe_comparison(noisy) if "busy" in line)
    assert "other processes used 44 % of the 2 cores; 60 switches" in output and "a larger --seconds" in output
    assert not any("busy" in line for line in describe_comparison(FOUND))


def test_incomparable_specs_are_refused(project: Project):
    spec = load_spec(project.spec)
    with pytest.raises(
        InputError, match="none of tensorrt-rtx builds for cpu; `enginesmith backends list` says what does"
    ):
        widen_spec(spec, asked("cpu", "tensorrt-rtx"))
    with pytest.raises(UnknownNameError, match="did you mean 'onnxruntime'"):
        widen_spec(spec, asked("cpu", "onnxruntim"))


def test_without_a_runnable_engine_the_exit_code_is_1(project: Project):
    project.change_spec(precisions=["fp32"], calibration=None)
    result = project.run(
        "backends", "compare", project.spec, "--target", "sm_89", "--backend", "tensorrt-rtx,tensorrt", "--json"
    )
    assert result.code == 1
    engines = {engine["backend"]: engine for engine in result.json["engines"]}
    assert engines["tensorrt-rtx"]["status"] == "unproven" and engines["tensorrt-rtx"]["build_s"] > 0
    assert engines["tensorrt"]["status"] == "refused" and "pip install" in engines["tensorrt"]["reason"]
    assert result.json["recommendation"]["unit"] is None and result.json["duels"] == []


def test_an_unknown_precision_is_refused(project: Project):
    result = project.run("backends", "compare", project.spec, "--target", "cpu", "--precision", "fp8")
    assert result.code == 2 and "fp8: not in the spec, which has fp32, int8" in result.err
    result = project.run("backends", "compare", project.spec, "--target", "cpu", "--precision", "fp33")
    assert result.code == 2 and "fp33: there is no such name; choose from the spec's: fp32, int8" in result.err
