import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.compile.closure.definitions import PACKAGES
from tests.pipeline.projects import Project

ROOT = Path(__file__).parents[4]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / "copy" / package, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "copy"


def edit(copy: Path, name: str, before: str, after: str) -> None:
    text = (copy / name).read_text()
    assert before in text, f"{name} reads otherwise: adapt this test"
    (copy / name).write_text(text.replace(before, after))


def run(copy: Path, project: Project, *words: str) -> tuple[Any, str]:
    env = {**os.environ, "PYTHONPATH": str(copy), "ENGINESMITH_CACHE": str(copy.parent / "cache")}
    env["PYTHONDONTWRITEBYTECODE"] = "1"  # 20 MB that nobody reads again
    command = [sys.executable, "-m", "enginesmith", *words, project.spec, "--registry", project.registry, "--json"]
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=env, cwd=copy.parent)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout), result.stderr


@pytest.mark.slow
def test_an_edited_function_repeats_its_results_and_the_plan_names_it(copy: Path, built: Project) -> None:
    body = 'return "QuantizeLinear" in op_types or op_types >= {"DequantizeLinear", "DynamicQuantizeLinear"}'
    edit(copy, "pipeline/quantization/schemes/qdq.py", body, f"found = 1\n    {body}")
    planned_result, _ = run(copy, built, "plan", "--no-export")
    assert "code of pipeline.quantization.schemes.qdq changed" in planned_result["changes"]
    outcome, log = run(copy, built, "build")
    assert (outcome["version"], outcome["cached"]) == ("1", True), "it gives the same, so no engine is built"
    assert "export: done" in log and "calibrate: cached" in log and "write int8" in log
    assert "prove cpu int8 onnxruntime: cached" in log
    planned_result, _ = run(copy, built, "plan")
    assert planned_result["changes"] == []
