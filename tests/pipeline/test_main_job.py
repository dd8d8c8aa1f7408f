import json
import resource
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from builders.backends.installed_versions import versions_of
from tests.pipeline.projects import Project, arrays, rebuilt, units


def test_a_build_publishes_proven_unproven_and_refused_engines(built: Project) -> None:
    outcome = built.build().json
    assert units(outcome, "status") == {
        "cpu fp32": "proven",
        "cpu int8": "proven",
        "sm_75 fp32": "refused",
        "sm_75 int8": "unproven",
        "sm_89 fp32": "unproven",
        "sm_89 int8": "unproven",
    }
    assert "use fp16" in units(outcome, "reason")["sm_75 fp32"]
    assert outcome["version"] == "1"
    for engine in outcome["engines"]:
        expected = {"target", "precision", "backend", "digest", "size", "status", "reason", "checks"}
        assert expected <= engine.keys()
    assert outcome["metrics"]["fp32"]["accuracy"] == 1.0
    statement = built.run("show", "tiny", "--provenance").json
    assert {item["digest"]["sha256"] for item in statement["subject"]} == {
        engine["digest"] for engine in outcome["engines"] if engine["digest"]
    }


def test_a_repeated_build_is_cached_and_takes_under_three_seconds_of_cpu(built: Project) -> None:
    usage_before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "enginesmith", "build", built.spec, "--registry", built.registry, "--json"]
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    outcome = json.loads(result.stdout)
    assert outcome["cached"] is True and outcome["version"] == "1"
    assert sum(after[:2]) - sum(usage_before[:2]) < 3
    assert [item["version"] for item in built.run("list", "tiny", "--json").json] == ["1"]
    assert built.run("registry", "fsck", "--json").code == 0


