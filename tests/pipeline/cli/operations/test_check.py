import re
from pathlib import Path

import numpy as np
import pytest

from tests.pipeline.projects import Project, weights, write_model

QUICK = ("--target", "cpu", "--seconds", "0.05")


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_an_unchanged_model_passes_and_publishes_nothing(built: Project) -> None:
    models = built.registry / "models"
    files_before = files_of(models)
    result = built.run("check", built.spec, *QUICK, "--json")
    assert result.code == 0 and result.json["passed"] and result.json["against"] == "tiny@1", result.err
    assert all(pair["same"] for pair in result.json["pairs"]) and len(result.json["pairs"]) == 2
    assert files_of(models) == files_before


def test_a_worse_model_is_a_regression_at_its_line(built: Project) -> None:
    rng = np.random.default_rng(0)
    values = {name: value + rng.normal(size=value.shape, scale=0.05).astype("f4") for name, value in weights().items()}
    write_model(built.folder / "tiny.onnx", values)
    metric = {"name": "accuracy", "output": "logits", "floor": 0.5}
    built.change_spec(precisions=["fp32"], golden={"data": "golden.npz", "labels": "label", "metric": metric})
    files_before = files_of(built.registry / "models")
    page = built.folder / "new" / "check.md"
    words = ("check", built.spec, *QUICK, "--slower", "900%", "--worse", "accuracy=0", "--drift", "fail")
    result = built.run(*words, "--report", page, "--json")
    assert result.code == 1, result.err
    ends = [line for line in result.err.splitlines() if "] times of " in line and not line.endswith("...")]
    assert ends and all(re.search(r": [\d.]+ \w+ and [\d.]+ \w+$", line) for line in ends), "the table has the verdict"
    actual = {item["rule"]: item for item in result.json["findings"] if item["level"] == "error"}
    assert "drift" in actual and "latency" not in actual
    assert built.spec.read_text().splitlines()[actual["drift"]["line"] - 1].strip() == "- fp32"
    (pair, *_) = result.json["pairs"]
    expected = {"batch=1", "batch=4", "batch=8"}
    assert pair["pulled"] and not pair["same"] and {item["bucket"] for item in pair["times"]} == expected
    assert all(item["ratio"] > 0 for item in pair["times"])
    assert "**regression** (drift)" in page.read_text()
    assert files_of(built.registry / "models") == files_before
    # What the same command would be with nothing that decides but the metric's floor.
    first_result = built.run("check", built.spec, *QUICK, "--against", "none", "--json")
    assert first_result.code == 0 and first_result.json["against"] is None and first_result.json["pairs"] == []


def test_a_scratch_registry_gets_the_builds_and_the_shared_one_is_only_read(built: Project) -> None:
    built.change_spec(dims={"batch": {"min": 1, "opt": 2, "max": 8}}, precisions=["fp32"])
    files_before = files_of(built.registry)
    scratch = built.folder / "scratch"
    result = built.run("check", built.spec, *QUICK, "--scratch", scratch, "--slower", "900%", "--json")
    assert result.json["against"] == "tiny@1" and result.code == 0, result.err
    assert files_of(built.registry) == files_before
    assert any(scratch.rglob("blobs/sha256/*/*")) and not (scratch / "models").exists()


def test_a_model_without_versions_names_the_remedy(project: Project) -> None:
    result = project.run("check", project.spec, *QUICK)
    assert result.code == 2 and "--against none" in result.err


def test_an_unreadable_spec_is_in_the_reports_with_its_line(built, monkeypatch):
    built.change_spec(precisions=["fp33"])
    page, summary = built.folder / "check.xml", built.folder / "summary.md"
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    result = built.run("check", built.spec, "--report", page)
    assert result.code == 2 and result.out == ""
    (line,) = [text for text in result.err.splitlines() if text.startswith("::error ")]
    number = 1 + built.spec.read_text().splitlines().index("- fp33")
    assert f",line={number},title=enginesmith spec::" in line and "fp33" in line
    assert 'failures="1"' in page.read_text() and "fp33" in summary.read_text()
    assert "not checked, 1 mistake" in summary.read_text() and "regression by" not in summary.read_text()


def test_a_loss_of_an_unknown_metric_is_bad_input(built: Project) -> None:
    result = built.run("check", built.spec, *QUICK, "--worse", "acuracy=0.1")
    assert result.code == 2 and "--worse acuracy: the spec has no such task metric; it has" in result.err


@pytest.mark.parametrize(
    "option",
    [
        *(("--slower", "fast"), ("--slower", "-1"), ("--slower", "3"), ("--worse", "x=y"), ("--worse", "nan")),
        *(("--report", "x.txt"), ("--report", "a.md", "--report", "b.md")),
        ("--bucket", "all", "--bucket", "batch=1"),
    ],
)
def test_an_option_of_another_kind_is_bad_input(built: Project, option: tuple[str, ...]) -> None:
    result = built.run("check", built.spec, *option)
    assert result.code == 2 and option[0] in result.err
