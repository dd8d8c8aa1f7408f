import json
import os
import re
import subprocess
import sys

import pytest

from builders.backends import discovery
from pipeline.cli.machines.doctor import row_of
from tests.pipeline.projects import Project, exit_code


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert exit_code("backends", "list", *words) == 0
    return capsys.readouterr().out


def test_the_table_fits_a_hundred_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")  # what a pipe is taken for; the table is not squeezed into that
    lines = (out_lines := said(capsys)).splitlines()
    assert "[tensorrt]" in out_lines and "…" not in out_lines, "markup would swallow it"
    table = [line for line in lines if "is not installed:" not in line]
    assert max(map(len, table)) <= 100
    assert table[0].rstrip().endswith("runs here")
    assert any(line.startswith("onnxruntime ") and "dynamic" in line and "same bytes" in line for line in table)
    assert {line.split()[0] for line in table if not line.startswith(" ")} == {"backend", *discovery.names()}


@pytest.mark.parametrize("columns", ["80", "100", "120"])
def test_no_column_is_truncated_on_a_terminal(capsys, monkeypatch, columns):
    monkeypatch.setenv("FORCE_COLOR", "1")  # what makes rich take this for a terminal
    monkeypatch.setenv("COLUMNS", columns)
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip() for line in said(capsys).splitlines()]
    if columns == "80":  # too narrow for a table: a block for each
        first_index = lines.index("backend    onnxruntime")
        assert lines[first_index + 4 : first_index + 6] == ["rebuild    same bytes", "runs here  cpu"]
        return
    assert lines[0].split()[-3:] == ["rebuild", "runs", "here"]
    row = next(line for line in lines if line.startswith("onnxruntime "))
    assert row.split()[-3:] == ["same", "bytes", "cpu"]


def test_a_missing_backend_shows_its_installation_and_targets(capsys, monkeypatch):
    monkeypatch.setattr(discovery.load("tensorrt-rtx"), "versions", lambda self: {})
    assert "tensorrt-rtx is not installed: pip install tensorrt-rtx (Linux, x86-64)\n" in said(capsys)
    row = next(row for row in json.loads(said(capsys, "--json"))["backends"] if row["name"] == "tensorrt-rtx")
    assert row["versions"] == {} and row["missing"] == row["install"] and row["runs"] == []
    assert row["builds"]["sm_75"] == ["fp16", "int8"] and row["dynamic"]


def test_every_fact_is_in_the_json(capsys):
    rows = json.loads(said(capsys, "--json"))["backends"]
    assert [row["name"] for row in rows] == discovery.names()
    row = next(row for row in rows if row["name"] == "onnxruntime")
    assert row["runs"] == ["cpu"] and row["dynamic"] and row["determinism"] == "bytes"
    options = {"graph_optimization": "extended", "intra_op_threads": 0, "reduced_range": "where-needed"}
    assert row["options"] == options and not row["tunes_on_target"]


def test_a_name_shows_the_options_and_an_unknown_one_the_nearest(capsys):
    lines = said(capsys, "tensorrt-rtx")
    assert "option tf32: false" in lines and "10 mantissa bits" in lines
    assert "builds for sm_75: fp16 int8" in lines and "onnxruntime" not in lines
    assert exit_code("backends", "list", "onnxrun") == 2 and "did you mean 'onnxruntime'" in capsys.readouterr().err


def test_a_backend_for_fixed_sizes_is_marked(monkeypatch):
    cls = discovery.load("onnxruntime")
    monkeypatch.setattr(cls, "refuses", lambda self, request: "no dims; give sizes" if request.profiles else None)
    assert not row_of(discovery.configure("onnxruntime", {})).dynamic


def test_findings_in_json_name_the_remedy(project: Project) -> None:
    findings = {item["subject"]: item for item in project.run("doctor", "--json").json["findings"]}
    assert findings["onnxruntime"]["state"] == "ok" and findings["tensorrt"]["state"] == "missing"
    assert "pip install" in findings["tensorrt"]["detail"]


def test_doctor_works_with_an_invalid_tmpdir(project: Project) -> None:
    command = [sys.executable, "-m", "enginesmith", "doctor", "--registry", str(project.registry)]
    result = subprocess.run(command, env={**os.environ, "TMPDIR": "/nowhere"}, capture_output=True, text=True)
    assert "temporary space" in result.stdout and "Traceback" not in result.stderr