def test_a_cached_run_imports_nothing_heavy(built: Project) -> None:
    code = (
        "import sys\nfrom enginesmith.cli import main\n"
        f"try:\n    main(['build', {str(built.spec)!r}, '--registry', {str(built.registry)!r}, '--json'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'onnx', 'onnxruntime', 'tensorrt_rtx', 'ray', 'prefect', 'numpy', 'matplotlib',"
        " '_strptime', 'prometheus_client', 'opentelemetry') if m in sys.modules], file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stderr.splitlines()[-1] == "[]"


def test_an_unmoved_channel_is_not_reported_as_serving(built: Project) -> None:
    built.change_spec(publication={"channel": "stable"})
    result = built.run("build", built.spec)
    assert "everything was cached; report:" in result.out and "channel stable did not move" in result.err


def test_a_changed_golden_value_proves_again_and_builds_nothing(built: Project) -> None:
    data = arrays(built.folder / "golden.npz")
    data["x"][0, 0] += 0.001
    np.savez(built.folder / "golden.npz", **data)
    result = built.build()
    assert rebuilt(result.json) == set()
    assert result.json["version"] == "2" and result.json["cached"] is False
    assert "prove cpu int8 onnxruntime: done" in result.err and "calibrate: cached" in result.err


def test_another_compiler_version_rebuilds_only_its_engines(built: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    def upgraded(*names: str) -> dict[str, str]:
        return {name: "99.0" if name == "tensorrt-rtx" else result for name, result in versions_of(*names).items()}

    monkeypatch.setattr("builders.backends.tensorrt.build.versions_of", upgraded)
    plan = {f"{u['target']} {u['precision']}": u for u in built.run("plan", built.spec, "--json").json["units"]}
    expected = {"sm_75 int8", "sm_89 fp32", "sm_89 int8"}
    assert {name for name, unit in plan.items() if unit["action"] == "build"} == expected
    assert "99.0" in plan["sm_89 int8"]["reason"] and plan["cpu int8"]["action"] == "cached"


def test_a_backends_option_rebuilds_only_its_engines_with_the_reason(built: Project) -> None:
    built.change_spec(backends={"onnxruntime": {"intra_op_threads": 1}, "tensorrt-rtx": {}})
    plan = built.run("plan", built.spec, "--json").json["units"]
    assert {u["target"] for u in plan if u["action"] == "build"} == {"cpu"}
    assert "intra_op_threads: 0 -> 1" in next(u["reason"] for u in plan if u["action"] == "build")


def test_a_metric_below_its_floor_fails_the_engines_and_publishes_nothing(project: Project) -> None:
    data = arrays(project.folder / "golden.npz")
    np.savez(project.folder / "golden.npz", x=data["x"], label=(data["label"] + 1) % 10)
    result = project.build("--target", "cpu")
    assert result.code == 1 and result.json["version"] is None
    assert {engine["status"] for engine in result.json["engines"]} == {"failed"}
    assert "accuracy" in result.json["engines"][0]["reason"]
    assert not any("attribution" in engine for engine in result.json["engines"]), "labels are wrong, and no node is"
    assert project.run("list", "--json").json == []
    page = Path(result.json["report"])
    text = page.read_text()
    assert "2 engines failed; there is none to pull" in text and "tiny@" not in text and "enginesmith pull" not in text
    assert project.run("report", page.with_suffix(".json"), "--out", project.folder / "again.html").code == 0
    assert (project.folder / "again.html").read_text() == text
    mtime_before = page.stat().st_mtime_ns
    assert project.build("--target", "cpu").code == 1 and page.stat().st_mtime_ns == mtime_before
    assert project.build("--target", "cpu", "--precision", "fp32").code == 1 and page.stat().st_mtime_ns > mtime_before
    assert project.run("registry", "fsck").code == 0


def test_a_failed_unit_does_not_stop_the_others(built: Project) -> None:
    built.change_spec(validation={"limits": {"int8": {"engine": {"max_abs": 0.0}}}})
    done_build = built.build()
    assert done_build.code == 1
    status = units(done_build.json, "status")
    assert status["cpu int8"] == "failed" and status["cpu fp32"] == "proven"
    result = built.run("pull", f"tiny@{done_build.json['version']}", "--target", "cpu", "--precision", "int8")
    assert result.code == 2 and "failed" in result.err


def test_a_failed_build_names_a_repeating_command(project: Project) -> None:
    # The first look at a job comes as soon as it has started, and a microsecond has passed by then.
    project.change_spec(build={"timeout_s": 1e-6}, precisions=["fp32"], targets=["cpu"], calibration=None)
    (failed_engine,) = project.build().json["engines"]
    words = shlex.split(failed_engine["failure"]["reproduce"])
    assert words[:3] == ["enginesmith", "build", str(project.spec)]
    assert words[words.index("--registry") + 1] == project.registry.as_uri()
    assert "export: cached" in project.build(*words[5:]).err


def test_a_quantized_model_stays_unchanged_and_has_no_other_precision(built: Project, project: Project) -> None:
    quantized_unit = next(u for u in built.run("plan", built.spec, "--json").json["units"] if u["precision"] == "int8")
    blob = quantized_unit["request"]["model"]
    model = (built.registry / "blobs" / "sha256" / blob[:2] / blob).read_bytes()
    (project.folder / "tiny.onnx").write_bytes(model)
    project.change_spec(calibration=None, targets=["cpu"])
    outcome = project.build().json
    assert units(outcome, "status") == {"cpu fp32": "refused", "cpu int8": "proven"}
    assert "Q/DQ of its own" in units(outcome, "reason")["cpu fp32"]
    assert "passed through untouched" in project.page()


def test_a_pulled_engine_runs_with_only_onnxruntime(built: Project) -> None:
    pulled_document = built.run("pull", "tiny", "--target", "cpu", "--dest", built.folder / "out", "--json").json
    session = ort.InferenceSession(pulled_document["path"], providers=["CPUExecutionProvider"])
    data = arrays(built.folder / "golden.npz")
    (logits,) = session.run(None, {"x": data["x"][:8]})
    assert (logits.argmax(-1) == data["label"][:8]).mean() >= 0.75
    extra_document = json.loads(Path(pulled_document["path"]).with_suffix(".json").read_text())
    assert extra_document["inputs"][0] == {"name": "x", "dtype": "float32", "shape": ["batch", 8]}
    assert extra_document["profiles"][0]["inputs"][0] == ["x", [1, 8], [4, 8], [8, 8]]


def test_other_bytes_of_the_same_model_publish_nothing_and_move_no_channel(built: Project) -> None:
    channel = built.registry / "models" / "tiny" / "channels" / "candidate.json"
    data_before = channel.read_bytes(), sorted((built.registry / "blobs").rglob("*"))
    model = onnx.load(built.folder / "tiny.onnx")
    model.doc_string = "a comment"
    onnx.save(model, built.folder / "tiny.onnx")
    result = built.build()
    assert "export: done" in result.err and rebuilt(result.json) == set()
    assert (result.json["version"], result.json["same_as"], result.json["cached"]) == ("1", "tiny@1", True)
    assert "tiny: same as tiny@1" in result.err
    assert (channel.read_bytes(), sorted((built.registry / "blobs").rglob("*"))) == data_before
    built.change_spec(timeouts={"proof_s": 999.0})
    assert (
        "engines and proofs are equal to those of tiny@1: nothing was published" in built.run("build", built.spec).out
    )


def test_validate_accepts_groups_and_reports_an_empty_result(built: Project) -> None:
    actual = built.run("validate", "tiny", "--target", "gpu", "--json").json
    assert {engine["target"] for engine in actual["engines"]} == {"sm_75", "sm_89"}
    result = built.run("validate", "tiny", "--target", "sm_90")
    assert result.code == 2 and "tiny@1 has no engine for sm_90" in result.err


def test_the_reports_path_is_a_path(project: Project) -> None:
    project.registry = project.folder.parent / "my registry"
    project.change_spec(targets=["cpu"], precisions=["fp32"])
    assert Path(project.build().json["report"]).is_file()
